"""What to see in charts of scores, in sentences that hold for the figures at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerbisect.bisect.scores.report import PairReport, PositionGap
from layerbisect.bisect.token_report import Distribution
from layerbisect.score_words import positions
from layerbisect.wording import count, nat, percent

_CLEAR = 2.0
"""A range of positions stands out where its gap is so many times what is accepted."""
_FEWEST = 32
_ONE_SIGN = 0.9
_CANCELS = 0.3
BELL = 3.2
"""99th percentile of absolute values over their mean, for a normal distribution about 0."""


def position_reading(pairs: Sequence[PairReport], tolerance: float) -> str:
    """Say where the mean absolute gap is beyond ``tolerance`` (nat), and for which pairs."""
    if all(pair.gap.max == 0 for pair in pairs):
        names = ", ".join(pair.name for pair in pairs)
        return f"{names}: 0 at every position, the scores are equal."
    apart = [pair for pair in pairs if _apart(pair, tolerance)]
    near = [pair for pair in pairs if pair not in apart]
    if not apart:
        worst, at = max(
            ((pair, gap) for pair in pairs for gap in pair.by_position), key=lambda p: p[1].mae
        )
        where = (
            "Every point lies in the grey band"
            if at.mae <= tolerance
            else "All gaps are within the grey band in the mean"
        )
        return (
            f"{where}, which is what is accepted ({nat(tolerance)} nat). The highest is "
            f"{worst.name} {_at(at)}: {nat(at.mae)} nat over {count(at.tokens, 'token')}."
        )
    odd = _odd_one(apart, near)
    if odd is not None and len({_where(pair, tolerance) for pair in apart}) == 1:
        beyond = [_sizes(pair, tolerance) for pair in apart]
        said = [
            f"{odd} differs from both others {_where(apart[0], tolerance)}, by "
            f"{_range([s for inside, _ in beyond for s in inside])} nat"
            + _elsewhere([s for _, outside in beyond for s in outside])
        ]
    else:
        said = [_beyond(pair, tolerance) for pair in apart]
    said += [
        f"{pair.name} is {nat(pair.gap.mae)} nat in the mean, within the accepted {nat(tolerance)}"
        for pair in near
    ]
    return "; ".join(said) + "."


def signed_reading(pairs: Sequence[PairReport]) -> str:
    """Say of each pair whether its differences have one sign or cancel."""
    return " ".join(_lean(pair) for pair in pairs)


def spread_reading(pairs: Sequence[PairReport]) -> str:
    """Say of each pair on which side of 0 its tokens lie, and how far out its tail goes."""
    return " ".join(_spread(p, p.distribution) for p in pairs if p.distribution is not None)


def worst_reading(pair: PairReport) -> str:
    """Say how much of a pair's gap its worst tokens make."""
    total = pair.gap.mae * pair.gap.rows
    made = sum(abs(token.difference) for token in pair.worst) / total if total else 0.0
    shown, rows = len(pair.worst), pair.gap.rows
    if shown >= rows:
        return f"These are all {count(rows, 'token')} of {pair.name}."
    what = "worst token" if shown == 1 else f"{shown} worst tokens"
    verb = "makes" if shown == 1 else "make"
    said = f"The {what} of {pair.name} {verb} {percent(made)} of its gap over {rows:,} tokens"
    if made > 0.5:
        return f"{said}: a few tokens are most of it."
    if made < 0.1 or made < _CLEAR * shown / rows:
        return f"{said}: the gap is spread over many tokens."
    return f"{said}."


def _apart(pair: PairReport, tolerance: float) -> bool:
    return pair.gap.mae > tolerance or any(g.mae > _CLEAR * tolerance for g in pair.by_position)


def _odd_one(apart: Sequence[PairReport], near: Sequence[PairReport]) -> str | None:
    """The letter that both pairs apart share, where the third pair is near."""
    if len(apart) != 2 or len(near) != 1:
        return None
    first, second = ({pair.first[0], pair.second[0]} for pair in apart)
    common = first & second
    return common.pop() if len(common) == 1 else None


def _sizes(pair: PairReport, tolerance: float) -> tuple[list[float], list[float]]:
    """Means of the ranges beyond the tolerance, and of the others."""
    inside = [gap.mae for gap in pair.by_position if gap.mae > tolerance]
    return inside, [gap.mae for gap in pair.by_position if not gap.mae > tolerance]


def _where(pair: PairReport, tolerance: float) -> str:
    bins = pair.by_position
    beyond = [gap.mae > tolerance for gap in bins]
    if all(beyond):
        return "at every position"
    start = beyond.index(True)
    if bins[0].start == 0 and sum(beyond) == 1 and beyond[0]:
        return "at the first token alone"
    if all(beyond[start:]):
        return f"from position {bins[start].start:,} on"
    if sum(beyond) == 1:
        return _at(bins[start])
    return f"in {sum(beyond)} of {len(bins)} ranges of positions"


def _beyond(pair: PairReport, tolerance: float) -> str:
    inside, outside = _sizes(pair, tolerance)
    if not inside:
        # the mean over all tokens is rounded otherwise than those of the ranges
        return f"{pair.name} is {nat(pair.gap.mae)} nat, about what is accepted"
    return (
        f"{pair.name} is above the accepted {nat(tolerance)} nat {_where(pair, tolerance)}, "
        f"at {_range(inside)} nat{_elsewhere(outside)}"
    )


def _range(sizes: Sequence[float]) -> str:
    low, high = nat(min(sizes)), nat(max(sizes))
    return low if low == high else f"{low} to {high}"


def _elsewhere(sizes: Sequence[float]) -> str:
    return f", elsewhere by at most {nat(max(sizes))}" if sizes else ""


def _at(gap: PositionGap) -> str:
    if (gap.start, gap.stop) == (0, 1):
        return "at the first token"
    noun = "position" if gap.stop - gap.start == 1 else "positions"
    return f"at {noun} {positions(gap.start, gap.stop)}"


def _lean(pair: PairReport) -> str:
    mean, size = pair.gap.signed_mean, pair.gap.mae
    if size == 0:
        return f"{pair.name} is 0."
    said = f"{pair.name} is {signed(mean)} nat in the mean, of {nat(size)} absolute"
    if pair.gap.rows < _FEWEST:
        return f"{said}; {count(pair.gap.rows, 'token')} cannot tell a lean from chance."
    if abs(mean) >= _ONE_SIGN * size:
        lower = pair.first if mean < 0 else pair.second
        return f"{said}: nearly all one way, {lower} is the lower one."
    if abs(mean) <= _CANCELS * size:
        return f"{said}: both signs nearly cancel."
    return f"{said}: it leans to one side."


def signed(value: float) -> str:
    """Write a difference in nat with its sign."""
    return ("+" if value > 0 else "") + nat(value)


@dataclass(frozen=True, slots=True)
class _Sides:
    """How many tokens are below 0, about 0, and above."""

    below: int
    about: int
    above: int


def _sides(one: Distribution) -> _Sides:
    below = about = above = 0
    for low, high, number in zip(one.edges[:-1], one.edges[1:], one.counts, strict=True):
        if high <= 0:
            below += number
        elif low >= 0:
            above += number
        else:
            about += number
    return _Sides(below, about, above)


def _spread(pair: PairReport, one: Distribution) -> str:
    sides = _sides(one)
    total = sides.below + sides.about + sides.above
    small = nat(min((edge for edge in one.edges if edge > 0), default=0.0))
    if sides.about == total:
        return f"{pair.name}: all of {count(total, 'token')} within {small} nat of 0."
    said = f"{pair.name}: {sides.below:,} of {count(total, 'token')} below 0, {sides.above:,} above"
    said += f", {sides.about:,} within {small} nat of it" if sides.about else ""
    said += f"; largest {nat(pair.gap.max)} nat"
    one_way = max(sides.below, sides.above) >= 0.95 * total
    if total >= _FEWEST and one_way:
        return f"{said}: it lies to one side."
    if total >= 10 * _FEWEST and pair.gap.mae:
        ratio = pair.gap.p99 / pair.gap.mae
        said += f", 99th percentile {ratio:.1f} times the mean ({BELL} for a bell curve)"
        if ratio > 2 * BELL:
            return f"{said}: a heavy tail."
    return f"{said}."
