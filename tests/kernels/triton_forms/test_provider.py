"""Which Triton forms are offered, and what is said where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerbisect.kernels.replay.implementation import OPERATORS, Implementation

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.provider import implementations  # noqa: E402


def offered(operator: str, device: str) -> dict[str, Implementation]:
    found = implementations(operator, device)
    assert all(isinstance(one, Implementation) for one in found), found
    return {one.name: one for one in found if isinstance(one, Implementation)}


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_has_a_fast_and_a_deterministic_form(operator: str, device: str) -> None:
    found = offered(operator, device)
    families = ["triton", "triton-decode"] if operator == "attention" else ["triton"]
    assert list(found) == [f"{f}-{mode}" for f in families for mode in ("fast", "deterministic")]
    for name, one in found.items():
        assert name == f"{one.family}-{one.mode}" and one.operator == operator
        assert one.package.startswith("triton 3")


def made() -> dict[str, dict[str, Any]]:
    """Small arguments of every operator, by keyword, as OPERATORS names them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ids = torch.tensor([[0, 1], [1, -1]])
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    return {
        "rms_norm": dict(x=random(2, 8), weight=random(8), eps=1e-6, rounds_before_weight=False),
        "linear": dict(x=random(2, 8), weight=random(4, 8), bias=random(4)),
        "rope": dict(
            x=random(2, 1, 8),
            position=torch.tensor([0, 5]),
            inv_freq=random(4).abs(),
            attention_scaling=1.0,
            interleaved=False,
        ),
        "attention": dict(
            q=random(3, 2, 8),
            k=random(3, 1, 8),
            v=random(3, 1, 8),
            lengths=(2, 1),
            queries=None,
            scale=0.3,
            sliding_window=None,
        ),
        "router": dict(
            logits=random(2, 4),
            top_k=2,
            renormalise=True,
            scoring="softmax",
            softmax_after_top_k=False,
            groups=None,
            top_groups=None,
            scaling=1.0,
        ),
        "swiglu": dict(gate=random(2, 8), up=random(2, 8)),
        "experts": dict(
            x=random(2, 8), ids=ids, weights=weights, gate_up=random(2, 8, 8), down=random(2, 8, 4)
        ),
        "combine": dict(outputs=random(2, 2, 8), ids=ids),
        "logprob": dict(logits=random(2, 8), targets=torch.tensor([3, 0]), shards=2),
        "add": dict(stream=random(2, 8), delta=random(2, 8)),
    }


def on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("operator", OPERATORS)
def test_takes_the_operators_arguments_by_keyword_and_does_as_the_reference(
    operator: str, device: str
) -> None:
    from layerbisect.kernels.replay.program import REFERENCES

    reference: Callable[..., Any] = REFERENCES[operator]
    arguments = {name: on(device, value) for name, value in made()[operator].items()}
    expected = reference(**arguments)
    for one in offered(operator, device).values():
        torch.testing.assert_close(one.run(**arguments), expected, rtol=1e-5, atol=1e-5)


def said(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


ASK = (
    "from layerbisect.kernels.triton_forms.provider import implementations\n"
    "for one in implementations('linear', 'cpu'): print(one.name, one.why)\n"
)


def test_without_gpu_or_interpreter_says_what_to_do() -> None:
    assert said(ASK).splitlines() == [
        f"triton-{mode} on the device cpu Triton's kernels run under its interpreter only: "
        "set TRITON_INTERPRET=1 before the start"
        for mode in ("fast", "deterministic")
    ]


def test_without_triton_says_so() -> None:
    # as find_spec answers for a package that isn't there
    hidden = "import importlib.util as u\nu.find_spec = lambda name: None\n"
    assert said(hidden + ASK).splitlines() == [
        f"triton-{mode} the package triton is not installed: pip install triton"
        for mode in ("fast", "deterministic")
    ]
