"""A model whose routers nearly tie, so that two engines that round differently choose apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.capture import capture
from layerbisect.fault_tools import forward_replaced
from layerbisect.faults import plant
from layerbisect.models import make_tiny
from scripts.planted.controls import tie_routers
from tests.bisect.making import Engine, Fault, random_tokens

LAYERS, EXPERTS, CHOSEN = 3, 16, 3

Choice = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a gate's logits, weights and numbers to the weights and numbers that it returns instead."""


def make_tied(directory: Path) -> Path:
    """Write a small Qwen3-MoE in which experts 0 and 1, 2 and 3, ... nearly tie everywhere.

    Of pairs an odd number is chosen, so nearly every token has a pair that is cut in two.
    """
    make_tiny(
        directory, layers=LAYERS, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=EXPERTS,
        top_k=CHOSEN, vocab=512,
    )  # fmt: skip
    tie_routers(directory)
    return directory


@dataclass(frozen=True)
class Tied:
    """Two engines of the model, the tokens that they ran, and their captures of all points."""

    model: Path
    engines: dict[str, Engine]
    tokens: list[list[int]]
    clean: dict[str, Path]

    @classmethod
    def make(cls, folder: Path) -> Tied:
        """Make the model, and capture both engines with nothing planted."""
        model = make_tied(folder / "model")
        engines = {
            "rollout": Engine.load(model, "rollout"),
            "trainer": Engine.load(model, "trainer", attention="sdpa", experts="grouped_mm"),
        }
        tokens = random_tokens(512, [48, 48, 48, 48])
        clean = {label: e.capture(folder / label, tokens) for label, e in engines.items()}
        return cls(model, engines, tokens, clean)

    def judge(
        self, given: Mapping[str, Path] = MappingProxyType({}), forced: Sequence[Path] = ()
    ) -> Verdict:
        """Compare the clean captures, or those ``given`` for a side."""
        sides = self.clean | dict(given)
        return bisect(sides["rollout"], sides["trainer"], model=self.model, forced=forced)

    def faulty(self, side: str, folder: Path, *faults: Fault) -> Path:
        """Capture one engine while faults are planted."""
        return self.engines[side].capture(folder, self.tokens, faults=faults)

    def choosing(self, side: str, folder: Path, layer: int, choice: Choice) -> Path:
        """Capture one engine while a layer's gate returns other weights and numbers."""
        with self._choosing(side, layer, choice):
            return self.engines[side].capture(folder, self.tokens)

    def _choosing(self, side: str, layer: int, choice: Choice) -> AbstractContextManager[None]:
        gate = self.engines[side].model.model.layers[layer].mlp.gate

        def forward(own: Any, hidden: torch.Tensor) -> Any:
            logits, weights, ids = own(hidden)
            return (logits, *choice(logits, weights, ids))

        return forward_replaced(gate, forward)

    def forced(
        self,
        folder: Path,
        *,
        weights: bool,
        routes: Path | None = None,
        faults: Sequence[Fault] = (),
    ) -> Path:
        """Capture the trainer with routes forced on it, the clean rollout's if not given."""
        engine = self.engines["trainer"]
        with ExitStack() as stack:
            for name, layer in faults:
                stack.enter_context(plant(engine.model, name, layer))
            stack.enter_context(
                capture(
                    engine.model,
                    folder,
                    points="all",
                    label="trainer",
                    names=[f"s{i}" for i in range(len(self.tokens))],
                    routes=routes or self.clean["rollout"],
                    route_weights=weights,
                )
            )
            stack.enter_context(torch.no_grad())
            for ids in self.tokens:
                engine.model(input_ids=torch.tensor([ids]), use_cache=False)
        return folder
