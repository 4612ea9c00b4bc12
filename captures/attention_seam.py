"""The place where every transformers model looks up its attention function.

An attention function gets the queries, keys and values that attention really reads: after q/k norm,
RoPE and the KV cache. All implementations (eager, sdpa, flash) are looked up in one object, so one
seam there shows them all, and is gone again when nobody looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Observer = Callable[["torch.nn.Module", "torch.Tensor", "torch.Tensor", "torch.Tensor"], None]
"""Called with the attention module and query, key, value, each [batch, head, position, channel]."""

Replacement = Callable[..., Any]
"""Called with the engine's own attention function, and then with that function's arguments."""


class _Seam:
    """Stands in for ``get_interface`` while it has users."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.replacements: list[tuple[torch.nn.Module, Replacement]] = []
        self._restore: Callable[[], None] | None = None

    def look_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return functools.partial(self.call, original(*args, **kwargs))

    def call(
        self,
        inner: Callable[..., Any],
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *a: Any,
        **k: Any,
    ) -> Any:
        # observers come first whatever was entered first: they see what attention was given
        for observer in self.observers:
            observer(module, query, key, value)
        for owner, replacement in self.replacements:
            if owner is module:
                inner = functools.partial(replacement, inner)
        return inner(module, query, key, value, *a, **k)

    @contextmanager
    def holding(self, users: list[Any], user: Any) -> Iterator[None]:
        self._install()
        users.append(user)
        try:
            yield
        finally:
            # by identity: two equal users must not remove each other
            del users[next(i for i, u in enumerate(users) if u is user)]
            if not self.observers and not self.replacements and self._restore is not None:
                self._restore()

    def _install(self) -> None:
        if self._restore is not None:
            return
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        functions: Any = ALL_ATTENTION_FUNCTIONS
        before = vars(functions).get("get_interface")
        ours = functools.partial(self.look_up, functions.get_interface)
        functions.get_interface = ours

        def restore() -> None:
            # someone who has wrapped us since would be cut off: then stay, and pass calls through
            if vars(functions).get("get_interface") is not ours:
                return
            if before is None:
                del functions.get_interface
            else:
                functions.get_interface = before
            self._restore = None

        self._restore = restore


_SEAM = _Seam()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Show every attention call of the process to ``observer``, unaltered."""
    with _SEAM.holding(_SEAM.observers, observer):
        yield


@contextmanager
def replaced(module: torch.nn.Module, replacement: Replacement) -> Iterator[None]:
    """Let ``replacement`` compute the attention of one module; observers still see its input."""
    with _SEAM.holding(_SEAM.replacements, (module, replacement)):
        yield
