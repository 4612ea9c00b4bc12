"""Keep errors of ours from a job's forward, and tell them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Problems(list[str]):
    """What went wrong on this rank, in the order in which it did."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of the block and go on: other ranks would wait for this one for ever."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever we do, the forward goes on
            self.append(f"{type(error).__name__}: {error}")
