"""How far the sum of routed experts may be from the exact one.

The errors of the projections, of the gate and of the sum, each carried through what follows it.
"""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import gamma, smallest_subnormal, unit_roundoff
from layerbisect.kernels.bounds.linear import linear_bound
from layerbisect.kernels.bounds.swiglu import swiglu_bound
from layerbisect.kernels.experts import ExpertWeights
from layerbisect.kernels.swiglu import swiglu

_SINGLE = unit_roundoff(torch.float32)
# the largest slope of silu, at 2.4
_STEEPEST = 1.1


def experts_bound(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the error of `experts` of the same arguments, to the bit: float64 [row, hidden].

    Projections accumulate in float32; what is written between, the weighted outputs and their sum
    after every slot may be rounded to ``dtype``.
    """
    x = x.double()
    size, error = (x.new_zeros(*ids.shape, x.shape[1]) for _ in range(2))
    for expert in torch.unique(ids[ids >= 0]).tolist():
        at = torch.where(ids == expert)
        weight = weights[at][:, None].double()
        out, off = _mlp(x[at[0]], gate_up[expert].double(), down[expert].double(), dtype)
        size[at] = (weight * out).abs()
        error[at] = (weight * off).abs()
    u = unit_roundoff(dtype)
    error += (size + error) * (_SINGLE + u + _SINGLE * u) + smallest_subnormal(dtype) / 2
    return _sum_bound(size, error, ids, dtype)


def combine_bound(outputs: torch.Tensor, ids: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Bound the error of `combine` of ``outputs`` [row, slot, hidden]: float64 [row, hidden]."""
    size = outputs.double().abs()
    return _sum_bound(size, torch.zeros_like(size), ids, dtype)


def _sum_bound(
    size: torch.Tensor, error: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Bound the sum over used slots of terms of ``size``, each off by ``error``, in any order."""
    unused = (ids < 0)[..., None]
    size, error = (t.masked_fill(unused, 0).sum(1) for t in (size, error))
    slots = ids.shape[1]
    # each sum in float32 and then in dtype; the least numbers of a dtype add up exactly
    lost = gamma(slots, unit_roundoff(dtype) + _SINGLE) * (size + error)
    return error + lost + smallest_subnormal(dtype) / 2


def _mlp(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply one expert exactly, and bound the error: two float64 [row, hidden]."""
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    gate_off, up_off = linear_bound(x, gate_up, dtype=dtype).chunk(2, dim=1)
    u = unit_roundoff(dtype)
    silu_off = _STEEPEST * gate_off
    moved = torch.nn.functional.silu(gate).abs() * up_off + silu_off * (up.abs() + up_off)
    # the gate's own error at most; where silu moved, it is rounded and errs by that much more
    off = swiglu_bound(gate, up.abs() + up_off, dtype=dtype)
    off = off + (1 + 2 * u + 2**-14) * moved
    inner = swiglu(gate, up)
    moved = off @ down.abs().T
    more = gamma(down.shape[1], 2 * _SINGLE) + 2 * u
    return inner @ down.T, linear_bound(inner, down, dtype=dtype) + (1 + more) * moved
