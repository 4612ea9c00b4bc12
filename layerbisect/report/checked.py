"""Whether a result that was read can be one: parts that belong together, and nothing impossible.

What is parsed has the right types; a file that was cut, edited or merged may still hold columns of
two lengths, a negative count or a verdict that agrees and accuses. Such a file is refused, so that
no page is drawn of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from layerbisect.accuracy_summary import AccuracySummary
from layerbisect.bisect.routing_report import CAUSES, Group, Routing
from layerbisect.bisect.scores.report import PairReport, PositionGap, ScoreReport
from layerbisect.bisect.token_report import Distribution, Heatmap, TokenReport
from layerbisect.bisect.verdict import Gap, Verdict
from layerbisect.report.selftest import said_selftest

if TYPE_CHECKING:
    from layerbisect.report.results import Result

_LARGEST = 1e100
"""No log-prob and no difference is nearly as large, nor as small as one over it, and squares
between the two are neither infinite nor 0."""
_NATS = frozenset(
    (
        *("mae", "signed_mean", "edges", "first", "second", "difference", "tolerance", "maes"),
        *("floors", "values", "carried_in", "carried_out", "predicted_gap", "shares", "whole"),
        *("quadrature", "distances", "own", "forced", "forced_with_weights", "parts", "k1"),
    )
)
"""What is measured in nats. A ratio may be of any size: its divisor may be nearly 0."""
_WHOLE = 2**53
"""Whole numbers beyond it are not exact in a page."""
_SIGNED = frozenset(("token", "tokens"))
"""Whole numbers that are names: all others count something."""
_SIZES = frozenset(
    (
        *("mae", "p95", "p99", "max", "median", "maes", "floors", "tolerance", "closing"),
        *("logit_mae", "normalizer_mae", "own_error", "floor", "gain", "carried_in", "carried_out"),
        *("predicted_gap", "shares", "whole", "quadrature", "distances", "bitwise_equal"),
        *("overlap", "weights_mean", "weights_max", "order", "stream_same", "stream_rerouted"),
        *("noise", "own", "forced", "forced_with_weights", "false_alarm", "clipped_low"),
        *("clipped_high", "ratio_mean", "ratio_min", "ratio_max", "effective_sample_size"),
        *("effective_responses", "relative", "ratio", "ulps", "max_ulps", "equal_elements"),
        *("equal_rows", "bound_used", "time_ms", "seconds", "low", "high", "values"),
    )
)
"""Numbers without a sign: sizes, shares and times."""
_ROUNDING = 1e-9
_ANYONE = ("both", "unknown")


def check(result: Result) -> None:
    """Check a result of any kind.

    Raises ValueError, which names the field, where no command can have printed it.
    """
    verdict = getattr(result, "verdict", None)
    if isinstance(verdict, Verdict):
        _numbers(verdict, "it")
        _verdict(verdict)
        return
    data = getattr(result, "data", None)
    if data is not None:
        said = said_selftest(data)
        _numbers(said, "it")
        return
    summary = getattr(result, "summary", None)
    if isinstance(summary, AccuracySummary):
        _numbers(summary, "it")
        _accuracy(summary)
        return
    for name in ("replays", "pairs"):
        _numbers(getattr(result, name, None), f"it.{name}")


def _verdict(verdict: Verdict) -> None:
    labels, scores = verdict.labels, verdict.scores
    _hold(labels[0] != labels[1], "labels", "two sides have two names", labels)
    sides = (*labels, *_ANYONE)
    for number, culprit in enumerate(verdict.culprits):
        # scores have these two sides, whatever captures are called
        known = sides if scores is None else (*sides, "rollout", "trainer")
        _side(culprit.side, known, f"culprits[{number}].side")
    for number, error in enumerate(verdict.own_errors):
        _side(error.side, labels, f"own_errors[{number}].side")
    for number, smallest in enumerate(verdict.sensitivity):
        _side(smallest.side, sides, f"sensitivity[{number}].side")
    for number, layer in enumerate(verdict.layers):
        for side in (*layer.own_error, *layer.worst_point):
            _side(side, labels, f"layers[{number}]")
    if verdict.gap is not None:
        _gap(verdict.gap, "gap")
    if verdict.probe is not None:
        _nats(verdict.probe.floor, "probe.floor")
    if verdict.status == "agree":
        _agrees(verdict)
    if verdict.routing is not None:
        _routing(verdict.routing)
    if verdict.tokens is not None:
        _tokens(verdict.tokens, verdict.gap)
    if scores is not None:
        _scores(scores)


def _agrees(verdict: Verdict) -> None:
    accused = [culprit.point for culprit in verdict.culprits]
    _hold(not accused, "culprits", "sides that agree have none", accused)
    gap, budget = verdict.gap, verdict.rounding_budget
    if gap is None or verdict.of_scores:
        return
    _hold(not gap.nonfinite, "gap.nonfinite", "sides that agree have none", gap.nonfinite)
    _hold(gap.rows > 0, "gap.rows", "sides agree on some", gap.rows)
    if budget is not None:
        predicted = budget.predicted_gap
        where = "rounding_budget.predicted_gap"
        _hold(math.isfinite(predicted), where, "it is known where sides agree", predicted)


def _gap(gap: Gap, where: str) -> None:
    if gap.rows:
        for name in ("mae", "signed_mean", "p95", "p99", "max"):
            value = getattr(gap, name)
            _hold(math.isfinite(value), f"{where}.{name}", "it must be a finite number", value)
            _nats(value, f"{where}.{name}")


def _routing(routing: Routing) -> None:
    for name in routing.gaps:
        _hold(name in get_args(Group), "routing.gaps", "it is no group of tokens", name)
    for number, layer in enumerate(routing.layers):
        where = f"routing.layers[{number}]"
        _hold(layer.flips <= layer.rows, f"{where}.flips", f"there are {layer.rows}", layer.flips)
        if layer.explained is not None:
            causes = layer.explained.causes
            same = causes.keys() == set(CAUSES)
            _hold(same, f"{where}.explained.causes", f"they are {', '.join(CAUSES)}", list(causes))
    if routing.split is not None:
        _hold(bool(routing.split.parts), "routing.split.parts", "there must be some", {})
        for part_of, part in routing.split.parts.items():
            where = f"routing.split.parts[{part_of!r}]"
            _hold(math.isfinite(part), where, "it must be a finite number", part)


def _tokens(tokens: TokenReport, gap: Gap | None) -> None:
    if tokens.distribution is not None:
        rows = None if gap is None or gap.source != "scores" else gap.rows
        _distribution(tokens.distribution, rows, "tokens.distribution")
    _positions(tokens.by_position, "tokens.by_position")
    names = [one.name for one in tokens.sequences]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    _hold(not twice, "tokens.sequences", "each must have a name of its own", twice)
    for number, one in enumerate(tokens.sequences):
        for side, scored in (("first", one.first), ("second", one.second)):
            where = f"tokens.sequences[{number}].{side}"
            _long(scored, len(one.tokens), where, "token")
    for number, heatmap in enumerate(tokens.heatmaps):
        _heatmap(heatmap, f"tokens.heatmaps[{number}]")


def _heatmap(heatmap: Heatmap, where: str) -> None:
    lines, columns = len(heatmap.boundaries), len(heatmap.columns)
    rising = all(a < b for a, b in zip(heatmap.boundaries, heatmap.boundaries[1:], strict=False))
    _hold(rising and lines > 0, f"{where}.boundaries", "they must rise", heatmap.boundaries)
    for number, column in enumerate(heatmap.columns):
        place = f"{where}.columns[{number}]"
        _hold(column.start < column.stop, place, "it must have a row", (column.start, column.stop))
    _long(heatmap.values, lines, f"{where}.values", "boundary")
    for number, values in enumerate(heatmap.values):
        _long(values, columns, f"{where}.values[{number}]", "column")
    if not heatmap.worst:
        return
    _long(heatmap.worst, lines, f"{where}.worst", "boundary")
    for number, worst in enumerate(heatmap.worst):
        _long(worst, columns, f"{where}.worst[{number}]", "column")
        for at, (row, column) in enumerate(zip(worst, heatmap.columns, strict=True)):
            if not column.start <= row < column.stop:
                said = f"its column has rows {column.start} to {column.stop - 1}"
                _hold(False, f"{where}.worst[{number}][{at}]", said, row)


def _scores(scores: ScoreReport) -> None:
    _hold(bool(scores.between), "scores.pairs", "two scores were compared", [])
    names = [pair.name for pair in scores.pairs]
    _hold(len(set(names)) == len(names), "scores.pairs", "each must have its own name", names)
    for number, pair in enumerate(scores.pairs):
        _pair(pair, f"scores.pairs[{number}]")


def _pair(pair: PairReport, where: str) -> None:
    gaps = {"gap": pair.gap, "first_token": pair.first_token, "later": pair.later}
    for name, gap in gaps.items():
        if gap is not None:
            _gap(gap, f"{where}.{name}")
    _hold(bool(pair.by_position), f"{where}.by_position", "there are positions", [])
    _positions(pair.by_position, f"{where}.by_position")
    if pair.distribution is not None:
        _distribution(pair.distribution, pair.gap.rows, f"{where}.distribution")


def _distribution(spread: Distribution, rows: int | None, where: str) -> None:
    edges, counts = spread.edges, spread.counts
    _long(edges, len(counts) + 1, f"{where}.edges", "bin and one more")
    for number, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
        _hold(low < high, f"{where}.edges[{number}]", "they must rise", (low, high))
    _hold(bool(edges) and edges[-1] > 0, f"{where}.edges", "the last must be above 0", edges[-1:])
    total = sum(counts)
    wanted = "some tokens" if rows is None else f"{rows} tokens, as the gap"
    fits = total > 0 if rows is None else total == rows > 0
    _hold(fits, f"{where}.counts", f"they must add up to {wanted}", total)


def _positions(bins: Sequence[PositionGap], where: str) -> None:
    for number, one in enumerate(bins):
        place = f"{where}[{number}]"
        _hold(one.start < one.stop, place, "it must have a position", (one.start, one.stop))
        for name, value in (("mae", one.mae), ("signed_mean", one.signed_mean)):
            _hold(math.isfinite(value), f"{place}.{name}", "it must be a finite number", value)


def _accuracy(summary: AccuracySummary) -> None:
    for number, one in enumerate(summary.groups):
        where = f"accuracy.groups[{number}]"
        _hold(one.total > 0, f"{where}.total", "a group has cases", one.total)
        _hold(one.right <= one.total, f"{where}.right", f"there are {one.total} cases", one.right)
        share = one.right / one.total
        ordered = 0 <= one.low <= share + _ROUNDING and share - _ROUNDING <= one.high <= 1
        _hold(ordered, where, "the interval must hold the share", (one.low, one.high))


def _numbers(value: Any, where: str, name: str = "") -> None:
    """Refuse numbers of a size that nothing measured has, and signs of what has none."""
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int):
        _hold(abs(value) < _WHOLE, where, "it is too large", value)
        _hold(value >= 0 or name in _SIGNED, where, "it must be 0 or more", value)
    elif isinstance(value, float):
        # nan is what was not finite
        if name in _NATS:
            _nats(value, where)
        _hold(not (value < 0 and name in _SIZES), where, "it must be 0 or more", value)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _numbers(getattr(value, field.name), f"{where}.{field.name}", field.name)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _numbers(one, f"{where}[{key!r}]", name)
    elif isinstance(value, Sequence):
        for number, one in enumerate(value):
            _numbers(one, f"{where}[{number}]", name)


def _nats(value: float, where: str) -> None:
    _hold(not abs(value) > _LARGEST, where, "it is too large", value)
    _hold(not 0 < abs(value) < 1 / _LARGEST, where, "it is too near 0", value)


def _long(values: Sequence[object], wanted: int, where: str, each: str) -> None:
    _hold(len(values) == wanted, where, f"it must have {wanted}, one for each {each}", len(values))


def _side(side: str, known: Sequence[str], where: str) -> None:
    _hold(side in known, where, f"it must be {' or '.join(dict.fromkeys(known))}", side)


def _hold(truth: bool, where: str, wanted: str, got: object) -> None:
    if not truth:
        raise ValueError(f"{where.removeprefix('it.')}: {wanted}, got {got!r:.80}")
