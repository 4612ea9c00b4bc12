"""Faults of the record change the columns that they name, as the engine they are of would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from layerbisect.captures.record.file import ScoreRecord
from scripts.planted.fault import ModelFault, Scored, ScoreFault, Side
from scripts.planted.scene import write_record
from scripts.planted.scores import (
    FAULTS,
    GATE_LIMIT,
    NOT_PLANTED,
    PENALTY,
    at_temperature,
    log_softmax,
    picked,
)
from tests.scripts.planted.checking import Checked, check_truth

SCORED = {fault.name: fault for fault in FAULTS if isinstance(fault, ScoreFault)}
PLANTED = {fault.name: fault for fault in FAULTS if isinstance(fault, ModelFault)}
TEMPERATURES = {
    "temperature-not-in-trainer": 0.7,
    "temperature-not-in-rollout": 0.6,
    "temperature-after-softmax": 0.5,
}
CALLS, PROMPT, RESPONSE, VOCAB = 3, 8, 56, 40


def right() -> Scored:
    """Columns of random logits, with a little noise in A and C as other engines would have."""
    draw = torch.Generator().manual_seed(0)
    of = np.random.default_rng(0)
    logits = [3 * torch.randn(RESPONSE, VOCAB, generator=draw) for _ in range(CALLS)]
    prompts = [of.integers(0, VOCAB, PROMPT) for _ in range(CALLS)]
    tokens = [torch.multinomial(z.softmax(-1), 1, generator=draw)[:, 0].numpy() for z in logits]
    exact = [picked(z.double().numpy(), t) for z, t in zip(logits, tokens, strict=True)]
    scores = {
        column: [values + size * of.standard_normal(RESPONSE) for values in exact]
        for column, size in {"A": 1e-3, "B0": 0.0, "B1": 0.0, "C0": 1e-3, "C1": 1e-3}.items()
    }
    both: Mapping[Side, list[torch.Tensor]] = {"rollout": logits, "trainer": logits}
    return Scored(scores, both, prompts, tokens, {})


def changed(name: str) -> tuple[Scored, Scored]:
    """The columns as they should be, and with a fault."""
    before, after = right(), right()
    if name in TEMPERATURES:
        at_temperature(before, TEMPERATURES[name])
    SCORED[name].change(after)
    return before, after


def columns(name: str, column: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One column of a fault, right and wrong, float64 [call, response]."""
    before, after = changed(name)
    return np.stack(before.scores[column]), np.stack(after.scores[column])


@pytest.mark.parametrize("name", SCORED)
def test_only_the_named_columns_change(name: str, tmp_path: Path) -> None:
    before, after = changed(name)
    assert before.definition == after.definition
    for column, values in after.scores.items():
        assert [v.shape for v in values] == [(RESPONSE,)] * CALLS
        same = all(map(np.array_equal, before.scores[column], values))
        assert same != (column in SCORED[name].columns), column
        off = np.concatenate(values) - np.concatenate(before.scores[column])
        assert same or np.isnan(off).any() or np.abs(off).mean() > 0.05
    write_record(after, tmp_path / "record.safetensors")
    record = ScoreRecord.open(tmp_path / "record.safetensors")
    assert [call.name for call in record] == ["call-0", "call-1", "call-2"]


def test_what_is_left_out_is_what_nobody_scored() -> None:
    missing = {
        name: {
            c: int(np.isnan(np.concatenate(v)).sum()) for c, v in changed(name)[1].scores.items()
        }
        for name in SCORED
    }
    one = {"A": 0, "B0": 0, "B1": 0, "C0": CALLS, "C1": CALLS}
    some = {
        "gather-same-position": one,
        "logprobs-one-left": one,
        "labels-shifted-twice": one,
        "cp-chunks-misordered": one,
        "logprobs-first-alone": one | {"A": CALLS * (RESPONSE - 1), "C0": 0, "C1": 0},
    }
    nothing = dict.fromkeys(one, 0)
    assert missing == {name: some.get(name, nothing) for name in SCORED}


Source = Callable[[int], tuple[int, int]]
"""From a response token's place to the row of logits that scores it, and the place in the sequence
of the token that is scored there."""


def _misordered(i: int) -> tuple[int, int]:
    # chunks 0, 2, 3, 1 of the rows; the last row of the first is that of response token 8
    row = i if i < 9 else i + 16 if i < 41 else i - 32
    return row, PROMPT + row


SOURCES: dict[str, Source] = {
    "gather-truncated": lambda i: (max(i - 5, 0), PROMPT + i),
    "gather-same-position": lambda i: (i + 1, PROMPT + i),
    "logprobs-one-left": lambda i: (i + 1, PROMPT + i + 1),
    "labels-shifted-twice": lambda i: (i, PROMPT + i + 1),
    "cp-labels-rolled": lambda i: (i, i - 8 if i in (8, 24, 40) else PROMPT + i),
    "cp-chunks-misordered": _misordered,
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_gather_takes_the_row_and_the_token_that_it_says(name: str) -> None:
    _, after = changed(name)
    for call, values in enumerate(after.scores["C0"]):
        sequence = np.concatenate([after.prompts[call], after.tokens[call]])
        z = log_softmax(after.logits["trainer"][call].double().numpy())
        for i in np.flatnonzero(np.isfinite(values)).tolist():
            row, place = SOURCES[name](i)
            # the column's own noise stays
            assert values[i] == pytest.approx(z[row, sequence[place]], abs=0.01)


def test_zeros_are_where_the_report_has_them() -> None:
    _, values = columns("cp-response-offset", "C0")
    assert (np.flatnonzero((values == 0).all(0)) == np.arange(2, 9)).all()
    _, values = columns("logprobs-zero-filled", "A")
    assert np.flatnonzero((values == 0).all(0)).tolist() == [54, 55]


def test_temperatures_are_of_logits_or_of_log_probs() -> None:
    raw = right()
    for name, column, factor in (
        ("temperature-not-in-trainer", "C1", 1.0),
        ("temperature-not-in-rollout", "B0", 1.0),
        ("temperature-after-softmax", "A", 2.0),
    ):
        before, after = columns(name, column)
        np.testing.assert_allclose(after, factor * np.stack(raw.scores[column]))
        scaled = [
            picked(z.double().numpy() / TEMPERATURES[name], t)
            for z, t in zip(raw.logits["trainer"], raw.tokens, strict=True)
        ]
        np.testing.assert_allclose(before, scaled, atol=0.01)
        assert set(changed(name)[1].definition.values()) == {"temperature"}


def test_a_penalty_lowers_what_was_seen() -> None:
    before, after = columns("repetition-penalty", "A")
    scored = right()
    exact, tokens = scored.logits["rollout"][0].double().numpy(), scored.tokens[0]
    z = exact.copy()
    for token in {*scored.prompts[0].tolist(), *tokens[:20].tolist()}:
        z[20, token] = z[20, token] / PENALTY if z[20, token] > 0 else z[20, token] * PENALTY
    change = picked(z, tokens)[20] - picked(exact, tokens)[20]
    assert after[0, 20] - before[0, 20] == pytest.approx(change, abs=1e-9)


def test_stale_log_probs_depend_on_the_order_of_requests() -> None:
    (before, first), (_, second) = (columns("cached-logprobs-stale", c) for c in ("B0", "B1"))
    assert (first[:, :24] == before[[2, 0, 1], :24]).all()
    assert (second[:, :24] == before[[1, 2, 0], :24]).all()
    assert (first[:, 24:] == before[:, 24:]).all()


def test_an_infinity_is_one_token_of_one_sequence(
    moe: Checked, llama: Checked, tmp_path: Path
) -> None:
    for engine in (moe, llama):
        folder = tmp_path / engine.folder.name
        (seen,) = check_truth(engine, PLANTED["infinite-channel"], 1, folder).values()
        assert seen.positions[seen.changed].tolist() == [9] and seen.changed.sum() == 1
        assert np.isinf(seen.taken).sum() == 1 and not np.isnan(seen.taken).any()
        table = seen.capture.scores
        bad = ~np.isfinite(table.logprob)
        assert set(table.rows.sequence[bad]) == {0} and table.rows.position[bad].min() == 10
        assert bad.sum() == 38  # and all that see it, to the end of its sequence


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_a_clamped_gate_changes_few_tokens(
    experts: str, small_moe_dir: Path, tmp_path: Path
) -> None:
    engine = Checked.load(small_moe_dir, tmp_path / "clean", experts=experts)
    seen = check_truth(engine, PLANTED["swiglu-clamped"], 1, tmp_path)
    for one in seen.values():
        assert 0 < one.changed.mean() < 1 and np.isfinite(one.taken).all()
    assert GATE_LIMIT == 2.0


def test_reports_are_told_once() -> None:
    planted = [report for fault in FAULTS for report in fault.reports]
    assert not set(planted) & set(NOT_PLANTED)
    assert len(set(planted) | set(NOT_PLANTED)) == 20
