"""What to see in charts of scores, in sentences that hold for the figures at hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from layerbisect.bisect.scores.decision_map import CLEAR
from layerbisect.bisect.scores.explain import FEWEST
from layerbisect.bisect.scores.report import PairReport, PositionGap
from layerbisect.score_words import positions
from layerbisect.wording import count, nat, percent

_STANDS_OUT = 2.0
"""A range of positions stands out where its gap is so many times what is accepted."""
_OF_HIGHEST = 0.25
"""Ranges with less than this part of a pair's highest one are not where it is apart."""
_GROWTH = 4.0
_RISES = 3
_UNEVEN = 8
_ONE_SIGN = 0.9
_CANCELS = 0.3


def position_reading(
    pairs: Sequence[PairReport], tolerance: float, floors: Mapping[str, float]
) -> str:
    """Say where the mean absolute gap is beyond ``tolerance`` (nat), and for which pairs.

    ``floors`` is what repeats of a pair's columns differ by (nat), by pair.
    """
    if all(pair.gap.max == 0 for pair in pairs):
        names = ", ".join(pair.name for pair in pairs)
        return f"{names}: 0 at every position, the scores are equal."
    apart = [pair for pair in pairs if _apart(pair, tolerance)]
    near = [pair for pair in pairs if pair not in apart]
    if not apart:
        worst, at = max(
            ((pair, gap) for pair in pairs for gap in pair.by_position), key=lambda p: p[1].mae
        )
        inside = (
            f"Every point lies in the grey band of what is accepted, {tolerance:g} nat"
            if at.mae <= tolerance
            else f"Over all tokens every gap is within the accepted {tolerance:g} nat (grey)"
        )
        return (
            f"{inside}; the highest is {worst.name} {_at(at)}, {nat(at.mae)} nat over "
            f"{count(at.tokens, 'token')}."
        )
    odd = _odd_one(apart, near)
    if odd is not None and all(_grows(pair, tolerance) for pair in apart):
        said = [f"{odd} differs from both others, {_growing(apart[0])}"]
    elif odd is not None and len({_where(pair, tolerance) for pair in apart}) == 1:
        beyond = [_sizes(pair, tolerance) for pair in apart]
        said = [
            f"{odd} differs from both others {_where(apart[0], tolerance)}, by "
            f"{_range([s for inside, _ in beyond for s in inside])} nat"
            + _elsewhere([s for _, outside in beyond for s in outside])
        ]
    else:
        said = [_beyond(pair, tolerance) for pair in apart]
    said += [f"{pair.name} stays small, {nat(pair.gap.mae)} nat in the mean" for pair in near]
    hidden = [p for p in apart if p.gap.mae <= CLEAR * floors.get(p.name, 0.0)]
    noise = ""
    if hidden:
        largest = max(floors[pair.name] for pair in hidden)
        names = ", ".join(pair.name for pair in hidden)
        noise = f" Repeats of one side differ by {nat(largest)} nat: they alone may make {names}."
    return f"{'; '.join(said)}. Up to {tolerance:g} nat is accepted (grey).{noise}"


def signed_reading(pairs: Sequence[PairReport]) -> str:
    """Say of each pair whether its differences have one sign or cancel."""
    tokens = [gap.tokens for pair in pairs for gap in pair.by_position]
    said = " ".join(_lean(pair) for pair in pairs)
    if max(tokens) < _UNEVEN * min(tokens) or all(pair.gap.max == 0 for pair in pairs):
        return said
    return (
        f"{said} A point is the mean of {min(tokens):,} to {max(tokens):,} tokens; those of few "
        "scatter more."
    )


def worst_reading(pair: PairReport) -> str:
    """Say how much of a pair's gap its worst tokens make."""
    total = pair.gap.mae * pair.gap.rows
    made = sum(abs(token.difference) for token in pair.worst) / total if total else 0.0
    shown, rows = len(pair.worst), pair.gap.rows
    if rows == 1:
        return f"{pair.name} has no other token than this one."
    if shown >= rows:
        return f"These are all {count(rows, 'token')} of {pair.name}."
    what = "worst token" if shown == 1 else f"{shown} worst tokens"
    verb = "makes" if shown == 1 else "make"
    said = f"The {what} of {pair.name} {verb} {percent(made)} of its gap over {rows:,} tokens"
    if made > 0.5:
        return f"{said}: a few tokens are most of it."
    if made < 0.1 or made < _STANDS_OUT * shown / rows:
        return f"{said}: the gap is spread over many tokens."
    return f"{said}."


def _apart(pair: PairReport, tolerance: float) -> bool:
    return pair.gap.mae > tolerance or any(
        g.mae > _STANDS_OUT * tolerance for g in pair.by_position
    )


def _odd_one(apart: Sequence[PairReport], near: Sequence[PairReport]) -> str | None:
    """The letter that both pairs apart share, where the third pair is near."""
    if len(apart) != 2 or len(near) != 1:
        return None
    first, second = ({pair.first[0], pair.second[0]} for pair in apart)
    common = first & second
    return common.pop() if len(common) == 1 else None


def _is_apart(pair: PairReport, tolerance: float) -> list[bool]:
    """Of each range of positions, whether the pair is apart there."""
    highest = max((gap.mae for gap in pair.by_position), default=0.0)
    least = max(tolerance, _OF_HIGHEST * highest)
    return [gap.mae > least for gap in pair.by_position]


def _sizes(pair: PairReport, tolerance: float) -> tuple[list[float], list[float]]:
    """Mean gaps of the ranges where a pair is apart, and of the others."""
    sizes = list(zip(pair.by_position, _is_apart(pair, tolerance), strict=True))
    return [gap.mae for gap, is_so in sizes if is_so], [g.mae for g, is_so in sizes if not is_so]


def _where(pair: PairReport, tolerance: float) -> str:
    bins, apart = pair.by_position, _is_apart(pair, tolerance)
    if not any(apart) or all(apart):
        return "at every position"
    start = apart.index(True)
    if sum(apart) == 1 and (bins[start].start, bins[start].stop) == (0, 1):
        return "at the first token alone"
    if all(apart[start:]):
        return f"from position {bins[start].start:,} on"
    if sum(apart) == 1:
        return _at(bins[start])
    return f"in {sum(apart)} of {len(bins)} ranges of positions"


def _beyond(pair: PairReport, tolerance: float) -> str:
    if _grows(pair, tolerance):
        return f"{pair.name} is apart, {_growing(pair)}"
    inside, outside = _sizes(pair, tolerance)
    return (
        f"{pair.name} is apart {_where(pair, tolerance)}, by "
        f"{_range(inside or outside)} nat{_elsewhere(outside if inside else [])}"
    )


def _grows(pair: PairReport, tolerance: float) -> bool:
    """Whether the gap grows steadily with position, once it is beyond the tolerance."""
    sizes = [max(gap.mae, tolerance) for gap in pair.by_position if gap.start > 0]
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    rising = sum(step > 0 for step in steps)
    return rising >= _RISES and min(steps) >= 0 and sizes[-1] > _GROWTH * sizes[0]


def _growing(pair: PairReport) -> str:
    first, last = next(g for g in pair.by_position if g.start > 0), pair.by_position[-1]
    return f"more and more: {nat(first.mae)} nat {_at(first)}, {nat(last.mae)} {_at(last)}"


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
    said = f"{pair.name}: {signed(mean)} nat in the mean, {nat(size)} absolute"
    if pair.gap.rows < FEWEST:
        return f"{said}; {count(pair.gap.rows, 'token')} cannot tell a side from chance."
    if abs(mean) >= _ONE_SIGN * size:
        lower = pair.first if mean < 0 else pair.second
        return f"{said}: nearly all one way, {lower} is the lower one."
    if abs(mean) <= _CANCELS * size:
        return f"{said}: both signs nearly cancel."
    return f"{said}: it leans to one side."


def signed(value: float) -> str:
    """Write a difference in nat with its sign."""
    return ("+" if value > 0 else "") + nat(value)
