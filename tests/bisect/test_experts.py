"""What goes into experts and comes out of them, judged where an engine shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.format import TensorHeader
from layerbisect.captures.points import parse
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter, Scores
from tests.bisect.conftest import Clean

LAYER = 1
AT = f"layers.{LAYER}.mlp."
Change = Callable[[torch.Tensor], None]


def nothing(values: torch.Tensor) -> None:
    """Change nothing."""


def with_experts(
    clean: Clean,
    target: Path,
    *,
    into: Change = nothing,
    out: Change = nothing,
    total: Change = nothing,
    without: tuple[str, ...] = (),
    reverse: bool = False,
) -> Path:
    """Copy the rollout's capture, and add what its experts are given and give back in one layer.

    The experts are the engine's own, each slot alone. Changes are made in the order of computation
    and carried on, in place; ``reverse`` has the slots of each row in the other order.
    """
    old = Capture.open(clean.rollout)
    rows = np.arange(len(old.rows))
    tensors = {name: _stored(old, name, rows) for name in old.points if old.has(name).any()}
    ids, weights = tensors[AT + "expert_ids"].long(), tensors[AT + "expert_weights"]
    if reverse:
        ids, weights = ids.flip(1), weights.flip(1)
    given = tensors[AT + "norm"][:, None].repeat(1, ids.shape[1], 1)
    into(given)
    engine: Any = clean.engines["rollout"].model
    experts = engine.model.layers[LAYER].mlp.experts
    with torch.no_grad():
        back = torch.stack(
            [
                experts(given[:, s], ids[:, s : s + 1], weights[:, s : s + 1])
                for s in range(ids.shape[1])
            ],
            1,
        )
    out(back)
    added = torch.zeros_like(tensors[AT + "out"])
    order = ids.argsort(1)
    for slot in range(ids.shape[1]):
        added += back[torch.arange(len(back)), order[:, slot]]
    if nothing is into is out:
        # the slots are the whole of it
        assert torch.equal(added, tensors[AT + "out"])
    total(added)
    tensors |= {
        AT + "expert_ids": ids,
        AT + "expert_weights": weights,
        AT + "expert_in": given,
        AT + "expert_out": back,
        AT + "out": added,
    }
    kept = {n: v for n, v in tensors.items() if n.removeprefix(AT) not in without}
    writer = CaptureWriter(target, old.info)
    table = old.scores
    headers = {name: TensorHeader(parse(name).dims) for name in kept}
    scores = Scores(table.rows, table.logprob)
    writer.write_pass("forward", old.sequences, old.rows, kept, headers, scores=scores)
    writer.finish()
    return target


def _stored(capture: Capture, name: str, rows: NDArray[np.intp]) -> torch.Tensor:
    values = torch.from_numpy(capture.read(name, rows).copy())
    return values if name.endswith("expert_ids") else values.bfloat16()


def blamed(verdict: Verdict) -> list[tuple[str, str | None, str]]:
    return [
        (c.point, c.operator, c.side)
        for c in verdict.culprits
        if c.layer == LAYER and ".mlp." in c.point
    ]


@pytest.mark.parametrize("reverse", [False, True])
def test_sound_experts_are_acquitted_in_any_order_of_slots(
    clean: Clean, tmp_path: Path, reverse: bool
) -> None:
    made = with_experts(clean, tmp_path / "c", reverse=reverse)
    verdict = bisect(made, clean.trainer, model=clean.model)
    assert (verdict.status, verdict.culprits) == ("agree", ())
    # that the other engine does not show them is no gap in what is seen of it
    assert not any("operator by operator" in note for note in verdict.coverage.notes)


def test_one_bit_of_one_input_is_no_rounding(clean: Clean, tmp_path: Path) -> None:
    def one_bit(given: torch.Tensor) -> None:
        given[7, 1, 3:4].view(torch.int16).bitwise_xor_(1)

    made = with_experts(clean, tmp_path / "c", into=one_bit)
    verdict = bisect(made, clean.trainer, model=clean.model)
    assert blamed(verdict) == [(AT + "expert_in", "dispatch", "rollout")]
    (culprit,) = (c for c in verdict.culprits if c.point == AT + "expert_in")
    assert any("1 of" in line and "0 of them another row's" in line for line in culprit.evidence)
    assert culprit.where == "1 row, at position 7"


@pytest.mark.parametrize("without", [(), ("expert_in",)])
def test_an_experts_output_is_judged_on_its_own_input(
    clean: Clean, tmp_path: Path, without: tuple[str, ...]
) -> None:
    def louder(back: torch.Tensor) -> None:
        back[20:24] *= 1.5

    made = with_experts(clean, tmp_path / "c", out=louder, without=without)
    verdict = bisect(made, clean.trainer, model=clean.model)
    # what was not seen to go in may be what is wrong
    operator = "experts" if not without else None
    found = blamed(verdict)
    assert found == [(AT + "expert_out", operator, "rollout")]
    (culprit,) = (c for c in verdict.culprits if c.point == AT + "expert_out")
    assert "slot" not in culprit.where and "head" not in culprit.where
    assert "positions 20, 21, 22, 23" in culprit.where


@pytest.mark.parametrize("without", [(), ("expert_in",)])
def test_one_expert_a_little_too_loud_is_named_under_the_noise_of_rounding(
    clean: Clean, tmp_path: Path, without: tuple[str, ...]
) -> None:
    ids = torch.from_numpy(Capture.open(clean.rollout).read(AT + "expert_ids")).long()

    def louder(back: torch.Tensor) -> None:
        back[ids == 3] = (back[ids == 3].float() * 1.01).bfloat16()

    made = with_experts(clean, tmp_path / "c", out=louder, without=without)
    verdict = bisect(made, clean.trainer, model=clean.model)
    (culprit,) = (c for c in verdict.culprits if c.point == AT + "expert_out")
    assert (culprit.side, culprit.where) == ("rollout", "expert 3")
    assert any("expert 3 gain +0.0" in line for line in culprit.evidence)


def test_a_sum_that_leaves_half_out_is_the_combination(clean: Clean, tmp_path: Path) -> None:
    def less(added: torch.Tensor) -> None:
        added[30:40] *= 0.5

    made = with_experts(clean, tmp_path / "c", total=less)
    verdict = bisect(made, clean.trainer, model=clean.model)
    assert (AT + "out", "combine", "rollout") in blamed(verdict)


@pytest.mark.parametrize("without", [("expert_in", "expert_out"), ("expert_ids",)])
def test_without_them_or_without_their_experts_numbers_it_is_one_operator(
    clean: Clean, tmp_path: Path, without: tuple[str, ...]
) -> None:
    made = with_experts(clean, tmp_path / "c", without=without)
    verdict = bisect(made, clean.trainer, model=clean.model)
    assert (verdict.status, verdict.culprits) == ("agree", ())

    def less(added: torch.Tensor) -> None:
        added[30:100] *= 0.5

    bad = with_experts(clean, tmp_path / "bad", total=less, without=without)
    found = blamed(bisect(bad, clean.trainer, model=clean.model))
    operator = "experts" if "expert_in" in without else None
    assert (AT + "out", operator, "rollout") in found


def test_both_sides_are_compared_expert_by_expert(clean: Clean, tmp_path: Path) -> None:
    made = with_experts(clean, tmp_path / "a"), with_experts(clean, tmp_path / "b", reverse=True)
    first, second = (Capture.open(one, label=one.name) for one in made)
    verdict = bisect(first, second, model=clean.model)
    for name in ("expert_in", "expert_out"):
        (found,) = (d for d in verdict.differences if d.point == AT + name)
        assert found.bitwise_equal == 1.0
