"""What is shown of single tokens: the spread of their gap, the worst of them, and heatmaps.

Nothing is judged by it, so that it must say what it can of any case, one without scores or with
values that are not finite, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.carried_gap import CarriedGap
from layerbisect.bisect.case import Case
from layerbisect.bisect.heatmap import HeatRows, reduce_rows, significant
from layerbisect.bisect.join import Joined
from layerbisect.bisect.scores.measure import PositionBins
from layerbisect.bisect.scores.report import PositionGap, TokenGap
from layerbisect.bisect.token_report import (
    Distribution,
    DistributionMeasure,
    Heatmap,
    SequenceTokens,
    TokenReport,
)
from layerbisect.captures.format import SequenceInfo
from layerbisect.captures.rows import parent_keys

WORST = 20
SCORE_DIGITS = 7
"""Significant digits of a log-prob, as many as a float32 has: differences of those above -100 nat
are then right to the fourth decimal, which is the last that is shown."""


def token_report(
    case: Case, streams: Mapping[int, NDArray[np.float32]], carried: CarriedGap | None
) -> TokenReport:
    """Say what can be shown of a case's tokens.

    ``streams`` are the joined rows' relative differences at layer boundaries, as
    :class:`layerbisect.bisect.differences.Comparison` has them; ``carried`` is None where no
    boundary was probed. Sequences are named as the first capture names them.
    """
    names = _distinct(case.sides[0].capture.sequences)
    distribution, by_position, worst = _gaps(case.joined, names)
    return TokenReport(
        distribution=distribution,
        by_position=by_position,
        worst=worst,
        sequences=_sequences(case, names),
        heatmaps=_heatmaps(case, names, streams, carried),
    )


def _distinct(sequences: tuple[SequenceInfo, ...]) -> tuple[str, ...]:
    """Name sequences apart that differ in their scoring context alone."""
    times = Counter(one.name for one in sequences)
    return tuple(
        f"{one.name} ({one.salt or 'no salt'})" if times[one.name] > 1 else one.name
        for one in sequences
    )


def _gaps(
    joined: Joined, names: tuple[str, ...]
) -> tuple[Distribution | None, tuple[PositionGap, ...], tuple[TokenGap, ...]]:
    first, second, rows = joined.score_rollout, joined.score_trainer, joined.score_rows
    with np.errstate(invalid="ignore"):
        difference = first - second
    at = np.flatnonzero(np.isfinite(difference))
    spread, bins = DistributionMeasure(), PositionBins()
    spread.add(difference[at])
    bins.add(rows.position[at], difference[at])
    largest = at[np.argsort(-np.abs(difference[at]), kind="stable")[:WORST]]
    worst = []
    for one in largest.tolist():
        ours, theirs, apart = significant(
            [v[one] for v in (first, second, difference)], SCORE_DIGITS
        )
        name = names[rows.sequence[one]]
        assert ours is not None and theirs is not None and apart is not None
        worst.append(
            TokenGap(name, int(rows.position[one]), int(rows.token[one]), ours, theirs, apart)
        )
    return spread.report(), bins.report(), tuple(worst)


def _sequences(case: Case, names: tuple[str, ...]) -> tuple[SequenceTokens, ...]:
    chains = case.joined.chains
    first, second = (significant(side.scores().tolist(), SCORE_DIGITS) for side in case.sides)
    token = chains.token.tolist()
    ends = np.cumsum(chains.lengths, dtype=np.intp).tolist()
    after = _after(case.joined, ends)
    found = []
    for name, length, end, more in zip(
        _named(case, names, ends), chains.lengths, ends, after, strict=True
    ):
        start = end - length
        # a place's score is of the token after it
        scores = [(None, *one[start : end - 1]) for one in (first, second)]
        tokens = tuple(token[start:end])
        if more is not None:
            joined = case.joined
            tokens = (*tokens, int(joined.score_rows.token[more]))
            pair = (joined.score_rollout[more], joined.score_trainer[more])
            last = significant(pair, SCORE_DIGITS)
            scores = [(*one, value) for one, value in zip(scores, last, strict=True)]
        found.append(SequenceTokens(name, 0, tokens, scores[0], scores[1]))
    return tuple(found)


def _after(joined: Joined, ends: list[int]) -> list[int | None]:
    """Which score is of the token that follows each sequence's last row, None where none is.

    The last token of a generation is scored, and never computed.
    """
    if not len(joined.score_keys):
        return [None] * len(ends)
    parents, first = np.unique(parent_keys(joined.score_keys, joined.score_rows), return_index=True)
    last = joined.keys[joined.chains.row[np.array(ends, np.intp) - 1]]
    slot = np.searchsorted(parents, last).clip(max=len(parents) - 1)
    follows = parents[slot] == last
    return [
        one if there else None
        for one, there in zip(first[slot].tolist(), follows.tolist(), strict=True)
    ]


def _named(case: Case, names: tuple[str, ...], ends: list[int]) -> list[str]:
    """Name the laid out sequences by the one that their last rows are of."""
    joined = case.joined
    last = joined.rollout[joined.chains.row[np.array(ends, np.intp) - 1]]
    return [names[one] for one in case.sides[0].capture.rows.sequence[last].tolist()]


def _heatmaps(
    case: Case,
    names: tuple[str, ...],
    streams: Mapping[int, NDArray[np.float32]],
    carried: CarriedGap | None,
) -> tuple[Heatmap, ...]:
    chains = case.joined.chains
    scored = chains.scored
    # where sequences part, the row before is an earlier one's, and its next token is this one's
    place = np.flatnonzero(chains.fresh | scored)
    number = np.repeat(np.arange(len(chains.lengths)), chains.lengths)
    ends = np.cumsum(chains.lengths, dtype=np.intp).tolist()
    rows = HeatRows(tuple(_named(case, names, ends)), number[place], chains.position[place])
    shown = [
        reduce_rows(
            "stream", "relative", {n: v[chains.row[place]] for n, v in streams.items()}, rows
        )
    ]
    if carried is not None and carried.tokens:
        at: dict[int, NDArray[np.float32]] = {}
        for boundary, apart in carried.tokens.items():
            flat = np.full(len(scored), np.nan, np.float32)
            flat[scored] = apart
            at[boundary] = flat[place]
        shown.append(reduce_rows("carried gap", "nat", at, rows))
    return tuple(one for one in shown if one is not None)
