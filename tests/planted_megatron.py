"""Plant a fault in one layer of real megatron-core, as layerbisect.planted_sglang does in SGLang.

Faults act inside the faulty module's own computation, before it rounds, so that the module's
output is faulty wherever a hook looks. Layers are counted from 0 over the whole model: only the
ranks that hold the layer, or the head or expert in question, plant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from layerbisect.planted_sglang import TRUTH

_AT_THE_END = ("final-norm-weight", "head-scaled")


@contextmanager
def plant(chunks: Sequence[Any], text: str) -> Iterator[None]:
    """Plant ``name:layer[=value]`` in a job's model while the block runs.

    Raises:
        ValueError: there is no such fault or layer, or this rank's share of the layer is too small
            for the fault to change anything.
    """
    name, _, rest = text.partition(":")
    number, _, value = rest.partition("=")
    models = [next(m for m in chunk.modules() if hasattr(m, "decoder")) for chunk in chunks]
    layers = range(models[0].config.num_layers)
    if name not in TRUTH or not number.isdecimal() or int(number) not in layers:
        raise ValueError(f"no such fault in a model of {len(layers)} layers: {text!r}")
    with ExitStack() as undo:
        fault = _Fault(float(value) if value else None, undo)
        act = getattr(fault, name.replace("-", "_"))
        for model in models:
            if name in _AT_THE_END:
                if model.post_process:
                    act(model)
            else:
                for layer in model.decoder.layers:
                    if layer.layer_number == int(number) + 1:
                        act(layer)
        yield


@dataclass
class _Fault:
    """The faults by name; each is given the layer, or the model where it is at the end."""

    value: float | None
    undo: ExitStack = field(repr=False)

    def of(self, default: float) -> float:
        """The value that was given, or else ``default``."""
        return default if self.value is None else self.value

    def norm_eps(self, layer: Any) -> None:
        norm = layer.input_layernorm
        self._meanwhile(norm, norm, "eps", self.of(0.05))

    def norm_weight(self, layer: Any) -> None:
        self._scaled_weight(layer.input_layernorm)

    def final_norm_weight(self, model: Any) -> None:
        self._scaled_weight(model.decoder.final_layernorm)

    def _scaled_weight(self, norm: Any) -> None:
        import torch

        gain = self.of(1.05)

        def faulty(original: Any, x: Any) -> Any:
            # in float32, as the norm itself: the product is rounded once
            weight = norm.weight.float() * gain
            out = torch.nn.functional.rms_norm(x.float(), weight.shape, weight, norm.eps)
            return out.to(x.dtype)

        self._replace(norm, "forward", faulty)

    def qk_norm_skipped(self, layer: Any) -> None:
        for norm in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm):
            self._replace(norm, "forward", lambda original, x: x)

    def rope_base(self, layer: Any) -> None:
        import torch

        factor = self.of(2.0)

        def slower(angles: Any) -> Any:
            # angles [s, 1, 1, d] of positions times base ** (-2i / d), twice over
            dim = angles.shape[-1]
            exponents = torch.arange(0, dim, 2) / dim
            return angles * (factor**-exponents).repeat(2)

        self._replace_angles(layer, lambda q, k: (slower(q), slower(k)))

    def rope_shifted(self, layer: Any) -> None:
        shift = int(self.of(1))
        self._replace_angles(layer, lambda q, k: (q + shift * (q[1:2] - q[:1]), k))

    def _replace_angles(self, layer: Any, changed: Callable[[Any, Any], Any]) -> None:
        def faulty(original: Any, *args: Any, rotary_pos_emb: Any, **kwargs: Any) -> Any:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            return original(*args, rotary_pos_emb=changed(*pair), **kwargs)

        self._replace(layer.self_attention, "forward", faulty)

    def softmax_scale(self, layer: Any) -> None:
        attention = layer.self_attention.core_attention
        scaled = attention.softmax_scale * self.of(1.2)
        self._meanwhile(attention, attention, "softmax_scale", scaled)

    def sliding_window(self, layer: Any) -> None:
        import torch

        window = int(self.of(8))

        def faulty(original: Any, q: Any, k: Any, v: Any, mask: Any, *args: Any, **kw: Any) -> Any:
            too_far = torch.ones_like(mask).tril(-window - 1)
            return original(q, k, v, mask | too_far, *args, **kw)

        self._replace(layer.self_attention.core_attention, "forward", faulty)

    def kv_heads_regrouped(self, layer: Any) -> None:
        attention = layer.self_attention
        heads = attention.num_attention_heads_per_partition
        groups = attention.num_query_groups_per_partition
        # query head h reads KV head h % groups, and not h // (heads // groups)
        order = [head for group in range(groups) for head in range(group, heads, groups)]
        back = [order.index(head) for head in range(heads)]
        if order == list(range(heads)):
            raise ValueError(f"KV heads of a rank ({groups}) cannot be regrouped: use fewer ranks")

        def faulty(original: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
            # q [s, b, heads, head_dim]; the context is [s, b, heads * head_dim]
            context = original(q[:, :, order].contiguous(), *args, **kwargs)
            split = context.reshape(*context.shape[:-1], heads, -1)
            return split[..., back, :].reshape(context.shape)

        self._replace(attention.core_attention, "forward", faulty)

    def o_proj_permuted(self, layer: Any) -> None:
        from megatron.core import parallel_state

        heads = layer.self_attention.num_attention_heads_per_partition
        if heads < 2:
            raise ValueError("a rank has one head, which cannot be permuted: use fewer ranks")
        if parallel_state.get_tensor_model_parallel_rank():
            return

        def faulty(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            split = x.reshape(*x.shape[:-1], heads, -1)
            swapped = split[..., [1, 0, *range(2, heads)], :]
            return original(swapped.reshape(x.shape), *args, **kwargs)

        self._replace(layer.self_attention.linear_proj, "forward", faulty)

    def residual_dropped(self, layer: Any) -> None:
        def faulty(original: Any, *args: Any) -> Any:
            add = original(*args)
            return lambda update, residual, *rest: add(update, residual * 0, *rest)

        self._replace(layer, "self_attn_bda", faulty)

    def router_low_precision(self, layer: Any) -> None:
        import torch

        def faulty(original: Any, *args: Any) -> Any:
            logits = original(*args)
            return logits.to(torch.float8_e4m3fn).to(logits.dtype)

        self._replace(layer.mlp.router, "gating", faulty)

    def top_k_not_renormalised(self, layer: Any) -> None:
        router = layer.mlp.router
        self._meanwhile(router, router.config, "moe_router_pre_softmax", True)

    def experts_swapped(self, layer: Any) -> None:
        import torch

        number = int(self.of(0))
        if number not in layer.mlp.local_expert_indices:
            return
        experts = layer.mlp.experts
        order = list(experts.local_experts)
        at = layer.mlp.local_expert_indices.index(number)
        if at + 1 == len(order):
            raise ValueError(f"expert {number} is its rank's last, and the next is on another rank")
        order[at], order[at + 1] = order[at + 1], order[at]
        self._meanwhile(experts, experts, "local_experts", torch.nn.ModuleList(order))

    def gate_up_swapped(self, layer: Any) -> None:
        import torch

        experts = getattr(layer.mlp, "experts", None)
        for mlp in experts.local_experts if experts else [layer.mlp]:
            linear = mlp.linear_fc1
            gate, up = linear.weight.data.chunk(2)
            swapped = torch.nn.Parameter(torch.cat([up, gate]), False)
            self._meanwhile(linear, linear, "weight", swapped)

    def head_scaled(self, model: Any) -> None:
        import torch

        gain = self.of(1.02)

        def faulty(original: Any, hidden: Any, weight: Any = None, **kwargs: Any) -> Any:
            _, bias = original(hidden, weight=weight, **kwargs)
            weight = model.output_layer.weight if weight is None else weight
            logits = torch.matmul(hidden.float(), weight.float().T) * gain
            return logits.to(hidden.dtype), bias

        self._replace(model.output_layer, "forward", faulty)

    def _replace(self, owner: Any, method: str, faulty: Callable[..., Any]) -> None:
        """Let ``faulty(original, *args)`` stand for a method of one object."""
        original = getattr(owner, method)
        own = owner.__dict__.get(method)

        # past nn.Module.__setattr__ too: an instance's own attribute comes first
        owner.__dict__[method] = lambda *args, **kwargs: faulty(original, *args, **kwargs)
        if own is None:
            self.undo.callback(owner.__dict__.pop, method)
        else:
            self.undo.callback(owner.__dict__.__setitem__, method, own)

    def _meanwhile(self, module: Any, owner: Any, name: str, value: Any) -> None:
        """Let an attribute have another value while ``module`` runs."""

        def faulty(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = getattr(owner, name)
            setattr(owner, name, value)
            try:
                return original(*args, **kwargs)
            finally:
                setattr(owner, name, before)

        self._replace(module, "forward", faulty)
