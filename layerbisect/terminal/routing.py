"""What a verdict says about routing: a sentence, a line a layer, and the gap split by routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from rich.console import Console

from layerbisect.bisect.routing_report import (
    CAUSES,
    Cause,
    GapSplit,
    Group,
    LayerRouting,
    RouteGap,
    Routing,
)
from layerbisect.terminal.layers import RUN, SHORT
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import line, title
from layerbisect.wording import count, nat, percent

LOUD = 3
"""So many layers in which most tokens flip first are shown."""
EXAMPLES = 5
"""So many flips are told one by one."""
GROUPS: dict[Group, str] = {
    "same": "routed alike so far",
    "context": "after a re-routed token",
    "rerouted": "re-routed",
}
"""Tokens by how the rows before them were routed, in words."""
_PLURAL = {"near tie": "near ties", "consequence": "consequences"}
_HEADERS = {"near tie": "near\ntie", "consequence": "conse-\nquence", "not known": "not\nknown"}


def routing_sentence(routing: Routing) -> str:
    """Say in one sentence how many routes differ, and whether that is explained."""
    rows, flips, causes = routing.rows, routing.flips, routing.causes
    if routing.forced:
        sides = " and ".join(routing.forced)
        share = share_words(flips, rows)
        return f"routing: {share} of routes differ; those of {sides} were forced on it"
    if not flips:
        return f"routing: all {count(rows, 'route')} agree"
    told = ", ".join(flips_words(number, cause) for cause in CAUSES if (number := causes[cause]))
    unknown = flips - sum(causes.values())
    if unknown:
        told += f"{', ' if told else ''}{unknown:,} not judged"
    explained = (
        "not all explained"
        if unknown or causes["unexplained"] or causes["not known"]
        else "all explained"
    )
    return f"routing: {share_words(flips, rows)} of routes differ, {explained}: {told}"


def flips_words(number: int, cause: Cause) -> str:
    """Write how many flips have a cause: ``2 near ties``."""
    return f"{number:,} {cause if number == 1 else _PLURAL.get(cause, cause)}"


def render_routing(
    routing: Routing, labels: tuple[str, str], console: Console, *, verbose: bool
) -> None:
    """Print the sentence, the layers, what re-routed tokens differ by, and the split.

    Some flips that are unexplained are told one by one, and where ``verbose`` those inherited, too.
    """
    if routing.layers:
        title(console, routing_sentence(routing))
    if routing.flips:
        _table(routing, verbose).print(console, 2)
        causes: tuple[Cause, ...] = ("unexplained", "inherited") if verbose else ("unexplained",)
        for sentence in islice(flip_sentences(routing, causes), EXAMPLES):
            line(console, sentence, 2, hang=2)
        if routing.causes["not known"]:
            line(console, lacking_sentence(routing), 2, hang=2)
        line(console, _gaps(routing), 2, hang=2)
    if routing.split is not None:
        title(console, "gap split by routes")
        line(console, split_sentence(routing.split, labels[0]), 2, hang=2)


def lacking_sentence(routing: Routing) -> str:
    """Say what to capture to know of the flips of which it is not known."""
    told = [one.explained for one in routing.layers if one.explained is not None]
    names = {
        n for why in told if why.causes["not known"] for ns in why.lacking.values() for n in ns
    }
    return (
        f"not known is what came before the router: capture {' and '.join(sorted(names))} of both"
    )


def share_words(flips: int, rows: int) -> str:
    """Write how much of the routes differ; the least share that is any is not called nothing."""
    value = 100 * flips / rows if rows else 0.0
    return f"{value:.1f} %" if value >= 0.05 or not flips else "<0.1 %"


def _table(routing: Routing, verbose: bool) -> Table:
    weights = any(one.weights_mean is not None for one in routing.layers)
    order = any(one.order is not None for one in routing.layers)
    causes = [c for c in CAUSES if c != "not known" or routing.causes[c]]
    names = ["layer", "flips", "overlap", "first", *(_HEADERS.get(c, c) for c in causes)]
    names += ["weights\ndiffer"] * weights + ["order\ndiffers"] * order
    table = Table([Column(name) for name in names])
    for run in _runs(routing.layers, verbose):
        number = str(run[0].layer) if len(run) == 1 else f"{run[0].layer}-{run[-1].layer}"
        flips, rows = sum(one.flips for one in run), sum(one.rows for one in run)
        cells = [
            number,
            share_words(flips, rows),
            f"{sum(one.overlap * one.rows for one in run) / max(rows, 1):.3f}",
            f"{sum(one.first for one in run):,}",
            *_causes(run, causes),
        ]
        cells += [_mean([one.weights_mean for one in run])] * weights
        cells += [percent(_average([one.order for one in run]))] * order
        table.add(*cells)
    return table


def _causes(run: Sequence[LayerRouting], causes: Sequence[Cause]) -> Iterator[str]:
    told = [one.explained.causes for one in run if one.explained is not None]
    judged = bool(told) or not any(one.flips for one in run)
    for cause in causes:
        yield f"{sum(one[cause] for one in told):,}" if judged else "-"


def _runs(layers: Sequence[LayerRouting], verbose: bool) -> Iterator[Sequence[LayerRouting]]:
    """Split into single layers and, in a deep model, runs of those that say least."""
    if verbose or len(layers) <= SHORT:
        yield from ([one] for one in layers)
        return
    loud = sorted(layers, key=lambda one: -one.first)[:LOUD]
    quiet: list[LayerRouting] = []
    for one in layers:
        unexplained = one.explained is not None and one.explained.causes["unexplained"]
        if not unexplained and one not in loud:
            quiet.append(one)
            continue
        yield from [quiet] if len(quiet) >= RUN else ([other] for other in quiet)
        quiet = []
        yield [one]
    if quiet:
        yield from [quiet] if len(quiet) >= RUN else ([other] for other in quiet)


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean(values: Sequence[float | None]) -> str:
    value = _average(values)
    return "-" if value is None else f"{value:.2g}"


def flip_sentences(routing: Routing, causes: Sequence[Cause]) -> Iterator[str]:
    """Tell the examples of these causes one by one, by cause and then by layer."""
    told = [(one.layer, one.explained) for one in routing.layers if one.explained is not None]
    for cause, (layer, explained) in product(causes, told):
        for flip in explained.examples:
            if flip.cause != cause:
                continue
            margins = ""
            if flip.margins is not None:
                first, second = flip.margins
                margins = (
                    f", ahead by {first:.2g} and {second:.2g} (rounding {explained.noise:.2g})"
                )
            yield (
                f"layer {layer}, position {flip.position}, token {flip.token}: experts "
                f"{_numbers(flip.first)} against {_numbers(flip.second)}{margins}: {cause}"
            )


def _numbers(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts)) or "none"


def _gaps(routing: Routing) -> str:
    told = [f"{GROUPS[group]} {_gap(gap)}" for group, gap in routing.gaps.items() if gap.tokens]
    said = f"mean gap of tokens {'; '.join(told)}" if told else ""
    last = routing.layers[-1]
    if last.stream_same is not None and last.stream_rerouted is not None:
        said += (
            f"{'. ' if said else ''}Stream that leaves layer {last.layer}: {last.stream_same:.2g} "
            f"apart where routed alike, {last.stream_rerouted:.2g} where re-routed"
        )
    return said


def _gap(gap: RouteGap) -> str:
    return f"{nat(gap.mae)} nat ({gap.tokens:,})"


def split_sentence(split: GapSplit, rollout: str) -> str:
    """Say what forcing the rollout's routes leaves of the gap (nat), and what takes which part."""
    said = [f"own routes {nat(split.own)} nat"]
    if split.forced is not None:
        said.append(f"{rollout}'s routes forced {nat(split.forced)}")
    if split.forced_with_weights is not None:
        theirs = "their weights too" if said[1:] else f"{rollout}'s routes and weights forced"
        said.append(f"{theirs} {nat(split.forced_with_weights)}")
    parts = ", ".join(f"{name} {nat(size)}" for name, size in split.parts.items())
    unchecked = "".join(f"; {told}" for told in split.unchecked)
    return f"{', '.join(said)}, over {count(split.tokens, 'token')}: {parts} nat{unchecked}"
