"""Faults of attention and masks: where each begins, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.planted import attention, decode_attention, masks
from scripts.planted.fault import ModelFault
from tests.scripts.planted.checking import PROMPT, Checked, Layout, changed_rows, check_truth

FAULTS = (*attention.FAULTS, *decode_attention.FAULTS, *masks.FAULTS)
CONTROLS = (*attention.CONTROLS, *masks.CONTROLS)
BY_NAME = {fault.name: fault for fault in FAULTS}
LAYER = 1
POINT = f"layers.{LAYER}.attn.context"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_context_is_the_first_to_change(
    fault: ModelFault, moe: Checked, tmp_path: Path
) -> None:
    for seen in check_truth(moe, fault, LAYER, tmp_path).values():
        if fault.passes == "decode":
            assert seen.positions[seen.changed].min() >= PROMPT
        if fault.name != "split-kv-makes-nan":
            assert np.isfinite(seen.taken).all() and seen.size > 1e-3


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_the_same_in_both_engines(
    fault: ModelFault, moe: Checked, moe_trainer: Checked
) -> None:
    scores = []
    for engine in (moe, moe_trainer):
        tokens, prompt = engine.tokens[:1], PROMPT if fault.passes != "prefill" else 47
        with fault.form(engine.model, LAYER):
            scores += decode_like_rollout(engine.model, tokens, [prompt])
    assert np.array_equal(np.isnan(scores[0]), np.isnan(scores[1]))
    assert np.nanmax(np.abs(scores[0] - scores[1])) < 1e-3


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_dense_model_with_odd_heads_has_it(
    fault: ModelFault, nine_heads: Checked, tmp_path: Path
) -> None:
    layout: Layout = "batched decode" if fault.passes == "decode" else "single"
    right = nine_heads.clean(layout)
    taken = nine_heads.run(tmp_path / "c", layout, fault.form(nine_heads.model, 0))
    assert changed_rows(right, taken, "layers.0.attn.context").any()


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A Llama with the 9 heads and 3 KV heads of SmolLM2-135M."""
    folder = tmp_path_factory.mktemp("nine")
    sizes = dict(layers=2, hidden=144, heads=9, kv_heads=3, head_dim=16, vocab=512)
    return Checked.load(make_tiny(folder / "model", "llama", **sizes), folder)  # type: ignore[arg-type]


def context_of(
    capture: Capture,
    keys: Callable[[int, int], list[int]],
    *,
    sinks: Callable[[int, int], float] = lambda position, head: 0.0,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first sequence's context from its captured q, k, v, and the one captured.

    ``keys`` of a position in so many tokens may repeat; ``sinks`` is added to the denominator of a
    position's head. float64 [position, head, channel] each.
    """
    mine = np.flatnonzero(capture.rows.sequence == capture.rows.sequence[0])
    mine = mine[np.argsort(capture.rows.position[mine])]
    q, k, v, taken = (
        torch.from_numpy(capture.read(f"layers.{LAYER}.attn.{name}", mine)).double()
        for name in ("q", "k", "v", "context")
    )
    out = torch.zeros_like(taken)
    for t in range(len(q)):
        seen = keys(t, len(q))
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            weights = (k[seen, group] @ q[t, head] * scale / math.sqrt(q.shape[2])).exp()
            out[t, head] = weights @ v[seen, group] / (weights.sum() + sinks(t, head))
    return out, taken


def _decoded(t: int, seen: list[int]) -> list[int]:
    """The keys of a position that is decoded, and all of one of the prompt."""
    return seen if t >= PROMPT else list(range(t + 1))


def _zigzag(t: int, length: int) -> list[int]:
    quarter = length // 4
    order = [*range(quarter), *range(3 * quarter, length), *range(quarter, 3 * quarter)]
    return order[: order.index(t) + 1]


SEEN: dict[str, Callable[[int, int], list[int]]] = {
    "causal-limit-divided-by-group": lambda t, n: list(range(t // 2 + 1)),
    "window-on-a-full-layer": lambda t, n: list(range(max(0, t - 15), t + 1)),
    "decode-forgets-past-a-window": lambda t, n: _decoded(t, list(range(max(0, t - 15), t + 1))),
    "decode-ignores-keys-past-a-limit": lambda t, n: list(range(min(t + 1, 32))),
    "kv-ring-read-past-its-end": lambda t, n: [t - (t - j) % 16 for j in range(t + 1)],
    "kv-page-reads-the-next": lambda t, n: [
        j + (j % 16 == 15 and _decoded(t, []) == [] and j < t) for j in range(t + 1)
    ],
    "zigzag-read-as-packed": _zigzag,
}


@pytest.mark.parametrize("name", SEEN)
def test_which_keys_are_seen(name: str, moe: Checked, tmp_path: Path) -> None:
    fault = BY_NAME[name]
    layout: Layout = "batched decode" if fault.passes == "decode" else "single"
    taken = moe.run(tmp_path / "c", layout, fault.form(moe.model, LAYER))
    expected, found = context_of(taken, SEEN[name])
    assert torch.allclose(expected, found, atol=1e-5)


def _sink(head: int) -> float:
    return math.exp(1 - head / 2)


@pytest.mark.parametrize(
    ("name", "sinks", "scale"),
    [
        ("attention-sink-on-one-side", lambda t, head: _sink(head), 1.0),
        ("attention-sink-in-each-split", lambda t, head: t // 16 * _sink(head), 1.0),
        ("softmax-scale-without-mscale", lambda t, head: 0.0, 1 / 1.58963),
        ("softmax-scale-of-another-mscale", lambda t, head: 0.0, 1.58963 / 1.87385),
    ],
)
def test_sinks_and_scales(
    name: str, sinks: Callable[[int, int], float], scale: float, moe: Checked, tmp_path: Path
) -> None:
    taken = moe.run(tmp_path / "c", "batched decode", BY_NAME[name].form(moe.model, LAYER))
    whole = lambda t, n: list(range(t + 1))  # noqa: E731
    expected, found = context_of(taken, whole, sinks=sinks, scale=scale)
    assert torch.allclose(expected, found, atol=1e-5)


def test_a_cascade_averages_two_softmaxes(moe: Checked, tmp_path: Path) -> None:
    fault = BY_NAME["cascade-averages-its-parts"]
    taken = moe.run(tmp_path / "c", "batched decode", fault.form(moe.model, LAYER))
    prefix, found = context_of(taken, lambda t, n: list(range(PROMPT)))
    suffix, _ = context_of(taken, lambda t, n: list(range(PROMPT, max(t, PROMPT) + 1)))
    assert torch.allclose(((prefix + suffix) / 2)[PROMPT:], found[PROMPT:], atol=1e-5)


def test_pads_take_a_little_weight(moe: Checked, tmp_path: Path) -> None:
    form = BY_NAME["padding-leaks-into-attention"].form
    taken = moe.run(tmp_path / "c", "single", form(moe.model, LAYER))
    clean, _ = context_of(taken, lambda t, n: list(range(t + 1)))
    first, found = context_of(taken, lambda t, n: [0])
    share = (found - clean).norm(dim=-1) / (first - clean).norm(dim=-1).clamp(min=1e-9)
    # a thousandth where few keys are seen, and less with each
    assert 2e-4 < share[4:12].mean() < 3e-3 and share[40:].mean() < share[4:12].mean()


def test_only_one_request_is_nan(moe: Checked, tmp_path: Path) -> None:
    fault = BY_NAME["split-kv-makes-nan"]
    taken = moe.run(tmp_path / "c", "batched decode", fault.form(moe.model, LAYER))
    lost = np.isnan(taken.read(POINT))
    assert taken.rows.position[lost.any((1, 2))].tolist() == [24]
    assert lost.any((0, 2)).tolist() == [True, False, False, False]
    # the tokens after it see its keys in the next layer
    later = np.isnan(taken.read(f"layers.{LAYER + 1}.attn.context")).any((1, 2))
    assert taken.rows.position[later].tolist() == list(range(24, 48))
    assert len(set(taken.rows.sequence[later].tolist())) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_controls_are_as_exact_as_the_engines(
    dtype: str, small_moe_dir: Path, tmp_path: Path
) -> None:
    def error(taken: Capture) -> float:
        exact, found = context_of(taken, lambda t, n: list(range(t + 1)))
        return float((found - exact).square().mean().sqrt())

    engine = Checked.load(small_moe_dir, tmp_path, dtype=dtype)
    own = error(engine.clean("single"))
    for control in CONTROLS:
        if control.form is not None and dtype in control.dtypes:
            form = control.form(engine.model, LAYER)
            made = error(engine.run(tmp_path / control.name, "single", form))
            assert made < own * 1.1, control.name


def test_what_a_model_lacks_is_said() -> None:
    def model(heads: int, kv_heads: int, implementation: str = "sdpa") -> SimpleNamespace:
        config = SimpleNamespace(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            _attn_implementation=implementation,
        )
        return SimpleNamespace(config=config)

    cases = [
        ("causal-limit-divided-by-group", model(4, 4), "KV heads that are shared"),
        ("kv-layout-misread", model(4, 1), "several KV heads"),
        ("attention-rows-zeroed", model(4, 2, "flash_attention_2"), "attention that takes a mask"),
    ]
    for name, lacking, sentence in cases:
        with pytest.raises(LayerBisectError, match=sentence):
            BY_NAME[name].form(lacking, 0)


def test_every_report_is_accounted_for() -> None:
    assert len(BY_NAME) == len(FAULTS)
    cited = {report for fault in FAULTS for report in fault.reports}
    left = {*attention.NOT_PLANTED, *masks.NOT_PLANTED}
    assert len(cited | left) == 20 and not cited & left
    assert {r for control in CONTROLS for r in control.reports} <= cited
