"""The real SGLang and the real megatron-core on the same tokens: clean, and with faults planted."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout
from tests.sglang_server import sglang_server

VOCAB = 250
"""Both engines pad the embedding and the head to more rows."""
TINY: dict[str, Any] = dict(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, vocab=VOCAB
)
LAYOUTS = {
    "one": Layout(),
    "pp2": Layout(pipeline=2),
    "ep2": Layout(expert=2),
    "pp2-ep2": Layout(pipeline=2, expert=2),
    "tp2": Layout(tensor=2),
}

PROMPTS, PROMPT, RESPONSE = 4, 12, 36

ROLLOUT_FAULTS = {
    1: (
        "o-proj-permuted:0",
        "softmax-scale:1",
        "experts-swapped:2",
        "rope-shifted:3",
        "head-scaled:0",
    ),
    2: (
        "top-k-not-renormalised:0",
        "qk-norm-skipped:1",
        "norm-eps:2",
        "gate-up-swapped:3",
        "experts-swapped:1=5",
    ),
}
"""Planted in the server, by its tensor-parallel size."""
TRAINER_FAULTS = (
    "norm-weight:0",
    "rope-base:1",
    "softmax-scale:2",
    "o-proj-permuted:3",
    "qk-norm-skipped:3",
    "residual-dropped:1",
    # under expert parallelism the first rank has experts 0 to 3, and the second 4 to 7
    "experts-swapped:0",
    "experts-swapped:3=4",
    "head-scaled:0",
)
COARSE_FAULTS = ("o-proj-permuted:3", "residual-dropped:1")
STALE_LAYER = 2


@dataclass(frozen=True)
class Rollouts:
    """What the servers of either size captured, and the tokens that all engines ran."""

    model: Path
    tokens: list[list[int]]
    captures: Mapping[int, Path]

    def side(self, size: int, run: str = "clean") -> Capture:
        """The run, ``clean`` or a fault, of the server of this tensor-parallel size."""
        return Capture.open(self.captures[size], requests=f"{run}-*", label="rollout")


def record_rollouts(folder: Path) -> Rollouts:
    """Let a server answer prompts, and servers of both sizes replay what it answered."""
    model = make_tiny(folder / "model", **TINY)
    captures = {size: folder / f"tp{size}" for size in ROLLOUT_FAULTS}
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    tokens: list[list[int]] = []
    for size, faults in ROLLOUT_FAULTS.items():
        with sglang_server(
            model, capture=captures[size], points="all", tp=size, fault=""
        ) as server:
            if not tokens:
                answers = server.generate_many(
                    prompts, RESPONSE, rids=[f"generated-{n}" for n in range(PROMPTS)]
                )
                tokens = [answer.tokens for answer in answers]
            for run in ("clean", *faults):
                server.plant(None if run == "clean" else run)
                for number, ids in enumerate(tokens):
                    server.replay(ids, rid=f"{run}-{number}")
            server.captured()
    return Rollouts(model, tokens, captures)


@dataclass(frozen=True)
class Trainers:
    """Captures of megatron-core in every layout; a layout's ranks start once, when asked for."""

    rollouts: Rollouts
    folder: Path
    done: set[str] = field(default_factory=set)

    def side(self, layout: str, run: str = "clean") -> Path:
        """The run ``clean``, a fault, ``coarse``, ``coarse`` with a fault, or one of others."""
        if layout not in self.done:
            job = {"model": str(self.rollouts.model), "steps": list(self._steps(layout))}
            run_job(job, LAYOUTS[layout])
            self.done.add(layout)
        return self.folder / layout / run

    def _steps(self, layout: str) -> list[dict[str, Any]]:
        tokens = self.rollouts.tokens

        def captured(run: str, **more: Any) -> dict[str, Any]:
            directory = str(self.folder / layout / run)
            whole = {"points": "all", "vocab": VOCAB, "tokens": tokens}
            return {"do": "forward", "capture": directory, **whole, **more}

        stale = self.folder / "stale"
        if not stale.exists():
            write_stale(self.rollouts.model, stale)
        return [
            captured("clean"),
            captured("coarse", points="coarse"),
            *(captured(fault, fault=fault) for fault in TRAINER_FAULTS),
            *(captured(f"coarse {f}", fault=f, points="coarse") for f in COARSE_FAULTS),
            captured("other tokens", tokens=[ids[::-1] for ids in tokens]),
            captured("adapter", salts=["adapter"] * len(tokens)),
            {"do": "tests.megatron_steps:load_weights", "model": str(stale)},
            captured("stale"),
        ]


def write_stale(model: Path, target: Path) -> None:
    """Write a checkpoint in which one layer's weights are those of another model."""
    other = make_tiny(target.with_name("other"), seed=1, **TINY)
    shutil.copytree(model, target)
    name = "model.safetensors"
    with safe_open(model / name, "pt") as ours, safe_open(other / name, "pt") as theirs:
        layer = f"model.layers.{STALE_LAYER}."
        tensors = {
            key: (theirs if key.startswith(layer) else ours).get_tensor(key) for key in ours.keys()
        }
    save_file(tensors, target / name, metadata={"format": "pt"})


def without_rank(capture: Path, target: Path, rank: int) -> Path:
    """Copy a capture without what one rank wrote."""
    shutil.copytree(capture, target)
    shutil.rmtree(target / f"rank-{rank}")
    return target


def edited(capture: Path, target: Path, rank: int, old: bytes, new: bytes) -> Path:
    """Copy a capture, and write something else of the same length into one rank's header."""
    assert len(old) == len(new)
    shutil.copytree(capture, target)
    (path,) = (target / f"rank-{rank}").glob("pass-*.safetensors")
    held = path.read_bytes()
    assert old in held
    path.write_bytes(held.replace(old, new))
    return target


def corrupted(
    capture: Path, target: Path, rank: int, point: str, values: int, bit: int = 0x40
) -> Path:
    """Copy a capture, and flip a bit of some of one rank's values of a point in bfloat16.

    The highest of the mantissa's seven by default; ``bit=1`` is its lowest.
    """
    shutil.copytree(capture, target)
    (path,) = (target / f"rank-{rank}").glob("pass-*.safetensors")
    held = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(held[:8], "little")
    begin = start + json.loads(held[8:start])[point]["data_offsets"][0]
    for at in range(begin, begin + 2 * values, 2):
        held[at] ^= bit
    path.write_bytes(held)
    return target
