"""The reference model: Llama, Qwen3 and Qwen3-MoE in plain PyTorch, layer by layer, from disk.

It is the judge of every engine, so it owes nothing to any of them: it reads an ordinary checkpoint,
computes in float32 or float64 with the operators of ``layerbisect.kernels``, and can start and stop
at any point of a layer. With a ``Precision`` it rounds as an ordinary low-precision implementation
does, which tells how large legitimate rounding is.

Rows are whole sequences laid end to end, and ``lengths`` says how long each is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from layerbisect.bisect.checkpoint import Checkpoint
from layerbisect.bisect.model_config import ModelConfig
from layerbisect.bisect.precision import FULL, Precision
from layerbisect.bisect.steps import Steps
from layerbisect.bisect.weights import Weights
from layerbisect.kernels.rounding import COMPUTE_DTYPES

__all__ = ["CACHE_BYTES", "ModelConfig", "Precision", "ReferenceModel"]

CACHE_BYTES = 2 * 2**30
"""Converted weights kept: enough for a model of 130 million parameters in float64."""


class ReferenceModel(Steps):
    """A whole model: opened from disk, run by layers, and read out in log-probs."""

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        compute_dtype: torch.dtype = torch.float32,
        *,
        weight_dtype: torch.dtype | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> ReferenceModel:
        """Open a checkpoint: ``config.json`` and safetensors files, which stay mapped.

        ``weight_dtype`` rounds the weights as the judged engine did on loading (for a float32
        checkpoint served in bfloat16); None takes them as stored. Raises ModelDirectoryError for a
        directory that is missing, incomplete, truncated or unsupported, and TypeError for a
        compute dtype other than float32 and float64.
        """
        if compute_dtype not in COMPUTE_DTYPES:
            raise TypeError(f"compute_dtype must be float32 or float64, got {compute_dtype}")
        config = ModelConfig.from_directory(directory)
        weights = Weights(config, Checkpoint(directory), compute_dtype, weight_dtype, cache_bytes)
        return cls(config, weights, compute_dtype)

    def tensor_names(self) -> tuple[str, ...]:
        """Every tensor of the checkpoint that is read, sorted by name."""
        return self._weights.names

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint as stored, mapped; don't write to it."""
        return self._weights.checkpoint.tensor(name)

    def expert(self, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one expert's gate-and-up and down matrices, in the compute dtype."""
        gate_up, down = self._weights.experts(layer, None)
        return gate_up[number], down[number]

    def layer(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        lengths: Sequence[int],
        *,
        precision: Precision = FULL,
        want: Collection[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run one layer on the stream ``x`` [row, hidden] that enters it.

        Returns the points of the layer by suffix (``attn.norm`` ... ``output``), all of them or
        those in ``want``; a dense layer has no router points. Raises ValueError for a layer or
        lengths that don't fit.
        """
        kept: dict[str, torch.Tensor] = {}

        def keep(suffix: str, tensor: torch.Tensor) -> torch.Tensor:
            if want is None or suffix in want:
                kept[suffix] = tensor
            return tensor

        x = self._in(x)
        normed = keep("attn.norm", self.attn_norm(layer, x, precision=precision))
        q, k, v = self.qkv(layer, normed, positions, precision=precision)
        for suffix, tensor in (("attn.q", q), ("attn.k", k), ("attn.v", v)):
            keep(suffix, tensor)
        context = keep("attn.context", self.attention(layer, q, k, v, lengths, precision=precision))
        out = keep("attn.out", self.attn_out(layer, context, precision=precision))
        mid = keep("mid", self.residual_add(x, out, precision=precision))
        normed = keep("mlp.norm", self.mlp_norm(layer, mid, precision=precision))
        ids = weights = None
        if self.config.is_sparse(layer):
            logits = self.router_logits(layer, normed, precision=precision)
            ids, weights = self.route(layer, keep("mlp.router_logits", logits), precision=precision)
            keep("mlp.expert_ids", ids)
            keep("mlp.expert_weights", weights)
        out = keep("mlp.out", self.mlp(layer, normed, ids, weights, precision=precision))
        keep("output", self.residual_add(mid, out, precision=precision))
        return kept

    def tail(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        lengths: Sequence[int],
        targets: torch.Tensor,
        *,
        precision: Precision = FULL,
        progress: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """Read a hidden state out in nats: from the stream entering ``layer`` to log-probs [row].

        ``layer`` may be the number of layers: then only the final norm and the head run. Row r is
        log p(targets[r] | the sequence up to row r), and nan where the target is negative.
        ``progress`` is called with the layers done and to do, after each.
        """
        if not 0 <= layer <= self.config.num_layers:
            raise ValueError(f"layer must lie in 0..{self.config.num_layers}, got {layer}")
        x = self._in(x)
        for index in range(layer, self.config.num_layers):
            x = self.layer(index, x, positions, lengths, precision=precision, want=("output",))[
                "output"
            ]
            if progress is not None:
                progress(index + 1 - layer, self.config.num_layers - layer)
        normed = self.final_norm(x, precision=precision)
        return self.logprobs(normed, targets, precision=precision)
