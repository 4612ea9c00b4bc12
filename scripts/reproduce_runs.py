"""Real engines for the published experiments: a served rollout, a trainer, and planted faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from layerbisect.captures.record.call import Call
from layerbisect.captures.record.extraction import TokenScores
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.rollout import collect
from layerbisect.captures.record.trainer import score
from layerbisect.captures.score_steps.watch import ScoreSteps
from layerbisect.captures.sglang.worker import Worker
from layerbisect.loading import load_model
from layerbisect.models import make_tiny
from scripts.published_scores import OFFSET
from tests.sglang_server import sglang_server

if TYPE_CHECKING:
    import torch

    Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

PROMPTS, SAMPLES = 4, 2
# a step of 5e-7, as published, is lost in the bfloat16 weights of a model this small
LEARNING_RATE = 2e-3
HEAD_SCALE = 0.35


@dataclass(frozen=True, slots=True)
class Rollout:
    """A served model and where its records go."""

    worker: Worker
    prompts: Sequence[Sequence[int]]
    folder: Path
    tokens: int

    def generate(
        self,
        name: str,
        *,
        step: int | None = None,
        temperature: float = 1.0,
        replays: int = 2,
    ) -> tuple[ScoreRecord, Path]:
        """Generate with raw scores, keep A, and replay."""
        path = self.folder / f"{name}.safetensors"
        record = collect(
            self.worker,
            self.prompts,
            path,
            samples=SAMPLES,
            max_new_tokens=self.tokens,
            replays=replays,
            sampling={"temperature": temperature, "ignore_eos": True},
            original_logprobs=True,
            step=step,
        )
        return record, path


def make_model(directory: Path, vocab: int) -> Path:
    """Make a tiny Qwen3-MoE whose rounding stays below 0.01 nat, as that of the published model.

    A head with smaller weights makes flatter distributions, which round to smaller differences.
    """
    make_tiny(directory, layers=4, hidden=128, heads=4, kv_heads=2, experts=8, top_k=2, vocab=vocab)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] *= HEAD_SCALE
    save_file(tensors, path, {"format": "pt"})
    return directory


@contextmanager
def serve(model: Path, folder: Path, tokens: int, vocab: int) -> Iterator[Rollout]:
    """Serve ``model`` with raw scores at every temperature, on this machine's CPU."""
    drawn = random.Random(1234)
    prompts = [[drawn.randrange(vocab) for _ in range(24 + 8 * n)] for n in range(PROMPTS)]
    snapshots = folder / "rollout-weights"
    environment = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "LAYERBISECT_WEIGHTS": str(snapshots.resolve()),
        "LAYERBISECT_WEIGHTS_FORM": "digests",
    }
    with sglang_server(model, environment=environment) as server:
        worker = Worker(f"http://127.0.0.1:{server.port}")
        yield Rollout(worker, prompts, folder, tokens)


def lower_stored_a(record: ScoreRecord, path: Path) -> tuple[ScoreRecord, Path]:
    """Plant Case 1: what stores A lowers it from position 1 on; the engine's own file keeps A."""
    calls = []
    for call in record:
        stored = call.scores["A"].copy()
        stored[1:] -= OFFSET
        calls.append(replace(call, scores={**call.scores, "A": stored}))
    changed = ScoreRecord(record.info, calls)
    target = path.with_name(path.name.replace(".safetensors", ".stored.safetensors"))
    changed.save(target)
    return changed, target


class Trainer:
    """A transformers model whose scoring function has two stages, as trainers have."""

    def __init__(self, model: Path) -> None:
        self.model: Any = load_model(model)
        self.held = model
        self.offset = 0.0
        self.temperature = 1.0
        self.updates = 0
        self._optimizer: torch.optim.Optimizer | None = None

    def calculate_log_probs_and_entropy(self, call: Call) -> Scored:
        """Score a response from the logits of its sequence: log-prob, chosen logit, entropy."""
        import torch

        ids = torch.from_numpy(call.tokens)[None]
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(call.prompt) - 1 : -1]
        scaled = logits.float() / self.temperature
        scores = scaled - scaled.logsumexp(-1, keepdim=True)
        target = torch.from_numpy(call.response)[:, None]
        chosen, logit = (table.gather(-1, target).squeeze(-1) for table in (scores, scaled))
        return chosen, logit, -(scores.exp() * scores).sum(-1)

    def frozen_scores(self, call: Call) -> Scored:
        """Return what the loss gets; Case 2 plants its fault here."""
        log_probs, logit, entropy = self.calculate_log_probs_and_entropy(call)
        if self.offset:
            log_probs = log_probs - self.offset
        return log_probs, logit, entropy

    def returned(self, record: ScoreRecord, path: Path) -> ScoreRecord:
        """Score twice, frozen; C is what the scoring function returned."""
        return score(
            record,
            lambda calls: [self._scored(call) for call in calls],
            path,
            grad=False,
            module=self.model,
            engine="transformers",
            weight_version=f"T{self.updates}",
        )

    collect = returned

    def _scored(self, call: Call) -> TokenScores:
        return TokenScores(*(part.detach().double().numpy() for part in self.frozen_scores(call)))

    def changes(self, record: ScoreRecord) -> list[str]:
        """Watch both stages in one forward, and name what changed the scores between them."""
        import torch

        with ScoreSteps() as steps, torch.no_grad():
            steps.watch_attribute(self, "calculate_log_probs_and_entropy")
            steps.watch_attribute(self, "frozen_scores")
            self.frozen_scores(record[0])
        return [str(change) for change in steps.changes()]

    def update(self, record: ScoreRecord) -> float:
        """Take one step of AdamW on rewards of -1 and +1 for the two samples of each prompt."""
        import torch

        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._optimizer.zero_grad()
        total = 0.0
        for call in record:
            log_probs, _, _ = self.calculate_log_probs_and_entropy(call)
            loss = -(reward(call) * log_probs).mean() / len(record)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        self._optimizer.step()
        self.updates += 1
        return total

    def save(self, folder: Path) -> Path:
        """Write the weights as a checkpoint."""
        self.held = folder / f"T{self.updates}"
        self.model.save_pretrained(self.held)
        return self.held


def reward(call: Call) -> float:
    """-1 for the first sample of a prompt and +1 for the second."""
    return {"sample-0": -1.0, "sample-1": 1.0}[call.name.rpartition(".")[2]]
