from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from layerbisect.kernels.others import sglang, sglang_attention, sglang_triton
from layerbisect.kernels.replay.implementation import Implementation, Unavailable, Unsupported
from tests.kernels.others.cases import DTYPES, arguments, bound_used

OPERATORS = ("attention", "rms_norm", "linear", "rope", "router", "swiglu", "experts", "logprob")


pytest.importorskip("triton")
pytest.importorskip("sglang")


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs: the interpreter takes milliseconds for one, whether it has keys or not."""
    monkeypatch.setattr(sglang_attention, "KV_SPLITS", {"cuda": 3, "hip": 3})


def found(operator: str) -> list[Implementation]:
    every = sglang.implementations(operator, "cpu")
    return [i for i in every if isinstance(i, Implementation)]


def named(operator: str, name: str) -> Implementation:
    return {i.name: i for i in found(operator)}[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_runs_on_a_cpu_is_within_the_bound(operator: str, dtype: torch.dtype) -> None:
    ran = set()
    for given in arguments(operator, dtype):
        for implementation in found(operator):
            try:
                results = implementation.run(**given)
            except Unsupported:
                continue
            assert bound_used(operator, given, results) <= 1, (implementation.name, given)
            ran.add(implementation.name.removesuffix(" (in float32)"))
    assert ran == {i.name for i in found(operator) if "float32" not in i.name}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["extend", "unified", "decode", "decode-fixed"])
def test_a_softmax_scale_off_by_three_percent_leaves_the_bound(
    kernel: str, dtype: torch.dtype
) -> None:
    _, given, *_ = arguments("attention", dtype)
    name = f"sglang-triton-{kernel}" + " (in float32)" * (dtype == torch.bfloat16)
    wrong = named("attention", name).run(**{**given, "scale": 1.03 * given["scale"]})
    assert bound_used("attention", given, wrong) > 1


def test_bfloat16_is_not_handed_to_the_interpreters_dot() -> None:
    given = next(arguments("linear", torch.bfloat16))
    with pytest.raises(Unsupported, match=r"dtype=torch\.bfloat16 under Triton's interpreter"):
        named("linear", "sglang-batch-invariant").run(**given)
    # which is why: it is garbage, and a newer interpreter may be right
    raw = sglang_triton.linear(**given)
    assert bound_used("linear", given, raw) > 1000
    with pytest.raises(Unsupported, match="sglang-batch-invariant itself runs in it"):
        given = next(arguments("linear", torch.float16))
        named("linear", "sglang-batch-invariant (in float32)").run(**given)


def test_without_a_core_the_persistent_product_writes_nothing_and_that_is_seen() -> None:
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import matmul_persistent

    given = next(arguments("linear", torch.float32))
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        unwritten = matmul_persistent(given["x"], given["weight"].t())
    assert unwritten.isnan().all()
    assert bound_used("linear", given, unwritten) == torch.inf


@pytest.mark.parametrize(
    ("operator", "name", "change", "said"),
    [
        ("attention", "sglang-triton-extend", {"sliding_window": 1}, "sliding_window=1"),
        (
            "rms_norm",
            "sglang-batch-invariant",
            {"residual": torch.ones(9, 60)},
            "no residual",
        ),
        ("logprob", "sglang", {"shards": 4}, "shards=4"),
        ("router", "sglang-triton", {"groups": 4, "top_groups": 2}, "groups=4"),
        ("router", "sglang-triton", {"bias": torch.zeros(16)}, "takes no bias"),
        ("router", "sglang-native", {"scaling": 2.5}, "scaling=2.5"),
        ("experts", "sglang-native", {"ids": torch.full((9, 2), -1)}, "unused slots"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_value(
    operator: str, name: str, change: dict[str, Any], said: str
) -> None:
    given = {**next(arguments(operator, torch.float32)), "rounds_before_weight": False}
    if operator != "rms_norm":
        del given["rounds_before_weight"]
    with pytest.raises(Unsupported, match=said):
        named(operator, name).run(**{**given, **change})


def test_sinks_reach_every_attention_kernel() -> None:
    _, given, *_ = arguments("attention", torch.float32)
    sinks = torch.tensor([-3.0, 0.0, 3.0, 9.0])
    for implementation in found("attention"):
        if "float32" in implementation.name:
            continue
        results = implementation.run(**given, sinks=sinks)
        assert bound_used("attention", {**given, "sinks": sinks}, results) <= 1
        assert bound_used("attention", {**given, "sinks": sinks}, implementation.run(**given)) > 1


def test_a_fast_and_a_deterministic_implementation_are_one_switch() -> None:
    pairs = {
        (i.operator, i.family, i.mode)
        for operator in OPERATORS
        for i in found(operator)
        if i.family
    }
    families = {(operator, family) for operator, family, _ in pairs}
    assert families == {
        ("attention", "sglang-extend"),
        ("attention", "sglang-decode"),
        ("rms_norm", "sglang"),
        ("linear", "sglang"),
        ("logprob", "sglang"),
    }
    assert len(pairs) == 2 * len(families)


def test_backends_that_need_a_gpu_are_listed_from_the_class_with_the_reason() -> None:
    listed = {
        i.name: i.why
        for operator in ("rms_norm", "swiglu", "rope", "experts")
        for i in sglang.implementations(operator, "cpu")
        if isinstance(i, Unavailable)
    }
    assert listed["sglang-cuda"] == "it needs a GPU (cuda), and the device is cpu"
    assert {"sglang-hip", "sglang-aiter", "sglang-jit", "sglang-aot"} <= set(listed)
    assert "sgl_kernel" in listed["sglang-triton"]


def test_a_backend_that_would_fall_back_to_the_native_one_is_refused() -> None:
    from layerbisect.kernels.others import sglang_modules

    given = next(arguments("rms_norm", torch.bfloat16))
    with pytest.raises(Unsupported, match=r"sglang-aiter would compute forward_native .*bfloat16"):
        sglang_modules.rms_norm("aiter", **given)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_fused_experts_are_called_rightly(deterministic: bool) -> None:
    """With SGLang's sorting of tokens by expert, which needs a GPU, done in its place."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    def align(ids: torch.Tensor, block: int, count: int) -> tuple[torch.Tensor, ...]:
        rows: list[int] = []
        experts: list[int] = []
        for expert in range(-1, count):
            mine = torch.where(ids.flatten() == expert)[0].tolist()
            mine += [ids.numel()] * (-len(mine) % block)
            rows += mine
            experts += [expert] * (len(mine) // block)
        return tuple(torch.tensor(t, dtype=torch.int32) for t in (rows, experts, [len(rows)]))

    for given in arguments("experts", torch.float16):
        with (
            mock.patch.object(fused_moe, "moe_align_block_size", align),
            mock.patch.object(fused_moe_triton_config, "get_device_name", return_value="none"),
        ):
            results = sglang._quietly(sglang_triton.experts, **given, deterministic=deterministic)
        assert bound_used("experts", given, results) <= 1


def test_a_version_without_a_module_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sglang._MODULES, "rope", ("sglang.srt.layers.rotary",))
    (one,) = sglang.implementations("rope", "cpu")
    assert isinstance(one, Unavailable)
    assert one.why.startswith("sglang.srt.layers.rotary cannot be imported: ModuleNotFoundError")
