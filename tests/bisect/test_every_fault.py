"""Every fault that the demo can plant is found: layer, operator and side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.captures.capture import capture
from layerbisect.faults import FAULTS, plant

ATTENTION = {"rollout": "eager", "trainer": "sdpa"}
LAYERS = (0, 2, 3)
"""First, middle and last layer of the small model."""


class Pair:
    """Two transformers models of one checkpoint, and their clean captures."""

    def __init__(self, model: Path, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = model
        self.sides: dict[str, Any] = {
            label: AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.bfloat16, attn_implementation=attention
            ).eval()
            for label, attention in ATTENTION.items()
        }
        self.tokens = torch.randint(3, 500, (3, 64), generator=torch.Generator().manual_seed(0))
        self.clean = {label: folder / label for label in ATTENTION}
        for label, directory in self.clean.items():
            self.forward(label, directory)

    def forward(self, label: str, directory: Path, points: str | Sequence[str] = "all") -> Path:
        with capture(self.sides[label], directory, points=points, label=label), torch.no_grad():
            for ids in self.tokens:
                self.sides[label](input_ids=ids[None])
        return directory


@pytest.fixture(scope="module")
def pair(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(small_moe_dir, tmp_path_factory.mktemp("pair"))


CASES = [
    (name, layer)
    for name, fault in FAULTS.items()
    for layer in (LAYERS if fault.per_layer else (None,))
]


@pytest.mark.parametrize("side", ATTENTION)
@pytest.mark.parametrize(("name", "layer"), CASES, ids=[f"{n}-{at}" for n, at in CASES])
def test_fault_is_found(
    pair: Pair, tmp_path: Path, name: str, layer: int | None, side: str
) -> None:
    with plant(pair.sides[side], name, layer) as truth:
        faulty = pair.forward(side, tmp_path / "faulty")
    directories = {**pair.clean, side: faulty}
    verdict = bisect(directories["rollout"], directories["trainer"], model=pair.model)
    blamed = [(c.layer, c.operator, c.side) for c in verdict.culprits]
    assert blamed == [(truth.layer, truth.operator, side)], verdict.culprits
    assert verdict.exit_code == 1


def test_nothing_planted_is_rounding(pair: Pair) -> None:
    verdict = bisect(pair.clean["rollout"], pair.clean["trainer"], model=pair.model)
    assert verdict.status == "agree", verdict.reasons
    assert verdict.exit_code == 0
    assert len(verdict.layers) == 4
