"""The engines of a self-test: what plants a fault in one of them, and captures it.

One transformers model plays both sides in turn, each with another of its own implementations of
attention and experts, so that a large model is in memory once. `layerbisect.selftest_server` has a
real SGLang server for the rollout instead.
"""

from __future__ import annotations

import shlex
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from layerbisect.bisect.progress import Progress
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.demo import Planted
from layerbisect.demo_engines import ENGINES, Side, capture_tokens, sample, write_tokens
from layerbisect.faults import FAULTS, plant
from layerbisect.token_file import TokenSequence

CLEAN = 0
"""The number of the run in which nothing is planted."""


class CannotPlant(LayerBisectError):
    """A fault that this model or engine cannot have, or that changes nothing in it."""


@dataclass
class Bench:
    """Both sides of one model in transformers; ``folder`` gets a numbered directory for each run.

    ``length`` is how many tokens each sequence has, its prompt included, and ``probe`` what the
    locator does about layer boundaries: of a real model both are what takes least time.
    Neither the numbers nor anything else that is written says what was planted.
    """

    model: Path
    folder: Path
    device: str
    dtype: str | None
    length: int = 64
    probe: Literal["auto", "scan", "search"] = "search"
    engine: Any = field(init=False)
    tokens: list[TokenSequence] = field(init=False)
    layers: int = field(init=False)

    def open(self, news: Progress) -> None:
        """Load the model, let it answer the prompts that all runs are about, and run it clean."""
        from layerbisect.captures.transformers_adapter import Anatomy
        from layerbisect.loading import load_model

        news.start("loading the model", 1)
        self.engine = load_model(self.model, dtype=self.dtype, device=self.device)
        self.layers = Anatomy.of(self.engine).num_layers
        self._play("rollout")
        self.tokens = sample(self.engine, news, self.length)
        write_tokens(self.folder / "tokens.jsonl", self.tokens)
        for side in ENGINES:
            self.capture(side, CLEAN, news)

    def describe(self) -> str:
        """Say in a few words which engines are compared, and in which dtype."""
        said = "transformers, {} attention against {}".format(*(ENGINES[s][0] for s in ENGINES))
        if hasattr(self.engine.config, "num_experts"):
            said += ", {} experts against {}".format(*(ENGINES[s][1] for s in ENGINES))
        return said

    @property
    def computed_in(self) -> str:
        """The dtype, as torch names it without its prefix."""
        return str(self.engine.dtype).removeprefix("torch.")

    def source(self, side: Side, number: int) -> Path | Capture:
        """What a side captured in a run, as the locator takes it."""
        return self.folder / f"{number:02}" / side

    def argument(self, side: Side, number: int) -> str:
        """The same as `layerbisect bisect` takes it."""
        return shlex.quote(str(self.folder / f"{number:02}" / side))

    def plant(self, name: str, layer: int, side: Side, number: int, news: Progress) -> Planted:
        """Plant a fault in one side while run ``number`` of that side is captured.

        Raises CannotPlant, with the reason, where the fault cannot be there.
        """
        with ExitStack() as stack:
            try:
                self._play(side)
                truth = stack.enter_context(plant(self.engine, name, layer))
            except LayerBisectError as error:
                raise CannotPlant(str(error)) from None
            self.capture(side, number, news)
        self.check_changed(side, number)
        return Planted(
            fault=name,
            description=FAULTS[name].description,
            layer=truth.layer,
            operator=truth.operator,
            point=truth.point,
            side=side,
        )

    def capture(self, side: Side, number: int, news: Progress) -> None:
        """Run a side on all tokens, as it is at the moment."""
        self._play(side)
        directory = self.folder / f"{number:02}" / side
        capture_tokens(self.engine, directory, side, self.tokens, news)

    def forget(self, number: int) -> None:
        """Delete what was captured in a run."""
        shutil.rmtree(self.folder / f"{number:02}", ignore_errors=True)

    def check_changed(self, side: Side, number: int) -> None:
        """Raise CannotPlant where a run's scores are those of the clean one, bit for bit."""
        now, clean = (self._scores(side, run) for run in (number, CLEAN))
        if np.array_equal(now, clean, equal_nan=True):
            raise CannotPlant("it changes no score of this model")

    def _scores(self, side: Side, number: int) -> Any:
        source = self.source(side, number)
        found = source if isinstance(source, Capture) else Capture.open(source)
        rows = found.scores.rows
        return found.scores.logprob[np.lexsort((rows.position, rows.sequence))]

    def _play(self, side: Side) -> None:
        attention, experts = ENGINES[side]
        self.engine.set_attn_implementation(attention)
        if hasattr(self.engine.config, "num_experts"):
            self.engine.set_experts_implementation(experts)

    def close(self) -> None:
        """Release what was started."""
