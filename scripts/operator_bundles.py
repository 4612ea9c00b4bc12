"""Operator bundles of random numbers: every operator, at the sizes of a given model.

They have no captured output: what is replayed on them is how implementations differ, not an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layerbisect.kernels.replay.bundle import Bundle, Call


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer, and of the sequences that run through it; ``scored`` rows have logits."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    top_k: int
    vocab: int
    lengths: tuple[int, ...]
    scored: int

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


SMALL = Sizes(128, 4, 2, 32, 64, 8, 2, 500, (33, 64, 47), 100)
"""For a CPU and Triton's interpreter."""
QWEN3_30B_A3B = Sizes(2048, 32, 4, 128, 768, 128, 8, 151_936, (512, 63, 256, 1), 128)
"""A layer of Qwen3-30B-A3B on one GPU."""


class Maker:
    """Draw the bundles of one layer; the same seed draws the same numbers."""

    def __init__(self, sizes: Sizes, dtype: str = "bfloat16", seed: int = 0) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self._storage: torch.dtype = getattr(torch, dtype)
        self._draw = torch.Generator().manual_seed(seed)

    def all(self) -> list[Bundle]:
        """Make a bundle of every operator, and of each variant that kernels treat apart."""
        s = self.sizes
        hidden, heads = (s.rows, s.hidden), (s.rows, s.heads, s.head_dim)
        norm = {"x": "x", "weight": "weight"}
        eps = {"eps": 1e-6}
        logits = self._normal(s.rows, s.experts).float()
        ids = logits.topk(s.top_k).indices
        chosen = torch.softmax(logits, -1).gather(1, ids)
        return [
            self._one("norm", "rms_norm", norm, self._stream("x"), {"weight": s.hidden}, eps),
            self._one(
                "norm.with_residual",
                "rms_norm",
                {**norm, "residual": "residual"},
                {**self._stream("x"), **self._stream("residual")},
                {"weight": s.hidden},
                eps,
            ),
            self._one("qk_norm", "rms_norm", norm, {"x": heads}, {"weight": s.head_dim}, eps),
            self._one("linear", "linear", norm, {"x": hidden}, {"weight": (s.hidden, s.hidden)}),
            self._rope("rope", False),
            self._rope("rope.interleaved", True),
            self._attention("attention", None, sinks=False),
            self._attention("attention.window_and_sinks", max(2, s.lengths[0] // 4), sinks=True),
            self._one(
                "router",
                "router",
                {"logits": "logits"},
                {"logits": logits},
                {},
                {"top_k": s.top_k, "renormalise": True},
                results=("weights", "ids"),
            ),
            self._one(
                "swiglu",
                "swiglu",
                {"gate": "gate", "up": "up"},
                {"gate": (s.rows, s.intermediate), "up": (s.rows, s.intermediate)},
            ),
            self._one(
                "experts",
                "experts",
                {n: n for n in ("x", "ids", "weights", "gate_up", "down")},
                {"x": hidden, "ids": ids, "weights": chosen / chosen.sum(1, keepdim=True)},
                {
                    "gate_up": (s.experts, 2 * s.intermediate, s.hidden),
                    "down": (s.experts, s.hidden, s.intermediate),
                },
            ),
            self._one(
                "logprob",
                "logprob",
                {"logits": "logits", "targets": "targets"},
                {
                    "logits": (3 * self._normal(s.scored, s.vocab)).to(self._storage),
                    "targets": torch.randint(s.vocab, (s.scored,), generator=self._draw),
                },
                results=("logprob",),
            ),
            self._one(
                "residual",
                "add",
                {"stream": "stream", "delta": "delta"},
                {**self._stream("stream"), "delta": hidden},
            ),
        ]

    def _rope(self, point: str, interleaved: bool) -> Bundle:
        s = self.sizes
        pairs = torch.arange(0, s.head_dim, 2, dtype=torch.float32) / s.head_dim
        return self._one(
            point,
            "rope",
            {"x": "x", "position": "position", "inv_freq": "inv_freq"},
            {"x": (s.rows, s.heads, s.head_dim), "position": self._position()},
            {"inv_freq": 1e6**-pairs},
            {"interleaved": interleaved},
        )

    def _attention(self, point: str, window: int | None, *, sinks: bool) -> Bundle:
        s = self.sizes
        return self._one(
            point,
            "attention",
            {n: n for n in ("q", "k", "v", *(("sinks",) if sinks else ()))},
            {
                "q": (s.rows, s.heads, s.head_dim),
                "k": (s.rows, s.kv_heads, s.head_dim),
                "v": (s.rows, s.kv_heads, s.head_dim),
            },
            {"sinks": self._normal(s.heads).to(self._storage)} if sinks else {},
            {"lengths": s.lengths, "scale": s.head_dim**-0.5, "sliding_window": window},
        )

    def _one(
        self,
        point: str,
        operator: str,
        tensors: Mapping[str, str],
        inputs: Mapping[str, torch.Tensor | tuple[int, ...]],
        weights: Mapping[str, torch.Tensor | tuple[int, ...] | int] | None = None,
        attributes: Mapping[str, Any] | None = None,
        results: tuple[str, ...] = ("y",),
    ) -> Bundle:
        """Make a bundle of one call; a shape stands for numbers to be drawn."""
        rows = self.sizes.scored if operator == "logprob" else self.sizes.rows
        word = {"rms_norm": "norm", "add": "residual", "swiglu": "linear", "logprob": "head"}
        return Bundle(
            point=point,
            layer=None,
            operator=word.get(operator, operator),
            covers=(word.get(operator, operator),),
            dtype=self.dtype,
            calls=(Call(operator, tensors, results, attributes or {}),),
            inputs={
                n: (v if isinstance(v, torch.Tensor) else self._normal(*v).to(self._storage))
                for n, v in inputs.items()
            },
            weights={
                n: (v if isinstance(v, torch.Tensor) else self._weight(v))
                for n, v in (weights or {}).items()
            },
            captured={},
            position=self._position()[:rows],
            token=torch.zeros(rows, dtype=torch.int64),
            observed=torch.arange(rows),
        )

    def _stream(self, name: str) -> dict[str, torch.Tensor]:
        """Draw a residual stream, with the one massive channel that real models have."""
        values = self._normal(self.sizes.rows, self.sizes.hidden)
        values[:, 5] *= 200
        return {name: values.to(self._storage)}

    def _weight(self, size: int | tuple[int, ...]) -> torch.Tensor:
        shape = (size,) if isinstance(size, int) else size
        drawn = self._normal(*shape)
        scaled = 1 + 0.1 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5
        return scaled.to(self._storage)

    def _position(self) -> torch.Tensor:
        return torch.cat([torch.arange(length) for length in self.sizes.lengths])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._draw)
