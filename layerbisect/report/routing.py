"""Routing: flips by layer and cause, what they do to the gap, and what forced routes take away."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from layerbisect.bisect.routing_report import CAUSES, Cause, GapSplit, LayerRouting, Routing
from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import Block, Cell, Chart, Facts, Section, Table
from layerbisect.report.palette import (
    AMBER,
    BLUE,
    DASHES,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    figure,
    label,
    named_axis,
)
from layerbisect.terminal.routing import (
    EXAMPLES,
    GROUPS,
    flip_sentences,
    flips_words,
    lacking_sentence,
    routing_sentence,
    share_words,
    split_sentence,
)
from layerbisect.wording import count, nat, percent

NOT_JUDGED = "not judged"
"""Flips of a layer whose capture does not hold what the router read."""
LOOKS: dict[str, tuple[str, str]] = {
    "near tie": (SKY, "."),
    "consequence": (BLUE, "/"),
    "inherited": (GREEN, "-"),
    "unexplained": (ORANGE, "x"),
    "not known": (PURPLE, "\\"),
    NOT_JUDGED: (GREY, "|"),
}
"""A cause's colour and pattern."""
_MEANINGS = (
    ("near tie", "each side's choice wins by no more than rounding makes the logits differ"),
    ("consequence", "an earlier layer had routed the token to other experts already"),
    ("inherited", "what reached the router differs; the router itself did right on both sides"),
    ("unexplained", "a choice does not follow from its own side's logits, or the router erred"),
    ("not known", "what came before the router was not captured"),
    (NOT_JUDGED, "what the router read was not captured"),
)


def routing_section(verdict: Verdict) -> Section | None:
    """How both sides route, layer by layer; None where they do not show it."""
    routing = verdict.routing
    if routing is None:
        return None
    blocks: list[Block] = []
    if routing.flips:
        blocks += [_flips(routing), *_told(routing), _overlap(routing.layers)]
    weights = [one for one in routing.layers if one.weights_mean is not None]
    if weights:
        blocks.append(_weights(weights))
    if routing.layers:
        blocks.append(_layers(routing, verdict.labels))
    if routing.split is not None:
        blocks.append(_split(routing.split, verdict.labels[0]))
    said = routing_sentence(routing).removeprefix("routing: ")
    lead = f"{said[0].upper()}{said[1:]}." if routing.layers else "What forced routes take away."
    return Section("routing", "Routing", lead, tuple(blocks)) if blocks else None


def _by_cause(layer: LayerRouting) -> dict[str, int]:
    if layer.explained is None:
        return {NOT_JUDGED: layer.flips}
    return {cause: number for cause, number in layer.explained.causes.items()}


def _flips(routing: Routing) -> Chart:
    layers = routing.layers
    counts = [_by_cause(one) for one in layers]
    causes = [c for c in (*CAUSES, NOT_JUDGED) if any(one.get(c, 0) for one in counts)]
    made = figure("layer", "flips, tokens")
    numbers = [one.layer for one in layers]
    for cause in causes:
        colour, pattern = LOOKS[cause]
        made.add_bar(
            name=cause,
            x=numbers,
            y=[one.get(cause, 0) for one in counts],
            marker={
                "color": colour,
                "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "solidity": 0.25},
                "line": {"width": 0},
            },
            hovertemplate=f"layer %{{x}}: %{{y:,}} {cause}<extra></extra>",
        )
    made.update_layout(barmode="stack", bargap=0.15, showlegend=True)
    made.update_yaxes(rangemode="tozero", tickformat=",d")
    most = max(layers, key=lambda one: one.flips)
    first = next(one for one in layers if one.flips)
    reading = (
        f"{routing.flips:,} of {count(routing.rows, 'route')} differ "
        f"({share_words(routing.flips, routing.rows)}), the first in layer {first.layer} and most "
        f"in layer {most.layer} ({most.flips:,} of {count(most.rows, 'token')}). {_why(routing)}"
    )
    rows = tuple(
        (
            Cell(str(one.layer), number=True),
            *(Cell(f"{told.get(cause, 0):,}", number=True) for cause in causes),
            Cell(f"{one.flips:,}", number=True),
        )
        for one, told in zip(layers, counts, strict=True)
    )
    table = Table(
        "Tokens whose experts differ, by layer and cause", ("layer", *causes, "flips"), rows
    )
    return Chart("routing-flips", "Flips by layer and cause", reading, made, table)


def _why(routing: Routing) -> str:
    """Say how many flips are explained, and of which cause the most are."""
    causes = routing.causes
    unexplained = causes["unexplained"]
    unknown = routing.flips - sum(causes.values()) + causes["not known"]
    explained = routing.flips - unexplained - unknown
    if not explained and not unexplained:
        return "Why is not known: what would tell was not captured."
    if explained == routing.flips:
        said = "All are explained"
    else:
        said = f"{explained:,} are explained, {unexplained:,} are not"
        said += f", and of {unknown:,} it is not known" if unknown else ""
    most: Cause = max(CAUSES, key=lambda cause: causes[cause])
    return f"{said}; most of all {flips_words(causes[most], most)}: {dict(_MEANINGS)[most]}."


def _told(routing: Routing) -> list[Facts | Table]:
    """What the causes mean, single flips that should not be, and what to capture to know more."""
    present = {cause for one in routing.layers for cause, n in _by_cause(one).items() if n}
    rows = [(cause, text) for cause, text in _MEANINGS if cause in present]
    causes: tuple[Cause, ...] = ("unexplained", "inherited")
    rows += [("example", text) for text in islice(flip_sentences(routing, causes), EXAMPLES)]
    if routing.causes["not known"]:
        rows.append(("to know more", lacking_sentence(routing)))
    told: list[Facts | Table] = [Facts(tuple(rows), "Why tokens change experts")]
    gaps = [(GROUPS[name], gap) for name, gap in routing.gaps.items() if gap.tokens]
    if gaps:
        cells = tuple(
            (Cell(name), Cell(f"{gap.tokens:,}", number=True), Cell(nat(gap.mae), number=True))
            for name, gap in gaps
        )
        head = ("tokens that are", "tokens", "mean gap, nat")
        told.append(Table("The gap of tokens, by how they were routed", head, cells))
    return told


def _overlap(layers: Sequence[LayerRouting]) -> Chart:
    made = figure("layer", "share in common")
    made.add_scatter(
        name="overlap",
        x=[one.layer for one in layers],
        y=[one.overlap for one in layers],
        mode="lines+markers",
        line={"color": BLUE, "dash": DASHES[0]},
        marker={"symbol": MARKERS[0]},
        hovertemplate="layer %{x}: %{y:.4f}<extra></extra>",
        showlegend=False,
    )
    worst = min(layers, key=lambda one: one.overlap)
    # the whole range where routes differ much, and else room above 1 to see what little does
    made.update_yaxes(range=[0, 1.05] if worst.overlap < 0.9 else None)
    reading = (
        f"In layer {worst.layer}, where the sides agree least, a token has "
        f"{_share(worst.overlap)} of its experts in common on average; 1 is all of them."
    )
    return Chart("routing-overlap", "Experts in common by layer", reading, made, height=240)


def _share(value: float) -> str:
    return f"{value * 100:.2f} %" if 0.99 < value < 1 else percent(value)


def _weights(layers: Sequence[LayerRouting]) -> Chart:
    made = figure("layer", "weights differ by")
    numbers = [one.layer for one in layers]
    lines = (
        ("mean", [one.weights_mean for one in layers], BLUE, 0),
        ("largest", [one.weights_max for one in layers], AMBER, 1),
    )
    for name, values, colour, look in lines:
        made.add_scatter(
            name=name,
            x=numbers,
            y=values,
            mode="lines+markers",
            line={"color": colour, "dash": DASHES[look]},
            marker={"symbol": MARKERS[look]},
            hovertemplate=f"layer %{{x}}: {name} %{{y:.2g}}<extra></extra>",
        )
    if all(value for _, values, _, _ in lines for value in values):
        made.update_yaxes(type="log", dtick=1, tickformat="~g")
    else:
        made.update_yaxes(rangemode="tozero")
    largest = max(layers, key=lambda one: one.weights_max or 0.0)
    mean = [one.weights_mean or 0.0 for one in layers]
    reading = (
        "Of experts that both sides chose, weights differ by "
        f"{min(mean):.2g} to {max(mean):.2g} on average of a layer, and by "
        f"{largest.weights_max or 0.0:.2g} at most, in layer {largest.layer}; weights of a token "
        "are parts of about 1."
    )
    return Chart("routing-weights", "Weights of experts by layer", reading, made, height=260)


def _layers(routing: Routing, labels: tuple[str, str]) -> Table:
    astray = any(one.explained and any(one.explained.astray.values()) for one in routing.layers)
    columns = ["layer", "tokens", "flips", "first to flip", "experts in common"]
    columns += ["weights, mean", "weights, largest", "other order"]
    columns += ["stream apart, routed alike", "stream apart, re-routed"]
    if astray:
        columns += [f"not of its own logits, {one}" for one in labels]
    rows = []
    for one in routing.layers:
        cells = [
            str(one.layer),
            f"{one.rows:,}",
            f"{one.flips:,}",
            f"{one.first:,}",
            f"{one.overlap:.4f}",
            *(_number(value) for value in (one.weights_mean, one.weights_max)),
            percent(one.order),
            *(_number(value) for value in (one.stream_same, one.stream_rerouted)),
        ]
        if astray:
            told = one.explained.astray if one.explained else {}
            cells += [f"{told[name]:,}" if name in told else "-" for name in labels]
        rows.append(tuple(Cell(text, number=True) for text in cells))
    return Table("Routing by layer", tuple(columns), tuple(rows))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _split(split: GapSplit, rollout: str) -> Chart:
    made = figure("part of the gap, nat", "")
    names = list(split.parts)
    shown = [label(name) for name in names]
    looks = ((BLUE, "/"), (GREEN, "-"), (GREY, "."), (PURPLE, "\\"))
    for name, size, (colour, pattern) in zip(shown, split.parts.values(), looks, strict=False):
        made.add_bar(
            name=name,
            x=[size],
            y=[name],
            orientation="h",
            marker={
                "color": colour,
                "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "solidity": 0.25},
            },
            hovertemplate="%{y}: %{x:.4g} nat<extra></extra>",
            showlegend=False,
        )
    named_axis(made, shown)
    told = split_sentence(split, rollout)
    largest = max(names, key=lambda name: split.parts[name])
    reading = (
        f"Of {nat(split.own)} nat the largest part is {largest} ({nat(split.parts[largest])} nat). "
        f"With {told}."
    )
    rows = tuple(
        (
            Cell(name),
            Cell(nat(size), number=True),
            Cell(percent(size / split.own if split.own else None), number=True),
        )
        for name, size in split.parts.items()
    )
    table = Table("The gap split by routes", ("part", "nat", "share of the gap"), rows)
    height = 120 + 40 * len(names)
    return Chart(
        "routing-split", "What forced routes take away", reading, made, table, height=height
    )
