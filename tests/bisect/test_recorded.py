"""A record of A, B and C beside two captures: who kept another score than an engine computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.captured import captured_scores
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.store import Capture
from tests.bisect.conftest import Clean
from tests.bisect.making import rewrite

PROMPT = 8
Change = Callable[[NDArray[np.float64]], NDArray[np.float64]]
NO_CHANGE: dict[str, Change] = {}


def record_of(
    clean: Clean,
    rollout: Path,
    trainer: Path,
    changes: dict[str, Change] = NO_CHANGE,
    definition: str = "raw",
) -> ScoreRecord:
    """The record that both captures' log-probs make, with some columns changed."""
    calls = [
        Call.of(f"call-{n}", ids[:PROMPT], ids[PROMPT:], {"A": np.zeros(len(ids) - PROMPT)})
        for n, ids in enumerate(clean.tokens)
    ]
    sides = {"A": rollout, "B0": rollout, "C0": trainer}
    found = {c: captured_scores(calls, Capture.open(side)) for c, side in sides.items()}
    scored = [
        Call.of(
            call.name,
            call.prompt,
            call.response,
            {c: changes.get(c, _same)(found[c][call.name]) for c in sides},
        )
        for call in calls
    ]
    columns = {c: Scoring(definition=definition) for c in sides}  # type: ignore[arg-type]
    return ScoreRecord(RecordInfo(columns=columns), scored)


def _same(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return scores


def judged(clean: Clean, record: ScoreRecord, rollout: Path | None = None) -> Verdict:
    return bisect(rollout or clean.rollout, clean.trainer, model=clean.model, record=record)


def named(verdict: Verdict) -> list[tuple[int | None, str | None, str]]:
    return [(c.layer, c.operator, c.side) for c in verdict.culprits]


def test_a_true_record_changes_nothing(clean: Clean) -> None:
    verdict = judged(clean, record_of(clean, clean.rollout, clean.trainer))
    assert verdict.status == "agree" and verdict.scores is not None
    assert [r.hypothesis for r in verdict.ruled_out][-3:] == [
        "A was changed after the rollout had computed it",
        "B0 was changed after the rollout had computed it",
        "C0 was changed after the trainer had computed it",
    ]


@pytest.mark.parametrize(
    ("columns", "side"), [(("C0",), "trainer"), (("A", "B0"), "rollout"), (("A",), "rollout")]
)
def test_a_score_changed_after_it_was_computed(
    clean: Clean, columns: tuple[str, ...], side: str
) -> None:
    changes: dict[str, Change] = {c: lambda s: s - 0.1 for c in columns}
    verdict = judged(clean, record_of(clean, clean.rollout, clean.trainer, changes))
    assert named(verdict) == [(None, "logprob", side)]
    assert verdict.exit_code == 1


def test_a_change_without_a_shape_is_told_by_the_capture(clean: Clean) -> None:
    draw = np.random.default_rng(0)
    changes: dict[str, Change] = {"C0": lambda s: s + draw.normal(0, 0.3, len(s))}
    verdict = judged(clean, record_of(clean, clean.rollout, clean.trainer, changes))
    assert named(verdict) == [(None, "logprob", "trainer")]
    assert "differs from the log-probs captured" in " ".join(verdict.culprits[0].evidence)


def test_what_an_operator_does_to_scores_is_no_second_culprit(clean: Clean, tmp_path: Path) -> None:
    wrong = clean.engines["rollout"].capture(
        tmp_path / "wrong", clean.tokens, faults=[("head-scaled", None)]
    )
    verdict = judged(clean, record_of(clean, wrong, clean.trainer), wrong)
    assert named(verdict) == [(None, "head", "rollout")]


def test_what_decoding_does_to_a_is_told_by_its_capture(clean: Clean, tmp_path: Path) -> None:
    decoded = clean.engines["rollout"].capture(
        tmp_path / "decoded", clean.tokens[1:], layout="decode", faults=[("experts-swapped", 2)]
    )
    record = record_of(clean, clean.rollout, clean.trainer)
    wrong = captured_scores(record, Capture.open(decoded))
    calls = [
        Call.of(c.name, c.prompt, c.response, {**c.scores, "A": wrong[c.name]})
        for c in list(record)[1:]
    ]
    verdict = judged(clean, ScoreRecord(record.info, calls), decoded)
    assert named(verdict) == [(2, "experts", "rollout")]


def test_a_layer_and_a_kept_score_are_two_culprits(clean: Clean, tmp_path: Path) -> None:
    wrong = clean.engines["rollout"].capture(
        tmp_path / "wrong", clean.tokens, faults=[("o-proj-permuted", 1)]
    )
    record = record_of(clean, wrong, clean.trainer, {"C0": lambda s: np.roll(s, 1)})
    verdict = judged(clean, record, wrong)
    assert set(named(verdict)) == {(1, "linear", "rollout"), (None, "logprob", "trainer")}


def test_a_record_of_another_run_accuses_nobody(clean: Clean) -> None:
    draw = np.random.default_rng(0)
    other = draw.normal(-3, 1, sum(map(len, clean.tokens)))
    changes: dict[str, Change] = {c: lambda s: s + other[: len(s)] for c in ("A", "B0", "C0")}
    verdict = judged(clean, record_of(clean, clean.rollout, clean.trainer, changes))
    assert named(verdict) == []
    assert any("of different runs" in note for note in verdict.coverage.notes)


def test_scores_over_a_temperature_are_no_raw_ones(clean: Clean) -> None:
    changes: dict[str, Change] = {c: lambda s: s / 0.9 for c in ("A", "B0", "C0")}
    record = record_of(clean, clean.rollout, clean.trainer, changes, "temperature")
    assert named(judged(clean, record)) == []


def test_a_temperature_of_one_leaves_raw_scores(clean: Clean) -> None:
    record = record_of(clean, clean.rollout, clean.trainer, {}, "temperature")
    assert judged(clean, record).status == "agree"


@pytest.mark.parametrize(("columns", "side"), [(("C0",), "rollout"), (("A", "B0"), "trainer")])
def test_who_left_the_temperature_out(clean: Clean, columns: tuple[str, ...], side: str) -> None:
    changes: dict[str, Change] = {c: lambda s: 1.4 * s - 0.3 for c in columns}
    record = record_of(clean, clean.rollout, clean.trainer, changes, "temperature")
    verdict = judged(clean, record)
    assert named(verdict) == [(None, "logprob", side)]
    assert "the temperature was left out" in " ".join(verdict.culprits[0].evidence)


def test_too_few_scores_are_not_agreement(clean: Clean) -> None:
    record = record_of(clean, clean.rollout, clean.trainer)
    few = [
        Call.of(c.name, c.prompt, c.response, c.scores, mask=np.arange(len(c.response)) < 3)
        for c in record
    ]
    verdict = judged(clean, ScoreRecord(record.info, few))
    assert verdict.status == "inconclusive" and verdict.exit_code == 2
    assert "too few to judge" in verdict.reasons[0]


def test_other_labels_are_refused(clean: Clean) -> None:
    record = record_of(clean, clean.rollout, clean.trainer)
    decode = Capture.open(clean.rollout, label="decode")
    with pytest.raises(LayerBisectError, match="labelled decode and trainer"):
        bisect(decode, clean.trainer, model=clean.model, record=record)


def test_a_record_of_other_tokens_is_refused(clean: Clean) -> None:
    calls = [
        Call.of(c.name, c.prompt, c.response[::-1], c.scores)
        for c in record_of(clean, clean.rollout, clean.trainer)
    ]
    columns = {c: Scoring() for c in ("A", "B0", "C0")}
    with pytest.raises(LayerBisectError, match="no response token of the record"):
        judged(clean, ScoreRecord(RecordInfo(columns=columns), calls))


def test_a_gap_of_the_record_that_captures_do_not_show_is_no_agreement(clean: Clean) -> None:
    draw = np.random.default_rng(1)
    changes: dict[str, Change] = {
        "A": lambda s: 2.0 * s,
        "B0": lambda s: 2.0 * s,
        "C0": lambda s: s + draw.normal(0, 1, len(s)),
    }
    record = record_of(clean, clean.rollout, clean.trainer, changes, "temperature")
    verdict = judged(clean, record)
    assert named(verdict) == [] and verdict.status == "inconclusive"
    assert "and the record does not" in verdict.reasons[0]


@pytest.mark.parametrize("column", ["A", "B0"])
def test_one_column_apart_from_its_own_capture_is_no_agreement(clean: Clean, column: str) -> None:
    changes: dict[str, Change] = {column: lambda s: s[::-1].copy()}
    verdict = judged(clean, record_of(clean, clean.rollout, clean.trainer, changes))
    assert verdict.exit_code != 0


def test_a_small_offset_beside_an_exact_copy_is_named(clean: Clean) -> None:
    changes: dict[str, Change] = {"A": lambda s: s - 0.03}
    verdict = judged(clean, record_of(clean, clean.rollout, clean.trainer, changes))
    assert named(verdict) == [(None, "logprob", "rollout")]


def test_one_side_alone_that_is_off_may_be_another_run(clean: Clean) -> None:
    draw = np.random.default_rng(0)
    changes: dict[str, Change] = {
        c: lambda s: s + draw.normal(0, 3, len(s)) for c in ("A", "B0", "C0")
    }
    record = record_of(clean, clean.rollout, clean.trainer, changes)
    columns = {c: Scoring(definition="raw" if c == "C0" else "behavior") for c in ("A", "B0", "C0")}
    other = ScoreRecord(RecordInfo(columns=columns), list(record))
    assert ("logprob", "trainer") not in [c[1:] for c in named(judged(clean, other))]


def test_without_a_budget_decoding_is_not_held_against_a_prefill(
    clean: Clean, tmp_path: Path
) -> None:
    def spoil(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name == "layers.1.input":
            values[7] = np.nan
        return values

    damaged = rewrite(clean.rollout, tmp_path / "damaged", change=spoil)
    record = record_of(clean, clean.trainer, clean.trainer)
    verdict = judged(clean, record, damaged)
    assert named(verdict) == [] and verdict.status == "inconclusive"
