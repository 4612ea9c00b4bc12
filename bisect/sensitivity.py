"""What a verdict could have seen: the smallest fault of each operator that convicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from layerbisect.bisect.verdict import SmallestFault
from layerbisect.kernels.judging.own_error import OwnError


def smallest_faults(errors: Mapping[str, Sequence[OwnError]]) -> tuple[SmallestFault, ...]:
    """Sum up, by side and operator, what the judged operators that do not err would have shown.

    Of an operator that errs the fault itself is in the way of telling. Operators are in the order
    of computation.
    """
    return tuple(
        _worst(judged, operator, side)
        for side, found in errors.items()
        for operator, judged in _by_operator(found).items()
    )


def _by_operator(errors: Iterable[OwnError]) -> dict[str | None, list[OwnError]]:
    found: dict[str | None, list[OwnError]] = {}
    for error in errors:
        if error.smallest_gain is not None and not error.convicted and not error.acquitted:
            found.setdefault(_operator(error), []).append(error)
    return found


def _operator(error: OwnError) -> str | None:
    """Name the operator of an innocent point; queries and keys are the projection's."""
    projected = error.point.endswith((".attn.q", ".attn.k")) and error.covers[0] == "linear"
    return error.operator if len(error.covers) == 1 or projected else None


def _worst(judged: Sequence[OwnError], operator: str | None, side: str) -> SmallestFault:
    worst = max(judged, key=lambda error: error.smallest_gain or 0.0)
    return SmallestFault(
        operator=operator,
        side=side,
        of="logits" if worst.point == "logprob" else "output",
        gain=worst.smallest_gain or 0.0,
        point=worst.point,
        layer=worst.layer,
        layers=len({error.layer for error in judged} - {None}),
    )
