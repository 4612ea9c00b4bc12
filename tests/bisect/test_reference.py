"""The reference model against transformers: exact in float64, and as lossy in bfloat16."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from layerbisect.bisect.precision import FULL, KINDS, Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.captures.points import all_points, is_large

transformers = pytest.importorskip("transformers")

LENGTHS = [37, 1, 64]
VOCAB = 211
SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # larger than the default, so that attention and routing are far from uniform
    "initializer_range": 0.12,
}
MOE: dict[str, object] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}


def rope(kind: str, **parameters: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3-rope": ("llama", {"tie_word_embeddings": True, **LLAMA3}),
    "llama-bias-linear-rope": ("llama", {"attention_bias": True, **rope("linear", factor=4.0)}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied-bias-yarn": (
        "qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64),
        },
    ),
    "qwen3-sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-moe": ("qwen3_moe", MOE),
    "qwen3-moe-unnormalised": ("qwen3_moe", {**MOE, "norm_topk_prob": False}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second": ("qwen3_moe", {**MOE, "decoder_sparse_step": 2}),
}
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}


def save_model(directory: Path, name: str, dtype: torch.dtype, **save: object) -> Path:
    """Create a model of ``MODELS`` with random weights, norms and biases included."""
    family, extra = MODELS[name]
    config_class, model_class = (getattr(transformers, each) for each in CLASSES[family])
    torch.manual_seed(7)
    model = model_class(config_class(**SIZES, **extra)).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(directory, **save)
    return directory


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoint directory of a named model, in bfloat16, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_model(tmp_path_factory.mktemp(name), name, torch.bfloat16)
        return made[name]

    return get


class Float64(TorchFunctionMode):
    """Turn every explicit float32 into float64: transformers hard-codes it in norms and softmax."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = tuple(torch.float64 if each is torch.float32 else each for each in args)
        named = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return func(*widened, **named)


Points = dict[str, torch.Tensor]


@contextmanager
def recorded(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    """Record every point of one sequence's forward pass, without its batch dimension."""
    points: Points = {}
    handles = []

    def keep(name: str, tensor: torch.Tensor) -> None:
        points[name] = tensor.detach().reshape(-1, *tensor.shape[2:]).clone()

    def on_output(module: Any, name: str) -> None:
        handles.append(module.register_forward_hook(lambda _m, _a, out: keep(name, out)))

    def on_input(module: Any, name: str) -> None:
        handles.append(
            module.register_forward_pre_hook(
                lambda _m, args, kwargs: keep(name, args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        )

    def on_router(module: Any, prefix: str) -> None:
        def hook(_module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
            for suffix, tensor in zip(
                ("router_logits", "expert_weights", "expert_ids"), output, strict=True
            ):
                points[f"{prefix}mlp.{suffix}"] = tensor.detach().clone()

        handles.append(module.register_forward_hook(hook))

    body = model.model
    last = len(body.layers) - 1
    on_output(body.embed_tokens, "embed")
    on_output(body.norm, "final_norm")
    on_output(model.lm_head, "logits")
    for index, layer in enumerate(body.layers):
        prefix = f"layers.{index}."
        on_input(layer, prefix + "input")
        on_output(layer.input_layernorm, prefix + "attn.norm")
        on_output(layer.self_attn.o_proj, prefix + "attn.out")
        on_input(layer.post_attention_layernorm, prefix + "mid")
        on_output(layer.post_attention_layernorm, prefix + "mlp.norm")
        on_output(layer.mlp, prefix + "mlp.out")
        if hasattr(layer.mlp, "gate"):
            on_router(layer.mlp.gate, prefix)
    on_output(body.layers[last], f"layers.{last}.output")

    code = importlib.import_module(type(model).__module__)
    eager = code.eager_attention_forward

    def attend(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out = eager(module, q, k, v, *args, **kwargs)
        prefix = f"layers.{module.layer_idx}.attn."
        for suffix, tensor in (("q", q), ("k", k), ("v", v)):
            keep(prefix + suffix, tensor.transpose(1, 2))
        keep(prefix + "context", out[0])
        return out

    with monkeypatch.context() as patched:
        patched.setattr(code, "eager_attention_forward", attend)
        yield points
    for handle in handles:
        handle.remove()


def their_points(
    directory: Path, dtype: torch.dtype, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> Points:
    """Run transformers' eager model on each sequence by itself; the points of all rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    parts: list[Points] = []
    for sequence in torch.split(tokens, LENGTHS):
        # only around the computation: rotary frequencies stay float32 in every engine
        exact = Float64() if dtype is torch.float64 else nullcontext()
        with recorded(model, monkeypatch) as points, torch.no_grad(), exact:
            model(sequence[None], use_cache=False)
        parts.append(points)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    # transformers' scoring code takes the log-softmax in float32 at least
    logits = joined["logits"].to(torch.promote_types(dtype, torch.float32))
    targets = next_tokens(tokens)
    scores = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    joined["logprob"] = scores.where(targets >= 0, torch.nan)
    return joined


def random_tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


def next_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Each row's next token in its sequence, and -1 for the last of a sequence."""
    return torch.cat([torch.cat([s[1:], s.new_tensor([-1])]) for s in torch.split(tokens, LENGTHS)])


def our_points(model: ReferenceModel, tokens: torch.Tensor) -> Points:
    """Run the reference model on all sequences at once."""
    points = {"embed": model.embed(tokens)}
    x = points["embed"]
    for index in range(model.config.num_layers):
        points[f"layers.{index}.input"] = x
        layer = model.layer(index, x, positions(), LENGTHS)
        points |= {f"layers.{index}.{suffix}": tensor for suffix, tensor in layer.items()}
        x = layer["output"]
    points["final_norm"] = model.final_norm(x)
    points["logprob"] = model.logprobs(points["final_norm"], next_tokens(tokens))
    return points


def rms(x: torch.Tensor) -> float:
    return float(x.double().nan_to_num().square().mean().sqrt())


@pytest.mark.parametrize("name", MODELS)
def test_float64_equals_transformers_at_every_point(
    name: str, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens()
    model = ReferenceModel.from_directory(model_of(name), torch.float64)
    ours = our_points(model, tokens)
    theirs = their_points(model_of(name), torch.float64, tokens, monkeypatch)
    expected = all_points(model.config.num_layers, model.config.moe_layers)
    for point in expected:
        if is_large(point):
            continue
        assert ours[point].shape == theirs[point].shape, point
        if point.endswith("expert_ids"):
            assert torch.equal(ours[point], theirs[point]), point
            continue
        assert torch.equal(ours[point].isnan(), theirs[point].isnan()), point
        error = rms(ours[point] - theirs[point]) / rms(theirs[point])
        assert error < 1e-9, f"{point}: relative error {error:.1e}"


def from_captured_inputs(model: ReferenceModel, seen: Points, precision: Precision) -> Points:
    """Compute every point by one operator from the points that transformers captured before it."""
    points: Points = {}
    lengths, where = LENGTHS, positions()
    for index in range(model.config.num_layers):
        at = {
            point.removeprefix(f"layers.{index}."): tensor
            for point, tensor in seen.items()
            if point.startswith(f"layers.{index}.")
        }
        q, k, v = model.qkv(index, at["attn.norm"], where, precision=precision)
        own = {
            "attn.norm": model.attn_norm(index, at["input"], precision=precision),
            "attn.q": q,
            "attn.k": k,
            "attn.v": v,
            "attn.context": model.attention(
                index, at["attn.q"], at["attn.k"], at["attn.v"], lengths, precision=precision
            ),
            "attn.out": model.attn_out(index, at["attn.context"], precision=precision),
            "mid": model.residual_add(at["input"], at["attn.out"], precision=precision),
            "mlp.norm": model.mlp_norm(index, at["mid"], precision=precision),
        }
        ids = weights = None
        if model.config.is_sparse(index):
            own["mlp.router_logits"] = model.router_logits(
                index, at["mlp.norm"], precision=precision
            )
            ids, weights = at["mlp.expert_ids"], at["mlp.expert_weights"]
            _, own["mlp.expert_weights"] = model.route(
                index, at["mlp.router_logits"], precision=precision
            )
        own["mlp.out"] = model.mlp(index, at["mlp.norm"], ids, weights, precision=precision)
        after = "output" if index == model.config.num_layers - 1 else None
        output = model.residual_add(at["mid"], at["mlp.out"], precision=precision)
        points[f"layers.{index}.output" if after else f"layers.{index + 1}.input"] = output
        points |= {f"layers.{index}.{suffix}": tensor for suffix, tensor in own.items()}
    last = seen[f"layers.{model.config.num_layers - 1}.output"]
    points["final_norm"] = model.final_norm(last, precision=precision)
    points["logprob"] = model.logprobs(
        seen["final_norm"], next_tokens(random_tokens()), precision=precision
    )
    return points


@pytest.mark.parametrize("name", MODELS)
def test_low_precision_loses_as_much_as_transformers_in_bfloat16(
    name: str, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = their_points(model_of(name), torch.bfloat16, random_tokens(), monkeypatch)
    exact = from_captured_inputs(
        ReferenceModel.from_directory(model_of(name), torch.float64), theirs, FULL
    )
    rough = from_captured_inputs(
        ReferenceModel.from_directory(model_of(name)), theirs, Precision.all_in(torch.bfloat16)
    )
    ratios = {
        point: rms(rough[point] - exact[point]) / rms(theirs[point] - exact[point])
        for point in exact
    }
    low, high = min(ratios.values()), max(ratios.values())
    print(f"{name}: error over transformers' {low:.3f} to {high:.3f} at {len(ratios)} points")
    outside = {point: ratio for point, ratio in ratios.items() if not 0.8 <= ratio <= 1.3}
    assert not outside


@pytest.mark.parametrize("name", [name for name in MODELS if "moe" not in name])
def test_whole_low_precision_model_loses_as_much_as_transformers(
    name: str, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # without routing, whose flips make one run's error incomparable with another's
    tokens = random_tokens()
    theirs = their_points(model_of(name), torch.bfloat16, tokens, monkeypatch)["logprob"]
    exact = scores(ReferenceModel.from_directory(model_of(name), torch.float64), tokens)
    rough = scores(
        ReferenceModel.from_directory(model_of(name)), tokens, Precision.all_in(torch.bfloat16)
    )
    ratio = rms(rough - exact) / rms(theirs - exact)
    print(f"{name}: {rms(theirs - exact):.4f} nat, ratio {ratio:.2f}")
    assert 0.8 <= ratio <= 1.3


def scores(
    model: ReferenceModel, tokens: torch.Tensor, precision: Precision = FULL
) -> torch.Tensor:
    return model.tail(
        0,
        model.embed(tokens, precision=precision),
        positions(),
        LENGTHS,
        next_tokens(tokens),
        precision=precision,
    )


@pytest.mark.parametrize("name", ["qwen3-moe-some-dense", "llama"])
def test_a_tail_from_any_boundary_gives_the_same_scores(
    name: str, model_of: Callable[[str], Path]
) -> None:
    tokens = random_tokens()
    model = ReferenceModel.from_directory(model_of(name), torch.float64)
    points = our_points(model, tokens)
    for index in range(4):
        x = points[f"layers.{index}.input" if index < 3 else "layers.2.output"]
        calls: list[tuple[int, int]] = []

        def progress(done: int, todo: int, calls: list[tuple[int, int]] = calls) -> None:
            calls.append((done, todo))

        tail = model.tail(index, x, positions(), LENGTHS, next_tokens(tokens), progress=progress)
        torch.testing.assert_close(tail, points["logprob"], equal_nan=True, rtol=0, atol=1e-12)
        assert calls == [(done + 1, 3 - index) for done in range(3 - index)]
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    assert tail.isnan().nonzero()[:, 0].tolist() == ends.tolist()


def test_a_layer_keeps_only_the_points_wanted(model_of: Callable[[str], Path]) -> None:
    model = ReferenceModel.from_directory(model_of("qwen3-moe-some-dense"))
    x = model.embed(random_tokens())
    wanted = model.layer(0, x, positions(), LENGTHS, want=("mid", "mlp.expert_ids"))
    assert list(wanted) == ["mid", "mlp.expert_ids"]
    assert wanted["mlp.expert_ids"].dtype == torch.int64
    assert "mlp.router_logits" not in model.layer(1, x, positions(), LENGTHS)


@pytest.mark.parametrize("name", ["llama-bias-linear-rope", "qwen3-tied-bias-yarn"])
def test_queries_can_be_taken_apart(name: str, model_of: Callable[[str], Path]) -> None:
    model = ReferenceModel.from_directory(model_of(name), torch.float64)
    normed = model.attn_norm(1, model.embed(random_tokens()))
    q, k, v = model.qkv(1, normed, positions())
    raw_q, raw_k, raw_v = model.qkv_raw(1, normed)
    assert torch.equal(raw_v, v)
    before = model.qk_norm(1, raw_q, raw_k)
    for turned, unturned in zip((q, k), before, strict=True):
        torch.testing.assert_close(model.rotate(turned, positions(), inverse=True), unturned)
        torch.testing.assert_close(model.rotate(unturned, positions()), turned)


def test_low_precision_inputs_are_taken_as_they_are(model_of: Callable[[str], Path]) -> None:
    model = ReferenceModel.from_directory(model_of("llama"))
    x = model.embed(random_tokens())
    assert x.dtype == torch.float32
    assert torch.equal(model.attn_norm(0, x.bfloat16()), model.attn_norm(0, x))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_rounds_its_own_points_first(kind: str, model_of: Callable[[str], Path]) -> None:
    first = {
        "norm": "attn.norm",
        "residual": "mid",
        "linear": "attn.q",
        "attention": "attn.q",
        "router": "mlp.router_logits",
        "experts": "mlp.out",
        "head": "logprob",
    }[kind]
    model = ReferenceModel.from_directory(model_of("qwen3-moe"))
    tokens, precision = random_tokens(), Precision.only(kind, torch.bfloat16)
    x = model.embed(tokens, precision=precision)
    exact = model.layer(0, x, positions(), LENGTHS)
    rough = model.layer(0, x, positions(), LENGTHS, precision=precision)
    for layer, used in ((exact, FULL), (rough, precision)):
        layer["logprob"] = model.logprobs(x, next_tokens(tokens).clamp(min=0), precision=used)
    changed = [point for point in exact if not torch.equal(exact[point], rough[point])]
    assert changed[0] == first
    # values are projected from the norm, and neither rotated nor attended yet
    assert ("attn.v" in changed) == (kind in ("norm", "linear"))


def test_wrong_arguments_are_named(model_of: Callable[[str], Path]) -> None:
    model = ReferenceModel.from_directory(model_of("qwen3-moe-some-dense"))
    tokens = random_tokens()
    x, targets = model.embed(tokens), next_tokens(tokens)
    with pytest.raises(ValueError, match=r"layer must lie in 0\.\.3, got 4"):
        model.tail(4, x, positions(), LENGTHS, targets)
    with pytest.raises(ValueError, match=r"layer must lie in 0\.\.2, got -1"):
        model.layer(-1, x, positions(), LENGTHS)
    with pytest.raises(ValueError, match=r"layer must lie in 0\.\.2, got -1"):
        model.attention(-1, *model.qkv(0, x, positions()), LENGTHS)
    with pytest.raises(ValueError, match="lengths must add up to the 102 rows"):
        model.layer(0, x, positions(), [101])
    with pytest.raises(ValueError, match="layer 1 is dense"):
        model.router_logits(1, x)
    with pytest.raises(ValueError, match="layer 1 is dense"):
        model.mlp(1, x, torch.zeros(102, 3), torch.zeros(102, 3))
    with pytest.raises(ValueError, match="give ids and weights together"):
        model.mlp(0, x, torch.zeros(102, 3))
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.210, got 3 to 211"):
        model.embed(torch.tensor([3, 211]))


def test_the_reference_owes_nothing_to_the_engines() -> None:
    blocked = "import sys\nfor name in ('transformers', 'sglang', 'triton', 'megatron'):\n"
    blocked += "    sys.modules[name] = None\n"
    code = blocked + "import layerbisect.bisect.reference"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
