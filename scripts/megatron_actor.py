"""The actor of a job on the real megatron-core: scores frozen, takes optimizer steps, saves.

Its ranks stay alive and do what files tell them, so that a server can generate in between. The
model, the cross-entropy over the vocabulary and the reduction of gradients are megatron's. Its
schedules and its optimizer refuse tensors that are not on CUDA: here the stages hand boundaries and
gradients on themselves, and torch's AdamW updates copies of the weights in float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from scripts.megatron_engine import Rank, log_probs
from scripts.megatron_model import forward

if TYPE_CHECKING:
    import torch

    Calls = Sequence[tuple[list[int], int]]

STOP = "stop"
_POLL_SECONDS = 0.02


def serve(rank: Rank, step: dict[str, Any]) -> None:
    """Do what the files ``0.json``, ``1.json``, ... in the step's ``folder`` say, until one stops.

    Each says in ``do`` which method of `Actor` is called, and has its arguments. What it returns
    is each rank's answer, in ``{number}.{rank}.json``.
    """
    folder, actor = Path(step["folder"]), Actor(rank, step["learning_rate"])
    number = 0
    while True:
        file = folder / f"{number}.json"
        if not file.exists():
            time.sleep(_POLL_SECONDS)
            continue
        told = json.loads(file.read_text())
        what = told.pop("do")
        if what == STOP:
            return
        write_json(folder / f"{number}.{rank.number}.json", getattr(actor, what)(**told))
        number += 1


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(value))
    scratch.replace(path)


class Actor:
    """One rank's part of the policy.

    Calls are given to all ranks alike, as token IDs and how many of them are the prompt; replicas
    deal them out. Raises ValueError for a layout that cannot be trained here.
    """

    def __init__(self, rank: Rank, learning_rate: float) -> None:
        if rank.layout.tensor > 1 or rank.layout.virtual > 1:
            # without sequence parallelism megatron trains no experts on tensor-parallel ranks, and
            # in eval mode it would give them wrong gradients
            raise ValueError(f"a CPU cannot train {rank.layout}; leave tensor and virtual at 1")
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        self.offset = 0.0
        self._rank, self._learning_rate = rank, learning_rate
        self._vocab = json.loads((rank.model / "config.json").read_text())["vocab_size"]
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas = parallel_state.get_data_parallel_world_size()
        (self._chunk,) = rank.chunks
        self._reducing: Any = DistributedDataParallel(
            self._chunk.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            self._chunk,
        )
        self._parameters = list(self._chunk.parameters())
        self._begin()

    def load(self, checkpoint: str) -> None:
        """Start anew from a checkpoint."""
        from layerbisect.captures.megatron.weights import load_checkpoint

        load_checkpoint(self._rank.chunks, checkpoint)
        self._begin()

    def _begin(self) -> None:
        import torch

        self._copies = [p.detach().float().clone() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._copies, lr=self._learning_rate)

    def score(
        self, calls: Calls, capture: str, repeats: int, offset: float
    ) -> dict[int, list[list[float]]]:
        """Score calls frozen, in a capture.

        Returns:
            on the last stage, for each call of this replica by its number, what `frozen_scores`
            returned in each repeat.
        """
        import layerbisect

        self.offset = offset
        scores: dict[int, list[list[float]]] = {}
        with layerbisect.capture(self._rank.chunks, capture, points="logprob", vocab=self._vocab):
            for _ in range(repeats):
                for number, tokens, prompt, logits in self._forwards(calls):
                    found = self.frozen_scores(logits, tokens, prompt).tolist()
                    scores.setdefault(number, []).append(found)
        return scores

    def watch(self, calls: Calls, offset: float) -> list[str]:
        """Name what changed scores after they were calculated."""
        from layerbisect.captures.score_steps.watch import ScoreSteps

        self.offset = offset
        changes = []
        for _, tokens, prompt, logits in self._forwards(calls):
            with ScoreSteps() as steps:
                steps.watch_attribute(self, "calculate_log_probs")
                steps.watch_attribute(self, "frozen_scores")
                self.frozen_scores(logits, tokens, prompt)
            changes += [str(change) for change in steps.changes()]
        return changes

    def calculate_log_probs(
        self, logits: torch.Tensor, tokens: list[int], prompt: int
    ) -> torch.Tensor:
        """Log-probs [response] (nat) from one call's logits [token, vocabulary shard]."""
        import torch

        return log_probs(logits[prompt - 1 : len(tokens) - 1], torch.tensor(tokens[prompt:]))

    def frozen_scores(self, logits: torch.Tensor, tokens: list[int], prompt: int) -> torch.Tensor:
        """Return what the loss gets; Case 2 plants its fault here."""
        scores = self.calculate_log_probs(logits, tokens, prompt)
        if self.offset:
            scores = scores - self.offset
        return scores

    def _own(self, calls: Calls) -> Iterator[tuple[int, list[int], int]]:
        for number in range(self._replica, len(calls), self._replicas):
            yield number, *calls[number]

    def _forwards(self, calls: Calls) -> Iterator[tuple[int, list[int], int, torch.Tensor]]:
        """Run this replica's calls forward, one after the other; yields on the last stage alone."""
        # ranks that share experts must all give one shape
        longest = max(len(tokens) for tokens, _ in calls)
        for number, tokens, prompt in self._own(calls):
            for logits in forward(self._rank.chunks, [[tokens]], longest):
                yield number, tokens, prompt, logits[0]

    def update(self, calls: Calls, rewards: Sequence[float]) -> float:
        """Take one step of AdamW on the mean over all calls of -reward x mean log-prob.

        Returns this replica's part of that, on the last stage.
        """
        import torch

        self._reducing.train()
        self._reducing.zero_grad_buffer()
        longest = max(len(tokens) for tokens, _ in calls)
        loss = 0.0
        for number, tokens, prompt in self._own(calls):
            loss += self._backward(tokens, prompt, longest, -rewards[number] / len(calls))
        # 0.19 asks for a stream, and lets nothing wait for it here
        with mock.patch.object(torch.cuda, "current_stream", lambda: None):
            # averages over replicas
            self._reducing.finish_grad_sync()
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.grad = parameter.main_grad.float() * self._replicas
        self._optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(self._copies, self._parameters, strict=True):
                parameter.copy_(copy)
        self._reducing.eval()
        return loss

    def _backward(self, tokens: list[int], prompt: int, longest: int, weight: float) -> float:
        """Run one call forward and backward through all stages; its loss on the last, else 0."""
        import torch
        from megatron.core import parallel_state as state

        ids = torch.tensor([tokens + [0] * (longest - len(tokens))])
        mask = torch.ones(longest, longest, dtype=torch.bool).triu(1)[None, None]
        boundary = None
        if not state.is_pipeline_first_stage():
            config = self._chunk.config
            boundary = torch.empty(longest, 1, config.hidden_size, dtype=config.pipeline_dtype)
            torch.distributed.recv(boundary, state.get_pipeline_model_parallel_prev_rank())
            self._chunk.set_input_tensor(boundary.requires_grad_())
        out = self._reducing(ids, torch.arange(longest)[None], mask)
        if state.is_pipeline_last_stage():
            loss = weight * self.calculate_log_probs(out[0], tokens, prompt).mean()
            torch.autograd.backward(loss)
        else:
            following = state.get_pipeline_model_parallel_next_rank()
            torch.distributed.send(out.detach(), following)
            gradient = torch.empty_like(out)
            torch.distributed.recv(gradient, following)
            torch.autograd.backward(out, gradient)
            loss = torch.zeros(())
        if boundary is not None:
            assert boundary.grad is not None
            torch.distributed.send(boundary.grad, state.get_pipeline_model_parallel_prev_rank())
        return float(loss.detach())

    def save(self, directory: str, version: str) -> None:
        """Write this rank's part of a weight snapshot."""
        from layerbisect.captures.megatron.weights import save_weights

        save_weights(self._rank.chunks, directory, weight_version=version, vocab=self._vocab)
