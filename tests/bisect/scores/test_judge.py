"""The decision map: which of A, B and C differs, and what that means."""

import json
from typing import Any

import numpy as np
import pytest

from layerbisect.bisect.scores import seek as score_seek
from layerbisect.bisect.scores.judge import judge
from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.making import Change, Columns, below, run

Generator = np.random.Generator


def lowered(*columns: str, by: float = 0.1, start: int = 0) -> Change:
    def change(scores: Columns, _: Generator) -> Columns:
        for column in columns:
            scores[column][start:] -= by
        return scores

    return change


def noisy(*columns: str, size: float = 0.5) -> Change:
    def change(scores: Columns, generator: Generator) -> Columns:
        error = generator.normal(size=len(scores["A"])) * size
        for column in columns:
            scores[column] = below(scores[column] + error)
        return scores

    return change


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_run_agrees_and_raises_nothing(seed: int) -> None:
    verdict = judge([run(seed)])
    assert (verdict.status, verdict.culprits) == ("agree", ())
    assert verdict.scores is not None
    assert not [f for f in verdict.scores.findings if f.false_alarm <= 1e-6]


def test_a_lowered_a_is_found_from_its_first_token_on() -> None:
    verdict = judge([run(1, change=lowered("A", start=1))])
    assert verdict.status == "divergent" and verdict.exit_code == 1
    (culprit,) = verdict.culprits
    assert (culprit.side, culprit.operator, culprit.layer) == ("rollout", "logprob", None)
    assert "constant offset" in culprit.evidence[0] and "0.100" in culprit.evidence[0]
    assert culprit.where == "response positions >= 1 of generation (A)"
    assert culprit.share_of_gap is not None and culprit.share_of_gap > 0.9


def test_a_lowered_c_is_the_trainers() -> None:
    verdict = judge([run(2, change=lowered("C0", "C1"))])
    (culprit,) = verdict.culprits
    assert (culprit.side, culprit.operator) == ("trainer", "logprob")
    assert "constant offset" in culprit.evidence[0]


def test_two_faults_are_two_culprits() -> None:
    def both(scores: Columns, generator: Generator) -> Columns:
        scores = lowered("A", by=0.1)(scores, generator)
        return lowered("C0", "C1", by=0.4)(scores, generator)

    verdict = judge([run(3, change=both)])
    assert {c.side for c in verdict.culprits} >= {"trainer"}
    assert verdict.status == "divergent"


def test_noise_in_a_alone_is_the_generation_path() -> None:
    verdict = judge([run(4, change=noisy("A"))])
    (culprit,) = verdict.culprits
    assert (culprit.side, culprit.operator, culprit.where) == ("rollout", None, "generation (A)")
    assert "decode,prefill" in verdict.next


def test_noise_in_b_alone_is_the_replay() -> None:
    verdict = judge([run(5, change=noisy("B0", "B1"))])
    (culprit,) = verdict.culprits
    assert culprit.where == "the prefill replay (B)"


def test_noise_in_c_alone_accuses_nobody() -> None:
    verdict = judge([run(6, change=noisy("C0", "C1"))])
    assert (verdict.status, verdict.culprits) == ("divergent", ())
    assert "C differs from A and B" in " ".join(verdict.reasons)
    assert "layerbisect weights" in verdict.next


def test_moving_repeats_are_unstable_and_named() -> None:
    def moves(scores: Columns, _: Generator) -> Columns:
        scores["B1"][22] -= 0.443738
        return scores

    verdict = judge([run(7, change=moves)])
    assert (verdict.status, verdict.exit_code, verdict.culprits) == ("unstable", 2, ())
    assert verdict.scores is not None
    (report,) = [r for r in verdict.scores.repeats if r.letter == "B"]
    assert report.moved_tokens == 8
    assert {(m.call, m.position) for m in report.moved} == {(f"s{n}", 22) for n in range(8)}
    assert "response position 22" in verdict.reasons[0]


def test_one_token_that_moves_is_enough() -> None:
    record = run(8)
    moved = {call.name: call.scores["B1"].copy() for call in record}
    moved["s3"][22] -= 0.443738
    calls = [
        Call.of(c.name, c.prompt, c.response, {**c.scores, "B1": moved[c.name]}) for c in record
    ]
    changed = ScoreRecord(record.info, calls)
    verdict = judge([changed])
    assert verdict.status == "unstable"
    assert "s3 at response position 22" in verdict.reasons[0]
    # a user whose engine moves may say how far it may
    assert judge([changed], repeat_tolerance=0.5).status == "agree"


def test_a_gap_far_beyond_moving_repeats_is_still_a_gap() -> None:
    def change(scores: Columns, generator: Generator) -> Columns:
        scores["B1"] += generator.normal(size=len(scores["A"])) * 0.01
        return lowered("A")(scores, generator)

    verdict = judge([run(9, change=change)])
    assert verdict.status == "divergent"
    assert [c.side for c in verdict.culprits] == ["rollout"]
    assert any("repeats of B differ" in reason for reason in verdict.reasons)


def test_a_gap_within_its_repeats_is_unstable() -> None:
    def change(scores: Columns, generator: Generator) -> Columns:
        for column in ("B0", "B1"):
            error = generator.normal(size=len(scores["A"])) * 0.05
            scores[column] = below(scores[column] + error)
        return scores

    verdict = judge([run(10, change=change)])
    assert (verdict.status, verdict.culprits) == ("unstable", ())


def test_two_columns_alone_tell_no_side() -> None:
    record = run(11, change=lowered("C0", "C1"))
    kept = {"A": Scoring(), "C0": Scoring()}
    calls = [Call.of(c.name, c.prompt, c.response, {k: c.scores[k] for k in kept}) for c in record]
    verdict = judge([ScoreRecord(RecordInfo(columns=kept), calls)])
    (culprit,) = verdict.culprits
    assert culprit.side == "unknown" and "constant offset" in culprit.evidence[0]
    assert verdict.coverage.points.missing == ("B0", "B1", "C1")
    assert any("C was scored once" in note for note in verdict.coverage.notes)


def test_different_definitions_are_no_gap() -> None:
    scoring = {"A": Scoring(definition="temperature", worker="w")}
    verdict = judge([run(12, change=lowered("A"), scoring=scoring)])
    assert (verdict.status, verdict.culprits) == ("inconclusive", ())
    assert "different probabilities" in verdict.reasons[0]


def test_a_gradient_enabled_forward_that_differs_is_named() -> None:
    def change(scores: Columns, generator: Generator) -> Columns:
        scores["C.grad"] = scores["C0"] - np.abs(generator.normal(size=len(scores["A"])))
        return scores

    verdict = judge([run(13, change=change)])
    (culprit,) = verdict.culprits
    assert (verdict.status, culprit.side) == ("divergent", "trainer")
    assert "C.grad" in culprit.where


def test_a_step_whose_rollout_weights_stood_still_is_stale() -> None:
    records = [
        run(14, step=0, digests={"B": "r0", "C": "t0"}),
        run(15, step=1, digests={"B": "r0", "C": "t1"}, change=noisy("C0", "C1", size=4.0)),
        run(16, step=2, digests={"B": "r2", "C": "t2"}),
    ]
    verdict = judge(records)
    (culprit,) = verdict.culprits
    assert (culprit.operator, culprit.side, culprit.point) == ("weights", "rollout", "weights")
    assert "from step 0 to step 1" in culprit.evidence[0]
    assert verdict.scores is not None and [s.step for s in verdict.scores.steps] == [0, 1, 2]
    assert "layerbisect weights" in verdict.next


def test_a_trainer_that_stood_still_is_told_from_a_rollout_that_did() -> None:
    records = [
        run(17, step=0, digests={"B": "r0", "C": "t0"}),
        run(18, step=1, digests={"B": "r1", "C": "t0"}, change=noisy("C0", "C1", size=4.0)),
    ]
    assert [c.side for c in judge(records).culprits] == ["trainer"]


def test_steps_whose_weights_both_moved_accuse_no_update() -> None:
    records = [
        run(19, step=0, digests={"B": "r0", "C": "t0"}),
        run(20, step=1, digests={"B": "r1", "C": "t1"}, change=noisy("C0", "C1", size=4.0)),
    ]
    verdict = judge(records)
    assert verdict.status == "divergent"
    assert not [c for c in verdict.culprits if c.operator == "weights" or c.side != "unknown"]


def test_two_versions_of_one_side_are_inconclusive() -> None:
    scoring = {
        "A": Scoring(worker="w", weight_version="0"),
        "B0": Scoring(worker="w", weight_version="1"),
        "B1": Scoring(worker="w", weight_version="1"),
    }
    verdict = judge([run(21, scoring=scoring, change=noisy("A"))])
    assert verdict.status == "inconclusive"
    assert "weights changed between its scores" in verdict.reasons[0]


def test_the_json_is_the_contract() -> None:
    plain = json.loads(json.dumps(judge([run(1, change=lowered("A"))]).to_json(), allow_nan=False))
    assert plain["schema"] == 1 and plain["status"] == "divergent"
    assert [p["name"] for p in plain["scores"]["pairs"]] == ["A-B0", "B0-C0", "A-C0"]
    assert plain["gap"]["unit"] == "nat" and plain["coverage"]["rows"]["joined"] == 1024


def test_the_differences_close() -> None:
    verdict = judge([run(0)])
    assert verdict.scores is not None and verdict.scores.closing is not None
    assert verdict.scores.closing < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tolerance=0.0), "tolerance is 0"),
        (dict(epsilon=float("nan")), "epsilon is nan"),
        (dict(repeat_tolerance=-1.0), "repeat_tolerance is -1"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        judge([run(0)], **arguments)


def test_one_column_is_nothing_to_judge() -> None:
    call = Call.of("one", [1], [2], {"A": [-1.0]})
    with pytest.raises(RecordError, match="two of A, B0 and C0 are needed"):
        judge([ScoreRecord(RecordInfo(columns={"A": Scoring()}), [call])])
    with pytest.raises(RecordError, match="no record to judge"):
        judge([])


def test_nothing_active_is_nothing_to_judge() -> None:
    columns = {"A": Scoring(), "C0": Scoring()}
    call = Call.of("one", [1], [2], {"A": [-1.0], "C0": [-1.0]}, mask=[0])
    with pytest.raises(RecordError, match="no token"):
        judge([ScoreRecord(RecordInfo(columns=columns), [call])])


def test_few_mispaired_responses_of_many_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_seek, "SAMPLED_TOKENS", 64 * 128)
    record = run(22, responses=1600)
    calls = list(record)
    for number in (301, 702, 1103, 1504):
        # never one of the evenly spread
        assert number % 25
        scores = {**calls[number].scores}
        other = run(1000 + number, responses=1)[0].scores
        scores |= {name: other[name] for name in ("C0", "C1")}
        one = calls[number]
        calls[number] = Call.of(one.name, one.prompt, one.response, scores)
    verdict = judge([ScoreRecord(record.info, calls)])
    assert verdict.status == "divergent"
    assert [(c.side, c.operator) for c in verdict.culprits] == [("trainer", "inputs")]
    clean = judge([record])
    assert (clean.status, clean.culprits) == ("agree", ())
    assert "shapes were sought in 64 of 1600 responses" in clean.coverage.notes


def test_an_outlier_is_named_though_the_mean_agrees() -> None:
    record = run(23)
    calls = list(record)
    lower = calls[3].scores["C0"].copy()
    lower[40] -= 2.5
    scores = {**calls[3].scores, "C0": lower, "C1": lower}
    calls[3] = Call.of(calls[3].name, calls[3].prompt, calls[3].response, scores)
    verdict = judge([ScoreRecord(record.info, calls)])
    assert verdict.status == "agree"
    assert any("s3 at response position 40" in reason for reason in verdict.reasons)


def test_records_of_one_step_under_two_weights_are_inconclusive() -> None:
    one = run(24, digests={"B": "x", "A": "x"})
    other = run(25, digests={"B": "y", "A": "y"}, change=noisy("A"))
    calls = [Call.of("t" + c.name, c.prompt, c.response, c.scores) for c in other]
    verdict = judge([one, ScoreRecord(other.info, calls)])
    assert verdict.status == "inconclusive"
    assert "the rollout's weights changed" in verdict.reasons[0]


def test_logits_at_hand_split_the_gap() -> None:
    def change(scores: Columns, generator: Generator) -> Columns:
        logit = generator.normal(size=len(scores["A"])) * 3
        scores |= {"B0.logit": logit, "C0.logit": logit}
        return noisy("C0", "C1", size=0.3)(scores, generator)

    verdict = judge([run(26, change=change)])
    assert verdict.scores is not None
    (split,) = verdict.scores.splits
    assert (split.first, split.second, split.kind) == ("B0", "C0", "normalizer")
    assert "the model is not the cause" in split.summary


def test_few_tokens_are_no_verdict() -> None:
    for change in (None, lowered("A")):
        verdict = judge([run(27, responses=1, tokens=31, change=change)])
        assert (verdict.status, verdict.exit_code, verdict.culprits) == ("inconclusive", 2, ())
        assert "31, too few to judge" in verdict.reasons[0]
    assert judge([run(27, responses=1, tokens=32)]).status == "agree"


def test_an_offset_is_not_lost_beside_a_temperature() -> None:
    def both(scores: Columns, generator: Generator) -> Columns:
        scores = noisy("C0", "C1", size=1.0)(scores, generator)
        return lowered("A")(scores, generator)

    verdict = judge([run(28, change=both)])
    said = " ".join(sentence for c in verdict.culprits for sentence in c.evidence)
    assert "constant offset: A is lower than B0" in said


def test_a_record_given_twice_is_refused() -> None:
    with pytest.raises(RecordError, match="'s0' is in two of the records"):
        judge([run(29), run(29)])
    # other responses may have the same names
    assert judge([run(29), run(30)]).status == "agree"


def test_records_with_other_columns_are_no_one_step() -> None:
    with pytest.raises(RecordError, match="differ in having A, and count as one step"):
        judge([run(31), run(32).without("A")])


def test_workers_with_other_weights_are_not_called_unrepeatable() -> None:
    def change(scores: Columns, generator: Generator) -> Columns:
        moved = below(scores["B0"] + generator.normal(size=len(scores["A"])))
        return {**scores, "B2": moved}

    scoring = {
        "A": Scoring(worker="one", digest="aaaa"),
        "B0": Scoring(worker="one", digest="aaaa"),
        "B1": Scoring(worker="one", digest="aaaa"),
        "B2": Scoring(worker="two", digest="bbbb"),
    }
    verdict = judge([run(33, change=change, scoring=scoring)])
    assert verdict.status == "inconclusive"
    assert "workers hold different weights" in verdict.reasons[0]


def test_one_token_that_makes_the_gap_is_named() -> None:
    record = run(34)
    calls = list(record)
    lower = calls[3].scores["A"].copy()
    lower[40] = -9999.0
    scores = {**calls[3].scores, "A": lower}
    calls[3] = Call.of(calls[3].name, calls[3].prompt, calls[3].response, scores)
    verdict = judge([ScoreRecord(record.info, calls)])
    assert verdict.status == "divergent"
    assert any("1 token makes 100.0% of A-B0" in reason for reason in verdict.reasons)


def test_without_c_the_next_step_is_to_collect_it() -> None:
    verdict = judge([run(35, change=noisy("A")).without("C0", "C1")])
    assert "layerbisect scores trainer" in verdict.next


def test_what_changes_a_and_b_alike_is_said_to_look_like_a_fault_of_c() -> None:
    verdict = judge([run(36, change=lowered("A", "B0", "B1"))])
    (culprit,) = verdict.culprits
    assert any("A and B agree with each other" in sentence for sentence in culprit.evidence)


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        # names alone, which this side gave to no weights in particular
        (
            {"B": ("default", None), "C": ("0", "t0")},
            {"B": ("default", None), "C": ("1", "t1")},
            1.0,
        ),
        # a digest at one step and none at the other
        ({"B": (None, "r0"), "C": (None, "t0")}, {"B": ("v", None), "C": (None, "t0")}, 1.0),
        # a gap that did not open
        ({"B": (None, "r0"), "C": (None, "t0")}, {"B": (None, "r0"), "C": (None, "t1")}, 0.0),
    ],
)
def test_no_update_is_missed_where_nothing_shows_it(
    before: dict[str, Any], after: dict[str, Any], size: float
) -> None:
    def scored(said: dict[str, Any]) -> dict[str, Scoring]:
        def one(letter: str) -> Scoring:
            version, digest = said[letter]
            return Scoring(worker="w", weight_version=version, digest=digest)

        return {name: one("C" if name[0] == "C" else "B") for name in ("A", "B0", "B1", "C0", "C1")}

    change = noisy("C0", "C1", size=size) if size else None
    records = [
        run(37, step=0, scoring=scored(before), noise=0.02),
        run(38, step=1, scoring=scored(after), noise=0.02, change=change),
    ]
    assert not [c for c in judge(records).culprits if c.operator == "weights"]


def test_versions_that_both_sides_share_tell_a_missed_update() -> None:
    def scored(rollout: str, trainer: str) -> dict[str, Scoring]:
        named = {"A": rollout, "B0": rollout, "B1": rollout, "C0": trainer, "C1": trainer}
        return {name: Scoring(worker="w", weight_version=said) for name, said in named.items()}

    records = [
        run(39, step=0, scoring=scored("4", "4")),
        run(40, step=1, scoring=scored("4", "5"), change=noisy("C0", "C1", size=1.0)),
    ]
    (culprit, *_) = judge(records).culprits
    assert (culprit.operator, culprit.side) == ("weights", "rollout")


@pytest.mark.parametrize(
    ("responses", "tokens", "noise"), [(1, 400, 0.04), (3, 12, 0.04), (4, 33, 0.12), (8, 128, 0.06)]
)
def test_exchangeable_noise_convicts_no_path(responses: int, tokens: int, noise: float) -> None:
    for seed in range(15):
        verdict = judge([run(seed, responses=responses, tokens=tokens, noise=noise)])
        assert not verdict.culprits, (seed, verdict.culprits)


def test_decode_that_rounds_more_than_prefill_is_not_convicted() -> None:
    verdict = judge([run(41, noise=0.005, change=noisy("A", size=0.05))])
    assert (verdict.status, verdict.culprits) == ("divergent", ())
    assert "generation (A) differs from both others" in " ".join(verdict.reasons)
    assert "decode,prefill" in verdict.next


def test_a_token_that_moves_a_little_is_a_note() -> None:
    def moves(scores: Columns, _: Generator) -> Columns:
        scores["B1"][3] -= 0.012
        return scores

    verdict = judge([run(42, change=moves)])
    assert verdict.status == "agree"
    assert any("repeats of B differ" in reason for reason in verdict.reasons)


def test_a_trainer_that_does_not_repeat_is_unstable_beside_any_gap() -> None:
    def dropout(scores: Columns, generator: Generator) -> Columns:
        for column in ("C0", "C1"):
            error = generator.normal(size=len(scores["A"])) * 0.4
            scores[column] = below(scores[column] + error)
        return scores

    verdict = judge([run(43, noise=0.04, change=dropout)])
    assert (verdict.status, verdict.culprits) == ("unstable", ())
    assert "make C repeat first" in verdict.next


def test_rounding_that_explains_nothing_convicts_nobody() -> None:
    def rounded(scores: Columns, _: Generator) -> Columns:
        bits = scores["A"].astype(np.float32).view(np.uint32)
        scores["A"] = ((bits + 0x8000) & 0xFFFF0000).view(np.float32).astype(np.float64)
        return scores

    verdict = judge([run(44, noise=0.06, change=rounded)])
    assert verdict.status == "divergent" and not verdict.culprits


def test_equal_forwards_do_not_make_a_small_move_unstable() -> None:
    def change(scores: Columns, _: Generator) -> Columns:
        scores["B1"][3] -= 0.012
        return {**scores, "C.grad": scores["C0"].copy()}

    assert judge([run(45, change=change)]).status == "agree"


def test_weights_that_nobody_named_have_no_other_name() -> None:
    named = {"A": "default", "B0": "default", "B1": "default", "C0": "T0", "C1": "T0"}
    scoring = {name: Scoring(worker="w", weight_version=said) for name, said in named.items()}
    verdict = judge([run(46, scoring=scoring, change=lowered("A"))])
    assert not any("calls its weights" in reason for reason in verdict.reasons)
