"""Where two sides choose other experts for a token, by how little, and why.

Sets of experts are bool [row, expert] throughout, so that no order of slots is a difference.
"""

from __future__ import annotations

import torch

from layerbisect.bisect.routing_report import CAUSES
from layerbisect.kernels.judging.choices import TIE_MARGIN

# of a normal distribution, from its median absolute deviation
_NORMAL = 1.4826


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Share of its experts that a row has in common, of the larger of its two sets: [row]."""
    larger = torch.maximum(first.sum(1), second.sum(1)).clamp_min(1)
    return (first & second).sum(1).double() / larger


def margins(
    first: torch.Tensor, second: torch.Tensor, logits: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """By how much each side's own logits prefer its choice to the other side's: [row, side].

    Of experts that only one side chose, the best of a side's own against the worst of the other's:
    every pair of them has changed places, and this one is the farthest apart. Infinite where a side
    has none that the other lacks.
    """
    only = (first & ~second, second & ~first)
    found = []
    for side, (own, other) in enumerate((only, only[::-1])):
        best = logits[side].masked_fill(~own, -torch.inf).amax(1)
        worst = logits[side].masked_fill(~other, torch.inf).amin(1)
        whole = own.any(1) & other.any(1)
        found.append(torch.where(whole, best - worst, torch.inf))
    return torch.stack(found, 1)


def logits_differ(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Robust standard deviation of the difference of two sides' logits [row, expert].

    What is added to all experts of a row alike chooses nothing, and is left out. None without rows.
    """
    difference = (first - second).double()
    difference = difference[difference.isfinite().all(1)]
    if not len(difference):
        return None
    difference = difference - difference.mean(1, keepdim=True)
    return _NORMAL * float(difference.abs().median())


def causes_of(
    *,
    rerouted: torch.Tensor,
    at_fault: torch.Tensor,
    crossing: torch.Tensor,
    margin: torch.Tensor,
    noise: float,
) -> torch.Tensor:
    """Say of each flip why it is one: places in `CAUSES`, int64 [row].

    ``rerouted`` bool [row]: an earlier layer flipped the token. ``at_fault``: a side's choice does
    not follow from its own logits, or what is convicted made the flip. ``crossing``: the two sides'
    logits would choose different experts. ``margin`` [row] is the larger of both sides', and
    ``noise`` the standard deviation of what rounding makes of the logits.
    """
    cause = torch.full(margin.shape, CAUSES.index("inherited"))
    cause[(margin <= TIE_MARGIN * noise) | ~crossing] = CAUSES.index("near tie")
    cause[rerouted] = CAUSES.index("consequence")
    cause[at_fault] = CAUSES.index("unexplained")
    return cause


def by_expert(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Lay ``weights`` [row, slot] out by expert: [row, expert], 0 where one was not chosen.

    ``ids`` int64 [row, slot]; a number that is no expert's is left out.
    """
    known = (ids >= 0) & (ids < experts)
    out = weights.new_zeros(len(ids), experts + 1)
    return out.scatter_(1, torch.where(known, ids, experts), weights)[:, :experts]


def shared_weights_differ(
    first: torch.Tensor, second: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Absolute differences [n] of the weights of experts that both sides chose.

    ``weights`` are both sides' by expert, [row, expert].
    """
    return (weights[0] - weights[1]).abs()[first & second]


def rerouted_so_far(flips: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Say whether any token of a row's sequence up to it has flipped: bool [flat].

    ``flips`` bool [flat] are of sequences of ``lengths``, end to end.
    """
    parts = [part.cumsum(0) > 0 for part in flips.split(list(lengths))]
    return torch.cat(parts) if parts else flips
