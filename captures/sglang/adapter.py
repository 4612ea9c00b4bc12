"""Where SGLang 0.5.23 shows each point of Qwen3-MoE, Qwen3 and Llama, and what a rank holds of it.

=================  ==========================================================  ====================
point              where                                                       under tensor parallel
=================  ==========================================================  ====================
embed              ``embed_tokens``, out                                       whole
layers.i.input     ``self_attn``, in: the batch's residual stream              whole
attn.norm          ``self_attn``, in                                           whole
attn.q, .k, .v     ``self_attn.attn``, in                                      heads of this rank
attn.context       ``self_attn.attn``, out                                     heads of this rank
attn.out           ``self_attn.o_proj``, out                                   partial sum
mid                ``mlp``, in: the batch's residual stream                    whole
mlp.norm           ``mlp``, in                                                 whole
mlp.router_logits  ``mlp.gate``, out                                           whole
mlp.expert_*       ``mlp.topk``, out                                           whole
mlp.out            ``mlp``, out                                                partial sum
layers.L-1.output  ``norm``, out: the residual sum that it returns             whole
final_norm         ``norm``, out                                               whole
logits             not observable: computed for the rows to be sampled or scored, never kept
=================  ==========================================================  ====================

The residual stream is read where the layer has just written it, and not from what the norm modules
return: a norm fused with the all-reduce before it bypasses its module, and the stream is the same.
SGLang's norms work on the unrounded sum of stream and branch, which no tensor holds: a norm's input
is known to one rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from layerbisect.captures.format import How
from layerbisect.captures.recorder import Pick, Tap
from layerbisect.captures.sglang.layout import Layout

if TYPE_CHECKING:
    import torch

LAYER = r"model\.layers\.(?P<layer>\d+)"


def taps(
    layout: Layout, num_layers: int, check: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[Tap, ...]:
    """Return the table above as taps, of modules named from the root of the model.

    ``check`` sees every tensor before it is recorded; it returns None, or raises, to keep it out.
    """

    def tap(
        module: str, suffix: str, pick: Pick, when: Literal["before", "after"] = "after"
    ) -> Tap:
        def checked(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            value = pick(args, kwargs, output)
            return None if value is None else check(value)

        how: How = "partial_sum" if layout.partial(suffix) else "observed"
        if module.startswith(LAYER):
            suffix = f"layers.{{layer}}.{suffix}"
        return Tap(module, suffix, checked, when=when, how=how)

    whole = (
        tap(r"model\.embed_tokens", "embed", _out),
        tap(LAYER + r"\.self_attn", "input", _stream, "before"),
        tap(LAYER + r"\.self_attn", "attn.norm", _hidden_in, "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.q", _argument(0), "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.k", _argument(1), "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.v", _argument(2), "before"),
        tap(LAYER + r"\.self_attn\.attn", "attn.context", _out),
        tap(LAYER + r"\.self_attn\.o_proj", "attn.out", _out),
        tap(LAYER + r"\.mlp", "mid", _stream, "before"),
        tap(LAYER + r"\.mlp", "mlp.norm", _hidden_in, "before"),
        tap(LAYER + r"\.mlp\.gate", "mlp.router_logits", _out),
        tap(LAYER + r"\.mlp\.topk", "mlp.expert_ids", _field("topk_ids")),
        tap(LAYER + r"\.mlp\.topk", "mlp.expert_weights", _field("topk_weights")),
        tap(LAYER + r"\.mlp", "mlp.out", _out),
        tap(r"model\.norm", f"layers.{num_layers - 1}.output", _residual_sum),
        tap(r"model\.norm", "final_norm", _out),
    )
    # rows in no order that this process knows
    hidden = (".mlp.",) if layout.mlp_rows_differ else ()
    return tuple(t for t in whole if not any(part in t.point for part in hidden))


def _tensor(value: Any) -> Any:
    """Pass a tensor on; a quantized pair, a handle of the engine's or None is not the point."""
    return value if hasattr(value, "untyped_storage") else None


def _out(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    # linear layers return (output, bias), norms (normed, residual sum)
    return _tensor(output[0] if isinstance(output, tuple) else output)


def _argument(place: int) -> Pick:
    def pick(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return _tensor(args[place] if place < len(args) else kwargs.get("qkv"[place]))

    return pick


def _hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    # attention is called with keywords alone, the MLP with its input first
    return _tensor(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    for value in (*kwargs.values(), *args):
        if hasattr(value, "residual_stream"):
            return _tensor(getattr(value.residual_stream, "residual", None))
    return None


def _field(name: str) -> Pick:
    def pick(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # routing done inside the expert kernel leaves no such field
        return _tensor(getattr(output, name, None))

    return pick


def _residual_sum(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return _tensor(output[1] if isinstance(output, tuple) else None)
