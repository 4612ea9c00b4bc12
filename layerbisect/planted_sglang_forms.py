"""How each fault is planted into the model of an SGLang server (`layerbisect.planted_sglang`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerbisect.planted_sglang import NOT_PLANTED, Fault, said_of


class Planter:
    """Plants and removes faults, and knows whether a decode step is running."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._planted = ""
        self._undo: list[Callable[[], None]] = []
        self._decoding = False
        self.fault = Fault("", 0, None, False)

    def forward(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``ModelRunner.forward``."""
        self._decoding = forward_batch.forward_mode.is_decode()
        wanted = self._file.read_text().strip()
        if wanted != self._planted:
            self._take_back()
            self._planted, said = wanted, wanted
            try:
                if wanted:
                    self._plant(Fault.parse(wanted), runner.model)
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                # a model that is built otherwise: the server goes on, and nothing is planted
                self._take_back()
                said = f"{NOT_PLANTED}{type(error).__name__}: {error}"
            said_of(self._file).write_text(said)
            print(f"planted {said!r}", flush=True)

    def _take_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _plant(self, fault: Fault, model: Any) -> None:
        self.fault = fault
        layer = model.model.layers[fault.layer]
        getattr(self, "_" + fault.name.replace("-", "_"))(model, layer)

    def _replace(self, owner: Any, method: str, faulty: Callable[..., Any]) -> None:
        """Let ``faulty(original, *args)`` stand for a method of one object."""
        original = getattr(owner, method)
        decode = self.fault.decode

        def switch(*args: Any, **kwargs: Any) -> Any:
            if decode and not self._decoding:
                return original(*args, **kwargs)
            return faulty(original, *args, **kwargs)

        # past nn.Module.__setattr__ too: an instance's own attribute comes first
        owner.__dict__[method] = switch
        self._undo.append(lambda: owner.__dict__.pop(method, None))

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

    def _norm_eps(self, model: Any, layer: Any) -> None:
        norm = layer.input_layernorm
        self._meanwhile(norm, norm, "variance_epsilon", self.fault.of(0.05))

    def _norm_weight(self, model: Any, layer: Any) -> None:
        self._scaled_weight(layer.input_layernorm)

    def _final_norm_weight(self, model: Any, layer: Any) -> None:
        self._scaled_weight(model.model.norm)

    def _scaled_weight(self, norm: Any) -> None:
        import torch

        # in float32, where the norm multiplies: the product is rounded once
        weight = torch.nn.Parameter(norm.weight.data.float() * self.fault.of(1.05), False)
        self._meanwhile(norm, norm, "weight", weight)

    def _qk_norm_skipped(self, model: Any, layer: Any) -> None:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            self._replace(norm, "forward", lambda original, x, *args, **kwargs: x)

    def _rope_base(self, model: Any, layer: Any) -> None:
        rope = layer.self_attn.rotary_emb
        other = type(rope)(
            rope.head_size,
            rope.rotary_dim,
            rope.max_position_embeddings,
            rope.base * self.fault.of(2.0),
            rope.is_neox_style,
            rope.dtype,
        ).to(rope.cos_sin_cache.device)
        self._replace_rope(layer, lambda original, *args, **kwargs: other(*args, **kwargs))

    def _rope_shifted(self, model: Any, layer: Any) -> None:
        shift = int(self.fault.of(1))

        def faulty(rope: Any, positions: Any, q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
            shifted, _ = rope(positions + shift, q.clone(), k.clone(), *args, **kwargs)
            _, key = rope(positions, q, k, *args, **kwargs)
            return shifted, key

        self._replace_rope(layer, faulty)

    def _replace_rope(self, layer: Any, faulty: Callable[..., Any]) -> None:
        import torch

        # all layers share one module
        shared = layer.self_attn.rotary_emb

        class Own(torch.nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return shared(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(shared, name)

        own = Own()
        self._replace(own, "forward", faulty)
        layer.self_attn.rotary_emb = own
        self._undo.append(lambda: setattr(layer.self_attn, "rotary_emb", shared))

    def _softmax_scale(self, model: Any, layer: Any) -> None:
        attention = layer.self_attn.attn
        scaled = attention.scaling * self.fault.of(1.2)
        self._meanwhile(attention, attention, "scaling", scaled)

    def _sliding_window(self, model: Any, layer: Any) -> None:
        attention = layer.self_attn.attn
        self._meanwhile(attention, attention, "sliding_window_size", int(self.fault.of(8)))

    def _kv_heads_regrouped(self, model: Any, layer: Any) -> None:
        attention = layer.self_attn.attn
        heads, groups = attention.tp_q_head_num, attention.tp_k_head_num
        # query head h reads KV head h % groups, and not h // (heads // groups)
        order = [head for group in range(groups) for head in range(group, heads, groups)]
        back = [order.index(head) for head in range(heads)]

        def permuted(x: Any, places: list[int]) -> Any:
            return x.reshape(len(x), heads, -1)[:, places].reshape(x.shape)

        def faulty(original: Callable[..., Any], q: Any, *args: Any, **kwargs: Any) -> Any:
            return permuted(original(permuted(q, order), *args, **kwargs), back)

        self._replace(attention, "forward", faulty)

    def _o_proj_permuted(self, model: Any, layer: Any) -> None:
        heads = layer.self_attn.attn.tp_q_head_num

        def faulty(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
            split = x.reshape(len(x), heads, -1)
            swapped = split[:, [1, 0, *range(2, heads)]]
            return original(swapped.reshape(x.shape), *args, **kwargs)

        self._replace(layer.self_attn.o_proj, "forward", faulty)

    def _residual_dropped(self, model: Any, layer: Any) -> None:
        def faulty(original: Callable[..., Any], x: Any, residual: Any, *args: Any) -> Any:
            return original(x, residual * 0, *args)

        self._replace(layer.post_attention_layernorm, "forward", faulty)

    def _router_low_precision(self, model: Any, layer: Any) -> None:
        import torch

        def faulty(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            logits, bias = original(*args, **kwargs)
            return logits.to(torch.float8_e4m3fn).to(logits.dtype), bias

        self._replace(layer.mlp.gate, "forward", faulty)

    def _top_k_not_renormalised(self, model: Any, layer: Any) -> None:
        self._meanwhile(layer.mlp.topk, layer.mlp.topk.topk_config, "renormalize", False)

    def _experts_swapped(self, model: Any, layer: Any) -> None:
        import torch

        first = int(self.fault.of(0))
        second = first + 1

        def faulty(original: Callable[..., Any], x: Any, routed: Any, *args: Any, **kw: Any) -> Any:
            ids = routed.topk_ids
            swapped = torch.where(ids == first, second, torch.where(ids == second, first, ids))
            swapped = swapped.to(ids.dtype)
            return original(x, routed._replace(topk_ids=swapped), *args, **kw)

        self._replace(layer.mlp.experts, "forward", faulty)

    def _gate_up_swapped(self, model: Any, layer: Any) -> None:
        import torch

        experts = layer.mlp.experts
        first, second = experts.w13_weight.data.chunk(2, dim=1)
        swapped = torch.nn.Parameter(torch.cat([second, first], dim=1), False)
        self._meanwhile(experts, experts, "w13_weight", swapped)

    def _head_scaled(self, model: Any, layer: Any) -> None:
        gain = self.fault.of(1.02)

        def faulty(original: Any, hidden: Any, head: Any, *args: Any, **kwargs: Any) -> Any:
            return (hidden.float() @ head.weight.float().T * gain).to(hidden.dtype)

        self._replace(model.logits_processor, "_compute_lm_head", faulty)
