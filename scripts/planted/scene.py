"""A pair of real engines on the same sampled tokens, and cases made of it by planting faults.

Both engines are transformers' own, with other implementations of attention and experts: rounding
differs between them as it does between engines. The rollout also decodes: A comes from batched
decode steps over a KV cache, B from a prefill of the same tokens, C from the trainer's forward.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.captures.capture import capture
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from scripts.planted.fault import Scored, Side

SEQUENCES, PROMPT, RESPONSE = 6, 8, 56
ENGINES: dict[Side, tuple[str, str]] = {
    "rollout": ("eager", "eager"),
    "trainer": ("sdpa", "grouped_mm"),
}
"""Attention and experts of each engine."""
RARE = 8
"""So many last rows of the vocabulary are rare tokens; the first prompts end on some of them."""

Pass = Literal["decode", "prefill", "trainer"]
PASSES: tuple[Pass, ...] = ("decode", "prefill", "trainer")
Planting = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all sequences: its capture, and the responses' scores (float64, nat)."""

    directory: Path
    scores: list[NDArray[np.float64]]


@dataclass
class Scene:
    """A model in a dtype in both engines, its tokens, and the clean runs of each pass."""

    model: Path
    dtype: str
    folder: Path
    sequences: int = SEQUENCES
    response: int = RESPONSE
    engines: dict[Side, Any] = field(init=False)
    tokens: list[list[int]] = field(init=False)
    clean: dict[Pass, Run] = field(init=False)

    def __post_init__(self) -> None:
        self.engines = {side: load_engine(self.model, side, self.dtype) for side in ENGINES}
        self.tokens = sample(self.engines["rollout"], self.sequences, self.response)
        self.clean = {name: self.run(name, self.folder / f"clean-{name}") for name in PASSES}

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self.engines["rollout"].config.num_hidden_layers)

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return hasattr(self.engines["rollout"].model.layers[layer].mlp, "experts")

    def run(
        self,
        name: Pass,
        directory: Path,
        planted: Sequence[Planting] = (),
        *,
        points: str = "all",
    ) -> Run:
        """Run all sequences in one pass, with faults planted, and capture it."""
        side: Side = "trainer" if name == "trainer" else "rollout"
        engine = self.engines[side]
        shutil.rmtree(directory, ignore_errors=True)
        with ExitStack() as stack:
            for one in planted:
                stack.enter_context(one)
            stack.enter_context(capture(engine, directory, points=points, label=side))
            stack.enter_context(torch.no_grad())
            if name == "decode":
                prompts = [PROMPT] * len(self.tokens)
                decode_like_rollout(engine, self.tokens, prompts, batch_size=len(prompts))
            else:
                for ids in self.tokens:
                    engine(input_ids=torch.tensor([ids]), use_cache=False)
        return Run(directory, response_scores(Capture.open(directory), len(self.tokens)))

    @cached_property
    def logits(self) -> dict[Side, list[torch.Tensor]]:
        """Raw logits of each response token by side, nothing planted; as in `Scored`."""
        found: dict[Side, list[torch.Tensor]] = {side: [] for side in ENGINES}
        with torch.no_grad():
            for side, ids in itertools.product(ENGINES, self.tokens):
                out = self.engines[side](input_ids=torch.tensor([ids]), use_cache=False)
                found[side].append(out.logits[0, PROMPT - 1 : -1].float())
        return found

    def scored(self, runs: Mapping[Pass, Run]) -> Scored:
        """The columns that these runs make; repeats are the same runs, as both engines repeat."""
        made = {
            "A": runs["decode"],
            "B0": runs["prefill"],
            "B1": runs["prefill"],
            "C0": runs["trainer"],
            "C1": runs["trainer"],
        }
        return Scored(
            scores={name: [s.copy() for s in run.scores] for name, run in made.items()},
            logits=self.logits,
            prompts=[np.array(ids[:PROMPT]) for ids in self.tokens],
            tokens=[np.array(ids[PROMPT:]) for ids in self.tokens],
            definition={},
        )


def load_engine(model: Path, side: Side, dtype: str, settings: Mapping[str, str] = {}) -> Any:
    """Load one side's engine, with other implementations where ``settings`` names them."""
    attention, experts = ENGINES[side]
    engine: Any = load_model(model, dtype=dtype, attention=settings.get("attention", attention))
    if hasattr(engine.config, "num_experts"):
        engine.set_experts_implementation(settings.get("experts", experts))
    return engine


def sample(engine: Any, sequences: int = SEQUENCES, response: int = RESPONSE) -> list[list[int]]:
    """Let the rollout answer random prompts at temperature 1; the same tokens each time."""
    from transformers import DynamicCache

    from layerbisect.captures.transformers_calls import cache_name

    draw = torch.Generator().manual_seed(0)
    vocab = engine.config.vocab_size
    tokens = torch.randint(3, vocab - RARE, (sequences, PROMPT), generator=draw)
    for row in range(0, sequences, 2):
        tokens[row, PROMPT // 2] = vocab - 1 - row
    held, fed = {cache_name(engine): DynamicCache(config=engine.config)}, tokens
    with torch.no_grad():
        for _ in range(response):
            out = engine(input_ids=fed, use_cache=True, **held)
            fed = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=draw)
            tokens = torch.cat((tokens, fed), 1)
    rows: list[list[int]] = tokens.tolist()
    return rows


def response_scores(found: Capture, sequences: int) -> list[NDArray[np.float64]]:
    """Each sequence's captured log-probs (nat) from the response's first token on."""
    table = found.scores
    scores = []
    for number in range(sequences):
        mine = (table.rows.sequence == number) & (table.rows.position >= PROMPT)
        order = np.argsort(table.rows.position[mine])
        scores.append(table.logprob[mine][order])
    return scores


def write_record(scored: Scored, path: Path) -> None:
    """Write the record of a case, as a rollout and a trainer would have."""
    columns = {
        name: Scoring(
            definition=scored.definition.get(name, "raw"),  # type: ignore[arg-type]
            engine="trainer" if name.startswith("C") else "rollout",
        )
        for name in scored.scores
    }
    calls = [
        Call.of(
            f"call-{number}",
            scored.prompts[number],
            scored.tokens[number],
            {name: values[number] for name, values in scored.scores.items()},
            # a score that nobody made leaves its token out
            mask=np.all([np.isfinite(values[number]) for values in scored.scores.values()], axis=0),
        )
        for number in range(len(scored.tokens))
    ]
    ScoreRecord(RecordInfo(columns=columns), calls).save(path)
