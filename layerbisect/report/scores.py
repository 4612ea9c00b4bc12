"""The sections of a verdict on scores: A, B and C, from the gaps to what they do to training."""

from __future__ import annotations

from layerbisect.bisect.scores.report import ScoreReport, TokenGap
from layerbisect.bisect.verdict import Gap, Verdict
from layerbisect.report.blocks import Block, Cell, Section, Table
from layerbisect.report.score_positions import position_charts
from layerbisect.report.score_readings import signed
from layerbisect.report.score_spread import spread_chart
from layerbisect.report.score_steps import steps_section
from layerbisect.report.score_tables import (
    effect_section,
    repeats_section,
    shapes_section,
    split_section,
    worst_section,
)
from layerbisect.report.token_text import TokenText
from layerbisect.score_words import amount, exact
from layerbisect.wording import nat

_WHO = (
    "A is what the generation recorded, B the rollout engine's replay of the same tokens as a "
    "prompt, and C the forward of the frozen trainer; B1 and C1 are repeats of B0 and C0."
)


def score_sections(verdict: Verdict, text: TokenText | None) -> tuple[Section, ...]:
    """The sections of ``verdict.scores``; none where scores were not judged."""
    scores = verdict.scores
    if scores is None:
        return ()
    found = (
        _gaps_section(scores),
        steps_section(scores),
        _spread_section(scores),
        worst_section(scores, text),
        shapes_section(verdict, scores),
        split_section(scores),
        repeats_section(scores),
        effect_section(scores.effect),
    )
    return tuple(section for section in found if section is not None)


def _gaps_section(scores: ScoreReport) -> Section | None:
    if not scores.pairs:
        return None
    gaps = ", ".join(f"{pair.name} {nat(pair.gap.mae)}" for pair in scores.pairs)
    of_step = next((one.step for one in scores.steps if one.maes == _maes(scores)), None)
    lead = (
        f"Mean absolute gaps over {amount(scores)}"
        + ("" if of_step is None else f" of step {of_step:,}")
        + f", in nat: {gaps}; up to {scores.tolerance:g} "
        f"is accepted. {_WHO}"
    )
    blocks: tuple[Block, ...] = (*position_charts(scores), _gaps_table(scores))
    return Section("scores-gaps", "A, B and C by position", lead, blocks)


def _maes(scores: ScoreReport) -> dict[str, float]:
    return {pair.name: pair.gap.mae for pair in scores.pairs}


def _gaps_table(scores: ScoreReport) -> Table:
    columns = (
        "pair",
        "tokens",
        "signed mean",
        "mean absolute",
        "p95",
        "p99",
        "largest",
        "first token alone",
        "later tokens",
        "repeats differ by",
    )
    rows = []
    for pair in scores.pairs:
        gap, floor = pair.gap, scores.floors.get(pair.name)
        values = [f"{gap.rows:,}", ("+" if gap.signed_mean > 0 else "") + exact(gap.signed_mean)]
        values += [exact(value) for value in (gap.mae, gap.p95, gap.p99, gap.max)]
        values += [_part(pair.first_token), _part(pair.later)]
        values.append("not repeated" if floor is None else exact(floor))
        row = (Cell(pair.name, strong=True), *(Cell(value, number=True) for value in values))
        rows.append(row)
    return Table("Gaps by pair, first minus second, in nat", columns, tuple(rows))


def _part(gap: Gap | None) -> str:
    return "-" if gap is None else exact(gap.mae)


def _spread_section(scores: ScoreReport) -> Section | None:
    chart = spread_chart(scores.pairs, scores.tolerance)
    if chart is None:
        return None
    lead = (
        "How many tokens differ by how much, and to which side. What is made by rounding lies "
        "alike on both sides of 0."
    )
    worst = max((token for pair in scores.pairs for token in pair.worst), key=_size, default=None)
    if worst is not None and worst.difference:
        lead += (
            f" The largest single difference is {signed(worst.difference)} nat, in {worst.call} at "
            f"response position {worst.position:,}."
        )
    return Section("scores-spread", "How the differences are spread", lead, (chart,))


def _size(token: TokenGap) -> float:
    return abs(token.difference)
