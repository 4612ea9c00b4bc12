from __future__ import annotations

import pytest
import torch

from layerbisect.kernels.bounds.add import add_bound
from layerbisect.kernels.replay.implementation import Unsupported

pytest.importorskip("triton")

from layerbisect.kernels.triton_forms.add import add  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 60), (63, 60)])
def test_sum_is_rounded_once(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stream, delta = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    y = add(stream, delta, deterministic=True)
    assert torch.equal(y, (stream.float() + delta.float()).to(dtype))
    bound = add_bound(stream, delta, dtype=dtype)
    assert bool(((y.double() - stream.double() - delta.double()).abs() <= bound).all())


def test_refuses_what_does_not_fit() -> None:
    x = torch.zeros(2, 3)
    assert add(x[:0], x[:0], deterministic=False).shape == (0, 3)
    with pytest.raises(ValueError, match=r"\[2, 3\] torch.float32 and \[1, 3\]"):
        add(x, x[:1], deterministic=False)
    with pytest.raises(ValueError, match="bfloat16"):
        add(x, x.bfloat16(), deterministic=False)
    with pytest.raises(Unsupported, match="stream must be .* got torch.float64"):
        add(x.double(), x.double(), deterministic=False)
