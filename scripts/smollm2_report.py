"""The report of the SmolLM2 case: A, B and C judged, A against C and A against B bisected."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from layerbisect.bisect.scores.judge import judge
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.report.page import write_page
from layerbisect.report.results import read_result, with_explained
from layerbisect.report.token_text import TokenText
from scripts.smollm2_engines import write_json
from scripts.smollm2_work import Work

MAKES = ("model", "served-bf16", "trainer-bf16", "verdict.json", "decode.json")
"""What the report is made of, of all that the case's steps leave in its work directory."""

TITLE = "SmolLM2-135M, SGLang against transformers, bfloat16, nothing planted"


def score_record(work: Work) -> ScoreRecord:
    """A, two replays B and C of the answers, as `layerbisect scores judge` takes them."""
    columns = {"A": "A", "B0": "B", "B1": "again", "C0": "C"}
    lengths = [len(one.answer) for one in work.conversations]
    scores = {
        column: np.split(work.scores(label), np.cumsum(lengths)[:-1])
        for column, label in columns.items()
    }
    calls = [
        Call.of(
            f"conversation-{number}",
            one.prompt,
            one.answer,
            {column: values[number] for column, values in scores.items()},
        )
        for number, one in enumerate(work.conversations)
    ]
    engines = {"A": "sglang", "B0": "sglang", "B1": "sglang", "C0": "transformers"}
    scorings = {column: Scoring(engine=engine) for column, engine in engines.items()}
    return ScoreRecord(RecordInfo(model="SmolLM2-135M-Instruct", columns=scorings), calls)


def write_report(work: Work, path: Path) -> list[str]:
    """Write the page, and beside the captures the results that it shows; returns their names."""
    scores = work.directory / "scores.json"
    write_json(scores, judge([score_record(work)]).to_json())
    files = [scores, work.directory / "verdict.json", work.directory / "decode.json"]
    results = with_explained([read_result(file) for file in files])
    write_page(results, path, title=TITLE, text=TokenText.open(work.model))
    return [f"{file}: {one.status}" for file, one in zip(files, results, strict=True)]
