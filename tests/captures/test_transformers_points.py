"""What a transformers capture holds is what the model computed, and the model is left alone."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from layerbisect.captures.capture import capture
from layerbisect.captures.errors import CaptureError, LayerBisectError
from layerbisect.captures.points import all_points
from layerbisect.captures.store import Capture
from layerbisect.captures.telling import CaptureWarning

FAMILIES = ("moe", "qwen3", "llama")
LAYERS, VOCAB = 4, 512


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return _load(request.getfixturevalue(f"small_{request.param}_dir"), "sdpa")


@pytest.fixture(scope="module")
def moe(small_moe_dir: Path) -> Any:
    return _load(small_moe_dir, "sdpa")


def _load(directory: Path, implementation: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation=implementation
    ).eval()


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))


def _hooks(model: torch.nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_points_are_what_the_modules_compute(
    family: str, implementation: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = _load(request.getfixturevalue(f"small_{family}_dir"), implementation)
    ids = _ids(1, 24)
    with torch.no_grad(), capture(model, tmp_path / "c", points="all,logits"):
        logits = model(input_ids=ids).logits
    taken = Capture.open(tmp_path / "c")
    assert taken.finished and not taken.problems
    moe = family == "moe"
    unseen = {n for n in all_points(LAYERS, moe) if n.endswith(("expert_in", "expert_out"))}
    assert set(taken.points) == set(all_points(LAYERS, moe)) - {"logprob"} - unseen
    assert {seen.how for seen in taken.points.values()} == {"observed"}

    def read(point: str) -> torch.Tensor:
        value = torch.from_numpy(taken.read(point))[None]
        return value if point.endswith("expert_ids") else value.bfloat16()

    base, rotary = model.model, model.model.rotary_emb
    apply = sys.modules[type(base.layers[0].self_attn).__module__].apply_rotary_pos_emb
    same = torch.equal
    with torch.no_grad():
        assert same(read("embed"), base.embed_tokens(ids))
        assert same(read("layers.0.input"), read("embed"))
        for i, layer in enumerate(base.layers):
            at = f"layers.{i}."
            attention, normed = layer.self_attn, read(at + "attn.norm")
            assert same(normed, layer.input_layernorm(read(at + "input")))
            q, k, v = (
                project(normed).unflatten(-1, (-1, attention.head_dim))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if family != "llama":
                q, k = attention.q_norm(q), attention.k_norm(k)
            angles = rotary(normed, torch.arange(24)[None])
            q, k = (x.transpose(1, 2) for x in apply(q.transpose(1, 2), k.transpose(1, 2), *angles))
            assert same(read(at + "attn.q"), q)
            assert same(read(at + "attn.k"), k)
            assert same(read(at + "attn.v"), v)
            context = read(at + "attn.context")
            assert context.shape == q.shape
            query, key, value = (x.transpose(1, 2).double() for x in (q, k, v))
            exact = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            assert torch.allclose(context.double(), exact.transpose(1, 2), atol=0.03)
            assert same(read(at + "attn.out"), attention.o_proj(context.flatten(2)))
            mid = read(at + "mid")
            assert same(mid, read(at + "input") + read(at + "attn.out"))
            normed = read(at + "mlp.norm")
            assert same(normed, layer.post_attention_layernorm(mid))
            if moe:
                router, weights, experts = layer.mlp.gate(normed)
                assert same(read(at + "mlp.router_logits")[0], router)
                assert same(read(at + "mlp.expert_weights")[0], weights)
                assert same(read(at + "mlp.expert_ids")[0], experts)
            assert same(read(at + "mlp.out"), layer.mlp(normed))
            after = "layers.3.output" if i == LAYERS - 1 else f"layers.{i + 1}.input"
            assert same(read(after), mid + read(at + "mlp.out"))
        assert same(read("final_norm"), base.norm(read("layers.3.output")))
        assert same(read("logits"), logits)
    scores = torch.log_softmax(logits[0].float(), -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert np.array_equal(taken.scores.rows.position, np.arange(1, 24))
    assert np.allclose(taken.scores.logprob, scores.double().numpy(), rtol=0, atol=2e-6)


def test_capturing_changes_no_bit_and_leaves_nothing(model: Any, tmp_path: Path) -> None:
    ids = _ids(2, 16)
    with torch.no_grad():
        # transformers leaves hooks of its own behind when it returns hidden states
        alone = model(input_ids=ids, output_hidden_states=True)
        before = _hooks(model)
        with capture(model, tmp_path / "c", points="all,logits"):
            seen = model(input_ids=ids, output_hidden_states=True)
    assert torch.equal(alone.logits, seen.logits)
    assert all(map(torch.equal, alone.hidden_states, seen.hidden_states))
    assert _hooks(model) == before and "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)


def test_gradients_are_the_same(moe: Any, tmp_path: Path) -> None:
    ids = _ids(1, 12)

    def gradients() -> list[torch.Tensor]:
        moe.zero_grad()
        moe(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in moe.parameters()]

    alone = gradients()
    with capture(moe, tmp_path / "c", points="all"):
        assert all(map(torch.equal, alone, gradients()))
    moe.zero_grad()


def test_an_exception_leaves_no_hook_and_an_unfinished_capture(moe: Any, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    ids = _ids(1, 8)
    with pytest.raises(RuntimeError, match="out of memory"), torch.no_grad():
        with capture(moe, tmp_path / "c", points="all"):
            moe(input_ids=ids)
            with_fault = moe.model.layers[2].register_forward_hook(fail)
            try:
                moe(input_ids=ids)
            finally:
                with_fault.remove()
    assert not _hooks(moe) and "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    taken = Capture.open(tmp_path / "c")
    assert not taken.finished and len(taken.rows) == 8
    assert any("not finished" in problem for problem in taken.problems)


def test_a_broken_off_pass_is_dropped_and_told(moe: Any, tmp_path: Path) -> None:
    ids = _ids(1, 8)
    with torch.no_grad(), pytest.warns(CaptureWarning, match="broke off"):
        with capture(moe, tmp_path / "c"):
            with pytest.raises(IndexError):
                moe(input_ids=ids + VOCAB)
            moe(input_ids=ids)
    taken = Capture.open(tmp_path / "c")
    assert taken.finished and len(taken.rows) == 8
    assert any("broke off" in problem for problem in taken.problems)


def test_two_models_at_once_do_not_mix(moe: Any, small_llama_dir: Path, tmp_path: Path) -> None:
    llama = _load(small_llama_dir, "eager")
    ids = _ids(1, 8)
    with torch.no_grad():
        outer = capture(moe, tmp_path / "moe", points="all")
        inner = capture(llama, tmp_path / "llama", points="layers.1.attn.q")
        outer.__enter__()
        with inner:
            moe(input_ids=ids)
            llama(input_ids=ids)
            # out of order: the one that was entered first leaves first
            outer.__exit__(None, None, None)
            llama(input_ids=ids)
    assert len(Capture.open(tmp_path / "moe").rows) == 8
    assert len(Capture.open(tmp_path / "llama").rows) == 16
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)


def test_engine_facts_are_recorded(moe: Any, small_moe_dir: Path, tmp_path: Path) -> None:
    with torch.no_grad(), capture(moe, tmp_path / "c", label="mine") as open_capture:
        moe(input_ids=_ids(1, 4))
    info = Capture.open(tmp_path / "c").info
    assert (info.engine, info.label, info.dtype, info.device) == (
        "transformers",
        "mine",
        "bfloat16",
        "cpu",
    )
    assert info.moe_layers == (0, 1, 2, 3) and info.points == open_capture.points
    assert info.environment["attn_implementation"] == "sdpa"
    on_disk = json.loads((small_moe_dir / "config.json").read_text())
    assert info.model_config["hidden_size"] == on_disk["hidden_size"]
    assert info.model_config["rope_parameters"] == on_disk["rope_parameters"]


def test_a_dense_layer_among_experts_has_no_router(small_moe_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(small_moe_dir, mlp_only_layers=[1])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad(), capture(model, tmp_path / "c", points="all"):
        model(input_ids=_ids(1, 4))
    taken = Capture.open(tmp_path / "c")
    assert taken.info.moe_layers == (0, 2, 3) and not taken.problems
    assert "layers.1.mlp.expert_ids" not in taken.points


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m, d: capture(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)), d),
            "cannot capture a GPT2LMHeadModel; supported transformers models are LlamaForCausalLM",
        ),
        (lambda m, d: capture(m, d, points="layers.9.input"), "no point matches 'layers.9.input'"),
        (lambda m, d: capture(m, d, names="abc"), "names and salts are lists"),
    ],
)
def test_bad_arguments_are_refused(
    make: Callable[[Any, Path], Any], message: str, moe: Any, tmp_path: Path
) -> None:
    with pytest.raises(LayerBisectError, match=message):
        make(moe, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_directory_that_holds_a_capture_is_refused(moe: Any, tmp_path: Path) -> None:
    with torch.no_grad(), capture(moe, tmp_path / "c"):
        moe(input_ids=_ids(1, 4))
    with pytest.raises(CaptureError, match="already holds a capture"):
        capture(moe, tmp_path / "c").__enter__()
    assert not _hooks(moe) and len(Capture.open(tmp_path / "c").rows) == 4


def test_a_wrapped_model_is_found(moe: Any, tmp_path: Path) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = moe

        def forward(self, ids: torch.Tensor) -> Any:
            return self.module(input_ids=ids)

    wrapper = Wrapper()
    with torch.no_grad(), capture(wrapper, tmp_path / "c"):
        wrapper(_ids(1, 4))
    assert len(Capture.open(tmp_path / "c").rows) == 4


def test_a_model_that_is_never_called_is_told(moe: Any, tmp_path: Path) -> None:
    with pytest.warns(CaptureWarning, match="no forward pass was seen"), torch.no_grad():
        with capture(moe, tmp_path / "c"):
            moe.model(input_ids=_ids(1, 4))
    with pytest.raises(CaptureError, match="empty capture"):
        Capture.open(tmp_path / "c")


def test_embeddings_instead_of_tokens_are_told(moe: Any, tmp_path: Path) -> None:
    with pytest.warns(CaptureWarning, match="inputs_embeds has no token IDs"), torch.no_grad():
        with capture(moe, tmp_path / "c"):
            moe(inputs_embeds=torch.zeros(1, 3, 128, dtype=torch.bfloat16))
