"""Gaps at multiples of a length: chunks of prefill, pages of the cache, ends of parallel chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.gaps import (
    ALLOWED,
    RAISED,
    Bools,
    Gaps,
    Ints,
    chance,
    explained,
    log_set_chance,
    surprise,
)
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]

PERIODS = (*range(2, 65), 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# parts that a whole sequence, or a response, is cut into
PARTS = range(2, 17)
# share of the chosen tokens, and of the multiples they stand at, that must be apart
_TOKENS = 0.6
_MOST = 0.75
# candidates that are looked at closely
_CANDIDATES = 12
# tokens that are searched, about
_SEARCHED = 1 << 18


@dataclass(frozen=True, slots=True)
class _Candidate:
    z: float
    where: str
    coordinate: str
    period: int
    residue: int
    kind: str


def multiples(sample: PairSample) -> Finding | None:
    """Find tokens apart at every so many positions, in alternating blocks, or at ends of parts.

    All periods, residues, blocks and parts that were tried count in the chance.
    """
    whole = Gaps.distinct(sample)
    if whole is None:
        return None
    return next((f for kept in whole.views() if (f := _at_multiples(sample, whole, kept))), None)


def _at_multiples(sample: PairSample, whole: Gaps, kept: Bools) -> Finding | None:
    # enough to find it
    every = max(1, int(kept.sum()) // _SEARCHED)
    gaps = whole.only(kept & (whole.call % every == 0))
    if not len(gaps.d):
        return None
    scored = surprise(gaps.relative, gaps.call) - 1.0
    candidates = list(_candidates(gaps, sample, scored))
    tries = 2 * len(candidates)
    best: tuple[float, _Candidate] | None = None
    for candidate in sorted(candidates, key=lambda c: -c.z)[:_CANDIDATES]:
        chosen, place = _chosen(gaps, sample, candidate)
        if not _holds_everywhere(gaps, chosen, place, candidate.kind):
            continue
        if not whole.all_moved(kept, _chosen(whole, sample, candidate)[0]):
            continue
        log = log_set_chance(gaps, chosen) + math.log(tries)
        if log <= RAISED and (best is None or log < best[0]):
            best = log, candidate
    if best is None:
        return None
    log, candidate = best
    chosen, _ = _chosen(whole, sample, candidate)
    here, rest = (float(np.abs(whole.d[part]).mean()) for part in (chosen, ~chosen))
    seen, others = whole.relative[kept & chosen], whole.relative[kept & ~chosen]
    high = int((seen > ALLOWED * np.median(others)).sum())
    return Finding(
        test="multiples of a chunk or page",
        pair=sample.name,
        side=None,
        summary=f"{candidate.where}: {here:.4f} nat apart, elsewhere {rest:.4f}",
        evidence=(
            f"{high} of {len(seen)} tokens that tell there are more than {ALLOWED:g} times as far "
            "apart as usual ones",
            f"the best of {tries} periods, places, blocks and parts",
        ),
        false_alarm=chance(log),
        explains=explained(whole, chosen),
        tokens=int(chosen.sum()),
        mae=here,
        where=candidate.where,
    )


def _coordinate(gaps: Gaps, name: str) -> Ints:
    return gaps.position if name == "sequence" else gaps.index


def _candidates(gaps: Gaps, sample: PairSample, scored: Array) -> Iterator[_Candidate]:
    total = len(scored)
    for name in ("sequence", "response"):
        place = _coordinate(gaps, name)
        widest = int(place.max() - place.min()) + 1
        for period in (p for p in PERIODS if p < widest):
            residue = place % period
            number = np.bincount(residue, minlength=period)
            height = np.bincount(residue, weights=scored, minlength=period)
            z = _z(height, number, total)
            for at in range(period):
                said = f"{name} positions {at} modulo {period}"
                yield _Candidate(float(z[at]), said, name, period, at, "every")
        for block in (b for b in BLOCKS if 3 * b < widest):
            parity = place // block % 2
            number = np.bincount(parity, minlength=2)
            height = np.bincount(parity, weights=scored, minlength=2)
            z = _z(height, number, total)
            for at in (0, 1):
                said = f"{'odd' if at else 'even'} blocks of {block} {name} positions"
                yield _Candidate(float(z[at]), said, name, block, at, "blocks")
        for parts in PARTS:
            size = _part(gaps, sample, name, parts)
            for at in (-2, -1, 0):
                chosen = place % size == at % size
                z = _z(np.array([scored[chosen].sum()]), np.array([chosen.sum()]), total)
                said = f"{_BOUNDARY[at]} each of {parts} equal parts of the {name}"
                yield _Candidate(float(z[0]), said, name, parts, at, "parts")


_BOUNDARY = {-2: "the last but one token of", -1: "the last token of", 0: "the first token of"}


def _part(gaps: Gaps, sample: PairSample, name: str, parts: int) -> Ints:
    """Tokens of one part, rounded up, [token]."""
    whole = sample.lengths + (sample.prompt_lengths if name == "sequence" else 0)
    size: Ints = np.maximum(1, -(-whole // parts))
    return size[gaps.call]


def _z(height: NDArray[Any], number: NDArray[np.int64], total: int) -> Array:
    variance = number * (1.0 - number / total)
    z: Array = np.where(variance > 0, height / np.sqrt(np.maximum(variance, 1e-9)), -np.inf)
    return z


def _chosen(gaps: Gaps, sample: PairSample, candidate: _Candidate) -> tuple[Bools, Ints]:
    """The candidate's tokens, and which multiple each token belongs to, both [token]."""
    place = _coordinate(gaps, candidate.coordinate)
    if candidate.kind == "blocks":
        number = place // candidate.period
        return number % 2 == candidate.residue, number
    size = (
        _part(gaps, sample, candidate.coordinate, candidate.period)
        if candidate.kind == "parts"
        else np.full(len(place), candidate.period)
    )
    return place % size == candidate.residue % size, place // size


def _holds_everywhere(gaps: Gaps, chosen: Bools, number: Ints, kind: str) -> bool:
    """Say whether most chosen tokens are apart, at most of at least two multiples."""
    if not chosen.any() or chosen.all():
        return False
    usual = float(np.median(gaps.relative[~chosen]))
    high = gaps.relative[chosen] > ALLOWED * usual
    which = number[chosen]
    each = np.bincount(which - which.min(), weights=high) / np.maximum(
        np.bincount(which - which.min()), 1
    )
    present = np.unique(which - which.min())
    apart = each[present] >= 0.5
    if kind == "blocks" and not (~chosen & (number > which.min()) & (number < which.max())).any():
        return False
    return bool(high.mean() >= _TOKENS and len(present) >= 2 and apart.mean() >= _MOST)
