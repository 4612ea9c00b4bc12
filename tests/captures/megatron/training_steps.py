"""Steps of a job on the real megatron-core: frozen and training forwards, captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

import layerbisect
from scripts.megatron_engine import Rank
from scripts.megatron_model import forward

VOCAB = 250


def train(rank: Rank, step: dict[str, Any]) -> dict[str, Any]:
    """Capture frozen forwards into ``frozen``, and then training forwards into ``training``.

    ``tokens`` are micro-batches. In the training forwards ``hidden_dropout`` and
    ``attention_dropout`` are active, and ``config`` holds; ``recompute`` is full or selective, and
    ``restore`` false keeps megatron from restoring random states.

    Returns whether gradients are those of a run without a capture, to the bit.
    """
    config = rank.chunks[0].config
    batches = [torch.tensor(tokens) for tokens in step["tokens"]]
    with layerbisect.capture(
        rank.chunks, step["frozen"], points="all", label="frozen", vocab=VOCAB
    ):
        forward(rank.chunks, step["tokens"])
    with pytest.MonkeyPatch.context() as patch, _random_states_of_the_cpu(patch):
        if not step.get("restore", True):
            patch.setattr(random, "_set_all_rng_states", lambda *_: None)
        if step.get("recompute"):
            patch.setattr(config, "recompute_granularity", step["recompute"])
            patch.setattr(config, "recompute_method", "uniform")
            patch.setattr(config, "recompute_num_layers", 1)
        for name, value in step.get("config", {}).items():
            patch.setattr(config, name, value)
        _drop(rank, patch, step.get("hidden_dropout", 0.0), step.get("attention_dropout", 0.0))
        if step.get("recompute") == "selective":
            for block in _blocks(rank):
                patch.setattr(block, "checkpoint_core_attention", True)
                for layer in block.layers:
                    patch.setattr(layer.self_attention, "checkpoint_core_attention", True)
        for chunk in rank.chunks:
            chunk.train()
        plain = _gradients(rank, batches, nullcontext())
        recording = layerbisect.capture(
            rank.chunks, step["training"], points="all", label="training", vocab=VOCAB
        )
        captured = _gradients(rank, batches, recording)
        for chunk in rank.chunks:
            chunk.eval()
    equal = [torch.equal(one, other) for one, other in zip(plain, captured, strict=True)]
    return {"equal": all(equal), "gradients": len(equal)}


def _blocks(rank: Rank) -> list[Any]:
    return [m for c in rank.chunks for m in c.modules() if type(m).__name__ == "TransformerBlock"]


def _drop(rank: Rank, patch: pytest.MonkeyPatch, hidden: float, attention: float) -> None:
    for block in _blocks(rank):
        for layer in block.layers:
            patch.setattr(layer, "hidden_dropout", hidden)
            patch.setattr(layer.self_attention.core_attention.attention_dropout, "p", attention)


@contextmanager
def _random_states_of_the_cpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU's generator stand in for CUDA's, whose states megatron keeps."""
    patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    yield


def _gradients(rank: Rank, batches: list[torch.Tensor], recording: Any) -> list[torch.Tensor]:
    """Run micro-batches forward and backward, and take the gradients.

    The last stage runs each backward at once, and the others all forwards before, as megatron's
    schedules do: so passes come in another order on each stage.
    """
    torch.manual_seed(7)
    for chunk in rank.chunks:
        chunk.zero_grad(set_to_none=True)
    with recording:
        if parallel_state.is_pipeline_last_stage():
            for ids in batches:
                given, out, _ = _forward(rank, ids)
                _backward(given, out)
        else:
            for given, out, sent in [_forward(rank, ids) for ids in batches]:
                sent.wait()
                _backward(given, out)
    return [p.grad.clone() for c in rank.chunks for p in c.parameters() if p.grad is not None]


def _forward(rank: Rank, ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, Any]:
    """Run one micro-batch forward on this stage; hand the boundary on."""
    (chunk,) = rank.chunks
    given = None
    if not parallel_state.is_pipeline_first_stage():
        config = chunk.config
        given = torch.empty(*ids.T.shape, config.hidden_size, dtype=config.pipeline_dtype)
        torch.distributed.recv(given, parallel_state.get_pipeline_model_parallel_prev_rank())
        given.requires_grad_()
        chunk.set_input_tensor(given)
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    out = chunk(ids, torch.arange(ids.shape[1]).expand_as(ids), mask)
    sent = None
    if not parallel_state.is_pipeline_last_stage():
        following = parallel_state.get_pipeline_model_parallel_next_rank()
        sent = torch.distributed.isend(out.detach(), following)
    return given, out, sent


def _backward(given: torch.Tensor | None, out: torch.Tensor) -> None:
    if parallel_state.is_pipeline_last_stage():
        torch.autograd.backward(out.float().square().mean())
    else:
        gradient = torch.empty_like(out)
        following = parallel_state.get_pipeline_model_parallel_next_rank()
        torch.distributed.recv(gradient, following)
        torch.autograd.backward(out, gradient)
    if given is not None and given.grad is not None:
        before = parallel_state.get_pipeline_model_parallel_prev_rank()
        torch.distributed.send(given.grad, before)
