"""Replays: the engine's own output beside what implementations make of the same input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from layerbisect.kernels.judging.own_error import EXCESS_RATIO
from layerbisect.kernels.replay.deterministic import Pair
from layerbisect.kernels.replay.report import Errors, Replay, Result
from layerbisect.replay_words import columns, figures, finding, varies
from layerbisect.report.blocks import Block, Cell, Chart, Facts, Section, Table
from layerbisect.report.palette import BLUE, GREY, ORANGE, distinct, figure, label, named_axis
from layerbisect.terminal.replay import engine_words, not_run, notes, shown, where_words
from layerbisect.wording import count, percent, times

_LEAST = 0.01
"""Errors below this are drawn here: a logarithmic axis has no place for 0."""
_EXACT = "0"
"""The bin of numbers that are the correctly rounded ones."""


def replay_section(
    replays: Sequence[Replay],
    left_out: Mapping[str, str],
    pairs: Sequence[Pair] | None = None,
) -> Section | None:
    """Each stretch's conclusion, chart and table, and the pairs of a deterministic mode.

    ``left_out`` says of each point that could not be replayed why. None where nothing was.
    """
    if not replays and not left_out:
        return None
    blocks: list[Block] = []
    for number, replay in enumerate(replays):
        blocks += _stretch(replay, number)
    if pairs is not None:
        blocks.append(_pairs(pairs))
    told = not_run(replays)
    if told:
        rows = tuple((Cell(names, strong=True), Cell(s), Cell(why)) for names, s, why in told)
        blocks.append(Table("What did not run", ("implementation", "state", "why"), rows))
    if left_out:
        blocks.append(Facts(tuple(left_out.items()), "Not replayed"))
    return Section("replay", "Operators replayed", _lead(replays), tuple(blocks))


def _lead(replays: Sequence[Replay]) -> str:
    if not replays:
        return "Nothing could be replayed."
    guilty = [replay.point for replay in replays if replay.status == "convicted"]
    unknown = sum(replay.status == "inconclusive" for replay in replays)
    of = f"{len(guilty)} of {count(len(replays), 'stretch')}"
    said = f"{of} {'err' if len(replays) > 1 and len(guilty) != 1 else 'errs'} beyond rounding"
    said += f": {', '.join(guilty)}" if guilty else ""
    said += f"; {unknown} could not be judged" if unknown else ""
    return (
        f"{said}. Each ran on the input that the engine gave it and was measured against float64; "
        f"1x is what a low-precision reference loses there. {_sentence(where_words(replays))}"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _stretch(replay: Replay, number: int) -> list[Block]:
    title = f"{replay.point} ({', '.join(replay.covers)})"
    rows = _rows(replay)
    blocks: list[Block] = []
    facts = [(replay.status, replay.conclusion), (replay.label, engine_words(replay))]
    if any(_drawn(errors) for _, errors in rows):
        blocks.append(_chart(replay, number, title))
    else:
        blocks.append(Facts(tuple(facts[:1]), title))
        del facts[0]
    if rows:
        blocks.append(_table(replay))
    facts += [("", text) for text in figures(replay.engine)] if replay.engine else []
    over = f"{replay.dtype}, {count(replay.rows, 'row')}"
    over += f", {replay.rows_left_out:,} left out" if replay.rows_left_out else ""
    facts.append(("judged", over))
    facts += [(one.name, note) for one in shown(replay) for note in notes(one)]
    blocks.append(Facts(tuple(facts)))
    return blocks


def _rows(replay: Replay) -> list[tuple[Result, Errors | None]]:
    """What the engine returned, first, and what implementations did."""
    found = [(one, one.errors) for one in shown(replay)]
    if replay.engine is not None:
        engine = Result(_engine_name(replay), engine_words(replay), "", "", "ran")
        found.insert(0, (engine, replay.engine))
    return found


def _engine_name(replay: Replay) -> str:
    return f"{replay.label} (the engine)"


def _drawn(errors: Errors | None) -> bool:
    return errors is not None and math.isfinite(errors.ratio)


def _worst(errors: Errors) -> float:
    """The error of the worst row, in units of rounding."""
    finite = (row.ratio for row in errors.worst if math.isfinite(row.ratio))
    return max(finite, default=errors.ratio)


def _chart(replay: Replay, number: int, title: str) -> Chart:
    drawn = [(one, errors) for one, errors in _rows(replay) if errors and _drawn(errors)]
    names = distinct([label(one.name) for one, _ in drawn])
    rows = [(name, errors) for name, (_, errors) in zip(names, drawn, strict=True)]
    made = figure("error, times rounding (logarithmic)", "")
    for name, errors in rows:
        made.add_scatter(
            x=[max(value, _LEAST) for value in (errors.median, _worst(errors))],
            y=[name] * 2,
            mode="lines",
            line={"color": GREY, "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    for convicted, what, colour, symbol in (
        (False, "95th percentile of rows, within rounding", BLUE, "circle"),
        (True, "95th percentile, beyond rounding", ORANGE, "x"),
    ):
        _dots(made, what, [r for r in rows if r[1].convicted == convicted], _ratio, colour, symbol)
    _dots(made, "median row", rows, lambda errors: errors.median, GREY, "line-ns-open")
    _dots(made, "worst row", rows, _worst, GREY, "circle-open")
    # ticks and ends beyond that are no floats
    largest = min(max(max(_worst(errors) for _, errors in rows), EXCESS_RATIO), 1e300)
    decades = range(1, math.ceil(math.log10(largest)) + 1)
    ticks = [1.0, EXCESS_RATIO, *(10.0**decade for decade in decades)]
    for at, dash in ((1.0, "solid"), (EXCESS_RATIO, "dash")):
        made.add_vline(x=at, line={"color": GREY, "dash": dash, "width": 1.5}, layer="below")
    made.update_xaxes(
        type="log",
        tickvals=ticks,
        ticktext=[f"{tick:,g}x" for tick in ticks],
        range=[math.log10(0.3), math.log10(largest * 1.6)],
    )
    named_axis(made, names)
    height = 150 + 26 * len(rows)
    reading = f"{_sentence(f'{replay.status}: {finding(replay)}')} {_reading(replay)}"
    return Chart(f"replay-{number}", title, reading, made, height=height)


def _dots(
    made: object,
    what: str,
    rows: Sequence[tuple[str, Errors]],
    value: Callable[[Errors], float],
    colour: str,
    symbol: str,
) -> None:
    found = [(name, value(errors)) for name, errors in rows if math.isfinite(value(errors))]
    if not found:
        return
    made.add_scatter(  # type: ignore[attr-defined]
        name=what,
        x=[max(size, _LEAST) for _, size in found],
        y=[name for name, _ in found],
        mode="markers",
        marker={
            "color": colour,
            "symbol": symbol,
            "size": 10,
            "line": {"color": colour, "width": 2},
        },
        customdata=[times(size) for _, size in found],
        hovertemplate=f"%{{y}}, {what}: %{{customdata}}<extra></extra>",
    )


def _ratio(errors: Errors) -> float:
    return errors.ratio


def _reading(replay: Replay) -> str:
    """Say where the implementations lie, and what a row's error means."""
    others = [one.errors.ratio for one in shown(replay) if one.errors and _drawn(one.errors)]
    beyond = f"A row beyond {EXCESS_RATIO:g}x (dashed) is in excess of rounding."
    if not others:
        return beyond
    least, most = times(min(others)), times(max(others))
    span = least if least == most else f"{least} to {most}"
    run = count(len(others), "implementation")
    return f"At p95, {run} {'lies' if len(others) == 1 else 'lie'} at {span}. {beyond}"


def _table(replay: Replay) -> Table:
    rows = _rows(replay)
    ran = [one for one, _ in rows]
    heads, cells = columns([one for one in ran if one.errors or one.reproduces] or ran)
    head = ("implementation", "package", "setting", "state", *_words(heads))
    head += ("floor", "worst row", "right bits", "farthest")
    made = []
    for number, (one, errors) in enumerate(rows):
        engine = replay.engine is not None and number == 0
        judged = Result(one.name, one.package, one.mode, one.family, one.state, errors=errors)
        # what is varied and timed is an implementation, and the engine's output is only judged
        source = judged if engine else one
        setting = ", ".join(part for part in (one.family, one.mode) if part != "unspecified")
        state: str = "beyond rounding" if errors is not None and errors.convicted else one.state
        if engine and errors is not None and not errors.convicted:
            state = "within rounding"
        texts = [cell(source) for cell in cells] + _distances(errors)
        strong = engine or state not in ("ran", "within rounding")
        made.append(
            (
                Cell(one.name, strong=strong),
                Cell(one.package),
                Cell(setting.strip(", ")),
                Cell(state, strong=strong),
                *(Cell(text, number=True) for text in texts),
            )
        )
    caption = f"{replay.point}: errors as multiples of rounding, the engine's own output first"
    # such as times on a CPU, and a worst-case bound of several operators
    kept = [at for at in range(len(head)) if any(row[at].text not in ("", "-") for row in made)]
    return Table(
        caption,
        tuple(head[at] for at in kept),
        tuple(tuple(row[at] for at in kept) for row in made),
    )


def _words(heads: Sequence[str]) -> list[str]:
    """Name columns without the room that a terminal lacks."""
    names = {
        "p95": "error p95",
        "of bound": "of worst-case bound",
        "repeat": "rows that change in a repeat",
        "batch": "in another batch",
        "chunk": "in chunks",
        "engine's bits": "same bits as the engine",
    }
    return [names.get(head, head) for head in heads]


def _distances(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["-"] * 4
    apart = [name for name, share in errors.ulps.items() if share]
    right = percent(errors.ulps.get(_EXACT)) if errors.ulps else "-"
    farthest = f"{apart[-1]} ulp" if apart else "-"
    return [times(errors.floor), times(_worst(errors)), right, farthest]


def _pairs(pairs: Sequence[Pair]) -> Block:
    title = "What a deterministic mode changes"
    if not pairs:
        return Facts((("", "No implementation of these operators has such a switch."),), title)
    timed = any(pair.time_ratio is not None for pair in pairs)
    head = ("point", "switch", "off, on", "rows that change in a repeat", "in another batch")
    head += ("in chunks", "error p95", *(("time, on / off",) if timed else ()))
    rows = []
    for pair in pairs:
        both = (pair.off, pair.on)
        parts = [
            [varies(one.repeats) if one else "-" for one in both],
            [varies(one.batches) if one else "-" for one in both],
            [varies(one.chunks) if one else "-" for one in both],
            [times(ratio) for ratio in pair.error_ratio],
        ]
        texts = [" / ".join(two) for two in parts] + [times(pair.time_ratio)] * timed
        names = ", ".join(one.name if one else "none" for one in both)
        rows.append(
            (
                Cell(pair.point, strong=True),
                Cell(pair.family),
                Cell(names),
                *(Cell(text, number=True) for text in texts),
            )
        )
    caption = f"{title}: off / on; “same” is not a bit of any row"
    return Table(caption, head, tuple(rows))
