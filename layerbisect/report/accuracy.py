"""How often verdicts are right: shares with their intervals, and every miss."""

from __future__ import annotations

from collections.abc import Sequence

from layerbisect.accuracy_summary import AccuracySummary, Group
from layerbisect.report.blocks import Block, Cell, Chart, Section, Table
from layerbisect.report.palette import ORANGE, SKY, distinct, figure, label, named_axis
from layerbisect.wording import count


def accuracy_section(summary: AccuracySummary) -> Section:
    """A chart for each way in which cases are divided into groups, and a table of all misses."""
    divisions = list(dict.fromkeys(one.of for one in summary.groups))
    blocks: list[Block] = [
        _chart(of, [one for one in summary.groups if one.of == of], number)
        for number, of in enumerate(divisions)
    ]
    if summary.misses:
        rows = tuple(
            (Cell(miss.case, strong=True), Cell(miss.planted), Cell(miss.named))
            for miss in summary.misses
        )
        caption = f"Every miss, {count(len(rows), 'case')}"
        blocks.append(Table(caption, ("case", "planted", "the verdict named"), rows))
    measured = summary.measured
    return Section(
        "accuracy",
        "How often verdicts are right",
        f"{measured[:1].upper()}{measured[1:].rstrip('.')}. Lines are 95 % intervals (Wilson): "
        "what as many other cases of the kind could have shown.",
        tuple(blocks),
    )


def _chart(of: str, groups: Sequence[Group], number: int) -> Chart:
    made = figure("right, % of cases", "")
    names = distinct([label(one.name) for one in groups])
    made.add_bar(
        x=[_percent(one.right / one.total) for one in groups],
        y=names,
        orientation="h",
        marker={"color": SKY},
        width=0.6,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [100 * (one.high - one.right / one.total) for one in groups],
            "arrayminus": [100 * (one.right / one.total - one.low) for one in groups],
            "thickness": 2,
            "width": 6,
            "color": ORANGE,
        },
        customdata=[_words(one) for one in groups],
        hovertemplate="%{y}: %{customdata}<extra></extra>",
        showlegend=False,
    )
    made.update_xaxes(range=[0, 101], ticksuffix=" %")
    named_axis(made, names)
    rows = tuple(
        (
            Cell(one.name),
            Cell(f"{one.right:,}", number=True),
            Cell(f"{one.total:,}", number=True),
            Cell(f"{_percent(one.right / one.total):.1f} %", number=True),
            Cell(f"{_percent(one.low):.1f} % to {_percent(one.high):.1f} %", number=True),
        )
        for one in groups
    )
    title = f"By {of}" if of else "Shares that are right"
    table = Table(title, ("cases", "right", "of", "share", "95 % interval"), rows)
    return Chart(
        f"accuracy-{number}", title, _reading(groups), made, table, height=110 + 32 * len(groups)
    )


def _reading(groups: Sequence[Group]) -> str:
    worst = min(groups, key=lambda one: (one.right / one.total, one.low))
    perfect = [one for one in groups if one.right == one.total]
    if len(perfect) == len(groups):
        least = min(groups, key=lambda one: one.low)
        return (
            f"All are right in {'the group' if len(groups) == 1 else 'every group'}; the fewest "
            f"cases are of “{least.name}”, {least.total:,}, which leaves it at "
            f"{_percent(least.low):.1f} % or more."
        )
    right = f"{len(perfect)} of {count(len(groups), 'group')} are right in every case; " * bool(
        perfect
    )
    said = f"the least is “{worst.name}”, {_words(worst)}"
    text = f"{right}{said}."
    return f"{text[:1].upper()}{text[1:]}"


def _words(one: Group) -> str:
    share, low, high = (_percent(value) for value in (one.right / one.total, one.low, one.high))
    return f"{share:.1f} % ({one.right:,} of {one.total:,}; {low:.1f} % to {high:.1f} %)"


def _percent(share: float) -> float:
    """In percent; what is nearly all is not rounded to all."""
    value = 100 * share
    return min(value, 99.9) if value < 100 else 100.0
