"""A frozen forward against the training forward of the same module, on real transformers models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.training_forward import compare_training
from layerbisect.bisect.training_report import TrainingVerdict
from layerbisect.captures.capture import capture
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from layerbisect.models import make_tiny

VOCAB, LENGTH, LAYERS = 128, 16, 3
HOOKS = {"use_reentrant": False}
ANEW = {"use_reentrant": False, "preserve_rng_state": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = dict(
        layers=LAYERS, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=VOCAB
    )
    return {
        "dense": make_tiny(folder / "dense", "qwen3", **sizes),
        "moe": make_tiny(folder / "moe", "qwen3_moe", experts=8, top_k=2, **sizes),
    }


class Lab:
    """One model, and captures of it."""

    def __init__(self, model: Any, work: Path) -> None:
        self.model, self._work, self._count = model, work, 0
        self.ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)

    def frozen(self, points: str = "all", **options: Any) -> Path:
        self.model.eval()
        with torch.no_grad():
            return self._capture(points, "frozen", **options)

    def training(self, points: str = "all", again: dict[str, Any] | None = None) -> Path:
        self.model.train()
        if again is not None:
            self.model.gradient_checkpointing_enable(again)
        return self._capture(points, "training")

    def _capture(self, points: str, label: str, ids: torch.Tensor | None = None) -> Path:
        self._count += 1
        directory = self._work / f"{label}-{self._count}"
        ids = self.ids if ids is None else ids
        with capture(self.model, directory, points=points, label=label):
            logits = self.model(input_ids=ids, use_cache=False).logits
            if torch.is_grad_enabled():
                scores = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
                torch.autograd.backward(-scores.mean())
        return directory

    def drop(self, p: float) -> None:
        for layer in self.model.model.layers:
            layer.self_attn.attention_dropout = p


MakeLab = Callable[..., Lab]


@pytest.fixture
def lab(folders: dict[str, Path], tmp_path: Path) -> Iterator[MakeLab]:
    def make(family: str = "moe", attention: str = "sdpa") -> Lab:
        return Lab(load_model(folders[family], attention=attention), tmp_path)

    yield make


def kinds(verdict: TrainingVerdict) -> list[str]:
    return [cause.kind for cause in verdict.causes]


@pytest.mark.parametrize("again", [None, HOOKS], ids=["kept", "recomputed"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_a_clean_training_forward_repeats_the_frozen_one(
    family: str, attention: str, again: dict[str, Any] | None, lab: MakeLab
) -> None:
    one = lab(family, attention)
    verdict = compare_training(one.frozen(), one.training(again=again), recompute=again is not None)
    assert verdict and verdict.exit_code == 0
    assert verdict.first is None and verdict.causes == () and verdict.points == ()
    assert verdict.gap is not None and verdict.gap.max == 0
    assert verdict.gap.rows == 2 * (LENGTH - 1)
    assert verdict.recomputed.seen == (again is not None)
    assert not verdict.recomputed.differing and verdict.coverage.points.missing == ()
    assert verdict.mode is not None and verdict.mode.training and not verdict.mode.dropout


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_kernel_with_gradients_is_rounding(
    dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    frozen, training = (
        Lab(load_model(folders["moe"], attention=attention, dtype=dtype), tmp_path / attention)
        for attention in ("sdpa", "eager")
    )
    verdict = compare_training(frozen.frozen(), training.training())
    assert verdict.status == "agree" and set(kinds(verdict)) == {"rounding"}
    assert verdict.first is not None and verdict.first.point == "layers.0.attn.context"
    assert verdict.gap is not None and verdict.gap.mae > 0
    assert "rounding alone" in verdict.next


@pytest.mark.parametrize("points", ["all", "coarse"])
def test_dropout_is_named_where_it_is_active(points: str, lab: MakeLab) -> None:
    one = lab("dense")
    one.drop(0.1)
    verdict = compare_training(one.frozen(points), one.training(points))
    assert verdict.status == "divergent" and verdict.exit_code == 1
    (cause,) = verdict.causes
    where = "layers.0.attn.context" if points == "all" else "layers.1.input"
    assert (cause.kind, cause.point) == ("dropout", where)
    assert cause.modules == ("model.layers.0.self_attn",)
    assert verdict.mode is not None and len(verdict.mode.dropout) == LAYERS
    assert "model.layers.0.self_attn" in verdict.next


def test_a_dropout_module_of_a_later_layer_is_named_behind_rounding(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    frozen = Lab(load_model(folders["dense"], attention="sdpa"), tmp_path / "a")
    training = Lab(load_model(folders["dense"], attention="eager"), tmp_path / "b")
    norm = training.model.model.layers[2].mlp.down_proj
    training.model.model.layers[2].mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.3), norm)
    verdict = compare_training(frozen.frozen(), training.training())
    assert verdict.status == "divergent" and kinds(verdict) == ["rounding", "dropout"]
    assert verdict.causes[1].point == "layers.2.mlp.out"
    assert verdict.causes[1].modules == ("model.layers.2.mlp.down_proj.0",)


def test_recomputation_with_its_random_state_is_clean_and_without_is_named(lab: MakeLab) -> None:
    one = lab()
    one.drop(0.1)
    frozen = one.frozen()
    restored = compare_training(frozen, one.training(again=HOOKS), recompute=True)
    assert restored.status == "divergent" and kinds(restored) == ["dropout"]
    assert restored.recomputed.inner and not restored.recomputed.differing
    anew = compare_training(frozen, one.training(again=ANEW), recompute=True).recomputed
    assert anew.wrong and anew.differing[0].point == "layers.0.attn.context"
    assert [cause.point for cause in anew.causes] == [
        f"layers.{n}.attn.context" for n in range(LAYERS)
    ]
    assert all("random state was not restored" in cause.sentence for cause in anew.causes)


def test_recomputation_that_computes_otherwise_is_found_where_the_forwards_agree(
    lab: MakeLab,
) -> None:
    one = lab("dense")
    frozen = one.frozen()
    calls = []

    def second_time(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        return output * 1.5 if len(calls) > 1 else None

    one.model.model.layers[1].self_attn.v_proj.register_forward_hook(second_time)
    verdict = compare_training(frozen, one.training(again=HOOKS))
    assert verdict.first is None and verdict.status == "divergent"
    (cause,) = verdict.recomputed.causes
    assert (cause.kind, cause.point) == ("numerics", "layers.1.attn.v")


def test_a_routers_jitter_is_the_routers_own(lab: MakeLab) -> None:
    one = lab()
    frozen = one.frozen()

    def jitter(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        noise = 0.02 * (2 * torch.rand_like(args[0]) - 1)
        return (args[0] * (1 + noise),) if module.training else None

    one.model.model.layers[1].mlp.gate.register_forward_pre_hook(jitter)
    verdict = compare_training(frozen, one.training(again=ANEW))
    assert verdict.status == "divergent"
    assert (verdict.causes[0].kind, verdict.causes[0].point) == (
        "routing",
        "layers.1.mlp.router_logits",
    )
    assert "router of layers.1" in verdict.reasons[0]
    origin = next(origin for origin in verdict.routing if origin.layer == 1)
    assert origin.logits_size is not None and origin.logits == origin.flips
    last = next(origin for origin in verdict.routing if origin.layer == 2)
    assert last.flips == last.inherited
    assert verdict.recomputed.causes[0].kind == "routing"


def test_a_choice_by_equal_logits_is_told_from_logits(lab: MakeLab) -> None:
    one = lab()
    frozen = one.frozen()

    def other(module: Any, args: Any, output: Any) -> Any:
        logits, weights, ids = output
        return (logits, weights, (ids + 1) % 8) if module.training else None

    one.model.model.layers[0].mlp.gate.register_forward_hook(other)
    verdict = compare_training(frozen, one.training())
    assert verdict.status == "divergent" and kinds(verdict)[0] == "routing"
    assert verdict.causes[0].point == "layers.0.mlp.expert_ids"
    assert verdict.routing[0].choice == verdict.routing[0].flips == 2 * LENGTH
    assert "equal logits" in verdict.causes[0].sentence
    assert "bias" in verdict.reasons[0]


def test_what_nothing_explains_is_numerics(lab: MakeLab) -> None:
    one = lab("dense")
    frozen = one.frozen()
    one.model.model.layers[1].self_attn.o_proj.register_forward_hook(
        lambda module, args, output: output * 1.05 if module.training else None
    )
    verdict = compare_training(frozen, one.training())
    assert verdict.status == "divergent" and kinds(verdict) == ["numerics"]
    assert verdict.causes[0].point == "layers.1.attn.out"
    assert "layers.1.attn.out" in verdict.next


def test_what_cannot_be_judged_says_why(lab: MakeLab) -> None:
    one = lab("dense")
    frozen, training = one.frozen(), one.training()

    def reasons(*sides: Path, **options: Any) -> tuple[str, ...]:
        verdict = compare_training(*sides, **options)
        assert verdict.status == "inconclusive" and verdict.exit_code == 2
        return verdict.reasons

    assert "without gradients" in reasons(frozen, one.frozen())[0]
    assert "no recomputation was seen" in reasons(frozen, training, recompute=True)[0]
    short = one.frozen(ids=one.ids[:1, :4])
    assert "only 4 rows" in reasons(short, training)[0]
    assert "no point" in reasons(one.frozen("embed"), one.training("final_norm"))[0]
    coarse = reasons(one.frozen("coarse"), one.training("coarse", HOOKS), recompute=True)
    assert "inputs alone" in coarse[0]
    with torch.no_grad():
        one.model.lm_head.weight.mul_(2)
    assert "lm_head.weight first" in reasons(frozen, one.training())[0]
    with pytest.raises(LayerBisectError, match="different tokens"):
        compare_training(one.frozen(ids=(one.ids + 1) % VOCAB), training)


def test_a_frozen_forward_that_drops_is_not_frozen(lab: MakeLab) -> None:
    one = lab("dense")
    one.drop(0.1)
    one.model.train()
    with torch.no_grad():
        frozen = one._capture("all", "frozen")
    verdict = compare_training(frozen, one.training())
    assert verdict.status == "inconclusive" and "model.eval()" in verdict.reasons[0]


def test_notes_say_what_could_not_show(lab: MakeLab) -> None:
    one = lab("dense")
    frozen = one.frozen()
    one.model.gradient_checkpointing_enable(HOOKS)
    one.model.train()
    directory = one._work / "forward-only"
    with capture(one.model, directory, points="all"):
        one.model(input_ids=one.ids, use_cache=False)
    verdict = compare_training(frozen, directory)
    assert verdict and "nothing that was computed again" in verdict.coverage.notes[0]
    one.model.eval()
    verdict = compare_training(frozen, one._capture("all", "eval"))
    assert verdict and "eval mode" in verdict.coverage.notes[0]


def test_json_is_whole_and_strict(lab: MakeLab) -> None:
    one = lab()
    one.drop(0.1)
    verdict = compare_training(Capture.open(one.frozen()), one.training(again=ANEW))
    data = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert data["schema"] == 1 and data["status"] == "divergent"
    assert data["labels"] == ["frozen", "training"]
    assert data["causes"][0]["modules"] == ["model.layers.0.self_attn"]
    assert data["recomputed"]["causes"][0]["kind"] == "dropout"
    assert data["mode"]["dropout"][0] == {
        "module": "model.layers.0.self_attn",
        "p": 0.1,
        "point": "layers.0.attn.context",
    }
