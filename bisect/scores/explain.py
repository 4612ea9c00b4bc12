"""What was judged of scores in sentences: reasons, what was ruled out, what could not be seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerbisect.bisect.scores.conditions import UNNAMED, versions
from layerbisect.bisect.scores.decision_map import CLEAR, PATHS, Letter, Shape, Standing
from layerbisect.bisect.scores.report import PairReport, ScoreReport, StepReport
from layerbisect.bisect.verdict import Coverage, CoveredRows, Culprit, Points, RuledOut, Status
from layerbisect.captures.record.call import Scoring

FEWEST = 32
"""Tokens below which nothing is judged."""

_MOST = 0.5
_FAR = 100.0
"""Times the tolerance: a token so far apart is named, whatever the mean says."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One step's measured scores, and how they stand.

    ``unlike`` says what was not scored alike; ``cached`` counts cached tokens by column.
    """

    scores: ScoreReport
    standing: Standing
    columns: Mapping[str, Scoring]
    unlike: tuple[str, ...]
    left_out: int
    cached: Mapping[str, int]

    def weights(self) -> dict[str, str]:
        """Digests of the weights that scored, by side, where they were looked at."""
        return self._by_side({c: s.digest for c, s in self.columns.items()})

    def versions(self) -> dict[str, str]:
        """What each side calls the weights that scored."""
        return self._by_side(
            {c: s.weight_version for c, s in self.columns.items() if s.weight_version != UNNAMED}
        )

    def _by_side(self, told: Mapping[str, str | None]) -> dict[str, str]:
        found = {}
        for label, letters in (("rollout", "BA"), ("trainer", "C")):
            # the replay's own before the generation's
            for column in sorted(told, key=lambda c: letters.find(c[0])):
                if column[0] in letters and told[column] and label not in found:
                    found[label] = str(told[column])
        return found


def said(pair: PairReport) -> str:
    """Say a pair's mean absolute difference."""
    return f"{pair.name} has a mean absolute difference of {pair.gap.mae:.6f} nat"


def chance(value: float) -> str:
    """Write a chance; one that has no digits left is not called nothing."""
    return f"{value:.0e}" if value > 0 else "below 1e-300"


def ruled_out(judged: Judged, shaped: Sequence[Shape]) -> tuple[RuledOut, ...]:
    """Say what the gaps, the repeats and the silent tests exclude."""
    scores = judged.scores
    out = []
    for report in scores.repeats:
        if not report.moved_tokens:
            out.append(
                RuledOut(
                    f"unstable {report.letter} ({report.kind})",
                    f"{', '.join(report.pairs)}: largest difference {report.max:.2g} nat",
                )
            )
    near = [pair for pair in scores.between if pair.gap.mae <= scores.tolerance]
    meaning: Mapping[tuple[str, str], str] = {
        ("A", "B"): "generation apart from prefill: bookkeeping of A, decode, KV cache",
        ("B", "C"): "engines apart: weights, model, the trainer's scoring",
    }
    for pair in near:
        hypothesis = meaning.get((pair.first[0], pair.second[0]))
        if hypothesis and not any(s.finding.pair == pair.name for s in shaped):
            out.append(RuledOut(hypothesis, said(pair)))
    if scores.tokens < FEWEST:
        return tuple(out)
    names = ", ".join(pair.name for pair in scores.between)
    out += [RuledOut(test, f"not seen in {names}") for test in scores.silent]
    return tuple(out)


def coverage(judged: Judged) -> Coverage:
    """Say what was compared, and what could not be seen."""
    scores, have = judged.scores, judged.columns
    missing = [column for column in ("A", "B0", "B1", "C0", "C1") if column not in have]
    notes = []
    if scores.sampled < scores.responses:
        notes.append(f"shapes were sought in {scores.sampled} of {scores.responses} responses")
    for letter in "BC":
        if f"{letter}0" in have and f"{letter}1" not in have:
            notes.append(f"{letter} was scored once: whether it repeats is unknown")
    for column, count in judged.cached.items():
        if column[0] == "B" and count:
            notes.append(
                f"{column} read {count} tokens from the prefix cache: it is no clean replay"
            )
    for scoring in have.values():
        if scoring.definition == "unknown":
            notes.append("a column does not say which distribution it scored")
            break
    if len(judged.weights()) < 2:
        notes.append("weights were not looked at on both sides")
    return Coverage(
        Points(len(scores.pairs), tuple(missing)),
        CoveredRows(scores.tokens, judged.left_out),
        tuple(notes),
    )


def reasons(
    status: Status,
    judged: Judged,
    culprits: Sequence[Culprit],
    before: Sequence[StepReport],
    step: int | None,
) -> tuple[str, ...]:
    """Say why the status is what it is, what matters most first."""
    scores, standing = judged.scores, judged.standing
    sentences: list[str] = []
    if scores.tokens < FEWEST:
        sentences.append(
            f"tokens scored by all columns: {scores.tokens}, too few to judge; score {FEWEST} or "
            "more"
        )
    if status == "inconclusive":
        sentences += judged.unlike
    for report in scores.unrepeated:
        worst = report.moved[0]
        sentences.append(
            f"repeats of {report.letter} differ ({report.kind}): {report.moved_tokens} of "
            f"{scores.tokens} tokens by more than {report.tolerance:g} nat, {report.mae:.6f} nat "
            f"in the mean; most in {worst.call} at response position {worst.position} (token "
            f"{worst.token}): {worst.first:.6f} and {worst.second:.6f}"
        )
    for pair in standing.hidden:
        sentences.append(f"{said(pair)}, no more than {CLEAR:g} times what repeats differ by")
    if status == "divergent":
        sentences.append(_where_to_look(judged, culprits))
    if status != "agree":
        sentences += [few for pair in scores.pairs if (few := _few(pair))]
    rest = standing.rest
    if rest is not None and rest.gap.mae > scores.tolerance:
        sentences.append(
            f"{said(rest)} beside it, beyond the tolerance too: it remains after a fix"
        )
    if status == "agree":
        largest = max(scores.pairs, key=lambda pair: pair.gap.mae)
        sentences.append(f"{said(largest)}, within the tolerance of {scores.tolerance:g} nat")
        sentences += [_outlier(p) for p in scores.pairs if p.gap.max > _FAR * scores.tolerance]
    named = versions(judged.columns)
    if status == "divergent" and named:
        sentences.append(named)
    sound = bool(before) and all(mae <= scores.tolerance for mae in before[-1].maes.values())
    if status == "divergent" and sound and before[-1].step is not None:
        sentences.append(
            f"step {before[-1].step} agreed and step {step} does not: it broke at an update"
        )
    return tuple(sentences)


def _outlier(pair: PairReport) -> str:
    worst = pair.worst[0]
    return (
        f"yet {pair.name} differs by {worst.difference:+.4f} nat in {worst.call} at response "
        f"position {worst.position} (token {worst.token}): see the worst tokens with -v"
    )


def _few(pair: PairReport) -> str | None:
    """Say so where the worst tokens alone make most of a gap."""
    total = pair.gap.mae * pair.gap.rows
    if pair.gap.rows < 20 * len(pair.worst) or not total:
        return None
    made = 0.0
    for number, worst in enumerate(pair.worst, 1):
        made += abs(worst.difference)
        if made > _MOST * total:
            tokens = "1 token makes" if number == 1 else f"{number} tokens make"
            first = pair.worst[0]
            return (
                f"{tokens} {made / total:.1%} of {pair.name}; the worst is in {first.call} at "
                f"response position {first.position} (token {first.token})"
            )
    return None


def _where_to_look(judged: Judged, culprits: Sequence[Culprit]) -> str:
    standing = judged.standing
    letter: Letter | None = standing.letter
    apart = "; ".join(said(pair) for pair in standing.apart) or "a shape in the differences"
    if letter is None:
        if len(standing.apart) == 3:
            return f"A, B and C all differ ({apart}): more than one cause, or rounding of the model"
        return apart
    if letter == "C" and not culprits:
        rest = standing.rest
        near = rest is not None and rest.gap.mae <= judged.scores.tolerance
        return (
            f"C differs from A and B, which {'agree' if near else 'differ less'} ({apart}), and "
            "has no shape: weights, the model, its scoring, or another context in the trainer"
        )
    return f"{PATHS[letter]} differs from both others ({apart})"
