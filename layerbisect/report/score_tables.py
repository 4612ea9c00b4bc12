"""What else was measured of scores: worst tokens, shapes, repeats, logits, and training."""

from __future__ import annotations

from collections.abc import Sequence

from layerbisect.bisect.scores.explain import FEWEST, chance
from layerbisect.bisect.scores.report import Effect, Finding, RepeatReport, ScoreReport, TokenGap
from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import Block, Cell, Facts, Section, Table
from layerbisect.report.score_readings import worst_reading
from layerbisect.report.token_text import TokenText
from layerbisect.score_words import (
    clipped_words,
    divergence_words,
    exact,
    ratio_words,
    repeat_pairs,
    sample_words,
)
from layerbisect.wording import count, nat, percent

_EXPLAINED = 6
"""Shapes whose evidence is written out; a table has all."""

_SIDE = {"B": "The rollout engine's replay (B)", "C": "The trainer (C)"}


def worst_section(scores: ScoreReport, text: TokenText | None) -> Section | None:
    """The tokens with the largest differences, of each pair that differs."""
    apart = [pair for pair in scores.pairs if pair.worst and pair.gap.max > 0]
    if not apart:
        return None
    return Section(
        "scores-worst",
        "Worst tokens",
        worst_reading(max(apart, key=lambda pair: pair.gap.mae)),
        tuple(
            worst_table(f"Worst tokens of {p.name}, nat", p.worst, p.first, p.second, text)
            for p in apart
        ),
    )


def worst_table(
    caption: str, tokens: Sequence[TokenGap], first: str, second: str, text: TokenText | None
) -> Table:
    """Tokens with their scores on both sides, and their text where a tokenizer is given."""
    columns = ["call", "response position", "token ID", first, second, f"{first}-{second}"]
    rows = []
    for one in tokens:
        row = [
            Cell(one.call),
            *(Cell(value, number=True) for value in (f"{one.position:,}", str(one.token))),
            *(Cell(exact(value), number=True) for value in (one.first, one.second)),
            Cell(f"{one.difference:+.6f}", number=True, strong=True),
        ]
        if text is not None:
            said = text.text(one.token)
            row.insert(3, Cell("no such token") if said is None else Cell(said, token=True))
        rows.append(tuple(row))
    if text is not None:
        columns.insert(3, "text")
    return Table(caption, tuple(columns), tuple(rows))


def shapes_section(verdict: Verdict, scores: ScoreReport) -> Section | None:
    """The shapes that differences have; those that convict come first."""
    looked = len({finding.test for finding in scores.findings} | set(scores.silent))
    if not looked:
        return None
    sought = f"{count(looked, 'test')} looked at {count(scores.sampled, 'response')}"
    if not scores.findings:
        lead = f"No shape: {sought}, and none found anything."
        if scores.tokens < FEWEST:
            lead = f"{sought}, which are too short to show a shape: {FEWEST} tokens are needed."
        return Section("scores-shapes", "Shapes in the differences", lead, ())
    proofs = {sentence for culprit in verdict.culprits for sentence in culprit.evidence}
    convicting = [f for f in scores.findings if f"{f.test}: {f.summary}" in proofs]
    found = [*convicting, *(f for f in scores.findings if f not in convicting)]
    convicts = f"{len(convicting)} of them convicts" if convicting else "none of them convicts"
    lead = (
        f"{sought}; {len(scores.silent)} of them found nothing. "
        f"Found: {count(len(found), 'shape')}, and {convicts}. The first: {found[0].summary}."
    )
    rows = tuple(_shape_row(finding, finding in convicting) for finding in found)
    table = Table(
        "Shapes, those that convict first",
        ("pair", "shape", "what was found", "whose", "explains", "tokens", "false alarm", "role"),
        rows,
    )
    evidence = tuple(
        (f"{finding.pair}, {finding.test}", sentence)
        for finding in found[:_EXPLAINED]
        for sentence in finding.evidence
    )
    title = "What they rest on"
    if len(found) > _EXPLAINED:
        title = f"What the first {_EXPLAINED} of {len(found)} rest on"
    blocks: tuple[Block, ...] = (table, Facts(evidence, title)) if evidence else (table,)
    return Section("scores-shapes", "Shapes in the differences", lead, blocks)


def _shape_row(finding: Finding, convicts: bool) -> tuple[Cell, ...]:
    where = f" ({finding.where})" if finding.where else ""
    return (
        Cell(finding.pair),
        Cell(finding.test, strong=True),
        Cell(finding.summary),
        Cell(finding.side or " or ".join(column[0] for column in finding.pair.split("-"))),
        Cell(percent(finding.explains), number=True),
        Cell(f"{finding.tokens:,}{where}", number=not where),
        Cell(chance(finding.false_alarm), number=True),
        Cell("convicts" if convicts else "seen beside"),
    )


def repeats_section(scores: ScoreReport) -> Section | None:
    """Whether a side that scores the same tokens again gives the same scores."""
    if not scores.repeats:
        return None
    table = Table(
        "The same tokens scored again",
        ("side", "repeats share", "pairs of passes", "mean absolute, nat", "largest, nat", "moved"),
        tuple(
            (
                Cell(repeat.letter, strong=True),
                Cell(repeat.kind),
                Cell(repeat_pairs(repeat)),
                Cell(exact(repeat.mae), number=True),
                Cell(exact(repeat.max), number=True),
                Cell(f"{count(repeat.moved_tokens, 'token')} by more than {repeat.tolerance:g}"),
            )
            for repeat in scores.repeats
        ),
    )
    moved = tuple(
        worst_table(
            f"Tokens of {repeat.letter} that moved most ({repeat.kind}), nat",
            repeat.moved,
            "one pass",
            "other",
            None,
        )
        for repeat in scores.unrepeated
    )
    lead = " ".join(_repeats(repeat) for repeat in scores.repeats)
    return Section("scores-repeats", "Does a side repeat itself", lead, (table, *moved))


def _repeats(repeat: RepeatReport) -> str:
    who = _SIDE[repeat.letter] + (f", {repeat.kind}," if repeat.letter == "B" else "")
    if repeat.moved_tokens:
        return (
            f"{who} does not repeat itself: {count(repeat.moved_tokens, 'token')} moved by more "
            f"than {nat(repeat.tolerance)} nat, {nat(repeat.max)} at most. Settle that first."
        )
    if repeat.max == 0:
        return f"{who} repeats itself exactly."
    return f"{who} repeats itself within {nat(repeat.max)} nat."


def split_section(scores: ScoreReport) -> Section | None:
    """Whether a gap is in the chosen logits or in the normalizer, where logits were scored."""
    if not scores.splits:
        return None
    table = Table(
        "log-prob = chosen logit - normalizer; mean absolute differences, nat",
        ("pair", "tokens", "log-probs", "chosen logits", "normalizers", "logits' part"),
        tuple(
            (
                Cell(f"{one.first}-{one.second}", strong=True),
                *(
                    Cell(value, number=True)
                    for value in (
                        f"{one.tokens:,}",
                        exact(one.mae),
                        exact(one.logit_mae),
                        exact(one.normalizer_mae),
                        percent(one.logit_share),
                    )
                ),
            )
            for one in scores.splits
        ),
    )
    lead = " ".join(f"{one.first}-{one.second}: {one.summary}." for one in scores.splits)
    return Section("scores-split", "Logits or normalizer", lead, (table,))


def effect_section(effect: Effect | None) -> Section | None:
    """What the gap does to a loss that divides the trainer's probabilities by the rollout's."""
    if effect is None:
        return None
    clipped = effect.clipped_low + effect.clipped_high
    kept = effect.effective_sample_size * effect.tokens
    lead = (
        f"In a loss that weighs tokens by exp({effect.trainer} - {effect.rollout}), this gap makes "
        f"weights of {exact(effect.ratio_mean, 4)} in the mean instead of 1 and clips "
        f"{percent(clipped)} of the tokens; they then count as much as {kept:,.0f} equally weighed "
        f"ones, of {effect.tokens:,}."
    )
    rows = (
        ("ratio", f"{ratio_words(effect)}; 1 where both sides agree"),
        ("clipped", f"{clipped_words(effect)}: no gradient where the advantage has that sign"),
        (
            "sample size",
            f"{sample_words(effect)} (by the product of their ratios): 100 % without a gap",
        ),
        (
            "divergence",
            f"{divergence_words(effect)}: estimates of KL(rollout || trainer), 0 without a gap",
        ),
    )
    return Section("scores-effect", "What it does to training", lead, (Facts(rows),))
