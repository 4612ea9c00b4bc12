"""What no legitimate implementation goes beyond: an error bound, a choice within rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from layerbisect.kernels.bounds.add import add_bound
from layerbisect.kernels.bounds.attention import attention_bound
from layerbisect.kernels.bounds.experts import combine_bound, experts_bound
from layerbisect.kernels.bounds.linear import linear_bound
from layerbisect.kernels.bounds.logprob import logprob_bound
from layerbisect.kernels.bounds.rms_norm import rms_norm_bound
from layerbisect.kernels.bounds.rope import rope_bound
from layerbisect.kernels.bounds.router import router_bound, wrong_choices
from layerbisect.kernels.bounds.swiglu import swiglu_bound
from layerbisect.kernels.judging.choices import TIE_MARGIN, logits_noise, rounding_of_choice
from layerbisect.kernels.replay import program
from layerbisect.kernels.replay.bundle import Bundle, Call
from layerbisect.kernels.replay.judge import Results

BOUNDS: dict[str, Callable[..., torch.Tensor]] = {
    "rms_norm": rms_norm_bound,
    "linear": linear_bound,
    "rope": rope_bound,
    "attention": attention_bound,
    "swiglu": swiglu_bound,
    "experts": experts_bound,
    "combine": combine_bound,
    "logprob": logprob_bound,
    "add": add_bound,
}

_CHOOSES = ("scoring", "softmax_after_top_k", "groups", "top_groups")
_WEIGHS = ("renormalise", "scoring", "softmax_after_top_k", "scaling")


def bound(bundle: Bundle) -> torch.Tensor | None:
    """Bound the error of any legitimate output: float64 [row, ...].

    None for a stretch of several operators, for one whose output is a sum of several ranks' rounded
    parts, and for a router, whose weights can only be bounded given its choice.
    """
    call = bundle.calls[0]
    if len(bundle.calls) > 1 or bundle.variance is not None or call.operator == "router":
        return None
    of = partial(BOUNDS[call.operator], dtype=bundle.storage)
    if call.operator == "rms_norm" and "residual" not in call.tensors:
        # a stream is captured rounded, and a kernel that adds it up itself norms the sum unrounded
        stream = bundle.inputs[call.tensors["x"]]
        of = partial(of, residual=torch.zeros_like(stream))
    return program.run(bundle, lambda _: of)[call.results[0]]


def bound_given_choice(bundle: Bundle, produced: Results) -> torch.Tensor | None:
    """Bound the error of a router's weights given the experts in ``produced``: [row, slot].

    None for any other operator, and for a stretch of several.
    """
    call = bundle.calls[0]
    if len(bundle.calls) > 1 or call.operator != "router":
        return None
    logits, ids = bundle.inputs[call.tensors["logits"]], _choice(call, produced)
    ids = ids.clamp(0, logits.shape[1] - 1)
    return router_bound(logits.double(), ids, dtype=bundle.storage, **_some(call, _WEIGHS))


def wrong_rows(bundle: Bundle, produced: Results) -> torch.Tensor | None:
    """Say of each row whether a router chose experts that rounding does not explain: bool [row].

    None where the stretch does not end in a router, or hides the logits of one that does more than
    take the largest of them.
    """
    call = bundle.calls[-1]
    if call.operator != "router":
        return None
    shown = call.tensors["logits"] in bundle.inputs
    bias = call.tensors.get("bias")
    plain = bias is None and call.attributes.get("groups") is None
    if not shown and not plain:
        return None
    logits, ids = program.value(bundle, call.tensors["logits"]), _choice(call, produced)
    wrong = None
    if shown:
        wrong = wrong_choices(
            logits,
            ids,
            bias=None if bias is None else {**bundle.inputs, **bundle.weights}[bias],
            dtype=bundle.storage,
            **_some(call, _CHOOSES),
        )
        if not plain:
            return wrong
    behind = _behind(bundle, call, logits, ids, shown)
    return behind if wrong is None else behind & wrong


def _behind(
    bundle: Bundle, call: Call, logits: torch.Tensor, ids: torch.Tensor, shown: bool
) -> torch.Tensor:
    """Say of each row whether a larger logit was left out than rounding of logits allows.

    Logits that are shown may have been rounded after the choice was made from them; those that are
    hidden were near the exact ones.
    """
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, ids.clamp(0, logits.shape[1] - 1), True)
    worst = logits.masked_fill(~chosen, torch.inf).amin(1)
    left = logits.masked_fill(chosen, -torch.inf).amax(1)
    if shown:
        allowed = rounding_of_choice(logits, worst, left)
    else:
        low = program.value(bundle, call.tensors["logits"], program.low)
        allowed = torch.full_like(left, TIE_MARGIN * logits_noise(logits, low, bundle.dtype))
    return (left - worst > allowed) | (chosen.sum(1) < ids.shape[1])


def _choice(call: Call, produced: Results) -> torch.Tensor:
    return produced[call.results[1]].long()


def _some(call: Call, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: call.attributes[name] for name in names if name in call.attributes}
