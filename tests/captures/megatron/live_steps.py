"""Steps of a job on the real megatron-core: what a live job does around a capture."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerbisect.captures.megatron.hook import before_log_prob
from layerbisect.captures.megatron.pipeline import pipeline_forward
from layerbisect.captures.megatron.tail import live_carried_gap
from layerbisect.captures.store import Capture
from scripts.megatron_engine import Rank, do_forward
from scripts.megatron_model import forward
from tests.planted_megatron import plant

Sequences = Sequence[Sequence[int]]


def one_by_one(rank: Rank) -> Callable[[Sequences], None]:
    """Run sequences through the pipeline by hand, each for itself."""

    def run(sequences: Sequences) -> None:
        forward(rank.chunks, [[ids] for ids in sequences])

    return run


def state(rank: Rank) -> str:
    """Digest all that a forward could leave behind in a model and in the generator."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes())
    for chunk in rank.chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                digest.update(f"{name} {tensor.requires_grad} {tensor.grad is None}".encode())
                digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in chunk.modules()]
        digest.update(str([*hooks, *(m.training for m in chunk.modules())]).encode())
    return digest.hexdigest()


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Let megatron's schedules allocate on the CPU what they name CUDA's."""
    from torch.overrides import TorchFunctionMode

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    own, torch.cuda.synchronize = torch.cuda.synchronize, lambda *_: None
    try:
        with OnTheCpu():
            yield
    finally:
        torch.cuda.synchronize = own


def carry(rank: Rank, step: dict[str, Any]) -> dict[str, Any]:
    """Carry ``rollout``'s states through the job's layers, while ``fault`` is planted if named.

    ``schedule``: run the forwards through megatron's own pipeline schedule. ``training``: the model
    is in training mode before.
    """
    run = one_by_one(rank)
    for chunk in rank.chunks:
        chunk.train(bool(step.get("training")))
    try:
        with ExitStack() as stack:
            if step.get("schedule"):
                run = pipeline_forward(rank.chunks, packed=False)
                stack.enter_context(cpu_for_cuda())
            if step.get("fault"):
                stack.enter_context(plant(rank.chunks, step["fault"]))
            before = state(rank)
            found = live_carried_gap(
                rank.chunks,
                step["rollout"],
                run,
                vocab=step["vocab"],
                mode=step.get("mode", "search"),
            )
            after = state(rank)
    finally:
        for chunk in rank.chunks:
            chunk.eval()
    if rank.number == 0:
        found.write(step["out"])
    gaps = [[one.boundary, one.gap] for one in found.gaps]
    return {"gaps": gaps, "forwards": found.forwards, "undisturbed": after == before}


def refused_carry(rank: Rank, step: dict[str, Any]) -> str:
    """Say what a rank is told where the states cannot be carried.

    ``only``: the rank that sees ``rollout``. ``skip``: how many sequences a forward leaves out.
    ``unread``: a rank that can open ``rollout``, and after a forward not read its points.
    """
    rollout = step["rollout"]
    if step.get("only", rank.number) != rank.number:
        rollout += "-elsewhere"
    run, calls = one_by_one(rank), []

    def odd(sequences: Sequences) -> None:
        calls.append(1)
        run(sequences[step.get("skip", 0) :])

    own = Capture.read

    def read(*given: Any) -> Any:
        if calls:
            raise OSError("the disk is gone")
        return own(*given)

    with pytest.MonkeyPatch.context() as patch:
        if step.get("unread") == rank.number:
            patch.setattr(Capture, "read", read)
        try:
            live_carried_gap(rank.chunks, rollout, odd, vocab=step["vocab"])
        except Exception as error:
            return f"{len(calls)} forwards, {type(error).__name__}: {error}"
    return "carried"


def hooked(rank: Rank, step: dict[str, Any]) -> dict[str, Any]:
    """Live through ``events`` of a job that was started with ``env`` and ``args``.

    An event is ``hook:PREFIX``, ``forward`` (the log-probs of ``tokens``), ``train`` (a forward
    with gradients, in training mode), ``grow`` (the weights change), ``open`` (somebody reads the
    capture) or ``exit``. ``fault`` is planted all the while, if named.
    """
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("layerbisect")
    logger.addHandler(handler)
    before, undo = dict(os.environ), state(rank)
    os.environ |= step.get("env", {})
    scores, opened = [], []
    args = SimpleNamespace(**step.get("args", {}))
    for name, value in step.get("of the model", {}).items():
        setattr(rank.chunks[0], name, value)
    with ExitStack() as stack:
        if step.get("schedule"):
            stack.enter_context(cpu_for_cuda())
        if step.get("fault"):
            stack.enter_context(plant(rank.chunks, step["fault"]))
        for event in step["events"]:
            name, _, what = event.partition(":")
            if name == "hook":
                before_log_prob(args, rank.chunks, what)
            elif name == "forward":
                scores.append(do_forward(rank, step | {"fault": None}))
            elif name == "train":
                _train(rank, step["tokens"])
            elif name == "grow":
                _grow(rank, 1.0 + float(what))
            elif name == "open":
                capture = Capture.open(step["env"]["LAYERBISECT_CAPTURE"])
                opened.append([capture.finished, len(capture.rows)])
            elif name == "exit":
                atexit._run_exitfuncs()
    for name in step.get("of the model", {}):
        delattr(rank.chunks[0], name)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    logger.removeHandler(handler)
    return {
        "scores": scores,
        "told": told,
        "opened": opened,
        "undisturbed": state(rank) == undo,
    }


def _train(rank: Rank, tokens: Sequences) -> None:
    (chunk,) = rank.chunks
    chunk.train()
    ids = torch.tensor([tokens[0]])
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    chunk(ids, torch.arange(ids.shape[1])[None], mask).square().mean().backward()
    chunk.zero_grad(set_to_none=True)
    chunk.eval()


def _grow(rank: Rank, factor: float) -> None:
    with torch.no_grad():
        for chunk in rank.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("final_layernorm.weight"):
                    parameter.mul_(factor)


def dies(rank: Rank, step: dict[str, Any]) -> None:
    """Capture through the hook, until rank ``rank`` dies within its ``call``-th forward."""
    os.environ["LAYERBISECT_CAPTURE"] = step["capture"]
    before_log_prob(SimpleNamespace(vocab_size=step["vocab"]), rank.chunks, "")
    calls = []

    def die(*_: Any) -> None:
        calls.append(1)
        if len(calls) == step["call"]:
            os._exit(9)

    if rank.number == step["rank"]:
        layers = [m for c in rank.chunks for m in c.modules() if hasattr(m, "self_attention")]
        layers[-1].mlp.register_forward_pre_hook(die)
    forward(rank.chunks, [[ids] for ids in step["tokens"]])
