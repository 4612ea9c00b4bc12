"""Tables of a verdict: what each layer adds, and how each point differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerbisect.bisect.verdict import LayerEvidence, Verdict, squared_above
from layerbisect.terminal.table import Bar, Column, Table
from layerbisect.wording import nat, percent, times

SHORT = 24
"""A model of at most so many layers is shown whole."""
RUN = 3
"""Uninteresting layers beside one another are put together from this many on."""
SHARE = 0.05
"""A layer with at least this share of the gap is shown."""
LOUD = 3
"""So many layers with the largest own errors are shown."""
BAR = 16
_NAME = 12


def layers_table(verdict: Verdict, mark: str, verbose: bool) -> Table:
    """One line a layer, or a run of layers in which nothing happens.

    A layer's line has the gap carried into it, its share of the squared gap, and the largest own
    error in it on each side; the last line has what the layers hand on to the final norm and head,
    and the share that arises there.
    """
    layers = verdict.layers
    own_errors = [Column(f"own error\n{_short(label)}") for label in verdict.labels]
    columns = [
        Column("", "name"),
        Column("layer"),
        Column("gap carried in, nat", "bar"),
        Column("share"),
        *own_errors,
        Column("worst point", "words"),
    ]
    table = Table(columns, keys=2)
    carried = [v for e in layers for v in (e.carried_in, e.carried_out) if v is not None]
    largest = max(carried, default=0.0)
    last_carried = layers[-1].carried_out
    whole = whole_gap(verdict)
    floor = verdict.probe.floor if verdict.probe is not None else 0.0
    guilty = {c.layer for c in verdict.culprits}

    def gap(value: float | None) -> Bar:
        return Bar(f"{nat(value):<8}", value, largest, mark, BAR)

    for run in _runs(layers, guilty, whole, floor, verbose):
        first, last = run[0], run[-1]
        convicted = first.layer in guilty and len(run) == 1
        number = str(first.layer) if len(run) == 1 else f"{first.layer}-{last.layer}"
        own = [_largest(run, label) for label in verdict.labels]
        table.add(
            ">" if convicted else "",
            number,
            gap(first.carried_in),
            percent(_share(first, last, whole, floor)),
            *(times(value) for value in own),
            _worst(run, verdict.labels),
            style="bold" if convicted else "",
        )
    beyond = None
    if whole and last_carried is not None:
        beyond = max(1 - (last_carried / whole) ** 2, 0.0)
    table.add("", "head", gap(last_carried), percent(beyond), "", "", "")
    return table


def whole_gap(verdict: Verdict) -> float | None:
    """The gap (nat) that shares are of: of the scores, else what leaves the last layer."""
    if verdict.gap is not None:
        return verdict.gap.mae
    return verdict.layers[-1].carried_out if verdict.layers else None


def step_share(before: float, after: float, whole: float, floor: float) -> float:
    """Share of the squared whole gap that arises between two boundaries (all in nat)."""
    return (squared_above(after, floor) - squared_above(before, floor)) / whole**2


def _share(
    first: LayerEvidence, last: LayerEvidence, whole: float | None, floor: float
) -> float | None:
    if first.carried_in is None or last.carried_out is None or not whole:
        return None
    return step_share(first.carried_in, last.carried_out, whole, floor)


def _runs(
    layers: Sequence[LayerEvidence],
    guilty: set[int | None],
    whole: float | None,
    floor: float,
    verbose: bool,
) -> Iterator[Sequence[LayerEvidence]]:
    """Split into single layers and runs of at least ``RUN`` in which nothing happens."""
    if verbose or len(layers) <= SHORT:
        yield from ([layer] for layer in layers)
        return
    errors = [max(e.own_error.values(), default=0.0) for e in layers]
    loud = sorted(range(len(layers)), key=lambda place: -errors[place])[:LOUD]

    def matters(place: int) -> bool:
        layer = layers[place]
        near = {layer.layer - 1, layer.layer, layer.layer + 1} & guilty
        share = _share(layer, layer, whole, floor) or 0.0
        ends = place in (0, len(layers) - 1)
        return ends or bool(near) or abs(share) >= SHARE or place in loud

    quiet: list[LayerEvidence] = []
    for place, layer in enumerate(layers):
        if not matters(place):
            quiet.append(layer)
            continue
        yield from [quiet] if len(quiet) >= RUN else ([one] for one in quiet)
        quiet = []
        yield [layer]


def _largest(run: Sequence[LayerEvidence], label: str) -> float | None:
    return max((e.own_error[label] for e in run if label in e.own_error), default=None)


def _worst(run: Sequence[LayerEvidence], labels: Sequence[str]) -> str:
    found = [(e.own_error[name], e, name) for e in run for name in labels if name in e.own_error]
    if not found:
        return "not captured"
    _, layer, label = max(found, key=lambda item: item[0])
    point = layer.worst_point.get(label, "")
    if len(run) == 1:
        point = point.removeprefix(f"layers.{layer.layer}.")
    return f"{point} ({_short(label)})" if point else ""


def _short(label: str) -> str:
    # names that begin alike end in what tells them apart
    return label if len(label) <= _NAME else f"{label[:4]}...{label[7 - _NAME :]}"


def differences_table(verdict: Verdict) -> Table:
    """One line a point: relative difference by row, and the row that is worst."""
    bad = any(one.nonfinite for one in verdict.differences)
    names = ("rows", "equal", "median", "p95", "max", "worst\nposition", "its\ntoken")
    figures = [Column(name) for name in ((*names, "not\nfinite") if bad else names)]
    table = Table([Column("point", "words"), *figures])
    for one in verdict.differences:
        position, token, error = one.worst_rows[0] if one.worst_rows else (0, 0, 0.0)
        table.add(
            one.point,
            f"{one.rows:,}",
            percent(one.bitwise_equal),
            *(f"{value:.2g}" for value in (one.median, one.p95, one.max)),
            *((str(position), str(token)) if error else ("", "")),
            *((f"{one.nonfinite:,}" if one.nonfinite else "",) if bad else ()),
        )
    return table
