"""The tables of the SmolLM2 case say what the numbers say, and go where the page wants them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.bisect.reference import ReferenceModel
from layerbisect.captures.chains import Chains
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from scripts import smollm2_gaps as gaps
from scripts import smollm2_naive as naive
from scripts import smollm2_numbers as numbers
from scripts import smollm2_page as page
from scripts.smollm2_engines import Conversation, forward

TOKENS = 4000
KINDS = ("head", "residual")
SIZES = {"head": 0.03, "residual": 0.04}


def noise(size: float, seed: int) -> gaps.Array:
    """Draw differences of mean absolute value ``size``, one a token."""
    drawn: gaps.Array = np.random.default_rng(seed).standard_normal(TOKENS)
    drawn *= size / np.abs(drawn).mean()
    return drawn


def runs() -> dict[str, gaps.Array]:
    """Runs of a reference whose two kinds of operator round independently."""
    parts = {kind: noise(SIZES[kind], seed) for seed, kind in enumerate(KINDS)}
    exact = noise(2.0, 9)
    apart = {
        "fp32": exact,
        "bf16": exact + sum(parts.values()),
        "only head": exact + parts["head"],
        "only residual": exact + parts["residual"],
        "all but head": exact + parts["residual"],
        "all but residual": exact + parts["head"],
        "all but head and residual": exact,
    }
    return apart | {f"fused: {name}": run for name, run in apart.items()}


def cells(text: str, first: str) -> list[str]:
    """Cells of the row of a table that begins with ``first``."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_fill_replaces_only_what_stands_between_markers() -> None:
    text = "a\n<!-- smollm2: gaps -->\nold\n<!-- end -->\nb\n<!-- smollm2: own -->\n<!-- end -->\n"
    filled = page.fill(text, {"gaps": "new\n", "own": "| x |"})
    assert filled == (
        "a\n<!-- smollm2: gaps -->\nnew\n<!-- end -->\nb\n<!-- smollm2: own -->\n| x |\n"
        "<!-- end -->\n"
    )
    assert page.fill(filled, {"gaps": "new", "own": "| x |"}) == filled


def test_fill_refuses_a_page_that_wants_other_tables() -> None:
    with pytest.raises(LayerBisectError, match="own"):
        page.fill("<!-- smollm2: gaps -->\n<!-- end -->\n", {"gaps": "", "own": ""})


def test_the_page_in_the_repository_has_the_markers_of_all_tables() -> None:
    text = (Path(__file__).parents[2] / "docs" / "smollm2.md").read_text()
    assert [line for line in text.splitlines() if line == "<!-- end -->"]
    names = (
        *("setup", "gaps", "verdict", "own", "layers", "budget", "closing", "equal", "raised"),
        *("exact", "ownexact", "naive", "harm"),
    )
    assert page.fill(text, dict.fromkeys(names, "-")).count("\n-\n") == len(names)


def test_gaps_tell_greedy_from_sampled_tokens() -> None:
    scores = {"A": np.zeros(4), "B": np.array([0.1, 0.1, 0.3, -0.3]), "C": np.zeros(4)}
    text = gaps.gaps(scores, np.array([True, True, False, False]), scores["B"] + 0.5)
    assert cells(text, "A-B, greedy")[1:4] == ["2", "0.1000 ± 0", "-0.1000 ± 0.0000"]
    assert cells(text, "A-B, sampled")[1:3] == ["2", "0.3000 ± 0"]
    assert cells(text, "A-B, sampled")[4:6] == ["0.0450", "0.3000"]
    assert "differs from B by 0.5000 at most" in text
    assert cells(text, "A-C, all")[1] == "4"


def test_shares_of_the_layers_add_up_to_the_gap() -> None:
    layer, final, head = noise(0.03, 0), noise(0.04, 1), noise(0.12, 2)
    steps = [np.zeros(TOKENS), layer, layer + final, layer + final + head]
    carried = {"A": np.stack(steps), "B": np.zeros((4, TOKENS)), "C": -np.stack(steps)}
    text = gaps.layers(carried)
    shares = [cells(text, name)[6] for name in ("layer 0", "final norm", "head")]
    assert [float(share[:-1]) for share in shares] == pytest.approx([5, 9, 85], abs=2)
    assert f"- A-C: the 1 layers {shares[0]}, the final norm {shares[1]}" in text


def test_a_budget_of_independent_kinds_closes() -> None:
    text = gaps.budget(runs(), KINDS)
    assert cells(text, "residual")[1:3] == ["0.0400", "64%"]
    assert float(cells(text, "residual")[4]) == pytest.approx(0.04, rel=0.05)
    assert float(cells(text, "**all in bf16**")[1]) == pytest.approx(0.05, rel=0.05)
    assert float(cells(text, "**in quadrature**")[1]) == pytest.approx(0.05)


def test_closing_explains_a_gap_by_distances_and_what_they_share() -> None:
    found = runs()
    common = noise(0.03, 20)
    scores = {n: found["fp32"] + common + noise(0.04, 10 + i) for i, n in enumerate("ABC")}
    text = gaps.closing(found, scores, scores)
    assert cells(text, "B, SGLang replaying")[3] in ("0.99", "1.00", "1.01")
    measured, predicted, ratio, together, explained = (
        float(cell.split(" ")[0]) for cell in cells(text, "A-B")[1:6]
    )
    assert measured == pytest.approx(0.04 * 2**0.5, rel=0.05)
    assert predicted == pytest.approx(0.05 * 2**0.5, rel=0.05)
    assert ratio == pytest.approx(0.8, abs=0.04)
    assert together == pytest.approx(0.36, abs=0.05)
    assert explained == pytest.approx(measured, rel=0.05)
    before_head = cells(text, "A-B before the head")
    assert float(before_head[2]) == pytest.approx(0.04 * 2**0.5, rel=0.05)


def test_raising_a_part_is_predicted_by_shares_and_by_the_reference() -> None:
    found = runs()
    exact = found["fp32"]

    def sides(*sizes: float) -> dict[str, gaps.Array]:
        made = {}
        for seed, name in enumerate("BC"):
            parts = [noise(size, 30 + 10 * seed + i) for i, size in enumerate(sizes)]
            made[name] = exact + sum(parts, np.zeros(TOKENS))
        return made

    measured = {
        "": sides(0.03, 0.04),
        "head": sides(0.0, 0.04),
        "stream": sides(0.03, 0.0),
        "head stream": sides(0.0, 0.0),
    }
    text = gaps.raised(measured, found, np.arange(TOKENS))
    for name in ("head", "residual stream"):
        gap, by_shares, by_reference = (float(c.split(" ")[0]) for c in cells(text, name)[1:4])
        assert by_shares == pytest.approx(gap, rel=0.06)
        assert by_reference == pytest.approx(gap, rel=0.06)
    assert cells(text, "both")[1] == "0 ± 0"


def test_float32_shows_how_much_smaller_the_gap_is() -> None:
    scores = {"B": np.full(4, 1e-5), "C": np.zeros(4)}
    verdict = {
        "status": "agree",
        "rounding_budget": {"predicted_gap": 2e-5},
        "differences": [{"bitwise_equal": 1}, {"bitwise_equal": 0.9}],
    }
    bias = {"log_softmax": 5e-6, "logit - logsumexp": -1e-7}
    own = {"A": np.zeros(3), "B": np.zeros(3), "C": np.ones(3)}
    text = gaps.exact_sides(scores, own, 0.03, verdict, bias)
    assert "is 3,000 times smaller" in text
    assert "`log_softmax` +5.0e-06 nat, `logit - logsumexp` -1.0e-07 nat" in text
    assert "**agree**" in text and "1 of the 2 points" in text
    assert cells(text, "B-C, the same tokens")[1:] == ["4", "1.0e-05", "1.0e-05", "1.0e-05", "0 %"]
    assert cells(text, "A-B, the fp32 server's own answers")[5] == "100 %"
    gone = gaps.exact_sides({"B": np.ones(4), "C": np.ones(4)}, own, 0.03, verdict, bias)
    assert "gone altogether" in gone


def error(side: str, layer: int | None, point: str, **more: Any) -> dict[str, Any]:
    """One operator's own error as the case keeps it."""
    fine = {"operator": "norm", "rows": 9, "p95": 1.1, "median": 1.0, "floor": 1.0}
    return {"side": side, "layer": layer, "point": point} | fine | {
        "excess": 0.0, "convicted": False, "fits": [], **more
    }  # fmt: skip


def test_own_errors_are_summed_up_by_operator_and_the_convicted_named() -> None:
    errors = [
        error("A", 0, "layers.0.attn.norm"),
        error("A", 1, "layers.1.attn.norm", median=2.0, p95=3.0),
        error("A", 0, "layers.1.input"),
        error("A", 1, "layers.1.output"),
        error("A", None, "final_norm"),
    ]
    text = page.own(errors, {"A": "rollout"})
    assert cells(text, "`attn.norm`")[1] == "1.50 (3.00)"
    assert cells(text, "`output`")[1] == "1.00 (1.10)"
    assert "0 of 5 operators judged are convicted.\n" in text
    errors.append(error("A", None, "logprob", convicted=True, fits=["offset -0.1 (z 9.0)"]))
    assert "1 of 6 operators judged are convicted: A `logprob`" in page.own(errors, {"A": "a"})


def test_naive_metrics_stand_beside_ours() -> None:
    rows = [
        dict(layer=n, largest=big, at_position=0, at_channel=507, max_difference=1.0,
             relative=0.01, one_minus_cosine=1e-6, ours=0.02)
        for n, big in enumerate((0.5, 24960.0))
    ]  # fmt: skip
    text = page.naive(rows, [0.0, 0.01])
    assert cells(text, "1")[1:] == ["24960", "1", "0.0100", "1.0e-06", "0.0200", "0.0100"]
    assert "position 0, channel 507" in text
    spoiled = dict(layer=1, noise=0.05, massive_rows=1, rows=10, relative=0.009,
                   one_minus_cosine=1e-5, ours=0.05, nat=0.3)  # fmt: skip
    assert "in 9 of 10 rows and costs 10.0 times" in page.harm(spoiled, rows, 0.03)


def test_equal_values_are_listed_by_pair() -> None:
    text = page.equal([{"point": "layers.0.mid", "A-B": 0.987, "B-C": 0.5}], ["A-B", "B-C"])
    assert cells(text, "`layers.0.mid`")[1:] == ["99%", "50%"]


def test_setup_counts_tokens() -> None:
    text = page.setup({"torch 2": "in both"}, [(10, 5, 0.0), (12, 7, 1.0)], "a model")
    assert "2 prompts of 10 to 12 tokens" in text
    assert "12 response tokens: 5 decoded greedily, 7 sampled" in text
    assert "- torch 2 in both\n" in text


def chains(lengths: Sequence[int], tokens: Sequence[int], fresh: Sequence[bool]) -> Chains:
    """Lay sequences out as a join does."""
    target = np.array([*tokens[1:], -1])
    target[np.cumsum(lengths) - 1] = -1
    return Chains(
        row=np.arange(len(tokens)),
        lengths=tuple(lengths),
        fresh=np.array(fresh),
        position=np.concatenate([np.arange(length) for length in lengths]),
        token=np.array(tokens),
        target=target,
    )


def test_only_tokens_of_answers_are_scored() -> None:
    conversations = [
        Conversation([1, 2], [3, 4, 5], [], [], 0.0),
        Conversation([1, 6], [7, 8], [], [], 1.0),
    ]
    # the second conversation comes first; the last token of each answer was never fed back
    given = chains([3, 4], [1, 6, 7, 1, 2, 3, 4], [True] * 3 + [False] + [True] * 3)
    kept, place = numbers._of_answers(given, conversations)
    assert kept.target.tolist() == [-1, 7, -1, -1, 3, 4, -1]
    assert np.flatnonzero(kept.scored).tolist() == [1, 4, 5]
    assert place.tolist() == [3, 0, 1]


def test_numbers_come_out_of_captures(small_llama_dir: Path, tmp_path: Path) -> None:
    conversations = [
        Conversation([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [], [], 0.0),
        Conversation([3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8], [], [], 1.0),
    ]
    captures = {}
    for label in "ABC":
        forward(
            small_llama_dir,
            tmp_path / label,
            conversations,
            raised="stream" if label == "B" else "",
        )
        captures[label] = Capture.open(tmp_path / label / "capture", label=label)
    layout = numbers.lay_out(captures, conversations, torch.float32)
    model = ReferenceModel.from_directory(small_llama_dir)
    scores = {
        label: numbers.response_scores(capture.directory, "forward", conversations)
        for label, capture in captures.items()
    }
    done: list[tuple[int, int]] = []

    def advance(step: int, of: int) -> None:
        done.append((step, of))

    scan = numbers.scan(model, layout, advance)
    for label, carried in scan.items():
        assert carried.shape == (4 + 1 + 2, len(layout.place))
        assert np.array_equal(carried[-1], scores[label][layout.place])
    assert np.array_equal(scan["A"], scan["C"])
    # both begin alike, and what they score differs
    assert np.array_equal(scan["A"][0], scan["B"][0])
    assert not np.array_equal(scan["A"][-1], scan["B"][-1])
    runs = numbers.budget(model, layout, advance)
    assert set(runs) == set(numbers.budget_runs())
    assert np.abs(runs["bf16"] - runs["fp32"]).max() > 0
    assert done[-1] == (len(runs), len(runs))
    errors = numbers.judge(model, layout, advance)
    assert not [e for e in errors if e["convicted"]]
    rows = naive.naive(layout, 4)
    assert [row["relative"] for row in rows] == [0.0] * 5
    assert [row["A-C"] for row in naive.equal_values(layout, 4)] == [1.0] * 10
    bias = numbers.score_bias(model, layout)
    assert max(map(abs, bias.values())) < 1e-5
