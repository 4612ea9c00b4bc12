"""The gap of two captures' log-probs: its size, where it is by position, its spread, its worst."""

from __future__ import annotations

from layerbisect.bisect.token_report import Distribution, TokenReport
from layerbisect.bisect.verdict import Gap, Verdict
from layerbisect.report.blocks import Block, Cell, Chart, Section, Table
from layerbisect.report.difference_charts import by_position_chart, distribution_chart
from layerbisect.report.token_text import TokenText
from layerbisect.wording import count, nat, percent


def gap_section(verdict: Verdict, text: TokenText | None = None) -> Section | None:
    """The gap by position, its signed distribution and its worst tokens.

    None where scores were judged, which have these for each pair.
    """
    if verdict.gap is None or verdict.of_scores:
        return None
    order = f"{verdict.labels[0]} minus {verdict.labels[1]}"
    blocks: list[Block] = [_figures(verdict.gap, order)]
    tokens = verdict.tokens
    if tokens is not None:
        if tokens.by_position:
            blocks.append(_by_position(verdict, tokens, order))
        if tokens.distribution is not None:
            blocks.append(_distribution(tokens.distribution, verdict.gap, order))
        if tokens.worst:
            blocks.append(_worst(verdict, tokens, order, text))
    lead = f"Differences of the same tokens' log-probs, {order}."
    if verdict.gap.source == "read-out":
        lead += " No scores are captured: the last states were read out by the reference's head."
    return Section("gap", "The gap, token by token", lead, tuple(blocks))


def _figures(gap: Gap, order: str) -> Table:
    named = [
        ("tokens", f"{gap.rows:,}"),
        ("mean absolute, nat", nat(gap.mae)),
        ("signed mean, nat", nat(gap.signed_mean)),
        ("p95, nat", nat(gap.p95)),
        ("p99, nat", nat(gap.p99)),
        ("largest, nat", nat(gap.max)),
    ]
    if gap.nonfinite:
        named.append(("left out, not finite", f"{gap.nonfinite:,}"))
    row = tuple(Cell(value, number=True) for _, value in named)
    return Table(f"The gap, {order}", tuple(name for name, _ in named), (row,))


def _by_position(verdict: Verdict, tokens: TokenReport, order: str) -> Chart:
    bins = tokens.by_position
    worst = max(bins, key=lambda one: one.mae)
    place = f"positions {worst.start:,} to {worst.stop - 1:,}"
    if worst.stop - worst.start == 1:
        place = f"position {worst.start:,}"
    reading = f"The mean gap is largest at {place}: {nat(worst.mae)} nat over "
    reading += f"{count(worst.tokens, 'token')}"
    least = min(bins, key=lambda one: one.mae)
    reading += f"; its smallest is {nat(least.mae)} nat."
    budget = verdict.rounding_budget
    band = budget.predicted_gap if budget is not None else None
    if band:
        beyond = sum(one.mae > band for one in bins)
        reading += f" Rounding predicts up to {nat(band)} nat, the grey band; "
        reading += (
            "no bin is beyond it."
            if not beyond
            else f"{beyond} of {count(len(bins), 'bin')} {'is' if beyond == 1 else 'are'} beyond."
        )
    return by_position_chart(
        "gap-position", "Gap by position", order, bins, band, reading, "rounding predicts"
    )


def _distribution(spread: Distribution, gap: Gap, order: str) -> Chart:
    total = sum(spread.counts)
    bins = list(zip(spread.edges[:-1], spread.edges[1:], spread.counts, strict=True))
    above = sum(number for low, _, number in bins if low > 0)
    below = sum(number for _, high, number in bins if high < 0)
    reading = (
        f"{percent(above / total)} of {count(total, 'token')} lie above 0 and "
        f"{percent(below / total)} below; their mean is {nat(gap.signed_mean)} nat, the largest "
        f"{nat(gap.max)} nat from 0. A heap on one side alone is systematic, and no rounding."
    )
    title = "How the differences are spread"
    return distribution_chart("gap-spread", title, order, spread, reading)


def _worst(verdict: Verdict, tokens: TokenReport, order: str, text: TokenText | None) -> Table:
    opens = {column.sequence for one in tokens.heatmaps for column in one.columns}
    rows = tuple(
        (
            Cell(one.call),
            # the row before has the state that scored it
            Cell(
                f"{one.position:,}",
                number=True,
                opens=f"{one.call}:{one.position - 1}" if one.call in opens else "",
            ),
            *_token(one.token, text),
            Cell(nat(one.first), number=True),
            Cell(nat(one.second), number=True),
            Cell(nat(one.difference), number=True, strong=True),
        )
        for one in tokens.worst
    )
    a, b = verdict.labels
    columns = ("sequence", "position", "token ID", *(() if text is None else ("token",)))
    return Table(
        "The largest differences", (*columns, f"{a}, nat", f"{b}, nat", f"{order}, nat"), rows
    )


def _token(token: int, text: TokenText | None) -> tuple[Cell, ...]:
    number = Cell(f"{token}", number=True)
    if text is None:
        return (number,)
    return (number, Cell(text.text(token) or f"<token {token}>", token=True))
