"""Implementations that misbehave, each in its way: what a worker process is told that there are."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from layerbisect.kernels.replay.implementation import Implementation, Unavailable, Unsupported

Tensors = torch.Tensor | tuple[torch.Tensor, ...] | None
Linear = Callable[..., Any]

_calls = 0


def right(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project as torch does."""
    return functional.linear(x, weight, bias)


def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scale the product by 1.05 before it is rounded."""
    return (1.05 * (x.float() @ weight.float().T)).to(x.dtype)


def one_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scale one output channel by 1.05."""
    changed = weight.float()
    changed[7] *= 1.05
    return (x.float() @ changed.T).to(x.dtype)


def exits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """End the process, as if all were well."""
    print("a last word", file=sys.stderr, flush=True)
    os._exit(0)


def segfaults(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Die as a kernel's host code does."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def hangs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Never answer."""
    time.sleep(600)
    raise AssertionError("unreachable")


def raises(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raise what launching a kernel raises."""
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def refuses(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Know nothing of this dtype."""
    raise Unsupported(f"refuses does not support dtype={x.dtype}")


def refuses_one_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Take a batch alone."""
    if len(x) == 1:
        raise Unsupported("refuses_one_row does not support rows=1")
    return right(x, weight)


def squeezes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Drop the dimension of rows where there is one row."""
    return right(x, weight).squeeze(0)


def unwritten(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Leave the last row as it was."""
    made = torch.empty(len(x), len(weight), dtype=x.dtype)
    made[:-1] = right(x[:-1], weight)
    return made


def half_written_scratch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add up two halves of the sum, of which one was never written for row 3."""
    parts = torch.empty(2, len(x), len(weight))
    half = x.shape[1] // 2
    parts[0] = x[:, :half].float() @ weight[:, :half].float().T
    for row in range(len(x)):
        if row != 3:
            parts[1, row] = x[row, half:].float() @ weight[:, half:].float().T
    return parts.sum(0).to(x.dtype)


def garbage(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what has the right shape alone."""
    draw = torch.Generator().manual_seed(0)
    return (1e4 * torch.randn(len(x), len(weight), generator=draw)).to(x.dtype)


def zeros(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return zeros, as a kernel that was never launched does."""
    return x.new_zeros(len(x), len(weight))


def computes_nan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Divide zero by zero in one row."""
    made = right(x, weight)
    made[2] /= made[2] * 0
    return made - made * 0


def wrong_shape(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return one channel too few."""
    return right(x, weight)[:, :-1]


def wrong_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what has twice the bits."""
    return right(x, weight).double()


def returns_none(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Return nothing, as one that writes to an argument does."""


def unrepeatable(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return another rounding of the first row every other time."""
    global _calls
    _calls += 1
    made = right(x, weight)
    if _calls % 2:
        made[0] = torch.nextafter(made[0], torch.full_like(made[0], torch.inf))
    return made


def by_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum in halves, rounded on the way, where there are few rows."""
    if len(x) > 8:
        return right(x, weight)
    half = x.shape[1] // 2
    return right(x[:, :half], weight[:, :half]) + right(x[:, half:], weight[:, half:])


def writes_into_its_input(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute rightly, and leave the input other than it was."""
    made = right(x, weight)
    x.mul_(2)
    return made


def writes_into_its_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute rightly, and leave the weight other than it was."""
    made = right(x, weight)
    weight.mul_(2)
    return made


LINEAR: tuple[Linear, ...] = (
    right,
    scaled,
    one_row,
    exits,
    segfaults,
    hangs,
    raises,
    refuses,
    refuses_one_row,
    squeezes,
    unwritten,
    half_written_scratch,
    garbage,
    zeros,
    computes_nan,
    wrong_shape,
    wrong_dtype,
    returns_none,
    unrepeatable,
    by_batch,
    writes_into_its_input,
    writes_into_its_weight,
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: tuple[int, ...],
    scale: float,
    queries: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    by_queries: bool = False,
) -> torch.Tensor:
    """Attend query by query; with ``by_queries`` in another order where a chunk is not whole."""
    made, first, first_key = torch.empty_like(q), 0, 0
    group = q.shape[1] // k.shape[1]
    for length, count in zip(lengths, queries or lengths, strict=True):
        keys = k[first_key : first_key + length].float().repeat_interleave(group, 1)
        values = v[first_key : first_key + length].float().repeat_interleave(group, 1)
        for at in range(count):
            end = length - count + at + 1
            scores = torch.einsum("hc,khc->hk", q[first + at].float(), keys[:end]) * scale
            weights = torch.softmax(scores, -1)
            if by_queries and count < length:
                weights = weights.to(q.dtype).float()
            made[first + at] = torch.einsum("hk,khc->hc", weights, values[:end]).to(q.dtype)
        first, first_key = first + count, first_key + length
    return made


def by_chunk(**arguments: Any) -> torch.Tensor:
    """Round the weights of chunks and decode steps."""
    return attend(**arguments, by_queries=True)


def no_chunks(**arguments: Any) -> torch.Tensor:
    """Take whole sequences alone."""
    if arguments.get("queries") is not None:
        raise Unsupported(f"no_chunks does not support queries={arguments['queries']}")
    return attend(**arguments)


def implementations(operator: str, device: str) -> list[Implementation | Unavailable]:
    """Return the fakes of an operator, and one that cannot run here."""
    runs: dict[str, tuple[Callable[..., Any], ...]] = {
        "linear": LINEAR,
        "attention": (attend, by_chunk, no_chunks),
    }
    found: list[Implementation | Unavailable] = [
        Implementation(run.__name__, operator, "fakes 1.0", run) for run in runs.get(operator, ())
    ]
    absent = f"it needs a GPU (cuda), and the device is {device}"
    return [*found, Unavailable("absent", operator, absent)]
