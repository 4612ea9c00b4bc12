"""One value that stands in place of scores: zeros of padding, or another fill."""

from __future__ import annotations

import math

import numpy as np

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.grid import DECIMALS, GRIDS, distinct
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.tokens import Array, Flags, Tokens, explained, letter, mae

APART = 0.05
"""A fill value stands so far (nat) from the other column's score, and clear of the noise."""

ZERO = 2.0**-20
"""Chance that a computed score is exactly 0 where the other column's is not near it: float32
log-probs there are multiples of 2^-20 or so."""

MEET = 2.0**-16
"""The same for any other value."""

COARSE = 2.0**-7
"""The same on a coarse grid, which has so many numbers between a power of two and the next."""

FAR_FROM_ZERO = 1.0
"""What APART is for scores that were rounded to decimals: these are exactly 0 near to it."""

IMPOSSIBLE = -100.0
"""Log-prob at and below which no token is ever drawn (nat)."""

ROUND = 5 / (2**23 * math.log2(10))
"""Chance that a computed score is a round number (see _is_round): there are 5 in each decade, of
the numbers that float32 has there."""


def filled(sample: PairSample) -> Finding | None:
    """Find one value that stands in place of scores: zeros of padding, or another fill."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    found = [
        _filled(sample, tokens, sample.first_name, tokens.first, tokens.second),
        _filled(sample, tokens, sample.second_name, tokens.second, tokens.first),
    ]
    good = [finding for finding in found if finding is not None]
    return min(good, key=lambda finding: finding.false_alarm, default=None)


def _filled(
    sample: PairSample, tokens: Tokens, column: str, scores: Array, other: Array
) -> Finding | None:
    found = _sentinel(tokens, scores, other) or _repeated(tokens, scores, other)
    if found is None or found[2] > 1e-3:
        return None
    value, kept, chance = found
    where, said = _place(tokens, scores == value)
    # filters leave zeros too, where one token keeps all of the mass, but never far from 0
    if value == 0 and not where and float(other[kept].min()) > -1.0:
        return None
    apart = np.abs(scores - other)
    rest = apart[~kept] if not kept.all() else np.zeros(1)
    usual = float(np.quantile(rest, 0.99))
    return Finding(
        test="padding filled with zeros" if value == 0 else "padding filled with a value",
        pair=sample.name,
        side=letter(column),
        summary=f"{column} is exactly {value:g} on {int(kept.sum())} tokens where "
        f"{sample.second_name if column == sample.first_name else sample.first_name} is "
        f"{np.median(other[kept]):.3f} in the median" + (f": {where}" if where else ""),
        evidence=(
            *said,
            f"these tokens differ by {np.median(apart[kept]):.4f} nat in the median, and 99 % of "
            f"the others by less than {usual:.4f}",
        ),
        false_alarm=chance,
        explains=explained(tokens.difference, np.where(kept, 0.0, tokens.difference)),
        tokens=int(kept.sum()),
        mae=mae(tokens.difference[kept]),
        where=where or f"scores of exactly {value:g}",
    )


def _hits(tokens: Tokens, other: Array, kept: Flags) -> int:
    """How many tokens are ``kept``; the same ones after the same prompt count once, as both columns
    have equal scores there."""
    same = np.stack([tokens.index[kept], tokens.token[kept], np.round(other[kept], 2)])
    return int(np.unique(same, axis=1).shape[1])


def _repeated(tokens: Tokens, scores: Array, other: Array) -> tuple[float, Flags, float] | None:
    """A value that stands where the other column's score is not near, where, and its chance."""
    # what was rounded to decimals is 0 near to it
    coarse = any(distinct(scores, grid) is not None for grid in DECIMALS)
    away = np.abs(scores - other) > (FAR_FROM_ZERO if coarse else APART)
    values, counts = np.unique(scores[away], return_counts=True)
    if not len(values):
        return None
    zero = bool((values == 0).any())
    value = 0.0 if zero else float(values[counts.argmax()])
    equal = scores == value
    kept = equal & away
    hits = _hits(tokens, other, kept)
    # scores on a coarse grid meet often, but then near to the other column's
    if hits < 2 or (not zero and hits < 0.5 * int(equal.sum())):
        return None
    # what another value repeats by chance, as it does on a coarse grid, this one may as well
    again = int(counts[values != value].max(initial=0))
    common = again / len(tokens) if again > 1 else 0.0
    if (coarse or not zero) and hits < 4 * common * len(tokens):
        return None
    rate = ZERO if zero and not coarse else max(MEET, common)
    tries = 2 if zero else 2 * len(tokens)
    return value, kept, _chance(len(tokens), hits if zero else hits - 1, rate, tries)


def _sentinel(tokens: Tokens, scores: Array, other: Array) -> tuple[float, Flags, float] | None:
    """A value that no log-prob of a drawn token has, where the other's is usual, as _repeated."""
    far = (scores <= IMPOSSIBLE) & (other > IMPOSSIBLE / 2)
    if not far.any():
        return None
    values, counts = np.unique(scores[far], return_counts=True)
    value = float(values[counts.argmax()])
    kept = far & (scores == value)
    many, hits = int(far.sum()), _hits(tokens, other, kept)
    if counts.max() < 0.5 * many:
        return None
    coarse = any(distinct(scores, grid) is not None for grid in GRIDS)
    alone = bool((scores[scores != value] > value / 2).all())
    if _is_round(value) and alone and not coarse:
        return value, kept, _chance(many, hits, ROUND, 2)
    # it has to come again
    return value, kept, _chance(many, hits - 1, COARSE if coarse else MEET, 2 * many)


def _is_round(value: float) -> bool:
    """Whether a value is 1, 2 or 5 times a power of ten, only nines, or float16's lowest."""
    size = abs(value)
    digits = f"{size:.0f}"
    leading = digits.rstrip("0") in ("1", "2", "5") or set(digits) == {"9"}
    return size == float(np.finfo(np.float16).max) or (size == float(digits) and leading)


def _chance(many: int, wanted: int, rate: float, tries: int) -> float:
    """Upper bound of the chance that ``wanted`` of ``many`` take a value, over all ``tries``."""
    logs = math.lgamma(many + 1) - math.lgamma(wanted + 1) - math.lgamma(many - wanted + 1)
    return min(1.0, tries * math.exp(min(logs + wanted * math.log(rate), 0.0)))


def _place(tokens: Tokens, kept: Flags) -> tuple[str, tuple[str, ...]]:
    """Where filled tokens stand, if that is at the ends of responses, and a sentence."""
    calls = np.unique(tokens.call[kept])
    here = np.isin(tokens.call, calls)
    for side, edge in (("last", tokens.left), ("first", tokens.index)):
        depth = np.zeros(int(tokens.call.max()) + 1, np.int64)
        np.maximum.at(depth, tokens.call[kept], edge[kept] + 1)
        inside = here & (edge < depth[tokens.call])
        if kept[inside].mean() >= 0.95:
            many = np.median(depth[calls])
            said = f"the {side} {many:g} tokens of {len(calls)} responses"
            if len(set(depth[calls].tolist())) > 1:
                said = f"the {side} {depth[calls].min()} to {depth[calls].max()} tokens of "
                said += f"{len(calls)} responses"
            return said, (f"they stand together: {said}",)
    return "", (f"they stand in {len(calls)} responses, at neither end",)
