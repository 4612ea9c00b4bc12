"""Write the figures of docs/decides.md, between its markers, from the code and docs/accuracy.md.

    python scripts/write_decisions.py             # write them
    python scripts/write_decisions.py --check     # say whether they are up to date; draws nothing
    python scripts/write_decisions.py --runs 500  # clean runs of scores to draw

A block stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``. Exits with 1 where --check
finds other figures; clean runs are drawn anew only where the page is written.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from layerbisect.bisect import budget, kept_scores, weigh
from layerbisect.bisect.scores import conclude, decision_map, explain, judge, prompts, side_by_side
from layerbisect.bisect.shapes import table as shapes
from layerbisect.bisect.training_causes import GROWTH
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.kernels.judging import choices, measure, own_error

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, ACCURACY = DOCS / "decides.md", DOCS / "accuracy.md"
DRAWN = "drawn"
_BLOCK = re.compile(r"(<!-- figures: (?P<name>[a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def thresholds() -> str:
    """The thresholds as the code has them."""
    rows = [
        ("scores", "gap that is accepted, mean absolute", f"{judge.TOLERANCE:g} nat (--tolerance)"),
        ("scores", "a gap is no repeat's doing from", f"{decision_map.CLEAR:g} times the repeats"),
        ("scores", "a shape convicts at a chance of", f"{decision_map.CHANCE:g} or less"),
        ("scores", "decode and prefill of a sound engine", f"up to {conclude.DECODE:g} nat"),
        ("scores", "tokens at least", f"{explain.FEWEST}"),
        ("compare", "out of range at a chance of", f"{side_by_side.CHANCE:g} over all measures"),
        ("compare", "prompts at least", f"{prompts.FEWEST}"),
        (
            "record",
            "a kept score is the computed one up to",
            f"{kept_scores.KEPT:g} nat, or {budget.GAP_FACTOR:g} times the predicted gap",
        ),
        ("gap", "rounding explains", f"{budget.GAP_FACTOR:g} times the predicted gap"),
        ("gap", "and beyond that", f"{weigh.GAP_DEVIATIONS:g} of its standard errors"),
        ("gap", "a layer stands out above", f"{weigh.STANDING_OUT * 100:g} % of the squared gap"),
        ("own error", "a row is in excess from", f"{own_error.EXCESS_RATIO:g} times rounding"),
        (
            "own error",
            "that convicts in",
            f"{own_error.EXCESS_SHARE * 100:g} % of the rows, and {own_error.EXCESS_ROWS} rows or "
            "more",
        ),
        ("own error", "one row convicts from", f"{own_error.EXTREME_RATIO:g} times rounding"),
        ("own error", "the median row convicts from", f"{own_error.MEDIAN_RATIO:g} times rounding"),
        (
            "systematic",
            "a fit counts from",
            f"{own_error.SYSTEMATIC_Z:g} standard errors, and a size of "
            f"{measure.SYSTEMATIC_SIZE:g}",
        ),
        ("systematic", "distinct rows at least", f"{measure.SYSTEMATIC_ROWS}"),
        ("routing", "a near tie is within", f"{choices.TIE_MARGIN:g} deviations of the logits"),
        ("training", "grown, and not inherited, from", f"{GROWTH:g} times what came before"),
    ]
    return _table(("test", "threshold", "value"), rows)


def chances() -> str:
    """Chances of a false alarm that follow from the thresholds."""
    both = math.erfc(own_error.SYSTEMATIC_Z / math.sqrt(2.0))
    tests = len(shapes.CAUSES) + len(shapes.PLACES)
    rows = [
        (
            f"one systematic fit beyond {own_error.SYSTEMATIC_Z:g} standard errors",
            f"{both:.1e}",
        ),
        ("one of 4,096 channels, with a gain and an offset each", f"{both * 2 * 4096:.1e}"),
        ("one shape of one difference", f"{decision_map.CHANCE:g}"),
        (
            f"any of {tests} shapes in any of 3 differences of a run",
            f"{3 * tests * decision_map.CHANCE:.1e}",
        ),
        ("a measure of `scores compare` out of range", f"{side_by_side.CHANCE:g}"),
    ]
    return _table(("chance alone makes", "at most"), rows)


def counted() -> str:
    """What docs/accuracy.md counted, with what that leaves possible."""
    text = ACCURACY.read_text(encoding="utf-8")
    accused, controls = _numbers(r"Clean controls accused: ([\d,]+) of ([\d,]+)", text)
    rows = [
        ("clean controls accused", f"{accused} of {controls}", f"below {upper(accused, controls)}")
    ]
    for label, name in (
        ("- all three, and nothing else named", "one strong fault: wrong or incomplete"),
        ("two faults at once, both named and nothing else", "two faults: wrong or incomplete"),
        ("below the floor in scores, above it in their output", "hidden faults: not found"),
    ):
        line = next(one for one in text.splitlines() if one.startswith(f"| {label} "))
        found = re.findall(r"\((\d+) of (\d+)\)", line)
        for (right, of), kind in zip(found, ("tuned on", "kept aside"), strict=True):
            wrong, cases = int(of) - int(right), int(of)
            rows.append((f"{name}, {kind}", f"{wrong} of {cases}", f"below {upper(wrong, cases)}"))
    return _table(("what", "counted", "leaves possible, at 95 %"), rows)


def drawn(runs: int) -> str:
    """Judge clean runs of simulated scores, and count who is accused."""
    random = np.random.default_rng(0)
    statuses: dict[str, int] = {}
    accused: list[str] = []
    tokens = 0
    for _ in range(runs):
        record = _clean_run(random)
        tokens += sum(len(call.response) for call in record)
        verdict = judge.judge([record])
        statuses[verdict.status] = statuses.get(verdict.status, 0) + 1
        accused += [culprit.evidence[0] for culprit in verdict.culprits]
    said = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    return (
        f"- {runs:,} clean runs, {tokens:,} tokens: {said}\n"
        f"- culprits named: {len(accused)}" + "".join(f"\n    - {one}" for one in accused) + "\n"
    )


def _clean_run(random: np.random.Generator) -> ScoreRecord:
    """A, B and C of one model whose engines round independently, B and C repeating exactly.

    Noise has heavy tails (Student's t of 3), is in proportion to 1 - p as a softmax makes it, and
    between 0.002 and 0.05 nat in the mean.
    """
    level = math.exp(random.uniform(math.log(0.002), math.log(0.05)))
    columns = {name: Scoring(worker="simulated") for name in ("A", "B0", "B1", "C0", "C1")}
    calls = []
    for number in range(int(random.integers(4, 33))):
        exact = -random.gamma(1.0, 1.0, int(random.integers(16, 257)))
        a, b, c = (
            np.minimum(exact + random.standard_t(3, len(exact)) * level * -np.expm1(exact), 0.0)
            for _ in range(3)
        )
        prompt, response = (random.integers(0, 32000, n) for n in (24, len(exact)))
        scores = {"A": a, "B0": b, "B1": b, "C0": c, "C1": c}
        calls.append(Call.of(f"s{number}", prompt, response, scores, group=f"p{number // 2}"))
    return ScoreRecord(RecordInfo(columns=columns), calls)


def _numbers(pattern: str, text: str) -> tuple[int, int]:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"{ACCURACY} does not say {pattern!r}")
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def upper(wrong: int, cases: int) -> str:
    """The largest rate at which so few are wrong in one of 20 runs (Clopper and Pearson 1934)."""
    low, high = wrong / cases, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        # the binomial's probability of what was counted, or fewer
        few = sum(
            math.comb(cases, k) * rate**k * (1.0 - rate) ** (cases - k) for k in range(wrong + 1)
        )
        low, high = (rate, high) if few > 0.05 else (low, rate)
    return f"{high:.1%}".replace("%", " %")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    parser.add_argument("--runs", type=int, default=1000, help="clean runs of scores to draw")
    given = parser.parse_args(arguments)
    blocks = {"thresholds": thresholds(), "chances": chances(), "counted": counted()}
    if not given.check:
        blocks[DRAWN] = drawn(given.runs)
    text = PAGE.read_text(encoding="utf-8")
    wanted = _BLOCK.sub(
        lambda found: (
            f"{found[1]}{blocks[found['name']]}{found[3]}" if found["name"] in blocks else found[0]
        ),
        text,
    )
    if not given.check:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if wanted == text:
        return 0
    print(
        f"{PAGE.name} has other figures; run `python scripts/write_decisions.py`", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
