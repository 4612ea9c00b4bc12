"""Stand before one method of one object for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def method_wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let ``wrapper(own method, *args, **kwargs)`` answer for a method of this object alone.

    Where somebody has wrapped it again meanwhile, ours stays in their chain at the end, to be
    called on; so the wrapper must then pass calls through.
    """
    before, own = vars(owner).get(name), getattr(owner, name)

    def ours(*args: Any, **kwargs: Any) -> Any:
        return wrapper(own, *args, **kwargs)

    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
