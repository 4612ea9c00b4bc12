"""Replay bundles one after another, by all implementations of their operators or by some."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch

from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.implementation import Implementation, Unavailable
from layerbisect.kernels.replay.known import implementations as implementations_of
from layerbisect.kernels.replay.replayer import replay as replay_bundle
from layerbisect.kernels.replay.report import Replay
from layerbisect.kernels.replay.variants import REFERENCE


def replay_all(
    bundles: Sequence[Bundle],
    *,
    implementations: Sequence[str] = (),
    device: str = "auto",
    resume: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Replay, ...]:
    """Replay bundles; the arguments are those of `layerbisect.bisect.replay.replay`."""
    where = device_of(device)
    told = progress or NoProgress()
    if resume is not None and Path(resume).is_file():
        raise LayerBisectError(f"{resume} is a file; name a directory to resume in")
    names = _names(bundles, implementations, where)
    told.start("replaying", len(bundles))
    made = []
    for done, (bundle, wanted) in enumerate(zip(bundles, names, strict=True), 1):
        journal = None if resume is None else Path(resume) / f"{bundle.point}.jsonl"
        made.append(replay_bundle(bundle, device=where, names=wanted, journal=journal))
        told.advance(done)
    told.done()
    return tuple(made)


def _names(
    bundles: Sequence[Bundle], wanted: Sequence[str], device: str
) -> list[Sequence[str] | None]:
    """Of the names that are wanted, those that each bundle's operators have; None for all.

    Raises LayerBisectError for one that none of them has.
    """
    if not wanted:
        return [None] * len(bundles)
    if len(bundles) == 1:
        # the replayer knows itself what a process of its own can run
        return [wanted]
    known = [names_of(bundle, device) for bundle in bundles]
    every = list(dict.fromkeys(name for names in known for name in names))
    if unknown := [name for name in wanted if name not in every]:
        raise LayerBisectError(
            f"no implementation of these operators is called {unknown[0]!r}: there are "
            f"{', '.join(every)}"
        )
    # with none of its own the engine is still judged beside the reference
    return [[n for n in wanted if n in names] or [REFERENCE] for names in known]


def names_of(bundle: Bundle, device: str) -> list[str]:
    """Name the implementations of a bundle's operators, those that cannot run here too."""
    return list(dict.fromkeys([REFERENCE, *(one.name for one in _known([bundle], device))]))


def switched(bundles: Sequence[Bundle], device: str) -> tuple[str, ...]:
    """Name the implementations that have a deterministic and a fast form, or cannot run here."""
    found = (
        one.name for one in _known(bundles, device) if isinstance(one, Unavailable) or one.family
    )
    return tuple(dict.fromkeys(found)) or (REFERENCE,)


def _known(bundles: Sequence[Bundle], device: str) -> list[Implementation | Unavailable]:
    operators = dict.fromkeys(call.operator for bundle in bundles for call in bundle.calls)
    return [one for operator in operators for one in implementations_of(operator, device)]


def device_of(device: str) -> str:
    """Choose a GPU for ``auto`` where torch finds one, and else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
