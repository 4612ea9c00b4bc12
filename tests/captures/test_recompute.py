"""Captures of training forwards: gradients are left alone, and what is computed again is apart."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from layerbisect.captures.capture import capture
from layerbisect.captures.errors import CaptureError
from layerbisect.captures.forward_mode import Dropout, ForwardMode
from layerbisect.captures.store import Capture
from layerbisect.captures.summary import PhaseSummary, summarize
from layerbisect.captures.telling import CaptureWarning
from layerbisect.captures.transformers_mode import shown_at
from layerbisect.loading import load_model
from layerbisect.models import make_tiny

LAYERS, VOCAB, LENGTH = 2, 128, 12
REENTRANT: dict[str, dict[str, Any] | None] = {
    "none": None,
    "by hooks": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = make_tiny(
        tmp_path_factory.mktemp("model") / "tiny",
        request.param,
        layers=LAYERS,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        experts=4,
        top_k=2,
        vocab=VOCAB,
    )
    return load_model(directory)


@pytest.fixture(autouse=True)
def as_before(model: Any) -> Any:
    yield
    model.gradient_checkpointing_disable()
    model.zero_grad(set_to_none=True)
    model.eval()


def tokens(seed: int = 0, batch: int = 2) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    scores = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    mean: torch.Tensor = scores.mean()
    return -mean


def gradients(model: Any, work: Callable[[], None]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    work()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("how", REENTRANT)
def test_gradients_are_the_same_bits_and_what_is_computed_again_is_apart(
    how: str, model: Any, tmp_path: Path
) -> None:
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    if REENTRANT[how] is not None:
        model.gradient_checkpointing_enable(REENTRANT[how])

    def step(recording: Any) -> None:
        with recording:
            torch.autograd.backward(loss(model, tokens()))

    before = gradients(model, lambda: step(nullcontext()))
    during = gradients(model, lambda: step(capture(model, tmp_path / "c", points="all,logits")))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    taken = Capture.open(tmp_path / "c")
    assert taken.finished and not taken.problems
    assert len(taken.rows) == 2 * LENGTH and set(taken.phases) == {"forward"}
    assert len(taken.scores.logprob) == 2 * (LENGTH - 1)
    recompute = "" if how == "none" else "gradient_checkpointing"
    drops = tuple(
        Dropout(f"model.layers.{n}.self_attn", 0.1, f"layers.{n}.attn.context")
        for n in range(LAYERS)
    )
    assert taken.modes == (ForwardMode(True, True, recompute, drops),)
    assert taken.recomputed == (how != "none")
    if how == "none":
        with pytest.raises(CaptureError, match="empty capture"):
            Capture.open(tmp_path / "c", recomputed=True)
        return
    assert summarize(taken).phases["recompute"] == PhaseSummary(1, 2 * LENGTH)
    again = Capture.open(tmp_path / "c", recomputed=True)
    held = [name for name in taken.info.points if again.has(name).any()]
    inner = {"input", "attn.norm", "attn.q", "attn.k", "attn.v", "attn.context", "mlp.norm"}
    assert {f"layers.{n}.{suffix}" for n in range(LAYERS) for suffix in inner} <= set(held)
    assert not {"embed", "final_norm", "logits"} & set(held)
    for name in held:
        np.testing.assert_array_equal(again.read(name), taken.read(name))


def test_what_is_computed_again_belongs_to_the_call_whose_backward_runs(
    model: Any, tmp_path: Path
) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with capture(model, tmp_path / "c", points="all"):
        one, two, three = (loss(model, tokens(seed)) for seed in range(3))
        with torch.no_grad():
            model(input_ids=tokens(4), use_cache=False)
        torch.autograd.backward(two)
        torch.autograd.backward(three + one, retain_graph=True)
        torch.autograd.backward(one)
    taken = Capture.open(tmp_path / "c")
    assert not taken.problems and len(taken.passes) == 4
    again = Capture.open(tmp_path / "c", recomputed=True)
    assert [one.ranks[0].header.index for one in again.passes] == [0, 1, 2]
    for name in ("layers.0.attn.context", "layers.1.mlp.norm"):
        np.testing.assert_array_equal(again.read(name), taken.read(name)[: len(again.rows)])
    assert [mode.gradients for mode in taken.modes] == [True, False]


def test_no_graph_is_kept_alive(model: Any, tmp_path: Path) -> None:
    kept: list[weakref.ref[Any]] = []

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            # what is saved may be a node's own output, and would keep the node
            self.tensor = tensor.detach()

    def pack(tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor)
        kept.append(weakref.ref(packed))
        return packed

    model.train()
    with capture(model, tmp_path / "c", points="all,logits"):
        with saved_tensors_hooks(pack, lambda packed: packed.tensor):
            out = loss(model, tokens())
        torch.autograd.backward(out)
        del out
        with saved_tensors_hooks(pack, lambda packed: packed.tensor):
            # never goes backward
            loss(model, tokens())
        gc.collect()
        assert kept and not any(reference() is not None for reference in kept)


def test_a_checkpointed_model_is_recomputed_as_a_whole(model: Any, tmp_path: Path) -> None:
    model.train()
    with capture(model, tmp_path / "c", points="all,logits"):
        out = checkpoint(model, tokens(), use_cache=False, use_reentrant=False).logits
        torch.autograd.backward(out.float().square().mean())
    taken = Capture.open(tmp_path / "c")
    assert not taken.problems and len(taken.passes) == 1
    again = Capture.open(tmp_path / "c", recomputed=True)
    for name in ("embed", "layers.1.mlp.out", "final_norm"):
        np.testing.assert_array_equal(again.read(name), taken.read(name))
    with (
        pytest.warns(CaptureWarning, match="computed the whole model again"),
        capture(model, tmp_path / "loss", points="all"),
    ):
        out = checkpoint(loss, model, tokens(), use_reentrant=False)
        torch.autograd.backward(out)
    taken = Capture.open(tmp_path / "loss")
    assert len(taken.passes) == 1 and not taken.recomputed


def test_a_backward_that_breaks_off_leaves_what_it_computed_again(
    model: Any, tmp_path: Path
) -> None:
    def broken(gradient: torch.Tensor) -> None:
        raise RuntimeError("broken off")

    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with capture(model, tmp_path / "c", points="all"):
        handle = model.model.layers[1].register_forward_pre_hook(
            lambda module, args: args[0].register_hook(broken) and None
        )
        out = loss(model, tokens())
        handle.remove()
        with pytest.raises(RuntimeError, match="broken off"):
            torch.autograd.backward(out)
        loss(model, tokens(1))
    taken = Capture.open(tmp_path / "c")
    again = Capture.open(tmp_path / "c", recomputed=True)
    assert taken.finished and len(taken.passes) == 2 and len(again.passes) == 1
    assert again.has("layers.1.attn.q").all() and not again.has("layers.0.attn.q").any()


def test_a_backward_after_the_capture_is_no_longer_followed(model: Any, tmp_path: Path) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with capture(model, tmp_path / "c", points="all"):
        out = loss(model, tokens())
    torch.autograd.backward(out)
    taken = Capture.open(tmp_path / "c")
    assert taken.finished and not taken.recomputed
    assert taken.modes[0].recompute == "gradient_checkpointing"


def test_only_coarse_points_of_what_is_computed_again(model: Any, tmp_path: Path) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with capture(model, tmp_path / "c"):
        torch.autograd.backward(loss(model, tokens()))
        model.gradient_checkpointing_disable()
        torch.autograd.backward(loss(model, tokens()))
    again = Capture.open(tmp_path / "c", recomputed=True)
    assert len(again.passes) == 1 and again.has("layers.1.input").all()


@pytest.mark.parametrize(
    ("path", "point"),
    [
        ("model.embed_tokens", "embed"),
        ("model.layers.0.self_attn", "layers.0.attn.context"),
        ("model.layers.3.self_attn.q_proj.lora_dropout.default", "layers.3.attn.q"),
        ("model.layers.0.self_attn.o_proj.lora_dropout.default", "layers.0.attn.out"),
        ("model.layers.0.mlp.gate", "layers.0.mlp.router_logits"),
        ("model.layers.1.mlp.gate", "layers.1.mlp.out"),
        ("model.layers.1.mlp.down_proj.lora_dropout.default", "layers.1.mlp.out"),
        ("model.layers.1.resid_dropout", "layers.2.input"),
        ("model.layers.3.resid_dropout", "layers.3.output"),
        ("model.norm", "final_norm"),
        ("lm_head.lora_dropout.default", "logits"),
        ("value_head.dropout", ""),
    ],
)
def test_where_a_modules_dropout_shows_first(path: str, point: str) -> None:
    assert shown_at(path, 4, (0,)) == point
