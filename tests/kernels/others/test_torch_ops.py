from __future__ import annotations

from typing import Any

import pytest
import torch

from layerbisect.kernels.others import torch_ops
from layerbisect.kernels.replay.implementation import (
    OPERATORS,
    Implementation,
    Unavailable,
    Unsupported,
)
from tests.kernels.others.cases import DTYPES, arguments, bound_used


def named(operator: str, name: str) -> Implementation:
    found = {i.name: i for i in torch_ops.implementations(operator, "cpu")}[name]
    assert isinstance(found, Implementation)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_is_within_the_bound_of_every_operator(operator: str, dtype: torch.dtype) -> None:
    for given in arguments(operator, dtype):
        ran = 0
        for implementation in torch_ops.implementations(operator, "cpu"):
            if isinstance(implementation, Unavailable):
                continue
            try:
                results = implementation.run(**given)
            except Unsupported:
                continue
            assert bound_used(operator, given, results) <= 1, (implementation.name, given)
            first = results[0] if isinstance(results, tuple) else results
            wide = operator in ("router", "logprob")
            assert first.dtype == (torch.float32 if wide else dtype)
            ran += 1
        assert ran, given


def test_on_a_cpu_the_backends_for_gpus_say_why_they_are_unavailable() -> None:
    missing = {
        i.name: i.why
        for i in torch_ops.implementations("attention", "cpu")
        if isinstance(i, Unavailable)
    }
    assert set(missing) == {"torch-sdpa-efficient", "torch-sdpa-cudnn"}
    assert missing["torch-sdpa-cudnn"] == "it needs a GPU (cuda), and the device is cpu"


def test_backends_differ_in_bits_so_none_stands_in_for_another() -> None:
    given = next(arguments("attention", torch.float32))
    math, flash = (
        named("attention", f"torch-sdpa-{name}").run(**given) for name in ("math", "flash")
    )
    assert not torch.equal(math, flash)


def test_a_backend_that_refuses_a_shape_does_not_fall_back_to_another() -> None:
    given = next(arguments("attention", torch.float32))
    narrow = {**given, "v": given["v"][..., :16]}
    with pytest.raises(Unsupported, match=r"^torch-sdpa-flash does not support .*last dimension"):
        named("attention", "torch-sdpa-flash").run(**narrow)


@pytest.mark.parametrize(
    ("operator", "name", "change", "said"),
    [
        ("attention", "torch-sdpa-math", {"sinks": torch.zeros(4)}, "takes no sinks, got shape"),
        ("rms_norm", "torch-rms-norm", {"rounds_before_weight": True}, "rounds_before_weight=True"),
        ("linear", "torch-matmul", {"bias": torch.zeros(40)}, r"takes no bias, got shape \[40\]"),
        ("router", "torch", {"scoring": "tanh"}, "scoring='tanh'"),
        ("logprob", "torch", {"shards": 2}, "shards=2"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_value(
    operator: str, name: str, change: dict[str, Any], said: str
) -> None:
    given = next(arguments(operator, torch.float32))
    with pytest.raises(Unsupported, match=said):
        named(operator, name).run(**{**given, **change})


def test_sinks_take_a_share_of_the_attention() -> None:
    given = next(arguments("attention", torch.bfloat16))
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 9.0])
    run = named("attention", "torch").run
    assert bound_used("attention", {**given, "sinks": sinks}, run(**given, sinks=sinks)) <= 1
    # forgetting them is seen
    assert bound_used("attention", {**given, "sinks": sinks}, run(**given)) > 1
