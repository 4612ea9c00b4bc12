"""A gap that begins at some position: of the response, of the whole sequence, or from the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.chance import log_normal_tail
from layerbisect.bisect.shapes.gaps import (
    ALLOWED,
    RAISED,
    Bools,
    Gaps,
    Ints,
    by_call,
    chance,
    explained,
    inflation,
    log_set_chance,
)
from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]
Counted = Literal["response", "sequence", "end"]

# how many times larger the gap must get: in a response, and in all beyond smooth growth
_LARGER = 1.5
_STEP = 2.0
# responses that have tokens on both sides, and share of them where the gap rises
_RESPONSES = 4
_MOST = 0.8
# relative gap that is as good as none
_NONE = 0.05
# starts that part nearly as well are told apart by so many places on each side
_CLOSE = 0.9
_AROUND = 5
# at so few places of a response, noise may differ as it does between any two places
_FEW = 8
# a place before the best start is taken in while its tokens are so many deviations higher, and
# have that part of the whole rise
_CLEARLY = 2.0
_PART = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A start, the tokens from there on, and those from the likeliest start on, [token]."""

    counted: Counted
    start: int
    after: Bools
    likeliest: Bools
    z: float


def from_position(sample: PairSample) -> Finding | None:
    """Find a position from which on the gap is several times larger than before it, at once.

    Positions are counted in the response, in prompt and response together, and from the response's
    end; noise may grow smoothly with position, or rise at response position 1 with decode.
    """
    whole = Gaps.distinct(sample)
    if whole is None or not (whole.index > 0).any():
        return None
    # first tokens come from prefill: what begins after them is a test of its own
    whole = whole.only(whole.index > 0)
    return next((f for kept in whole.views() if (f := _begins(sample, whole, kept))), None)


def _begins(sample: PairSample, whole: Gaps, kept: Bools) -> Finding | None:
    gaps = whole.only(kept)
    if not len(gaps.d):
        return None
    scored = _within(np.log(gaps.relative + _NONE), _numbered(gaps.call))
    places = _places(gaps)
    found = [_best(scored, counted, place) for counted, place in places.items()]
    steps = [step for step in found if step is not None]
    if not steps:
        return None
    # where several count the same tokens, the first stays
    highest = max(s.z for s in steps)
    close = [s for s in steps if s.z >= _CLOSE * highest]
    step = max(close, key=lambda s: _contrast(scored, places[s.counted], s.start))
    like = dict.fromkeys(
        _where(sample, s) for s in close if not np.array_equal(s.after, step.after)
    )
    after = _places(whole)[step.counted] >= step.start
    if not whole.all_moved(kept, after):
        return None
    tries = 2 * sum(len(np.unique(place)) for place in places.values())
    if all(len(np.unique(lengths)) == 1 for lengths in (sample.lengths, sample.prompt_lengths)):
        # all three count the same
        tries //= len(places)
    both, rising = _rises(gaps, step.likeliest)
    if both < _RESPONSES or rising < _MOST * both:
        return None
    log, factor = _jump(gaps, places[step.counted], step.likeliest)
    if factor < _STEP:
        return None
    # both must be unlikely: a step over smooth growth, and ranks as high as these
    few = min(step.likeliest.sum(), (~step.likeliest).sum()) <= _FEW * len(by_call(gaps.call))
    allowed = ALLOWED if few else 1.0
    log = max(log, log_set_chance(gaps, step.likeliest, allowed)) + math.log(tries)
    if log > RAISED:
        return None
    here, before = (float(np.abs(whole.d[part]).mean()) for part in (after, ~after))
    where = _where(sample, step)
    return Finding(
        test="from a position on",
        pair=sample.name,
        side=None,
        summary=f"{where}: {here:.4f} nat apart, before {before:.4f}",
        evidence=(
            f"a step by a factor of {factor:.1f} beyond smooth growth with position",
            f"the gap rises there in {rising} of the {both} responses that have both sides",
            f"the best of {tries} places, counted in the response, in the sequence and from the "
            "end",
            *(f"almost as likely: {other}" for other in like),
        ),
        false_alarm=chance(log),
        explains=explained(whole, after),
        tokens=int(after.sum()),
        mae=here,
        where=where,
    )


def _places(gaps: Gaps) -> dict[Counted, Ints]:
    """Where each token stands, by what it is counted in, [token]."""
    return {"response": gaps.index, "sequence": gaps.position, "end": -gaps.last}


def _numbered(call: Ints) -> Ints:
    """Calls that have tokens, numbered from 0, [token]."""
    return np.unique(call, return_inverse=True)[1].astype(np.int64)


def _within(values: Array, call: Ints) -> Array:
    """Take each call's mean out of ``values``, [token]."""
    means: Array = np.bincount(call, weights=values) / np.bincount(call)
    return values - means[call]


def _best(scored: Array, counted: Counted, place: Ints) -> _Step | None:
    """Return the start that parts ``scored``, [token] with mean 0, into low and high best."""
    values = place - place.min()
    number = np.bincount(values)
    excess = np.bincount(values, weights=scored)
    after, total = np.cumsum(number[::-1])[::-1], len(values)
    height = np.cumsum(excess[::-1])[::-1]
    variance = after * (1.0 - after / total)
    z = np.where(variance > 0, height / np.sqrt(np.maximum(variance, 1e-9)), -np.inf)
    starts = np.arange(len(z)) + int(place.min())
    z = np.where((number > 0) & (after < total), z, -np.inf)
    at = likeliest = int(z.argmax())
    if not z[at] > 0.0:
        return None
    later = float(scored[values >= at].mean())
    while at > 1 and number[at - 1] and number[: at - 1].any():
        before = scored[values < at - 1]
        rise = excess[at - 1] / number[at - 1] - before.mean()
        if rise < max(
            _CLEARLY * before.std() / math.sqrt(number[at - 1]), _PART * (later - before.mean())
        ):
            break
        at -= 1
    return _Step(counted, int(starts[at]), values >= at, values >= likeliest, float(z[likeliest]))


def _contrast(scored: Array, place: Ints, start: int) -> float:
    """How much higher ``scored``, [token], is just after a start than before, in deviations."""
    sides = [scored[(place >= a) & (place < a + _AROUND)] for a in (start - _AROUND, start)]
    if not all(len(side) for side in sides):
        return -math.inf
    return float(sides[1].mean() - sides[0].mean()) / math.sqrt(sum(1 / len(s) for s in sides))


def _rises(gaps: Gaps, after: Bools) -> tuple[int, int]:
    """How many calls have tokens before and after, and in how many of these the gap rises."""
    both = rising = 0
    for part in by_call(gaps.call):
        later, sizes = after[part], gaps.relative[part]
        if later.any() and not later.all():
            both += 1
            rising += bool(np.median(sizes[later]) > _LARGER * np.median(sizes[~later]))
    return both, rising


def _jump(gaps: Gaps, place: Ints, after: Bools) -> tuple[float, float]:
    """Regress the log of the gap on the step, and on smooth growth, within responses.

    Returns the log chance of as large a step where there is none, and its factor.
    """
    y = np.log(gaps.relative + _NONE)
    scale = max(1.0, float(np.abs(place).max()))
    columns = [after.astype(float), place / scale, np.log1p(gaps.index)]
    call = _numbered(gaps.call)
    x = np.stack([_within(c, call) for c in columns], axis=1)
    target = _within(y, call)
    gram = x.T @ x + 1e-9 * np.eye(x.shape[1])
    fitted = np.linalg.solve(gram, x.T @ target)
    rest = target - x @ fitted
    free = max(1, len(y) - int(call.max()) - 1 - x.shape[1])
    variance = float(rest @ rest) / free * float(np.linalg.inv(gram)[0, 0])
    variance *= inflation(rest, np.ones(len(rest), bool), gaps.call) if len(rest) > 2 else 1.0
    z = fitted[0] / math.sqrt(max(variance, 1e-12))
    return log_normal_tail(float(z)), math.exp(min(float(fitted[0]), 50.0))


def _where(sample: PairSample, step: _Step) -> str:
    same_length = len(np.unique(sample.lengths)) == 1
    same_prompt = len(np.unique(sample.prompt_lengths)) == 1
    start, counted = step.start, step.counted
    length, prompt = int(sample.lengths[0]), int(sample.prompt_lengths[0])
    if counted == "end" and same_length and 1 - start > length // 8:
        counted, start = "response", length - 1 + start
    if counted == "sequence" and same_prompt:
        counted, start = "response", start - prompt
    if counted == "response" and same_length and length - start <= length // 8:
        counted, start = "end", start - length + 1
    if counted == "end":
        return "the last response token" if start == 0 else f"the last {1 - start} response tokens"
    if counted == "sequence":
        return f"sequence positions >= {start}"
    also = f" (sequence positions >= {start + prompt})" if same_prompt else ""
    return f"response positions >= {start}{also}"
