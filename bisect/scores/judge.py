"""Judge three scores: measure A, B and C, seek shapes in their differences, and say where to look.

One pass over the calls measures everything; the tests for shapes then see a sample of the calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.scores.conclude import conclude
from layerbisect.bisect.scores.conditions import conditions
from layerbisect.bisect.scores.decision_map import floors, stand
from layerbisect.bisect.scores.effect import EffectMeasure
from layerbisect.bisect.scores.environments import environments
from layerbisect.bisect.scores.explain import Judged
from layerbisect.bisect.scores.measure import PairMeasure
from layerbisect.bisect.scores.odd_one import OddOneOut
from layerbisect.bisect.scores.repeats import RepeatMeasure
from layerbisect.bisect.scores.report import ScoreReport, StepReport
from layerbisect.bisect.scores.seek import Place, WorstCalls, seek
from layerbisect.bisect.scores.split import split_record
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.call import GRADIENT, Call, Scoring, is_score, replays
from layerbisect.captures.record.file import ScoreRecord

TOLERANCE = 0.01
"""Mean absolute difference (nat) that is accepted where the user names none."""

EPSILON = 0.2
"""Clipping range of the loss where the user names none."""


def judge(
    records: Sequence[ScoreRecord],
    *,
    tolerance: float = TOLERANCE,
    repeat_tolerance: float | None = None,
    epsilon: float = EPSILON,
    progress: Progress | None = None,
) -> Verdict:
    """Judge what was scored.

    Records of several steps are judged step by step: the verdict is of the first step in which a
    culprit is found, else of the first that does not agree, else of the last. What later steps say
    of weights is added to it.

    Args:
        records: records with the same columns; at least two of A, B and C.
        tolerance: mean absolute difference (nat) that is accepted.
        repeat_tolerance: difference (nat) of a token's repeats above which it has moved; as
            ``tolerance`` where not given.
        epsilon: clipping range of the loss, for what the gap does to training.
        progress: told how many tokens are measured.

    Raises:
        RecordError: fewer than two of A, B and C, or tolerances that are none.
    """
    for name, value in (("tolerance", tolerance), ("epsilon", epsilon)):
        if not 0 < value < float("inf"):
            raise RecordError(f"{name} is {value}; give a positive number")
    if repeat_tolerance is not None and not 0 <= repeat_tolerance < float("inf"):
        raise RecordError(f"repeat_tolerance is {repeat_tolerance}; give 0 or a positive number")
    moved = tolerance if repeat_tolerance is None else repeat_tolerance
    report = progress or NoProgress()
    steps: dict[int | None, list[ScoreRecord]] = {}
    for record in records:
        steps.setdefault(record.info.step, []).append(record)
    order = sorted(steps, key=lambda step: (step is not None, step or 0))
    seen: list[StepReport] = []
    verdicts: list[Verdict] = []
    for step in order:
        judged = _measure(steps[step], tolerance, moved, epsilon, report)
        verdict = conclude(judged, tuple(seen), step)
        seen.append(_step(step, judged))
        told = environments([record.info for record in steps[step]])
        verdicts.append(replace(verdict, environments=told))
    if not verdicts:
        raise RecordError("there is no record to judge; give at least one")
    return verdicts[0] if len(verdicts) == 1 else _of_steps(verdicts, seen)


def _of_steps(verdicts: Sequence[Verdict], seen: Sequence[StepReport]) -> Verdict:
    found = [verdict for verdict in verdicts if verdict.culprits]
    apart = [verdict for verdict in verdicts if verdict.status != "agree"]
    chosen = (*found, *apart, verdicts[-1])[0]
    weights = [
        culprit
        for verdict in found
        for culprit in verdict.culprits
        if culprit.operator == "weights" and verdict is not chosen
    ]
    assert chosen.scores is not None
    return replace(
        chosen,
        culprits=(*chosen.culprits, *weights),
        scores=replace(chosen.scores, steps=tuple(seen)),
    )


def compared_columns(columns: Mapping[str, Scoring]) -> list[tuple[str, str]]:
    """The columns that stand for A, B and C, two by two: A-B0, B0-C0, A-C0 where all are there."""
    a = "A" if "A" in columns else None
    b, c = (next(iter(replays(columns, letter)), None) for letter in "BC")
    return [(first, second) for first, second in ((a, b), (b, c), (a, c)) if first and second]


def _measure(
    records: Sequence[ScoreRecord],
    tolerance: float,
    moved: float,
    epsilon: float,
    progress: Progress,
) -> Judged:
    columns = records[0].info.columns
    for record in records[1:]:
        differing = sorted(record.info.columns.keys() ^ columns.keys())
        if differing:
            raise RecordError(
                f"{_named(records[0])} and {_named(record)} differ in having {differing[0]}, and "
                "count as one step; judge them apart, or collect each rollout with its --step"
            )
    compared = compared_columns(columns)
    if not compared:
        have = ", ".join(c for c in columns if is_score(c)) or "no score"
        raise RecordError(
            f"{_named(records[0])} holds {have}; two of A, B0 and C0 are needed: add C by "
            "`layerbisect scores trainer`, or B by `layerbisect scores collect --saved`"
        )
    measures = [PairMeasure(first, second) for first, second in compared]
    trainer = next(iter(replays(columns, "C")), None)
    if trainer and GRADIENT in columns:
        measures.append(PairMeasure(trainer, GRADIENT))
    letters = [RepeatMeasure("B", columns, moved), RepeatMeasure("C", columns, moved)]
    rollout = next((c for c in ("behavior", "A", *replays(columns, "B")) if c in columns), None)
    effect = EffectMeasure(rollout, trainer, epsilon) if rollout and trainer else None
    odd = OddOneOut(dict(zip("ABC", _three(compared), strict=True))) if len(compared) == 3 else None
    sums = _Sums(tuple(dict.fromkeys(column for pair in compared for column in pair)))
    progress.start("measuring responses", sum(len(record) for record in records))
    for number, record in enumerate(records):
        for index, call in enumerate(record):
            for measure in measures:
                measure.add(call)
            for letter in letters:
                letter.add(call)
            if effect:
                effect.add(call)
            if odd:
                odd.add(call)
            sums.add(call, (number, index))
            progress.advance(sums.calls)
    progress.done()
    pairs = [report for m in measures if (report := m.report()) is not None]
    if not sums.scored:
        raise RecordError(
            f"no token of {sums.calls} responses is in the mask and scored by all columns; check "
            "the loss mask and the scores that are nan"
        )
    repeats = tuple(report for letter in letters for report in letter.reports())
    main = [p for p in pairs if p.second != GRADIENT]
    floor = floors(pairs, repeats)
    found = seek(records, main, floor, sums.tokens, sums.worst.places(), progress)
    splits = [
        split
        for first, second in compared
        if (split := split_record(records[0], first, second, tolerance=tolerance)) is not None
    ]
    scores = ScoreReport(
        tolerance=tolerance,
        responses=sums.calls,
        tokens=sums.scored,
        pairs=tuple(pairs),
        repeats=repeats,
        floors=floor,
        closing=sums.closing,
        effect=effect.report() if effect else None,
        findings=found.findings,
        silent=found.silent,
        sampled=found.sampled,
        splits=tuple(splits),
    )
    return Judged(
        scores=scores,
        standing=stand(main, floor, tolerance, odd),
        columns=columns,
        unlike=conditions([record.info.columns for record in records]),
        left_out=sums.tokens - sums.scored,
        cached=sums.cached,
    )


def _three(compared: Sequence[tuple[str, str]]) -> tuple[str, str, str]:
    (a, b), (_, c), _ = compared
    return a, b, c


def _named(record: ScoreRecord) -> str:
    return str(record.path or "a record")


class _Sums:
    """What is counted over all calls."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self.calls = self.tokens = self.scored = 0
        self.closing: float | None = None
        self.cached: dict[str, int] = {}
        self.worst = WorstCalls()
        self._seen: dict[bytes, int] = {}

    def add(self, call: Call, place: Place) -> None:
        self._once(call, place)
        self.calls += 1
        self.tokens += len(call.response)
        scores = [call.scores[name] for name in self._columns]
        used = call.mask & np.isfinite(scores).all(0)
        self.scored += int(used.sum())
        if used.any():
            self.worst.add(float(np.abs(scores[0] - scores[-1])[used].mean()), place)
        if len(scores) == 3 and used.any():
            a, b, c = (score[used] for score in scores)
            left = float(np.abs((a - c) - ((a - b) + (b - c))).max())
            self.closing = max(self.closing or 0.0, left)
        for column, count in call.cached.items():
            self.cached[column] = self.cached.get(column, 0) + count

    def _once(self, call: Call, place: Place) -> None:
        """Refuse a call that another record holds too: counted twice, it would look surer."""
        told = hashlib.blake2b(call.name.encode(), digest_size=16)
        for values in (call.prompt, call.response, *(call.scores[c] for c in self._columns)):
            told.update(np.ascontiguousarray(values).data)
        first = self._seen.setdefault(told.digest(), place[0])
        if first != place[0]:
            raise RecordError(
                f"call {call.name!r} is in two of the records, with the same tokens and scores; "
                "give each record once"
            )


def _step(step: int | None, judged: Judged) -> StepReport:
    return StepReport(
        step=step,
        maes={pair.name: pair.gap.mae for pair in judged.scores.pairs},
        weights=judged.weights(),
        versions=judged.versions(),
    )
