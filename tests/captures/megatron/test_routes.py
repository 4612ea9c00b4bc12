"""A real Megatron-core router on the CPU chooses the experts that it is told."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.routes import forced_router
from layerbisect.captures.routes import Choice
from tests.captures.megatron.calling import megatron_core

SEQUENCE, BATCH, HIDDEN, EXPERTS, SLOTS = 60, 2, 16, 16, 6
ROWS = SEQUENCE * BATCH
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax after top-k": {},
    "softmax before top-k": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid with bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 1.5,
    },
    "float32 router": {"moe_router_dtype": "fp32"},
    "groups": {
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 2,
    },
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    megatron_core()
    from megatron.core.transformer.moe import moe_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        # 0.16 asks whether this is None, but defines it only where TransformerEngine is there
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        yield


def router_of(**more: Any) -> Any:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=SLOTS,
        moe_ffn_hidden_size=HIDDEN,
        moe_router_load_balancing_type="none",
        params_dtype=torch.bfloat16,
        bf16=True,
        perform_initialization=False,
        add_bias_linear=False,
    )
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    with warnings.catch_warnings():
        # Megatron-core warns of its own defaults
        warnings.simplefilter("ignore")
        config = TransformerConfig(**(settings | more))
    router = TopKRouter(config, pg_collection=groups).eval()
    router.set_layer_number(1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.randn(EXPERTS, generator=generator))
    return router


def hidden() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).bfloat16()


@dataclass
class Told:
    """What a router must choose, and what became of it."""

    choice: Choice | None
    asked: list[int] = field(default_factory=list)
    done: list[Choice] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def look_up(self, rows: int) -> Choice | None:
        self.asked.append(rows)
        return self.choice

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as the recorder does
            self.errors.append(f"{what}: {error}")

    def __call__(self, router: Any, with_weights: bool = False) -> AbstractContextManager[None]:
        return forced_router(
            router,
            self.look_up,
            with_weights,
            guarded=self.guarded,
            forced=self.done.append,
        )


def route(router: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        probs, routed = router(hidden())
    return probs, routed


def choice_of(
    ids: torch.Tensor, found: torch.Tensor, weights: torch.Tensor | None = None
) -> Choice:
    kept = None if weights is None else weights.float().numpy()
    return Choice(found.numpy(), torch.where(found[:, None], ids, -1).numpy(), kept)


def everywhere() -> torch.Tensor:
    return torch.ones(ROWS, dtype=torch.bool)


def some_experts(slots: int) -> torch.Tensor:
    """Experts that the router chooses in hardly any row, in no order."""
    generator = torch.Generator().manual_seed(2)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:slots] for _ in range(ROWS)])


def ids_of(routed: torch.Tensor) -> torch.Tensor:
    return routed.nonzero()[:, 1].reshape(ROWS, -1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_its_own_routes_change_no_bit(variant: str, grad: bool) -> None:
    router = router_of(**VARIANTS[variant])
    with torch.set_grad_enabled(grad):
        probs, routed = router(hidden())
        ids = ids_of(routed)
        told = Told(choice_of(ids.flip(1), everywhere()))
        with told(router):
            forced = router(hidden())
        weights = probs.gather(1, ids)
        weighted = Told(choice_of(ids.flip(1), everywhere(), weights.detach().flip(1)))
        with weighted(router, True):
            wide = router(hidden())
    assert torch.equal(forced[0], probs) and torch.equal(forced[1], routed)
    assert forced[0].dtype == probs.dtype
    assert torch.equal(wide[0], probs.float()) and torch.equal(wide[1], routed)
    assert len(told.done) == len(weighted.done) == 1 and told.asked == [ROWS]
    assert told.errors == weighted.errors == []


def reference(variant: str, logits: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """The weights in float64 that a router gives to experts, by the formula of its variant."""
    if variant.startswith("sigmoid"):
        scores = logits.double().sigmoid().gather(1, ids)
        scores = scores / scores.sum(-1, keepdim=True)
    elif variant in ("softmax before top-k", "groups"):
        scores = logits.double().softmax(-1).gather(1, ids)
    else:
        scores = logits.double().gather(1, ids).softmax(-1)
    return scores * scale


@pytest.mark.parametrize("variant", VARIANTS)
def test_given_experts_get_the_weights_that_this_router_gives_them(variant: str) -> None:
    router = router_of(**VARIANTS[variant])
    own_probs, own_routed = route(router)
    ids = some_experts(router.topk)
    found = torch.arange(ROWS) % 3 != 1
    told = Told(choice_of(ids, found))
    with told(router):
        probs, routed = route(router)
    assert told.errors == [] and len(told.done) == 1
    assert torch.equal(ids_of(routed)[found], ids.sort(-1).values[found])
    assert not torch.equal(own_routed[found], routed[found])
    assert torch.equal(probs[~found], own_probs[~found])
    assert torch.equal(routed[~found], own_routed[~found])
    with torch.no_grad():
        logits = router.gating(hidden()).reshape(ROWS, EXPERTS)
    scale = router.config.moe_router_topk_scaling_factor or 1.0
    expected = reference(variant, logits, ids, scale)
    error = (probs.gather(1, ids).double() - expected)[found].abs().max()
    # 0.16 rounds scores, sum and scaled weight to the router's dtype one after the other
    rounding = 3 * torch.finfo(probs.dtype).eps * scale
    assert error < rounding
    assert not probs[~routed].any()


@pytest.mark.parametrize("variant", ["softmax after top-k", "sigmoid", "float32 router"])
def test_given_experts_get_the_bits_that_choosing_them_would_give(variant: str) -> None:
    router = router_of(**VARIANTS[variant])
    ids, own = some_experts(SLOTS), router.gating

    def others_out(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = own(hidden)
        kept = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, ids, True)
        return logits.masked_fill(~kept.view(logits.shape), -torch.inf)

    # with gradients 0.19 sorts what it chooses, too
    told = Told(choice_of(ids, everywhere()))
    with told(router):
        probs, routed = router(hidden())
    router.gating = others_out
    expected = router(hidden())
    assert torch.equal(probs, expected[0]) and torch.equal(routed, expected[1])


def test_given_weights_are_used_to_the_bit() -> None:
    router = router_of()
    ids, found = some_experts(SLOTS), torch.arange(ROWS) != 4
    weights = torch.rand(ROWS, SLOTS, generator=torch.Generator().manual_seed(3))
    told = Told(choice_of(ids, found, weights))
    own_probs, own_routed = route(router)
    with told(router, True):
        probs, routed = route(router)
    assert told.errors == []
    assert torch.equal(probs.gather(1, ids)[found], weights[found])
    assert torch.equal(probs != 0, routed)
    assert torch.equal(probs[4], own_probs[4].float()) and torch.equal(routed[4], own_routed[4])


def test_ranks_agree_on_the_dtype_whatever_rows_they_have() -> None:
    router = router_of()
    nothing = Choice(np.zeros(ROWS, bool), np.empty((ROWS, 0), np.int64), None)
    for choice in (nothing, None):
        told = Told(choice)
        own_probs, own_routed = route(router)
        with told(router, True):
            probs, routed = route(router)
        assert torch.equal(probs, own_probs.float()) and probs.dtype == torch.float32
        assert torch.equal(routed, own_routed) and not told.done
        with told(router):
            probs, routed = route(router)
        assert torch.equal(probs, own_probs) and probs.dtype == torch.bfloat16


def test_the_router_is_itself_again() -> None:
    router = router_of()
    before, told = route(router), Told(choice_of(some_experts(SLOTS), everywhere()))
    with told(router):
        assert not torch.equal(route(router)[1], before[1])
    with pytest.raises(RuntimeError, match="stop"), told(router):
        router.gating = _stop
        try:
            route(router)
        finally:
            del router.gating
    after = route(router)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    assert "routing" not in vars(router) and router.router_replay is None


def _stop(*_: Any) -> None:
    raise RuntimeError("stop")


def test_megatrons_own_replay_goes_on_where_nothing_is_forced() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    router = router_of(moe_enable_routing_replay=True)
    try:
        replayed, ids = some_experts(SLOTS).flip(0), some_experts(SLOTS)
        router.router_replay.set_target_indices(replayed)
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        found = torch.arange(ROWS) < 5
        mine = router.router_replay
        told = Told(choice_of(ids, found))
        with told(router):
            _, routed = route(router)
        expected = torch.where(found[:, None], ids, replayed).sort(-1).values
        assert torch.equal(ids_of(routed), expected) and told.errors == []
        assert router.router_replay is mine
    finally:
        RouterReplay.clear_global_router_replay_instances()


@pytest.mark.parametrize(
    "ids, said",
    [
        (torch.zeros(ROWS, 2, dtype=torch.int64), "name 2 experts a row where this router"),
        (torch.tensor([[0, 1, 2, 3, 4, EXPERTS]] * ROWS), "name expert 16 of 16"),
        (torch.tensor([[0, 1, 2, 3, 4, 4]] * ROWS), "name an expert twice"),
    ],
)
def test_routes_that_do_not_fit_are_told_and_not_used(ids: torch.Tensor, said: str) -> None:
    router, told = router_of(), Told(choice_of(ids, everywhere()))
    before = route(router)
    with told(router):
        after = route(router)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    assert said in told.errors[0] and told.errors[0].startswith("forcing the routes of layer 1,")
    assert told.done == []


def test_a_router_that_chooses_without_asking_is_told() -> None:
    router = router_of()
    own = type(router).routing

    def elsewhere(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        router.router_replay, before = None, router.router_replay
        try:
            return own(router, logits, *args, **kwargs)
        finally:
            router.router_replay = before

    router.routing = elsewhere
    told = Told(choice_of(some_experts(SLOTS), everywhere()))
    with told(router):
        route(router)
    assert "does not ask its router_replay" in told.errors[0] and told.done == []


def test_a_router_that_cannot_be_told_is_refused() -> None:
    told = Told(None)
    for name, value in {"moe_router_fusion": True, "moe_expert_capacity_factor": 1.0}.items():
        router = router_of()
        setattr(router.config, name, value)
        with pytest.raises(LayerBisectError, match=f"with {name}={value}: "):
            told(router)
    router = router_of(moe_router_load_balancing_type="sinkhorn")
    with pytest.raises(LayerBisectError, match="moe_router_load_balancing_type='sinkhorn'"):
        told(router)
    router = router_of()
    del router.router_replay
    with pytest.raises(LayerBisectError, match="Megatron-core 0.16 or later"):
        told(router)
