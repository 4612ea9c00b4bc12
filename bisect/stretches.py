"""The calls between the points that an engine shows: a stretch of a layer as a small program."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerbisect.bisect.bundle_rows import held
from layerbisect.bisect.operators import LayerPoints
from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bundle import Call
from layerbisect.kernels.rope import rope_attention_scaling, rope_frequencies


class Stretch:
    """What a point is made from: ``calls`` in order, the points and the weights that they read.

    ``inputs`` are suffixes of captured points of the layer; ``weights`` maps names to functions
    that read a tensor, as the engine holds it. What lies between and is not captured is computed on
    the way. Names of results are the suffixes of points, or hold a colon where they are none.
    Raises LayerBisectError for a point that no operator of the layer makes.
    """

    def __init__(self, points: LayerPoints, suffix: str) -> None:
        self.points = points
        self.calls: list[Call] = []
        self.inputs: list[str] = []
        self.weights: dict[str, Callable[[], torch.Tensor]] = {}
        self._made: set[str] = set()
        self._prefix = f"model.layers.{points.layer}."
        self._make(suffix)

    def _need(self, suffix: str) -> str:
        """Name the tensor with a point's values, which is captured or has to be made first."""
        if suffix in self.inputs or suffix in self._made:
            return suffix
        if suffix == "input" or self.points.captured(suffix) is not None:
            self.inputs.append(suffix)
        else:
            self._make(suffix)
        return suffix

    def _make(self, suffix: str) -> None:
        makers: dict[str, Callable[[], object]] = {
            "attn.norm": lambda: self._norm("input_layernorm", "input", "attn.norm"),
            "attn.q": lambda: self._projected("q"),
            "attn.k": lambda: self._projected("k"),
            "attn.v": lambda: self._projected("v"),
            "attn.context": self._attention,
            "attn.out": lambda: self._linear("self_attn.o_proj", "attn.context", "attn.out"),
            "mid": lambda: self._add("input", "attn.out", "mid"),
            "mlp.norm": lambda: self._norm("post_attention_layernorm", "mid", "mlp.norm"),
            "mlp.router_logits": lambda: self._linear("mlp.gate", "mlp.norm", "mlp.router_logits"),
            "mlp.expert_ids": self._router,
            "mlp.expert_weights": self._router,
            "mlp.expert_out": lambda: self._experts("mlp.expert_in", "mlp.expert_out"),
            "mlp.out": self._mlp,
            "output": lambda: self._add("mid", "mlp.out", "output"),
        }
        if suffix not in makers:
            raise LayerBisectError(
                f"{self.points.name(suffix)} is copied and not computed: there is nothing to replay"
            )
        makers[suffix]()
        self._made.add(suffix)

    def _weight(self, name: str) -> str:
        full = self._prefix + name
        self.weights[name] = lambda: held(self.points.side, self.points.model.tensor(full))
        return name

    def _call(
        self,
        operator: str,
        tensors: dict[str, str],
        *results: str,
        heads: int | None = None,
        **attributes: object,
    ) -> str:
        self.calls.append(Call(operator, tensors, results, attributes, heads))
        return results[0]

    def _norm(self, name: str, x: str, result: str) -> None:
        tensors = {"x": self._need(x), "weight": self._weight(f"{name}.weight")}
        self._call("rms_norm", tensors, result, eps=self.points.model.config.eps)

    def _linear(self, name: str, x: str, result: str, heads: int | None = None) -> str:
        tensors = {"x": self._need(x), "weight": self._weight(f"{name}.weight")}
        if self.points.model.config.attention_bias and name.startswith("self_attn."):
            tensors["bias"] = self._weight(f"{name}.bias")
        return self._call("linear", tensors, result, heads=heads)

    def _projected(self, part: str) -> None:
        config, point = self.points.model.config, f"attn.{part}"
        heads = config.heads if part == "q" else config.kv_heads
        last = point if part == "v" else f"{point}:projected"
        made = self._linear(f"self_attn.{part}_proj", "attn.norm", last, heads)
        if part == "v":
            return
        if config.qk_norm:
            tensors = {"x": made, "weight": self._weight(f"self_attn.{part}_norm.weight")}
            made = self._call("rms_norm", tensors, f"{point}:normed", eps=config.eps)
        self.weights["inv_freq"] = lambda: rope_frequencies(config)
        self._call(
            "rope",
            {"x": made, "position": "position", "inv_freq": "inv_freq"},
            point,
            attention_scaling=rope_attention_scaling(config),
        )

    def _attention(self) -> None:
        config = self.points.model.config
        self._call(
            "attention",
            {part: self._need(f"attn.{part}") for part in ("q", "k", "v")},
            "attn.context",
            lengths=self.points.side.chains.lengths,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[self.points.layer],
        )

    def _add(self, stream: str, delta: str, result: str) -> None:
        tensors = {"stream": self._need(stream), "delta": self._need(delta)}
        self._call("add", tensors, result)

    def _router(self) -> None:
        config = self.points.model.config
        self._call(
            "router",
            {"logits": self._need("mlp.router_logits")},
            "mlp.expert_weights",
            "mlp.expert_ids",
            top_k=config.top_k,
            renormalise=config.renormalise,
        )

    def _experts(self, x: str, result: str) -> None:
        if x == "mlp.expert_in" and self.points.captured(x) is None:
            raise LayerBisectError(
                f"{self.points.name(result)} cannot be replayed: the capture does not show what "
                "each expert was given; capture mlp.expert_in"
            )
        shown = all(
            self.points.captured(s) is not None for s in ("mlp.expert_ids", "mlp.expert_weights")
        )
        if not shown:
            # another choice within rounding would be taken for an error of the experts
            raise LayerBisectError(
                f"{self.points.name(result)} cannot be replayed: the capture does not show which "
                "experts were chosen with which weights; capture mlp.expert_ids and "
                "mlp.expert_weights"
            )
        tensors = {
            "x": self._need(x),
            "ids": self._need("mlp.expert_ids"),
            "weights": self._need("mlp.expert_weights"),
            "gate_up": "gate_up",
            "down": "down",
        }
        self._call("experts", tensors, result)

    def _mlp(self) -> None:
        if self.points.combined:
            tensors = {"outputs": self._need("mlp.expert_out"), "ids": self._need("mlp.expert_ids")}
            self._call("combine", tensors, "mlp.out")
        elif self.points.sparse:
            self._experts("mlp.norm", "mlp.out")
        else:
            gate = self._linear("mlp.gate_proj", "mlp.norm", "mlp:gate")
            up = self._linear("mlp.up_proj", "mlp.norm", "mlp:up")
            self._call("swiglu", {"gate": gate, "up": up}, "mlp:gated")
            self._made.add("mlp:gated")
            self._linear("mlp.down_proj", "mlp:gated", "mlp.out")
