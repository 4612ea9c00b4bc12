"""The report's self-test: what was planted, what the verdict named, and in what it was wrong."""

import dataclasses
import json
from typing import Any

from layerbisect.bisect.verdict import Coverage, CoveredRows, Culprit, Points, Verdict
from layerbisect.demo import Planted, held_against
from layerbisect.report.blocks import Facts, Section, Table
from layerbisect.report.selftest import selftest_section
from layerbisect.selftest import LeftOut, SelfTest, Setting, Tried

NOTHING = Coverage(Points(0, ()), CoveredRows(0, 0))
AGREE = Verdict("agree", None, (), (), None, NOTHING, "", ("no reason",))
GUILTY = Culprit(1, "layers.1.mid", "residual", "trainer", 0.8, 9.0, 1.1, "all rows", ())
ACCUSED = dataclasses.replace(AGREE, status="divergent", culprits=(GUILTY,))
DROPPED = Planted(
    "residual-dropped", "the sum lacks a part", 1, "residual", "layers.1.mid", "trainer"
)
SETTING = Setting("two in transformers", "policy <b>", 4, "bfloat16", "cpu")


def said_of(*verdicts: tuple[Verdict, Planted | None], captures: str | None = None) -> Any:
    tried = tuple(Tried(held_against(v, planted), 1.25, captures) for v, planted in verdicts)
    left = (LeftOut("experts-swapped", "needs a layer with experts", "norm-eps"),)
    done = SelfTest(SETTING, tried, left, len(verdicts))
    return json.loads(json.dumps(done.to_json()))


def rows(section: Section) -> list[dict[str, str]]:
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return [
        dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows
    ]


def test_right_and_wrong_are_said_run_by_run() -> None:
    section = selftest_section(said_of((AGREE, None), (ACCUSED, DROPPED), (AGREE, DROPPED)))
    assert section.lead == (
        "1 of 2 planted faults named rightly (layer, operator and side, and nobody else), and the "
        "pair without a fault was not accused. There should be 3: nothing was left to plant "
        "instead."
    )
    clean, found, missed = rows(section)
    assert clean["planted"] == "nothing" and clean["the verdict says"] == "agree"
    assert found["planted"] == "residual-dropped: residual, layer 1, trainer"
    assert found["the verdict says"] == "residual, layer 1, trainer"
    assert found["mistakes"] == "" and "nobody is convicted" in missed["mistakes"]
    assert [row["it is"] for row in (clean, found, missed)] == ["right", "right", "WRONG"]
    facts = [row for b in section.blocks if isinstance(b, Facts) for row in b.rows]
    assert ("", "`experts-swapped` could not be planted, `norm-eps` was planted instead: needs a "
            "layer with experts") in facts  # fmt: skip
    assert ("model", "policy <b>, 4 layers") in facts


def test_captures_are_named_where_they_were_kept() -> None:
    kept = selftest_section(said_of((AGREE, None), (ACCUSED, DROPPED), captures="00/a 01/b"))
    assert [row["captures"] for row in rows(kept)] == ["00/a 01/b"] * 2
    gone = selftest_section(said_of((AGREE, None), (ACCUSED, DROPPED)))
    # with nothing wrong there are no mistakes either
    assert not {"captures", "mistakes"} & rows(gone)[0].keys()


def test_an_accused_clean_pair_is_said_first() -> None:
    section = selftest_section(said_of((ACCUSED, None), (ACCUSED, DROPPED)))
    assert "the pair without a fault was accused" in section.lead
    assert rows(section)[0]["it is"] == "WRONG"
