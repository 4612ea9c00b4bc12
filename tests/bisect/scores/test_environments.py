"""A verdict on scores says who scored each column, with what weights and settings."""

from dataclasses import replace

import numpy as np

from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.captures.record.call import RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.making import Columns, run

B0 = Scoring(
    engine="sglang 0.5",
    worker="http://127.0.0.1:1",
    through="http://127.0.0.1:2",
    weight_version="v3",
    digest="abc",
    cache="flushed",
    batches=(("s0", "s1"), ("s2",)),
    settings={"tp_size": "2", "engine": "own"},
)


def told(record: ScoreRecord, **changes: object) -> ScoreRecord:
    info: RecordInfo = replace(record.info, **changes)  # type: ignore[arg-type]
    return ScoreRecord(info, list(record))


def test_every_column_of_scores_has_its_facts() -> None:
    record = told(
        run(0, scoring={"B0": B0}),
        model="Qwen3",
        model_revision="r1",
        sampling={"temperature": 0.7, "top_p": 1.0},
    )
    found = judge([record]).environments
    assert list(found) == ["A", "B0", "B1", "C0", "C1"]
    assert found["B0"] == {
        "model": "Qwen3",
        "model_revision": "r1",
        "sampling": "temperature 0.7, top_p 1.0",
        "engine": "sglang 0.5",
        "worker": "http://127.0.0.1:1",
        "through": "http://127.0.0.1:2",
        "weight_version": "v3",
        "digest": "abc",
        "definition": "raw",
        "cache": "flushed",
        "packed": "no",
        "batches": "2",
        "tp_size": "2",
        "settings.engine": "own",
    }
    assert found["C0"]["worker"] == "w" and "engine" not in found["C0"]


def test_records_of_a_step_that_differ_in_a_fact_have_all_its_values() -> None:
    # the same columns from six workers
    records = [
        run(seed, scoring={"A": Scoring(worker=f"w{seed}"), "B0": Scoring(worker="w")})
        for seed in range(6)
    ]
    found = judge(records).environments
    assert found["A"]["worker"] == "w0 | w1 | w2 | w3 | and 2 more"
    assert found["B0"]["worker"] == "w"


def test_the_facts_are_those_of_the_judged_step() -> None:
    def lowered(scores: Columns, _: np.random.Generator) -> Columns:
        scores["A"] -= 0.1
        return scores

    steps = [
        run(0, step=0, scoring={"A": Scoring(weight_version="v0")}),
        run(1, step=1, scoring={"A": Scoring(weight_version="v1")}, change=lowered),
        run(2, step=2, scoring={"A": Scoring(weight_version="v2")}),
    ]
    verdict = judge(steps)
    assert verdict.status == "divergent"
    assert verdict.environments["A"]["weight_version"] == "v1"
    assert verdict_from_json(verdict.to_json()).environments == verdict.environments
