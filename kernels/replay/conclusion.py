"""What a replay comes to: a status, and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from layerbisect.kernels.judging.measure import SYSTEMATIC_ROWS
from layerbisect.kernels.replay.report import Errors, Result
from layerbisect.kernels.replay.variants import REFERENCE

Status = Literal["convicted", "acquitted", "inconclusive"]

_NAMED = 3


def conclude(
    label: str,
    covers: Sequence[str],
    engine: Errors | None,
    results: Sequence[Result],
    acquitted: str,
) -> tuple[Status, str]:
    """Say whether rounding explains what the engine returned, and who computes the same.

    ``covers`` are the operators that were replayed together.
    Where that is not known the implementations alone are judged, and one that errs convicts.
    """
    ran = [one for one in results if one.errors is not None and one.name != REFERENCE]
    guilty = [one.name for one in ran if one.errors is not None and one.errors.convicted]
    if engine is None:
        return _without_engine(label, ran, guilty)
    # those first that compute all of the stretch themselves
    own = sorted(ran, key=lambda one: len(one.filled))
    same = [one.name for one in own if one.reproduces is not None and one.reproduces.exact]
    if engine.convicted:
        if all(one.name == REFERENCE for one in results):
            # nobody asked for another
            return "convicted", _errs(label, engine)
        return "convicted", _convicted(label, covers, engine, ran, guilty, same)
    return "acquitted", _acquitted(label, engine, ran, guilty, same, acquitted)


def _without_engine(label: str, ran: Sequence[Result], guilty: Sequence[str]) -> tuple[Status, str]:
    unknown = f"what {label} returned is not in the bundle, so implementations alone are judged"
    if not ran:
        return "inconclusive", f"{unknown}, and none could be run"
    if guilty:
        of = f"{len(guilty)} of {len(ran)}" if guilty[1:] else f"one of {len(ran)}"
        return "convicted", f"{unknown}: {of} errs beyond rounding, {_names(guilty)}"
    return "acquitted", f"{unknown}: none of {len(ran)} errs beyond rounding"


def _errs(label: str, engine: Errors) -> str:
    where = "" if engine.where == "all rows" else f" ({engine.where})"
    return f"{label} errs beyond rounding on this input{where}: {engine.why}"


def _convicted(
    label: str,
    covers: Sequence[str],
    engine: Errors,
    ran: Sequence[Result],
    guilty: Sequence[str],
    same: Sequence[str],
) -> str:
    found = _errs(label, engine)
    if same:
        return f"{found}; {_return(same)} the same bit for bit, so the fault is " + (
            "theirs" if same[1:] else "that implementation's"
        )
    if not ran:
        return f"{found}; no implementation could be run beside it"
    if len(guilty) == len(ran):
        return (
            f"{found}; so {_do(ran)} {_names(guilty)}, though not bit for bit: are the weights and "
            "attributes of the bundle those that it ran?"
        )
    right = len(ran) - len(guilty)
    compute = "computes" if right == 1 else "compute"
    err = "err" if guilty[1:] else "errs"
    others = f", though {_names(guilty)} {err} otherwise" if guilty else ""
    return (
        f"{found}; {right} of {len(ran)} implementations {compute} the same input right"
        f"{others}: a bug in its {_any_of(covers)}, not rounding"
    )


def _acquitted(
    label: str,
    engine: Errors,
    ran: Sequence[Result],
    guilty: Sequence[str],
    same: Sequence[str],
    acquitted: str,
) -> str:
    found = f"rounding explains what {label} returned: {engine.why}"
    if acquitted:
        found = f"what {label} returned changes nothing: {engine.why}"
    if same:
        found += f"; {_return(same)} it bit for bit"
    elif ran:
        near = max(ran, key=_equal)
        found += (
            f"; no implementation returns it bit for bit, {near.name} comes nearest with "
            f"{_equal(near):.1%} of elements"
        )
    if engine.rows < SYSTEMATIC_ROWS:
        found += (
            f"; {engine.rows} rows are too few to find a systematic error, which takes "
            f"{SYSTEMATIC_ROWS}"
        )
    if guilty:
        found += f"; beyond rounding {'are' if guilty[1:] else 'is'} {_names(guilty)}"
    return found


def _equal(result: Result) -> float:
    return 0.0 if result.reproduces is None else result.reproduces.equal_elements


def _return(names: Sequence[str]) -> str:
    return f"{_names(names)} {'return' if names[1:] else 'returns'}"


def _do(ran: Sequence[Result]) -> str:
    return "do all of" if ran[1:] else "does"


def _any_of(covers: Sequence[str]) -> str:
    """Name a stretch's operators, of which a replay cannot tell which one errs."""
    *others, last = covers
    return f"{', '.join(others)} or {last}" if others else last


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
