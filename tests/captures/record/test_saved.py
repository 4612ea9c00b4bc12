"""A rollout's JSON lines: what they say is kept, and lines that lie are refused by number."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.saved import read_rollout

WHOLE = {"prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -1]}


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "rollout.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_a_line_needs_ids_and_scores_alone(tmp_path: Path) -> None:
    record = read_rollout(write(tmp_path, WHOLE, "", WHOLE))
    assert record.names == ("line-1", "line-3") and record.columns == ("A",)
    assert record.info.columns["A"].definition == "unknown"
    assert record[0].scores["A"].tolist() == [-0.5, -1.0] and record[0].mask.all()


def test_a_conversation_is_several_calls_of_one_group(tmp_path: Path) -> None:
    common = {"weight_version": "12", "temperature": 1.0, "step": 3}
    first = {**WHOLE, **common, "name": "a", "group": "talk", "turn": 0, "worker": "http://x:1"}
    second = {
        **WHOLE,
        **common,
        "name": "b",
        "group": "talk",
        "turn": 1,
        "worker": "http://w:1",
        "logprobs": [-0.5, None],
        "loss_mask": [True, 0],
        "context": {"adapter": "sql"},
    }
    record = read_rollout(write(tmp_path, first, second))
    said = record.info.columns["A"]
    assert (said.definition, said.weight_version) == ("raw", "12")
    assert said.worker == "http://w:1, http://x:1" and record.info.step == 3
    assert record.info.sampling == {"temperature": 1.0}
    last = record[1]
    assert (last.group, last.turn, last.context) == ("talk", 1, {"adapter": "sql"})
    assert np.isnan(last.scores["A"][1]) and last.mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("said", "definition"),
    [
        ({"temperature": 0.8}, "temperature"),
        ({"temperature": 0.8, "definition": "raw"}, "raw"),
        ({"definition": "behavior"}, "behavior"),
    ],
)
def test_the_definition_is_what_was_said(
    tmp_path: Path, said: dict[str, Any], definition: str
) -> None:
    record = read_rollout(write(tmp_path, {**WHOLE, **said}))
    assert record.info.columns["A"].definition == definition


def test_behavior_stands_beside_the_raw_scores(tmp_path: Path) -> None:
    line = {**WHOLE, "temperature": 1, "behavior_logprobs": [-0.25, -0.75]}
    record = read_rollout(write(tmp_path, line))
    assert record.info.columns["behavior"].definition == "behavior"
    assert record[0].scores["behavior"].tolist() == [-0.25, -0.75]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "holds .1.; give an object"),
        ({"prompt_ids": [1], "response_ids": [2]}, "has no logprobs"),
        ({**WHOLE, "logprob": []}, "has 'logprob'; the keys are weight_version"),
        ({**WHOLE, "logprobs": [-0.5]}, "has 1 scores in A for 2 response tokens"),
        ({**WHOLE, "logprobs": [-0.5, None]}, "has the score nan in A at response position 1"),
        ('{"prompt_ids": [1], "response_ids": [2], "logprobs": [-Infinity]}', "the score -inf"),
        ({**WHOLE, "logprobs": [-0.5, "-1"]}, "has '-1' at place 1 of logprobs"),
        ({**WHOLE, "logprobs": [-0.5, True]}, "has True at place 1 of logprobs"),
        ({**WHOLE, "response_ids": [3, 4.0]}, "has 4.0 at place 1 of response_ids"),
        ({**WHOLE, "prompt_ids": [True]}, "has True at place 0 of prompt_ids"),
        ({**WHOLE, "prompt_ids": []}, "has 0 prompt tokens"),
        ({**WHOLE, "prompt_ids": [-1]}, "has token ID -1"),
        ({**WHOLE, "loss_mask": [1]}, "has a mask of 1 values for 2 response tokens"),
        ({**WHOLE, "loss_mask": [1, 2]}, "has the mask value 2"),
        ({**WHOLE, "turn": True}, "has True for turn; give a whole number"),
        ({**WHOLE, "weight_version": 12}, "has 12 for weight_version; give a text"),
        ({**WHOLE, "temperature": None}, "has None for temperature; give a number"),
        ({**WHOLE, "definition": "log"}, "has the definition 'log'; give raw, temperature"),
        ({**WHOLE, "context": {"adapter": 3}}, "has 3 for adapter in context"),
        ({**WHOLE, "name": "first"}, "has the name 'first', which line 1 has too"),
        ({**WHOLE, "step": 4}, "has step 4, where the lines before have None"),
        ({**WHOLE, "step": -1}, "has step -1; give 0 or more"),
        ({**WHOLE, "behavior_logprobs": [0.0, -1.0]}, "differ in having behavior_logprobs"),
    ],
)
def test_a_line_that_lies_is_refused_by_its_number(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path, {**WHOLE, "name": "first"}, line)
    with pytest.raises(RecordError, match=f"{path.name} line 2.* {said}") as caught:
        read_rollout(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot read .*: No such file"):
        read_rollout(tmp_path / "absent.jsonl")
    with pytest.raises(RecordError, match="holds no call"):
        read_rollout(write(tmp_path, ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="is not text"):
        read_rollout(tmp_path / "binary")
