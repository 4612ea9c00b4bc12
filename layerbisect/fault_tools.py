"""What a planted fault is made with: a change to one module that is taken back at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object and take it back; a method comes back to its class's."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def parameter_replaced(owner: torch.nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    """Put another parameter in the place of one, which is kept as it is."""
    import torch

    before = getattr(owner, name)
    setattr(owner, name, torch.nn.Parameter(value, requires_grad=before.requires_grad))
    try:
        yield
    finally:
        setattr(owner, name, before)


def forward_replaced(module: Any, wrapped: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let ``wrapped(own forward, *args)`` compute a module; hooks see it as the module's own."""
    own = module.forward
    return attribute_replaced(
        module, "forward", lambda *args, **kwargs: wrapped(own, *args, **kwargs)
    )
