"""Replay a stretch of operators: the engine's own output, and every implementation's, judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bundle import Bundle, save_bundle
from layerbisect.kernels.replay.conclusion import Status, conclude
from layerbisect.kernels.replay.journal import Journal, digest
from layerbisect.kernels.replay.report import Errors, Replay, Result
from layerbisect.kernels.replay.supervisor import supervise
from layerbisect.kernels.replay.worker import KNOWN, work

FEW_ROWS = 4
"""Fewer rows than these say nothing of an operator."""


def replay(
    bundle: Bundle,
    *,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    repeats: int = 5,
    journal: Path | None = None,
    timeout_s: float = 300,
    isolate: bool = True,
    known: str = KNOWN,
) -> Replay:
    """Run a bundle through the implementations of its operators, and judge each and the engine.

    Args:
        bundle: what to replay.
        device: where implementations run: ``cpu``, where Triton's kernels are interpreted, or
            ``cuda``. They are judged on the CPU.
        names: the implementations that are wanted, all by default; ``reference`` is the
            low-precision reference.
        repeats: how often each is run on the same input.
        journal: where to keep what is done. Another call with it goes on after that, and leaves
            out what the earlier one died of. Not kept by default.
        timeout_s: how long one implementation may take, in its own process.
        isolate: whether implementations run in a process of their own, so that one that dies takes
            nothing else along. Without it an exception is still told, but not a crash.
        known: the module whose ``implementations(operator, device)`` lists them.

    Raises LayerBisectError for a bundle that doesn't fit together, a name that no implementation
    has, a device that is not there, or a journal of another replay.
    """
    _check(device, repeats, timeout_s)
    bundle.check()
    usable, reason = usable_part(bundle)
    if reason:
        return report(bundle, usable, device, None, (), reason)
    with TemporaryDirectory(prefix="layerbisect-") as folder:
        path = Path(folder) / "bundle.safetensors"
        save_bundle(usable, path)
        facts = {"bundle": digest(path), "device": device, "repeats": repeats}
        book = Journal.open(journal or Path(folder) / "journal.jsonl", facts)
        if book.started is not None:
            book.add("result", replace(book.started, why="an earlier run did not get past it"))
        if not book.has(names) and isolate:
            supervise(path, book, device, repeats, known, names or (), timeout_s)
        elif not book.has(names):
            work(usable, book, device=device, times=repeats, known=known, names=names)
    results = tuple(book.results[n] for n in book.known if names is None or n in names)
    engine = book.engine[0] if book.engine else None
    return report(bundle, usable, device, engine, results)


def _check(device: str, repeats: int, timeout_s: float) -> None:
    if repeats < 2:
        raise LayerBisectError(f"repeats must be at least 2, got {repeats}")
    if not timeout_s > 0:
        raise LayerBisectError(f"timeout_s must be above 0, got {timeout_s:g}")
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return
    if kind != "cuda" or (number and not number.isdigit()):
        raise LayerBisectError(f"device must be cpu, cuda or cuda:NUMBER, got {device!r}")
    count = torch.cuda.device_count()
    if int(number or 0) >= count:
        raise LayerBisectError(f"torch finds {count} GPUs, so {device} is not there; use cpu")


def usable_part(bundle: Bundle) -> tuple[Bundle, str]:
    """Take the rows, or sequences where rows attend, with finite input; and why none are judged."""
    for name, weight in bundle.weights.items():
        bad = int((~weight.isfinite()).sum())
        if bad:
            return bundle, (
                f"{bad} of {weight.numel()} numbers in {name} are NaN or infinite, so nothing "
                "computed with it can be judged"
            )
    finite = torch.ones(bundle.rows, dtype=torch.bool)
    for values in bundle.inputs.values():
        finite &= values.reshape(bundle.rows, -1).isfinite().all(1)
    if not bool(finite.all()):
        parts = finite.split(list(bundle.lengths))
        usable = bundle.only([unit for unit, part in enumerate(parts) if bool(part.all())])
    else:
        usable = bundle
    rows, aside = len(usable.observed), _aside(bundle, usable)
    if not len(bundle.observed):
        return usable, "no row of it is observed, so there is nothing to judge"
    if rows < FEW_ROWS:
        rest = f"; {aside}" if aside else ""
        return usable, f"{rows} rows are too few to judge, which takes {FEW_ROWS}{rest}"
    return usable, ""


def _aside(bundle: Bundle, usable: Bundle) -> str:
    count = len(bundle.observed) - len(usable.observed)
    if not count:
        return ""
    what = "rows of sequences" if bundle.attends else "rows"
    return f"{count} {what} with NaN or infinity in their input are set aside"


def report(
    bundle: Bundle,
    usable: Bundle,
    device: str,
    engine: Errors | None,
    results: tuple[Result, ...],
    reason: str = "",
) -> Replay:
    """Put together what became of a bundle, of which ``usable`` was run.

    ``reason`` says why nothing could be judged.
    """
    status: Status = "inconclusive"
    if not reason:
        status, reason = conclude(bundle.label, bundle.covers, engine, results, bundle.acquitted)
        if aside := _aside(bundle, usable):
            reason += f"; {aside}"
    rows = len(usable.observed)
    return Replay(
        point=bundle.point,
        layer=bundle.layer,
        operator=bundle.operator,
        covers=bundle.covers,
        label=bundle.label,
        dtype=bundle.dtype,
        device=_named(device),
        rows=rows,
        rows_left_out=bundle.rows_left_out + len(bundle.observed) - rows,
        engine_facts=bundle.engine,
        engine=engine,
        results=results,
        status=status,
        conclusion=reason,
    )


def _named(device: str) -> str:
    """Name a device with the hardware behind it."""
    return device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
