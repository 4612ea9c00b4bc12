"""Run a bundle's calls in order: by the references, or by an implementation of each operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from layerbisect.kernels.attention import attention
from layerbisect.kernels.experts import combine, experts
from layerbisect.kernels.linear import linear
from layerbisect.kernels.logprob import logprob
from layerbisect.kernels.replay.bundle import Bundle, Call
from layerbisect.kernels.rms_norm import rms_norm
from layerbisect.kernels.rope import rope
from layerbisect.kernels.rounding import rounded
from layerbisect.kernels.router import route
from layerbisect.kernels.swiglu import swiglu


def add(
    stream: torch.Tensor, delta: torch.Tensor, *, round_to: torch.dtype | None = None
) -> torch.Tensor:
    """Add a block's output to the residual stream: [row, hidden]."""
    return rounded(stream + delta, round_to)


REFERENCES: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "linear": linear,
    "rope": rope,
    "attention": attention,
    "router": route,
    "swiglu": swiglu,
    "experts": experts,
    "combine": combine,
    "logprob": logprob,
    "add": add,
}

# references convert these themselves, a piece at a time; frequencies are defined in float32
_WEIGHTS = ("weight", "gate_up", "down", "inv_freq")

Run = Callable[..., Any]
Changes = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


def run(
    bundle: Bundle,
    choose: Callable[[Call], Run],
    changed: Changes | None = None,
) -> dict[str, torch.Tensor]:
    """Run the stretch; ``choose`` says what computes each call, by keyword arguments.

    ``changed`` maps names of inputs or results to functions that replace their values before they
    are read. Returns the last call's results by name.
    """
    values: dict[str, torch.Tensor] = {**bundle.inputs, **bundle.weights}
    changed = changed or {}
    for name in changed.keys() & values.keys():
        values[name] = changed[name](values[name])
    made: dict[str, torch.Tensor] = {}
    for call in bundle.calls:
        arguments = {a: values[name] for a, name in call.tensors.items()}
        if call.operator == "linear":
            arguments["x"] = arguments["x"].flatten(1)
        by_slot = call.operator == "experts" and arguments["x"].ndim == 3
        if by_slot:
            # each slot has an input of its own: one row an expert
            slots = arguments["x"].shape[1]
            arguments |= {n: arguments[n].flatten(0, 1) for n in ("x", "ids", "weights")}
            arguments |= {n: arguments[n][:, None] for n in ("ids", "weights")}
        results = choose(call)(**arguments, **call.attributes)
        found = results if isinstance(results, tuple) else (results,)
        if by_slot:
            found = tuple(t.unflatten(0, (-1, slots)) for t in found)
        made = dict(zip(call.results, found, strict=True))
        if call.heads is not None:
            made = {n: t.unflatten(1, (call.heads, -1)) for n, t in made.items()}
        values |= {n: changed[n](t) if n in changed else t for n, t in made.items()}
    return made


def exact(
    bundle: Bundle,
    changed: Changes | None = None,
) -> dict[str, torch.Tensor]:
    """Compute the stretch in float64, which rounds nothing that counts."""
    return run(bundle, lambda call: partial(_reference, call, torch.float64, None), changed)


def low(
    bundle: Bundle,
    changed: Changes | None = None,
) -> dict[str, torch.Tensor]:
    """Compute what the low-precision reference makes of the stretch, in float64 or float32.

    It rounds what an ordinary implementation writes to memory to the engine's dtype; one that
    stores float32 also computes in it.
    """
    made = run(bundle, lambda call: low_reference(bundle, call), changed)
    return {name: t.double() if t.is_floating_point() else t for name, t in made.items()}


def low_reference(bundle: Bundle, call: Call) -> Run:
    """Return what computes one call as `low` does, in float64 or float32."""
    wide = bundle.dtype == "float32" or only_scores(bundle)
    return partial(_reference, call, torch.float32 if wide else torch.float64, bundle.storage)


def only_scores(bundle: Bundle) -> bool:
    """Whether nothing but log-probs is computed, from logits: what rounds are sums in float32."""
    return all(call.operator == "logprob" for call in bundle.calls)


Compute = Callable[[Bundle, Changes | None], dict[str, torch.Tensor]]
"""`exact` or `low`."""


def value(bundle: Bundle, name: str, compute: Compute = exact) -> torch.Tensor:
    """Compute one tensor of the stretch in float64: an input, or a call's result."""
    seen: list[torch.Tensor] = []

    def keep(values: torch.Tensor) -> torch.Tensor:
        seen.append(values)
        return values

    compute(bundle, {name: keep})
    return seen[0].double()


def _reference(
    call: Call, compute: torch.dtype, round_to: torch.dtype | None, **arguments: Any
) -> Any:
    reference = REFERENCES[call.operator]
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in _WEIGHTS:
            arguments[name] = value.to(compute)
    positional = [
        arguments.pop(p.name)
        for p in inspect.signature(reference).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in arguments
    ]
    return reference(*positional, **arguments, round_to=round_to)
