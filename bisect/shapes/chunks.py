"""Chunks of a response whose scores stand in another order, as after context parallelism."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import log_match_chance
from layerbisect.bisect.shapes.gaps import RAISED, chance
from layerbisect.bisect.shapes.lag import BAD, CLOSE, RARE, Scores, listed, responses
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_BLOCK = 16
_STRIDE = 8
# responses, and tokens in all, that are searched; and blocks of each response
_RESPONSES = 16
_TOKENS = 1 << 16
_BLOCKS = 512
# share of a searched response's tokens that must be found elsewhere
_MOVED = 0.25


def chunk_order(sample: PairSample) -> Finding | None:
    """Find responses whose chunks were put together in another order.

    Blocks of the first column are looked for all over the second's response by half of their
    tokens; the other half tells how likely that is by chance.
    """
    bad = sorted((r for r in responses(sample) if r.gap > BAD), key=lambda r: -r.gap)
    fit = int(np.searchsorted(np.cumsum([len(r.first) for r in bad]), _TOKENS)) + 1
    chosen = sorted(bad[: min(fit, _RESPONSES)], key=lambda r: r.call)
    moved = [(r, lags) for r in chosen if (lags := _lags(r)) is not None]
    if not moved or len(moved) < RARE * len(chosen):
        return None
    parts = []
    for scores, lags in moved:
        there = np.arange(len(lags)) + lags
        # blocks were chosen by even tokens: only odd ones are evidence
        held = (np.arange(len(lags)) % 2 == 1) & (lags != 0)
        parts.append((scores.first, scores.second[there], scores.second, held))
    first, other, own = (np.concatenate([p[i] for p in parts]) for i in range(3))
    held = np.concatenate([p[3] for p in parts])
    log = log_match_chance(first[held], other[held], own[held])
    before, after = np.abs(first - own), np.abs(first - other)
    gap, left = float(np.nanmean(before)), float(np.nanmean(after))
    if log > RAISED or left > 0.5 * gap:
        return None
    tokens = int(np.isfinite(before).sum())
    share = sum(r.gap * np.isfinite(r.first - r.second).sum() for r, _ in moved) / sum(
        r.gap * np.isfinite(r.first - r.second).sum() for r in chosen
    )
    return Finding(
        test="chunk order",
        pair=sample.name,
        side=None,
        summary=f"the scores of {sample.first_name} are those of {sample.second_name} with chunks "
        "of a response in another order",
        evidence=(
            f"put back, {tokens} tokens are {left:.4f} nat apart; as they are recorded {gap:.4f}",
            f"{len(moved)} of {len(chosen)} responses searched",
            f"{listed(sample, [moved[0][0].call])}: {_segments(moved[0][1])}",
        ),
        false_alarm=chance(log),
        explains=float(share * (1.0 - left / gap)),
        tokens=tokens,
        mae=gap,
        where="" if len(moved) == len(chosen) else listed(sample, [r.call for r, _ in moved]),
    )


def _lags(scores: Scores) -> Ints | None:
    """Return where each token's score is found, as an offset [response]; None where in place."""
    first, second = scores.first, scores.second
    if len(first) < 4 * _BLOCK or not (np.isfinite(first) & np.isfinite(second)).all():
        return None
    even = np.arange(0, _BLOCK, 2)
    stride = max(_STRIDE, len(first) // _BLOCKS)
    windows = np.lib.stride_tricks.sliding_window_view(second, _BLOCK)[:, ::2]
    lags = np.zeros(len(first), np.int64)
    best = np.full(len(lags), np.inf)
    last: tuple[int, int] | None = None
    for start in range(0, len(first) - _BLOCK + 1, stride):
        apart = np.minimum(np.abs(windows - first[start + even]), 1.0).mean(1)
        place = int(apart.argmin())
        others = np.r_[apart[: max(0, place - 1)], apart[place + 2 :]]
        if apart[place] > CLOSE * scores.gap or apart[place] > 0.5 * others.min():
            continue
        # what lies between two blocks of one lag goes with them
        lag = place - start
        begin = last[0] if last is not None and last[1] == lag else start
        here = slice(begin, start + _BLOCK)
        nearer = apart[place] < best[here]
        lags[here] = np.where(nearer, lag, lags[here])
        best[here] = np.minimum(best[here], apart[place])
        last = start + _BLOCK, lag
    moved = lags != 0
    # one lag for all is a shift
    if moved.mean() < _MOVED or len(np.unique(lags[np.isfinite(best)])) < 2:
        return None
    return lags


def _segments(lags: Ints) -> str:
    ends = np.r_[np.flatnonzero(np.diff(lags)) + 1, len(lags)]
    starts = np.r_[0, ends[:-1]]
    runs = [(int(a), int(b), int(lags[a])) for a, b in zip(starts, ends, strict=True)]
    long = [run for run in runs if run[1] - run[0] >= _STRIDE]
    said = [f"{a}-{b - 1} holds {a + lag}-{b - 1 + lag}" for a, b, lag in long[:8]]
    return ", ".join(said) + (" ..." if len(long) > 8 else "")
