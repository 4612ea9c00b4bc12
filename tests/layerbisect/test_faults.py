"""Each planted fault changes the point that it says, none before it, and nothing afterwards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from layerbisect.captures.capture import capture
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.points import parse
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.store import Capture
from layerbisect.faults import FAULTS, plant

LAYERS, VOCAB, LENGTH = 4, 512, 24
NAMES = (
    "norm-eps norm-weight qk-norm-skipped rope-base rope-shifted softmax-scale mask-off-by-one "
    "kv-heads-regrouped o-proj-permuted residual-dropped router-low-precision "
    "top-k-not-renormalised experts-swapped gate-up-swapped final-norm-weight head-scaled"
).split()
NEEDS_EXPERTS = {"router-low-precision", "top-k-not-renormalised", "experts-swapped"}
CHANGES_A_PARAMETER = {"norm-weight"}


class Subject:
    """A model in float32, in which any change shows, with what it computes when it is right."""

    def __init__(self, directory: Path, implementation: str, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=implementation
        ).eval()
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        self.parameters = {name: p.clone() for name, p in self.model.named_parameters()}
        self.right = self.captured(folder / "right")

    def captured(self, directory: Path) -> Capture:
        with torch.no_grad(), capture(self.model, directory, points="all,logits"):
            self.model(input_ids=self.ids, use_cache=False)
        return Capture.open(directory)

    def wrong_points(self, taken: Capture) -> list[str]:
        return [
            point
            for point in self.right.points
            if not np.array_equal(self.right.read(point), taken.read(point))
        ]

    def changed_parameters(self) -> list[str]:
        now = self.model.named_parameters()
        return [name for name, p in now if not torch.equal(p, self.parameters[name])]


def _subject(family: str, implementation: str, request: Any, factory: Any) -> Subject:
    directory = request.getfixturevalue(f"small_{family}_dir")
    return Subject(directory, implementation, factory.mktemp("right"))


@pytest.fixture(scope="module", params=["moe", "qwen3", "llama"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    yield _subject(request.param, "sdpa", request, tmp_path_factory)


@pytest.fixture(scope="module")
def eager(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    yield _subject("moe", "eager", request, tmp_path_factory)


def test_the_faults_are_those_that_the_demo_names() -> None:
    assert list(FAULTS) == NAMES
    whole_model = {name for name, fault in FAULTS.items() if not fault.per_layer}
    assert whole_model == {"final-norm-weight", "head-scaled"}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_changes_its_point_and_none_before(
    name: str, subject: Subject, tmp_path: Path
) -> None:
    fault, family = FAULTS[name], subject.model.config.model_type
    if family != "qwen3_moe" and name in NEEDS_EXPERTS:
        with pytest.raises(LayerBisectError, match="needs a layer with experts"):
            plant(subject.model, name, 0).__enter__()
        return
    if fault.needs_qk_norm and family == "llama":
        with pytest.raises(LayerBisectError, match="needs a model with q/k norms"):
            plant(subject.model, name, 0).__enter__()
        return
    for layer in (0, 2, LAYERS - 1):
        with plant(subject.model, name, layer) as truth:
            taken = subject.captured(tmp_path / f"{layer}")
            assert bool(subject.changed_parameters()) == (name in CHANGES_A_PARAMETER)
        wrong = subject.wrong_points(taken)
        # points are in the order of computation
        assert wrong[0] == truth.point
        assert parse(wrong[0]).layer == truth.layer == (layer if fault.per_layer else None)
        assert not np.array_equal(taken.scores.logprob, subject.right.scores.logprob)
        dense = fault.dense if family != "qwen3_moe" else fault.operator
        assert truth.operator == dense
        if not fault.per_layer:
            break
    # nothing is left of it
    assert not subject.changed_parameters()
    assert not subject.wrong_points(subject.captured(tmp_path / "after"))
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)


@pytest.mark.parametrize("name", ["softmax-scale", "mask-off-by-one", "kv-heads-regrouped"])
def test_attention_faults_under_eager_attention(name: str, eager: Subject, tmp_path: Path) -> None:
    with plant(eager.model, name, 1) as truth:
        wrong = eager.wrong_points(eager.captured(tmp_path / "c"))
    assert wrong[0] == truth.point == "layers.1.attn.context"


def _attend(taken: Capture, layer: int, hidden: torch.Tensor, group: Any) -> torch.Tensor:
    """Attention over captured q, k, v of the first sequence; ``hidden`` bool [query, key]."""
    q, k, v = (
        torch.from_numpy(taken.read(f"layers.{layer}.attn.{p}", np.arange(LENGTH))).transpose(0, 1)
        for p in "qkv"
    )
    k, v = k[group], v[group]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    context: torch.Tensor = scores.softmax(-1) @ v
    return context.transpose(0, 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_the_attention_faults_compute(
    implementation: str, request: pytest.FixtureRequest, eager: Subject, tmp_path: Path
) -> None:
    model = eager.model
    model.set_attn_implementation(implementation)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    itself = torch.eye(LENGTH, dtype=torch.bool)
    itself[0, 0] = False
    own, other = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    cases = [("mask-off-by-one", future | itself, own), ("kv-heads-regrouped", future, other)]
    for name, hidden, group in cases:
        with plant(model, name, 2):
            taken = eager.captured(tmp_path / name)
        context = torch.from_numpy(taken.read("layers.2.attn.context", np.arange(LENGTH)))
        assert torch.allclose(context, _attend(taken, 2, hidden, group), atol=1e-5)
    model.set_attn_implementation("eager")


def test_a_shifted_rotation_leaves_keys_alone(eager: Subject, tmp_path: Path) -> None:
    with plant(eager.model, "rope-shifted", 1):
        wrong = eager.wrong_points(eager.captured(tmp_path / "c"))
    assert wrong[:2] == ["layers.1.attn.q", "layers.1.attn.context"]


@pytest.mark.parametrize("order", ["fault first", "capture first"])
def test_the_capture_sees_what_attention_is_given(
    order: str, eager: Subject, tmp_path: Path
) -> None:
    fault = plant(eager.model, "kv-heads-regrouped", 1)
    taking = capture(eager.model, tmp_path / "c", points="all,logits")
    outer, inner = (fault, taking) if order == "fault first" else (taking, fault)
    with torch.no_grad(), outer, inner:
        eager.model(input_ids=eager.ids, use_cache=False)
    assert eager.wrong_points(Capture.open(tmp_path / "c"))[0] == "layers.1.attn.context"


@pytest.mark.parametrize("name", NAMES)
def test_faults_are_there_when_decoding(name: str, eager: Subject, tmp_path: Path) -> None:
    tokens = eager.ids[:1].tolist()
    (right,) = decode_like_rollout(eager.model, tokens, [8])
    with plant(eager.model, name, 2):
        (wrong,) = decode_like_rollout(eager.model, tokens, [8])
        with torch.no_grad():
            logits = eager.model(input_ids=eager.ids[:1], use_cache=False).logits[0]
    assert np.abs(wrong - right).mean() > 1e-4
    # and it is the same fault as in one forward, for all but the token-by-token 8-bit scale
    if name != "router-low-precision":
        scores = torch.log_softmax(logits, -1)[7:-1].gather(-1, eager.ids[0, 8:, None])[:, 0]
        assert np.allclose(wrong, scores.numpy(), atol=2e-3)


def test_an_exception_takes_the_fault_back(eager: Subject, tmp_path: Path) -> None:
    for name in NAMES:
        with pytest.raises(RuntimeError), plant(eager.model, name, 0):
            raise RuntimeError
    assert not eager.wrong_points(eager.captured(tmp_path / "c"))


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("norm-epsilon", 0, "unknown fault 'norm-epsilon'; choose one of norm-eps, norm-weight"),
        ("norm-eps", 4, "norm-eps needs a layer from 0 to 3, got 4"),
        ("norm-eps", -1, "got -1"),
        ("norm-eps", None, "got None"),
    ],
)
def test_bad_arguments_are_refused(
    name: str, layer: int | None, message: str, eager: Subject
) -> None:
    with pytest.raises(LayerBisectError, match=message):
        plant(eager.model, name, layer).__enter__()
