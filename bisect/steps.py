"""The steps of a decoder layer, each of which can be run alone on given inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from layerbisect.bisect.model_config import ModelConfig
from layerbisect.bisect.precision import FULL, Precision
from layerbisect.bisect.weights import EMBED, FINAL_NORM, Weights
from layerbisect.kernels.attention import attention
from layerbisect.kernels.experts import expert_outputs, experts, swiglu_mlp
from layerbisect.kernels.linear import linear
from layerbisect.kernels.logprob import logprobs
from layerbisect.kernels.rms_norm import rms_norm
from layerbisect.kernels.rope import rope, rope_attention_scaling, rope_frequencies
from layerbisect.kernels.rounding import rounded
from layerbisect.kernels.router import route


class Steps:
    """A model's operators with their weights, in the order of computation.

    Every step takes tensors of any float dtype and returns the compute dtype; ``precision`` says
    which kinds of operator round on the way. One that rounds to float32 also computes in it, for an
    engine's sums are then no more precise than its results. Layers are numbered from 0; a number
    out of range raises ValueError.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self.compute_dtype = compute_dtype
        self._weights = weights
        self._inv_freq = rope_frequencies(config)
        self._rope_scaling = rope_attention_scaling(config)

    def embed(self, tokens: torch.Tensor, *, precision: Precision = FULL) -> torch.Tensor:
        """Look up ``tokens`` int [row]: [row, hidden]; ValueError outside the vocabulary."""
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab:
            raise ValueError(
                f"tokens must lie in 0..{self.config.vocab - 1}, "
                f"got {int(tokens.min())} to {int(tokens.max())}"
            )
        rows = self._weights.rows(EMBED, tokens.long())
        return rounded(rows, precision.residual)

    def attn_norm(
        self, layer: int, x: torch.Tensor, *, precision: Precision = FULL
    ) -> torch.Tensor:
        """Normalise the stream [row, hidden] that enters a layer."""
        return self._norm(self._name(layer, "input_layernorm.weight"), x, precision)

    def qkv_raw(
        self, layer: int, normed: torch.Tensor, *, precision: Precision = FULL
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project to queries, keys and values [row, head, channel], before q/k norm and rope."""
        q, k, v = (
            self._linear(layer, f"self_attn.{part}_proj", normed, precision.linear).view(
                len(normed), -1, self.config.head_dim
            )
            for part in ("q", "k", "v")
        )
        return q, k, v

    def qk_norm(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, *, precision: Precision = FULL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise each head of queries and keys [row, head, channel], in models that do."""
        if not self.config.qk_norm:
            return self._in(q), self._in(k)
        return (
            self._norm(self._name(layer, "self_attn.q_norm.weight"), q, precision),
            self._norm(self._name(layer, "self_attn.k_norm.weight"), k, precision),
        )

    def rotate(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        inverse: bool = False,
        *,
        precision: Precision = FULL,
    ) -> torch.Tensor:
        """Apply the rotary embedding to [row, head, channel], or undo it."""
        turned = rope(
            self._in(x, precision.attention),
            positions,
            self._inv_freq,
            attention_scaling=self._rope_scaling,
            inverse=inverse,
            round_to=precision.attention,
        )
        return self._in(turned)

    def qkv(
        self,
        layer: int,
        normed: torch.Tensor,
        positions: torch.Tensor,
        *,
        precision: Precision = FULL,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make q, k and v [row, head, channel] as attention reads them: normed and rotated."""
        q, k, v = self.qkv_raw(layer, normed, precision=precision)
        q, k = self.qk_norm(layer, q, k, precision=precision)
        q = self.rotate(q, positions, precision=precision)
        k = self.rotate(k, positions, precision=precision)
        return q, k, v

    def attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Sequence[int],
        *,
        precision: Precision = FULL,
    ) -> torch.Tensor:
        """Attend within each sequence: the context [row, head, channel]."""
        self._require_layer(layer)
        q, k, v = (self._in(x, precision.attention) for x in (q, k, v))
        context = attention(
            q,
            k,
            v,
            lengths,
            scale=self.config.head_dim**-0.5,
            sliding_window=self.config.sliding_windows[layer],
            round_to=precision.attention,
        )
        return self._in(context)

    def attn_out(
        self, layer: int, context: torch.Tensor, *, precision: Precision = FULL
    ) -> torch.Tensor:
        """Project the context [row, head, channel] to [row, hidden]."""
        return self._linear(layer, "self_attn.o_proj", context.flatten(1), precision.linear)

    def residual_add(
        self, stream: torch.Tensor, delta: torch.Tensor, *, precision: Precision = FULL
    ) -> torch.Tensor:
        """Add a block's output to the residual stream [row, hidden]."""
        return rounded(self._in(stream) + self._in(delta), precision.residual)

    def mlp_norm(
        self, layer: int, mid: torch.Tensor, *, precision: Precision = FULL
    ) -> torch.Tensor:
        """Normalise the stream [row, hidden] between attention and MLP."""
        return self._norm(self._name(layer, "post_attention_layernorm.weight"), mid, precision)

    def router_logits(
        self, layer: int, normed: torch.Tensor, *, precision: Precision = FULL
    ) -> torch.Tensor:
        """Score the experts: [row, expert]. Raises ValueError in a dense layer."""
        self._require_sparse(layer)
        return self._linear(layer, "mlp.gate", normed, precision.router)

    def route(
        self, layer: int, logits: torch.Tensor, *, precision: Precision = FULL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts: IDs int64 and weights [row, slot]. Raises ValueError in a dense layer."""
        self._require_sparse(layer)
        weights, ids = route(
            self._in(logits, precision.router),
            self.config.top_k,
            renormalise=self.config.renormalise,
            round_to=precision.router,
        )
        return ids, self._in(weights)

    def mlp(
        self,
        layer: int,
        normed: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        precision: Precision = FULL,
    ) -> torch.Tensor:
        """Apply the MLP, or in a sparse layer the experts in ``ids`` [row, slot], to [row, hidden].

        Without ``ids`` and ``weights`` a sparse layer routes by itself. Raises ValueError when one
        of the two is given without the other, or either in a dense layer.
        """
        if (ids is None) != (weights is None):
            raise ValueError("give ids and weights together, or neither")
        normed = self._in(normed)
        if ids is None and self.config.is_sparse(layer):
            logits = self.router_logits(layer, normed, precision=precision)
            ids, weights = self.route(layer, logits, precision=precision)
        if ids is None or weights is None:
            gate, up, down = (
                self._weights.get(self._name(layer, f"mlp.{part}_proj.weight"), precision.linear)
                for part in ("gate", "up", "down")
            )
            normed = self._in(normed, precision.linear)
            return self._in(swiglu_mlp(normed, gate, up, down, round_to=precision.linear))
        return self._experts(experts, layer, normed, ids, weights, precision.experts)

    def expert_outputs(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        precision: Precision = FULL,
    ) -> torch.Tensor:
        """Apply each slot's expert to its own input [row, slot, hidden], and weigh the output.

        Raises ValueError in a dense layer.
        """
        return self._experts(expert_outputs, layer, x, ids, weights, precision.experts)

    def _experts(
        self,
        compute: Callable[..., torch.Tensor],
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        round_to: torch.dtype | None,
    ) -> torch.Tensor:
        self._require_sparse(layer)
        gate_up, down = self._weights.experts(layer, round_to)
        x, weights = self._in(x, round_to), self._in(weights, round_to)
        return self._in(compute(x, ids.long(), weights, gate_up, down, round_to=round_to))

    def final_norm(self, x: torch.Tensor, *, precision: Precision = FULL) -> torch.Tensor:
        """Normalise the stream [row, hidden] that leaves the last layer."""
        return self._norm(FINAL_NORM, x, precision)

    def logprobs(
        self, normed: torch.Tensor, targets: torch.Tensor, *, precision: Precision = FULL
    ) -> torch.Tensor:
        """Score ``targets`` int [row] from the final norm's output, in nats; nan where negative."""
        head = self._weights.head(precision.head)
        return self._in(
            logprobs(self._in(normed, precision.head), head, targets, round_to=precision.head)
        )

    def logits(self, normed: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Score tokens ``start`` to ``stop`` from the final norm's output: [row, stop - start]."""
        return linear(self._in(normed), self._weights.head()[start:stop])

    def target_logit(self, normed: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logit [row] of one token a row, ``targets`` int [row]."""
        return (self._in(normed) * self._in(self._weights.head()[targets])).sum(-1)

    def _name(self, layer: int, suffix: str) -> str:
        self._require_layer(layer)
        return f"model.layers.{layer}.{suffix}"

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < self.config.num_layers:
            raise ValueError(f"layer must lie in 0..{self.config.num_layers - 1}, got {layer}")

    def _in(self, x: torch.Tensor, round_to: torch.dtype | None = None) -> torch.Tensor:
        return x.to(round_to if round_to == torch.float32 else self.compute_dtype)

    def _norm(self, name: str, x: torch.Tensor, precision: Precision) -> torch.Tensor:
        weight = self._weights.get(name, precision.norm)
        x = self._in(x, precision.norm)
        return self._in(rms_norm(x, weight, self.config.eps, round_to=precision.norm))

    def _linear(
        self, layer: int, name: str, x: torch.Tensor, round_to: torch.dtype | None
    ) -> torch.Tensor:
        weight = self._weights.get(self._name(layer, f"{name}.weight"), round_to)
        bias = None
        if self.config.attention_bias and name.startswith("self_attn."):
            bias = self._weights.get(self._name(layer, f"{name}.bias"), round_to)
        return self._in(linear(self._in(x, round_to), weight, bias, round_to=round_to))

    def _require_sparse(self, layer: int) -> None:
        self._require_layer(layer)
        if not self.config.is_sparse(layer):
            raise ValueError(f"layer {layer} is dense: it has no router and no experts")
