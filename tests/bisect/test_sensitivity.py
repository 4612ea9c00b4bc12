"""A verdict says the smallest fault that it could have seen, and is right in that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.bundles import open_side
from layerbisect.bisect.ends import end_errors
from layerbisect.bisect.locate import bisect
from layerbisect.bisect.own_error import own_errors
from layerbisect.bisect.sensitivity import smallest_faults
from layerbisect.captures.attention_seam import replaced
from layerbisect.captures.store import Capture
from layerbisect.fault_tools import forward_replaced
from layerbisect.kernels.judging.own_error import OwnError
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine, random_tokens

Plant = Callable[[Any, int, float], AbstractContextManager[None]]
TOKENS = random_tokens(512, [48, 48, 48])
LAYERS = (0, 1, 3)


def _linear(model: Any, layer: int, factor: float) -> AbstractContextManager[None]:
    return _projected(model.model.layers[layer].self_attn.o_proj, factor)


def _head(model: Any, layer: int, factor: float) -> AbstractContextManager[None]:
    return _projected(model.lm_head, factor)


def _projected(module: Any, factor: float) -> AbstractContextManager[None]:
    def forward(own: Any, x: Any) -> Any:
        return (torch.nn.functional.linear(x.double(), module.weight.double()) * factor).to(x.dtype)

    return forward_replaced(module, forward)


def _attention(model: Any, layer: int, factor: float) -> AbstractContextManager[None]:
    def attend(own: Any, module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out, chances = own(module, q.double(), k.double(), v.double(), *args, **kwargs)
        return (out * factor).to(q.dtype), chances

    return replaced(model.model.layers[layer].self_attn, attend)


def _experts(model: Any, layer: int, factor: float) -> AbstractContextManager[None]:
    experts = model.model.layers[layer].mlp.experts
    exact = copy.deepcopy(experts).double()

    def forward(own: Any, x: Any, ids: Any, weights: Any) -> Any:
        return (exact(x.double(), ids, weights.double()) * factor).to(x.dtype)

    return forward_replaced(experts, forward)


def _norm(model: Any, layer: int, factor: float) -> AbstractContextManager[None]:
    norm = model.model.layers[layer].post_attention_layernorm

    def forward(own: Any, x: Any) -> Any:
        x64 = x.double()
        size = (x64.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return (norm.weight.double() * x64 * size * factor).to(x.dtype)

    return forward_replaced(norm, forward)


PLANTS: dict[str, Plant] = {
    "attn.context": _attention,
    "attn.out": _linear,
    "mlp.norm": _norm,
    "mlp.out": _experts,
    "logprob": _head,
}


class Bench:
    """One engine, and what is judged of it with nothing planted."""

    def __init__(self, model: Path, dtype: str, folder: Path) -> None:
        self.directory, self.folder = model, folder
        self.engine = Engine.load(model, "rollout", dtype=dtype)
        self.clean = self.judged()

    def judged(self) -> dict[str, OwnError]:
        captured = self.engine.capture(self.folder / "captured", TOKENS)
        try:
            model, side = open_side(Capture.open(captured), self.directory)
            errors = own_errors(model, side, range(model.config.num_layers))
            return {e.point: e for e in (*errors, *end_errors(model, side))}
        finally:
            captured.rename(self.folder / f"captured-{len(list(self.folder.iterdir()))}")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def bench(
    request: pytest.FixtureRequest, small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    return Bench(small_moe_dir, request.param, tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize(
    ("share", "seen"), [(1.5, True), (-2.0, True), (0.25, False), (-0.25, False)]
)
def test_what_is_said_to_be_seen_is_seen_and_a_quarter_is_not(
    bench: Bench, share: float, seen: bool
) -> None:
    planted = {f"layers.{at}.{p}": (p, at) for at in LAYERS for p in PLANTS if p != "logprob"}
    planted["logprob"] = ("logprob", 0)
    assert not [point for point, e in bench.clean.items() if e.convicted]
    with ExitStack() as stack:
        # all at once: each operator is judged on its own input, whatever erred before it
        for name, (suffix, layer) in planted.items():
            said = bench.clean[name].smallest_gain
            assert said is not None
            stack.enter_context(PLANTS[suffix](bench.engine.model, layer, 1 + share * said))
        found = bench.judged()
    convicted = {point for point, e in found.items() if e.convicted}
    assert convicted == (planted.keys() if seen else set())


def test_every_operator_says_it_but_choices_and_copies(bench: Bench) -> None:
    unsaid = {point.split(".", 2)[-1] for point, e in bench.clean.items() if not e.smallest_gain}
    assert unsaid == {"mlp.expert_ids"}
    coarsest = max(e.smallest_gain for e in bench.clean.values() if e.smallest_gain)
    # a gain of half a step of bfloat16 is what rounding takes back of a lookup
    assert coarsest <= (2**-8 if bench.engine.model.dtype == torch.bfloat16 else 1e-5)


def test_the_worst_layer_stands_for_an_operator(bench: Bench) -> None:
    errors = list(bench.clean.values())
    found = {one.operator: one for one in smallest_faults({"rollout": errors})}
    assert found.keys() == {
        "embedding", "norm", "linear", "attention", "residual", "router", "experts", "head",
    }  # fmt: skip
    linear = [e for e in errors if e.operator == "linear" and e.smallest_gain]
    worst = max(linear, key=lambda e: e.smallest_gain or 0.0)
    one = found["linear"]
    assert (one.gain, one.point, one.layer) == (worst.smallest_gain, worst.point, worst.layer)
    assert (one.layers, one.side, one.of) == (4, "rollout", "output")
    head = found["head"]
    assert (head.layer, head.layers, head.of) == (None, 0, "logits")


def test_of_a_side_that_errs_only_what_was_acquitted_is_told(clean: Clean, tmp_path: Path) -> None:
    faulty = clean.engines["rollout"].capture(
        tmp_path / "faulty", clean.tokens, faults=[("softmax-scale", 1)]
    )
    verdict = bisect(faulty, clean.trainer, model=clean.model)
    layers = {one.side: one.layers for one in verdict.sensitivity if one.operator == "attention"}
    assert layers == {"rollout": 3, "trainer": 4}
    (attention,) = [
        one for one in verdict.to_json()["sensitivity"]
        if (one["operator"], one["side"]) == ("attention", "rollout")
    ]  # fmt: skip
    assert attention.keys() == {"operator", "side", "of", "gain", "point", "layer", "layers"}


def test_stretches_of_several_operators_are_told_by_their_size(
    clean: Clean, tmp_path: Path
) -> None:
    made = [
        engine.capture(tmp_path / label, clean.tokens, points="coarse")
        for label, engine in clean.engines.items()
    ]
    verdict = bisect(*made, model=clean.model)
    whole = [one for one in verdict.sensitivity if one.operator is None]
    assert [one.side for one in whole] == ["rollout", "trainer"]
    fine = max(e.gain for e in bisect(clean.rollout, clean.trainer, model=clean.model).sensitivity)
    assert all(one.layers == 4 and one.gain > fine for one in whole)
