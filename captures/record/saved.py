"""Read a rollout that somebody else saved, as JSON lines: one call of the model a line.

::

    {"prompt_ids": [1, 17, 4], "response_ids": [99, 2], "logprobs": [-0.51, -1.25]}
    {"prompt_ids": [1, 17, 4], "response_ids": [8, 6, 2], "logprobs": [-0.7, null, -0.1],
     "loss_mask": [1, 0, 1], "name": "turn-2", "group": "conversation-7", "turn": 2,
     "context": {"adapter": "sql"}, "weight_version": "12", "temperature": 1.0, "step": 12,
     "definition": "raw", "worker": "http://10.0.0.7:30000", "behavior_logprobs": [-0.7, null, 0.0]}

The first three keys must be there (the second example is one line in the file). A token that the
mask leaves out may have null for a score. What is true of the whole rollout (``weight_version``,
``temperature``, ``definition``, ``step``) must be the same in all lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.call import Call, Definition, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord

_NEEDED = ("prompt_ids", "response_ids", "logprobs")
_COMMON: Mapping[str, tuple[type, ...]] = {
    "weight_version": (str,),
    "temperature": (int, float),
    "definition": (str,),
    "step": (int,),
}
_OWN: Mapping[str, tuple[type, ...]] = {
    "prompt_ids": (list,),
    "response_ids": (list,),
    "logprobs": (list,),
    "behavior_logprobs": (list,),
    "loss_mask": (list,),
    "name": (str,),
    "group": (str,),
    "turn": (int,),
    "context": (dict,),
    "worker": (str,),
}
_KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def read_rollout(path: str | os.PathLike[str]) -> ScoreRecord:
    """Read a rollout's file as a record with column A, and ``behavior`` where it is given.

    Without a ``definition`` the scores are raw where the temperature is said to be 1, of the
    temperature's distribution where it is said to be another, as SGLang returns them, and unknown
    where nothing is said. Calls without a name are named after their line.

    Raises:
        RecordError: what is wrong in the first bad line, by its number.
    """
    source = Path(path)
    calls: list[Call] = []
    lines: dict[str, int] = {}
    common: dict[str, Any] = {}
    workers: set[str] = set()
    for number, line in _lines(source):
        where = f"{source} line {number}"
        facts = _facts(line, where)
        common = _agree(common, facts, where, first=not calls)
        call = _call(facts, where, f"line-{number}")
        if call.name in lines:
            raise RecordError(
                f"{where} has the name {call.name!r}, which line {lines[call.name]} has too"
            )
        if calls and call.scores.keys() != calls[0].scores.keys():
            raise RecordError(f"{where} and the first line differ in having behavior_logprobs")
        lines[call.name] = number
        calls.append(call)
        workers |= {facts["worker"]} if "worker" in facts else set()
    if not calls:
        raise RecordError(f"{source} holds no call; give one JSON object a line")
    temperature = common.get("temperature")
    said = "unknown" if temperature is None else "raw" if temperature == 1 else "temperature"
    scoring = Scoring(
        definition=common.get("definition", said),
        worker=", ".join(sorted(workers)),
        weight_version=common.get("weight_version"),
        cache="",
    )
    columns = {column: scoring for column in calls[0].scores}
    if "behavior" in columns:
        columns["behavior"] = Scoring(
            definition="behavior", worker=scoring.worker, weight_version=scoring.weight_version
        )
    sampling = {} if temperature is None else {"temperature": temperature}
    info = RecordInfo(step=common.get("step"), sampling=sampling, columns=columns)
    return ScoreRecord(info, calls)


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    try:
        with source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise RecordError(f"cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{source} is not text; give JSON lines") from None


def _facts(line: str, where: str) -> dict[str, Any]:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON: {error}") from None
    if not isinstance(facts, dict):
        raise RecordError(f"{where} holds {line.strip():.40}; give an object")
    lacking = [key for key in _NEEDED if key not in facts]
    if lacking:
        raise RecordError(f"{where} has no {lacking[0]}; it needs {', '.join(_NEEDED)}")
    known = {**_COMMON, **_OWN}
    for key, value in facts.items():
        if key not in known:
            raise RecordError(f"{where} has {key!r}; the keys are {', '.join(known)}")
        # bool is an int, and stands for neither a number nor an ID
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise RecordError(
                f"{where} has {value!r:.40} for {key}; give {_KINDS[known[key][-1]]}, or leave it "
                "out"
            )
    if facts.get("step", 0) < 0:
        raise RecordError(f"{where} has step {facts['step']}; give 0 or more")
    definition = facts.get("definition", "raw")
    if definition not in get_args(Definition):
        raise RecordError(
            f"{where} has the definition {definition!r}; give {', '.join(get_args(Definition))}"
        )
    return facts


def _agree(
    common: dict[str, Any], facts: Mapping[str, Any], where: str, *, first: bool
) -> dict[str, Any]:
    found = {key: facts[key] for key in _COMMON if key in facts}
    if first or found == common:
        return found
    key = next(k for k in _COMMON if found.get(k) != common.get(k))
    raise RecordError(
        f"{where} has {key} {found.get(key)!r}, where the lines before have {common.get(key)!r}; "
        "give each rollout a file of its own"
    )


def _call(facts: Mapping[str, Any], where: str, default: str) -> Call:
    for key in ("prompt_ids", "response_ids"):
        for place, token in enumerate(facts[key]):
            # 1.0 and true would be taken for 1
            if type(token) is not int:
                raise RecordError(f"{where} has {token!r:.40} at place {place} of {key}")
    scores = {"A": _scores(facts, "logprobs", where)}
    if "behavior_logprobs" in facts:
        scores["behavior"] = _scores(facts, "behavior_logprobs", where)
    context = facts.get("context", {})
    for key, value in context.items():
        if not isinstance(value, str):
            raise RecordError(f"{where} has {value!r:.40} for {key} in context; give a text")
    name = facts.get("name", default)
    try:
        return Call.of(
            name,
            facts["prompt_ids"],
            facts["response_ids"],
            scores,
            mask=facts.get("loss_mask"),
            group=facts.get("group", name),
            turn=facts.get("turn", 0),
            context=context,
        )
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None


def _scores(facts: Mapping[str, Any], key: str, where: str) -> list[float]:
    for place, score in enumerate(facts[key]):
        if score is not None and type(score) not in (int, float):
            raise RecordError(f"{where} has {score!r:.40} at place {place} of {key}")
    return [float("nan") if score is None else float(score) for score in facts[key]]
