"""From measured scores to a verdict: what stands apart, whose it is, and what was ruled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerbisect.bisect.score_map import CLEAR, PATHS, SIDES, Letter, Shape, Standing, shapes
from layerbisect.bisect.score_next import next_step
from layerbisect.bisect.score_report import PairReport, RepeatReport, ScoreReport, StepReport
from layerbisect.bisect.score_state import conditions, stale, versions
from layerbisect.bisect.score_tests import PLACES
from layerbisect.bisect.verdict import (
    Coverage,
    CoveredRows,
    Culprit,
    Points,
    RuledOut,
    Status,
    Verdict,
)
from layerbisect.captures.record import Scoring

# scores say which operator where they say what was done, and not where a gap merely lies
_INPUTS = ("swapped samples", "mispaired samples")


@dataclass(frozen=True, slots=True)
class Judged:
    """One step's measured scores, and how they stand; ``cached`` counts cached tokens by column."""

    scores: ScoreReport
    standing: Standing
    columns: Mapping[str, Scoring]
    left_out: int
    cached: Mapping[str, int]

    def weights(self) -> dict[str, str]:
        """What each side says of the weights that scored: a digest, else a version."""
        found = {}
        for label, letters in (("rollout", "BA"), ("trainer", "C")):
            for column, scoring in self.columns.items():
                said = scoring.digest or scoring.weight_version
                if column[0] in letters and said and label not in found:
                    found[label] = said
        return found


def conclude(judged: Judged, before: Sequence[StepReport], step: int | None) -> Verdict:
    """Conclude one step; ``before`` are the steps that were judged already."""
    scores, standing = judged.scores, judged.standing
    convicting = shapes(scores.findings, standing.letter, scores.tolerance, scores.floors)
    unlike = conditions(judged.columns)
    moved = [r for r in scores.repeats if r.moved_tokens]
    weights = stale(judged.weights(), before, step, standing)
    culprits = [] if weights is None else [_of_weights(*weights, judged)]
    # what other weights do to scores may look like a shape of the trainer's
    culprits += [_of_shape(s, judged) for s in convicting if weights is None or s.letter == "A"]
    path = _of_path(judged, convicting, bool(weights))
    if path is not None:
        culprits.append(path)
    gradient = _of_gradient(judged)
    if gradient is not None:
        culprits.append(gradient)
    clear = any(p.gap.mae > CLEAR * scores.floors.get(p.name, 0.0) for p in standing.apart)
    status: Status = "agree"
    if unlike and (standing.apart or culprits):
        status, culprits = "inconclusive", []
    elif culprits and (clear or gradient or convicting) or standing.apart and clear:
        status = "divergent"
    elif moved or standing.hidden:
        status, culprits = "unstable", []
    gap = _main(scores).gap
    return Verdict(
        status=status,
        gap=gap,
        culprits=tuple(culprits),
        ruled_out=_ruled_out(judged, convicting),
        rounding_budget=None,
        coverage=_coverage(judged),
        next=next_step(status, culprits, standing, moved),
        reasons=_reasons(status, judged, unlike, moved, culprits, before, step),
        scores=scores,
    )


def _main(scores: ScoreReport) -> PairReport:
    """A-C where both are there, else the one gap between engines or paths that is."""
    best = next((p for p in scores.pairs if p.first == "A" and p.second[0] == "C"), None)
    return best or scores.pairs[-1 if scores.pairs[-1].second != "C.grad" else 0]


def _of_shape(shape: Shape, judged: Judged) -> Culprit:
    found, letter = shape.finding, shape.letter
    operator = None
    side = "unknown" if letter is None else SIDES[letter]
    path = "" if letter is None else PATHS[letter]
    if found.test not in PLACES:
        operator = "inputs" if found.test in _INPUTS else "logprob"
    elif letter == "C":
        # A and B share weights and engine: what computes both otherwise than C may be at fault
        side, path = "unknown", f"{path}, or of A and B alike"
    return Culprit(
        layer=None,
        point="logprob",
        operator=operator,
        side=side,
        share_of_gap=found.explains,
        own_error=_times(found.mae, judged),
        floor=1.0,
        where=" of ".join(part for part in (found.where or "all response tokens", path) if part),
        evidence=(
            f"{found.test}: {found.summary}",
            *found.evidence,
            f"seen in {found.pair}; chance of a false alarm {found.false_alarm:.0e}",
        ),
    )


def _times(mae: float, judged: Judged) -> float:
    """How many times the gap between the two columns that agree."""
    rest = judged.standing.rest
    return mae / rest.gap.mae if rest is not None and rest.gap.mae else float("nan")


def _of_weights(side: str, evidence: tuple[str, ...], judged: Judged) -> Culprit:
    worst = max(judged.standing.apart, key=lambda pair: pair.gap.mae)
    return Culprit(
        layer=None,
        point="weights",
        operator="weights",
        side=side,
        share_of_gap=None,
        own_error=_times(worst.gap.mae, judged),
        floor=1.0,
        where="all response tokens",
        evidence=evidence,
    )


def _of_path(judged: Judged, shaped: Sequence[Shape], stale_weights: bool) -> Culprit | None:
    """A or B that differs from both others, without a shape: its path is as far as scores see.

    C that differs so is no culprit: rollout's weights, the trainer's and its forward make the same.
    """
    letter, rest = judged.standing.letter, judged.standing.rest
    if letter is None or letter == "C" or rest is None or stale_weights:
        return None
    if any(shape.letter in (letter, None) for shape in shaped):
        return None
    mine = [p for p in judged.standing.apart if letter in (p.first[0], p.second[0])]
    return Culprit(
        layer=None,
        point="logprob",
        operator=None,
        side=SIDES[letter],
        share_of_gap=None,
        own_error=_times(min(p.gap.mae for p in mine), judged),
        floor=1.0,
        where=PATHS[letter],
        evidence=(
            f"{' and '.join(_said(p) for p in mine)}, while {_said(rest)}",
            "no shape that score arrays can show",
        ),
    )


def _of_gradient(judged: Judged) -> Culprit | None:
    scores = judged.scores
    pair = next((p for p in scores.pairs if p.second == "C.grad"), None)
    if pair is None or pair.gap.mae <= max(
        scores.tolerance, CLEAR * max((r.mae for r in scores.repeats if r.letter == "C"), default=0)
    ):
        return None
    return Culprit(
        layer=None,
        point="logprob",
        operator=None,
        side="trainer",
        share_of_gap=None,
        own_error=float("nan"),
        floor=1.0,
        where="the gradient-enabled forward (C.grad)",
        evidence=(f"{_said(pair)}: dropout, recomputation or routing differ from the frozen C",),
    )


def _said(pair: PairReport) -> str:
    return f"{pair.name} has a mean absolute difference of {pair.gap.mae:.6f} nat"


def _ruled_out(judged: Judged, shaped: Sequence[Shape]) -> tuple[RuledOut, ...]:
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
    near = [p for p in scores.pairs if p.gap.mae <= scores.tolerance and p.second != "C.grad"]
    meaning: Mapping[tuple[str, str], str] = {
        ("A", "B"): "generation apart from prefill: bookkeeping of A, decode, KV cache",
        ("B", "C"): "engines apart: weights, model, the trainer's scoring",
    }
    for pair in near:
        hypothesis = meaning.get((pair.first[0], pair.second[0]))
        if hypothesis and not any(s.finding.pair == pair.name for s in shaped):
            out.append(RuledOut(hypothesis, _said(pair)))
    names = ", ".join(p.name for p in scores.pairs if p.second != "C.grad")
    out += [RuledOut(test, f"not seen in {names}") for test in scores.silent]
    return tuple(out)


def _coverage(judged: Judged) -> Coverage:
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


def _reasons(
    status: Status,
    judged: Judged,
    unlike: Sequence[str],
    moved: Sequence[RepeatReport],
    culprits: Sequence[Culprit],
    before: Sequence[StepReport],
    step: int | None,
) -> tuple[str, ...]:
    scores, standing = judged.scores, judged.standing
    said: list[str] = []
    if status == "inconclusive":
        said += unlike
    for report in moved:
        worst = report.moved[0]
        said.append(
            f"repeats of {report.letter} differ ({report.kind}): {report.moved_tokens} of "
            f"{scores.tokens} tokens by more than {report.tolerance:g} nat, {report.mae:.6f} nat "
            f"in the mean; most in {worst.call} at response position {worst.position} (token "
            f"{worst.token}): {worst.first:.6f} and {worst.second:.6f}"
        )
    for pair in standing.hidden:
        said.append(f"{_said(pair)}, no more than {CLEAR:g} times what repeats differ by")
    if status == "divergent":
        said.append(_where_to_look(judged, culprits))
    rest = standing.rest
    if rest is not None and rest.gap.mae > scores.tolerance:
        said.append(f"{_said(rest)} beside it, beyond the tolerance too: what remains after a fix")
    if status == "agree":
        largest = max(scores.pairs, key=lambda pair: pair.gap.mae)
        said.append(f"{_said(largest)}, within the tolerance of {scores.tolerance:g} nat")
    named = versions(judged.columns)
    if status == "divergent" and named:
        said.append(named)
    if status == "divergent" and before and before[-1].step is not None:
        said.append(
            f"step {before[-1].step} agreed and step {step} does not: it broke at an update"
        )
    return tuple(said)


def _where_to_look(judged: Judged, culprits: Sequence[Culprit]) -> str:
    standing = judged.standing
    letter: Letter | None = standing.letter
    apart = "; ".join(_said(pair) for pair in standing.apart) or "a shape in the differences"
    if letter is None:
        if len(standing.apart) == 3:
            return f"A, B and C all differ ({apart}): more than one cause, or rounding of the model"
        return apart
    if letter == "C" and not culprits:
        return (
            f"C differs from A and B, which agree ({apart}), and has no shape: weights, the model, "
            "or another context in the trainer"
        )
    return f"{PATHS[letter]} differs from both others ({apart})"
