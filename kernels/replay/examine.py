"""All that is said of one implementation on one bundle, whatever it does short of dying."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from layerbisect.kernels.replay.bench import Bench, OwnCall, RaisedError, UnwrittenError
from layerbisect.kernels.replay.bits import most_ulps, same_bits
from layerbisect.kernels.replay.bundle import BundleError
from layerbisect.kernels.replay.implementation import Unsupported
from layerbisect.kernels.replay.judge import Results
from layerbisect.kernels.replay.report import Errors, Reproduction, Result, State
from layerbisect.kernels.replay.timing import time_ms
from layerbisect.kernels.replay.variants import GarbageError, Variant
from layerbisect.kernels.replay.variation import batches, bounded, chunks, repeats

Made = TypeVar("Made")

_STATES: dict[type[Exception], State] = {
    Unsupported: "refused",
    GarbageError: "garbage",
    UnwrittenError: "unwritten",
    RaisedError: "crashed",
}


def examine(bench: Bench, variant: Variant, times: int) -> Result:
    """Run a variant in every way, ``times`` times the same, and judge what it returns.

    What it raises becomes the Result's state; what goes wrong here is raised.
    """
    try:
        made = bench.first_run(variant)
        errors = bench.yardstick.errors(made)
        part, calls = bounded(bench), list[OwnCall]()
        base = bench.run(variant, part, own_calls=calls)
        notes = [variant.why] if variant.why else []
        varied = _or_note(notes, "in other batches", lambda: batches(bench, variant, part, made))
        chunked = _or_note(notes, "in chunks", lambda: chunks(bench, variant, calls))
        return variant.result(
            state="ran",
            why="; ".join(notes),
            errors=errors,
            repeats=repeats(bench, variant, part, base, times),
            batches=varied,
            chunks=chunked,
            reproduces=reproduction(bench, made),
            time_ms=time_ms(bench, variant),
        )
    except tuple(_STATES) as error:
        state = next(state for kind, state in _STATES.items() if isinstance(error, kind))
        return variant.result(state=state, why=str(error))


def _or_note(notes: list[str], when: str, run: Callable[[], Made]) -> Made | None:
    """Leave out what the variant does not know, and note why."""
    try:
        return run()
    except Unsupported as why:
        notes.append(f"{when}: {why}")
        return None


def engine_errors(bench: Bench) -> Errors | None:
    """Judge what the engine returned; None where the bundle doesn't have it."""
    bundle, judge = bench.bundle, bench.judge
    captured = dict(bundle.captured)
    if not captured:
        return None
    for name, values in captured.items():
        if values.shape != judge.exact[name].shape:
            raise BundleError(
                f"what the engine returned as {name} has the shape {list(values.shape)}, and "
                f"{bundle.point} has {list(judge.exact[name].shape)}; export it again"
            )
    if judge.result not in captured:
        # a router of which only the choice is known: its weights count as right
        captured[judge.result] = judge.references(captured)[1]
    return bench.yardstick.errors(captured, bundle.acquitted)


def reproduction(bench: Bench, made: Results) -> Reproduction | None:
    """Compare an output with what the engine returned, over the observed rows; None if unknown.

    The engine's output is known in the dtype that it was captured in, to which a wider output is
    rounded first.
    """
    bundle, rows = bench.bundle, bench.bundle.observed
    if not bundle.captured:
        return None
    equal, most = [], 0.0
    for name, captured in bundle.captured.items():
        seen, own = captured[rows], made[name][rows].to(captured.dtype)
        equal.append(same_bits(own, seen).reshape(len(rows), -1))
        if seen.is_floating_point():
            most = max(most, most_ulps(own, seen, bundle.storage))
    elements = torch.cat(equal, 1)
    return Reproduction(
        equal_elements=float(elements.double().mean()),
        equal_rows=float(elements.all(1).double().mean()),
        max_ulps=most,
    )
