"""Figures of a replay in words: the same on the page, and in what an exported repro.py prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layerbisect.kernels.replay.report import Errors, Replay, Reproduction, Result, Variation
from layerbisect.wording import count, percent, times

Cell = Callable[[Result], str]
_PLAIN_RATIO = 2.0
"""An error this many times its floor is seen by its size alone."""


def headline(replay: Replay) -> str:
    """Say in one short sentence what became of a stretch; its conclusion says why."""
    return f"{replay.status}: {replay.point} ({', '.join(replay.covers)}): {finding(replay)}"


def finding(replay: Replay) -> str:
    """Say in few words what the engine's output is, or that it could not be judged."""
    errors = replay.engine
    if errors is None or replay.status == "inconclusive":
        return replay.conclusion
    if replay.status == "convicted":
        return f"{replay.label} errs beyond rounding, {_how_far(errors)}"
    said, because, _ = replay.conclusion.partition(f": {errors.why}")
    return f"{said}, {times(errors.ratio)} at p95" if because else said


def _how_far(errors: Errors) -> str:
    if errors.nonfinite:
        return f"{count(errors.nonfinite, 'row')} not finite"
    if errors.wrong_choices:
        return f"{count(errors.wrong_choices, 'row')} to the wrong experts"
    if errors.ratio > _PLAIN_RATIO * max(errors.floor, 1.0):
        return f"{times(errors.ratio)} at p95"
    # what a fit or a few elements convict is within rounding over most rows
    if errors.fits:
        return f"systematically: {errors.fits[0].name} {errors.fits[0].coefficient:+.2g}"
    if errors.beyond_bound:
        return f"{count(errors.beyond_bound, 'element')} beyond the worst-case bound"
    return f"{times(errors.worst[0].ratio if errors.worst else errors.ratio)} in the worst row"


def figures(errors: Errors) -> list[str]:
    """Say how far an output is off, and where rounding does not explain it."""
    text = (
        f"error {times(errors.median)} rounding at the median and {times(errors.ratio)} at the "
        f"95th percentile of {count(errors.rows, 'row')} (floor {times(errors.floor)})"
    )
    if errors.bound_used is not None:
        of = "" if _of_bound(errors).endswith("x") else " of"
        text += f", {_of_bound(errors)}{of} the worst-case bound"
    where = errors.convicted and errors.where not in ("", "all rows")
    return [text, f"where: {errors.where}"] if where else [text]


def columns(results: Sequence[Result]) -> tuple[list[str], list[Cell]]:
    """Return the heads and the cells of a table of implementations, as far as there are figures."""
    every: list[tuple[str, Cell, bool]] = [
        ("error p50", _of_errors(lambda e: times(e.median)), True),
        ("p95", _of_errors(lambda e: times(e.ratio)), True),
        ("of bound", _of_errors(_of_bound), True),
        ("systematic", _of_errors(_systematic), True),
        ("repeat", lambda one: varies(one.repeats), True),
        ("batch", lambda one: varies(one.batches), True),
        ("chunk", lambda one: varies(one.chunks), any(o.chunks for o in results)),
        ("engine's bits", _engine_bits, any(o.reproduces for o in results)),
        ("time", _time, any(o.time_ms is not None for o in results)),
    ]
    kept = [(head, cell) for head, cell, wanted in every if wanted]
    return [head for head, _ in kept], [cell for _, cell in kept]


def _of_errors(cell: Callable[[Errors], str]) -> Cell:
    return lambda one: "-" if one.errors is None else cell(one.errors)


def _of_bound(errors: Errors) -> str:
    used = errors.bound_used
    return percent(used) if used is None or used < 9.995 else times(used)


def _systematic(errors: Errors) -> str:
    return errors.fits[0].name if errors.fits else "none"


def varies(variation: Variation | None) -> str:
    """Write ``same`` where no bit changes, and else the share of rows that do."""
    if variation is None or not variation.of:
        return "-"
    return "same" if variation.none else percent(variation.rows / variation.of)


def _engine_bits(result: Result) -> str:
    found: Reproduction | None = result.reproduces
    if found is None:
        return "-"
    # what is nearly all is not called all
    return "all" if found.exact else percent(min(found.equal_elements, 0.99))


def _time(result: Result) -> str:
    return "-" if result.time_ms is None else f"{result.time_ms:.3g} ms"
