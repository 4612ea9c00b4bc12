"""Draw the weights of a tiny model, so that it behaves somewhat like a trained one.

Random weights, yet such that a fault anywhere shows in the log-probs, and rounding stays small:

- attention and MLP each add a fixed share of the residual stream in every layer, the first and the
  last included, so neither the embedding nor a single layer swamps the rest;
- attention scores are spread, so the softmax is far from uniform;
- each token has topics of its own, which routers read: the slots of a token have unequal weights,
  all experts are used, and few choices are near ties;
- norm weights are not constant;
- the head makes a distribution with an entropy of a few nats.

Each tensor has a generator of its own, seeded from the seed and the tensor's name: the layers of a
shallow model are the first layers of a deep one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# root mean square of what attention and MLP each add, over that of the stream they join
BRANCH_SHARE = 0.18
# standard deviations of attention scores and of logits
SCORE_STD = 1.75
LOGIT_STD = 3.1
# norm weights are lognormal around 1 with this sigma
NORM_SIGMA = 0.25
# what an embedding holds of its own topics, and of the others; units of the embedding's deviation
TOPIC_STRENGTH = 3.0
TOPIC_NOISE = 0.5
# how much of what a branch would write into the topics it writes: routing depends on context, less
# than on the token
TOPIC_WRITE = 0.3


@dataclass(frozen=True)
class TinyWeights:
    """Draws parameters by name, for a family and the keyword arguments of its configuration."""

    family: str
    seed: int
    shape: Mapping[str, Any]

    def draw(self, name: str, size: torch.Size) -> torch.Tensor:
        """Return the float32 parameter ``name`` of ``size``."""
        import torch

        noise = torch.randn(size, generator=self._generator(name))
        # a normed row has this second moment, because norm weights are lognormal
        norm_rms = math.exp(NORM_SIGMA**2)
        fan_in = math.sqrt(self.shape["hidden_size"]) * norm_rms
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]

        if part in ("q_norm", "k_norm"):
            return torch.exp(NORM_SIGMA * noise) * (math.sqrt(SCORE_STD) / norm_rms)
        if part.endswith("norm"):
            return torch.exp(NORM_SIGMA * noise)
        if part == "embed_tokens":
            return self._mark_topics(noise) if self._routed else noise
        if part == "lm_head":
            return noise * (LOGIT_STD / fan_in)

        # each branch before this one has made the stream larger by one factor
        layer = int(name.split(".layers.")[1].split(".")[0])
        grown = math.sqrt(1 + BRANCH_SHARE**2) ** (2 * layer + (".mlp." in name))
        if part == "gate":
            # each layer hands the topics to other experts
            order = torch.randperm(size[0], generator=self._generator(f"{name}/order"))
            return self._topics()[order] * grown
        if part in ("o_proj", "down_proj"):
            # root mean square of what the projection reads: averaging over keys leaves half of the
            # values; silu(gate) * up has 0.6, and the weighted sum of slots 0.6 of that
            inner = 0.5 if part == "o_proj" else 0.36 if self._routed else 0.6
            return self._keep_topics(noise * (BRANCH_SHARE * grown / inner / math.sqrt(size[-1])))
        if part in ("q_proj", "k_proj") and self.family == "llama":
            return noise * (math.sqrt(SCORE_STD) / fan_in)
        return noise / fan_in

    @property
    def _routed(self) -> bool:
        return self.family == "qwen3_moe"

    def _generator(self, name: str) -> torch.Generator:
        import torch

        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def _topics(self) -> torch.Tensor:
        """Return the directions of the stream that routers read: orthonormal [expert, hidden]."""
        import torch

        size = (self.shape["hidden_size"], self.shape["num_experts"])
        noise = torch.randn(size, generator=self._generator("topics"))
        basis: torch.Tensor = torch.linalg.qr(noise)[0]
        return basis.T

    def _mark_topics(self, embedding: torch.Tensor) -> torch.Tensor:
        """Give each token of ``embedding`` [vocab, hidden] top-k topics of its own.

        With routers drawn at random, the k-th and the next expert are within rounding of each
        other far more often than in a trained model, and in a deep one the flips feed each other.
        """
        import torch

        topics = self._topics()
        generator = self._generator("embedding topics")
        noise = torch.randn(len(embedding), len(topics), generator=generator)
        order = torch.rand(noise.shape, generator=generator).argsort(-1)
        own = order < self.shape["num_experts_per_tok"]
        code = torch.where(own, TOPIC_STRENGTH * (1 + 0.3 * noise), TOPIC_NOISE * noise)
        return embedding + (code - embedding @ topics.T) @ topics

    def _keep_topics(self, weight: torch.Tensor) -> torch.Tensor:
        """Weaken what ``weight`` [..., hidden, in] writes into the topics."""
        if not self._routed:
            return weight
        topics = self._topics()
        return weight - (1 - TOPIC_WRITE) * (topics.T @ (topics @ weight))
