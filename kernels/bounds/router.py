"""How far the weights of chosen experts may be from exact, and which choices rounding explains.

Scores are computed in float32. An exponential of an argument z that was rounded once, or multiplied
by log2(e) once, is off by ``u |z|`` for each, and by a few units besides; the sum of the softmax by
``gamma(n - 1)`` in any order (Blanchard, Higham and Higham 2021, Accurately computing the
log-sum-exp and softmax functions, IMA J. Numer. Anal. 41(4); Higham 2002, section 4.2).
"""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import gamma, smallest_subnormal, unit_roundoff
from layerbisect.kernels.router import SUM_EPSILON, Scoring, scores

_SINGLE = unit_roundoff(torch.float32)
_UNITS = 4.0
"""What an exponential or a division may be off by, in unit roundoffs: 2 ulp, as fast ones are."""
# float32 below this is flushed to zero by some devices
_LEAST = torch.finfo(torch.float32).smallest_normal


def router_bound(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    dtype: torch.dtype,
    renormalise: bool,
    scoring: Scoring = "softmax",
    softmax_after_top_k: bool = False,
    scaling: float = 1.0,
) -> torch.Tensor:
    """Bound the error of the weights of ``ids`` int64 [row, slot], given that choice.

    ``logits`` [row, expert] are what they are made from, to the bit. Scores, their sum, the
    quotient and its product with ``scaling`` may each be rounded to ``dtype``. Returns float64 of
    the shape of ``ids``; no weight is further from `weigh` in float64.
    """
    unit, least = unit_roundoff(dtype), smallest_subnormal(dtype) / 2
    logits = logits.double()
    if softmax_after_top_k:
        logits = logits.gather(1, ids)
        ids = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    score = scores(logits, scoring).gather(1, ids)
    # an error of the softmax's sum, which all scores share, goes where they are divided by theirs
    relative = _relative(logits, scoring, summed=softmax_after_top_k or not renormalise)
    relative = relative.gather(1, ids)
    error = score * relative + _LEAST
    error = error + (score + error) * unit + least
    if renormalise and not softmax_after_top_k:
        total = score.sum(1, keepdim=True) + (SUM_EPSILON if scoring == "sigmoid" else 0.0)
        off = error.sum(1, keepdim=True)
        off = off + (total + off) * (gamma(ids.shape[1], _SINGLE) + unit) + least
        share = (error + score / total * off) / (total - off).clamp_min(0)
        # a quotient of a number by a sum that it is part of
        score, error = score / total, share.clamp_max(1)
        error = error + (score + error) * (_UNITS * _SINGLE + unit) + least
    error = scaling * error
    # the product with the factor, and a last rounding
    return error + (abs(scaling) * score + error) * (_SINGLE + unit) + least


def wrong_choices(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    softmax_after_top_k: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Say of each row whether ``ids`` int64 [row, slot] are a choice that no rounding explains.

    Returns bool [row]. A set is wrong where an expert left out is ahead of one chosen by more than
    both scores' errors, or a group by more than both groups'; where a number is no expert's or is
    there twice; or where it needs more than ``top_groups`` groups. A tie may fall either way, and
    the order of slots does not count. ``logits`` [row, expert] are what the choice was made from,
    to the bit, and scores were rounded to ``dtype``, no narrower than an engine compares them in;
    logits are compared unrounded (``softmax_after_top_k``). A row with a NaN is wrong by its
    numbers only.
    """
    experts = logits.shape[1]
    known = (ids >= 0) & (ids < experts)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, torch.where(known, ids, 0), known)
    # written over by an unknown number where it is 0 that is chosen
    chosen[:, 0] = (ids == 0).any(1)
    low, high = _interval(logits.double(), scoring, bias, softmax_after_top_k, dtype)
    low, high, inside = (t.unflatten(1, (groups or 1, -1)) for t in (low, high, chosen))
    worst = high.masked_fill(~inside, torch.inf).flatten(1).amin(1)
    best_left = low.masked_fill(inside, -torch.inf).amax(2)
    # a group can only be among the best if none of its experts should have been chosen
    may = ~(best_left > worst[:, None])
    must = inside.any(2)
    feasible = _some_groups(low, high, must, may, top_groups or 1, 1 if bias is None else 2)
    return ~feasible | (chosen.sum(1) < ids.shape[1])


def _some_groups(
    low: torch.Tensor,
    high: torch.Tensor,
    must: torch.Tensor,
    may: torch.Tensor,
    count: int,
    best: int,
) -> torch.Tensor:
    """Say of each row whether ``count`` groups can be the best: all that must, none that may not.

    ``low`` and ``high`` [row, group, expert] enclose the scores, of which the ``best`` are summed.
    """
    best = min(best, low.shape[2])
    low, high = (t.topk(best, dim=2).values.sum(2) for t in (low, high))
    if best > 1:
        low, high = low - _SINGLE * low.abs(), high + _SINGLE * high.abs()
    # the least score of the groups taken, as high as it may be, is one of these
    least = high[:, :, None]
    needed = must[:, None] | (low[:, None] > least)
    allowed = may[:, None] & ~(high[:, None] < least)
    fits = ~(needed & ~allowed).any(2) & (needed.sum(2) <= count) & (allowed.sum(2) >= count)
    return fits.any(1)


def _interval(
    logits: torch.Tensor,
    scoring: Scoring,
    bias: torch.Tensor | None,
    softmax_after_top_k: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enclose what experts are chosen by: two float64 [row, expert]."""
    if softmax_after_top_k:
        return logits, logits
    score = scores(logits, scoring)
    # all scores of a row are divided by one sum, which cannot change their order
    relative = _relative(logits, scoring, summed=bias is not None)
    error = score * relative + _LEAST
    error = error + (score + error) * unit_roundoff(dtype) + smallest_subnormal(dtype) / 2
    if bias is not None:
        score = score + bias.double()
        error = error + (score.abs() + error) * _SINGLE
    return score - error, score + error


def _relative(logits: torch.Tensor, scoring: Scoring, *, summed: bool) -> torch.Tensor:
    """Bound the relative error of float32 scores: float64 [row, expert].

    ``summed`` with that of a softmax's denominator, which all scores of a row share.
    """
    if scoring == "sigmoid":
        # of exp(-z) as far as it counts in 1 + exp(-z), of that sum and of the quotient
        exponential = (3 * logits.abs() + _UNITS) * torch.sigmoid(-logits)
        return (exponential + 1 + _UNITS) * _SINGLE
    below = logits.amax(1, keepdim=True) - logits
    exponential = (3 * below + _UNITS) * _SINGLE
    relative = exponential + _UNITS * _SINGLE
    if not summed:
        return relative
    # vanishing terms of far lower logits count for nothing
    share = torch.softmax(logits, 1)
    total = (share * exponential.clamp_max(1)).sum(1, keepdim=True)
    total = total + gamma(logits.shape[1], _SINGLE)
    return (relative + total) / (1 - total)
