"""Outputs that show what a kernel left unwritten.

A kernel that skips an element leaves there what the memory held before, often the right number of
the run before. While ``poisoned_empty`` is active, a tensor that is made without values holds NaN,
or an integer that is no row, expert or token, so that what was not written is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WITHOUT_VALUES = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)


@contextmanager
def poisoned_empty(value: float = torch.nan) -> Iterator[None]:
    """Fill what torch.empty, empty_like, empty_strided and Tensor.new_empty return.

    Floating and complex tensors are filled with ``value``, signed integers with the lowest number
    of their dtype, unsigned ones with the highest; booleans have no value to spare and are left
    alone. Counts in the thread that entered, for calls from Python: what C++ allocates for itself
    is not filled. It may be nested. Every call of torch is slower meanwhile, so time nothing in it.
    """
    with _Poison(value):
        yield


class _Poison(TorchFunctionMode):
    # a mode, and no replaced functions: it leaves nothing behind, whatever is raised, it sees
    # names that were imported before, and other threads do not
    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _WITHOUT_VALUES and (value := _poison(made.dtype, self._value)) is not None:
            # detached: a leaf that requires a gradient may not be written in place
            made.detach().fill_(value)
        return made


def _poison(dtype: torch.dtype, value: float) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return value
    if dtype == torch.bool:
        return None
    numbers = torch.iinfo(dtype)
    return numbers.min if dtype.is_signed else numbers.max
