"""How a long computation says what is done and what is left."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Takes news of one stage after another."""

    def start(self, description: str, total: int) -> None:
        """Begin a stage of ``total`` steps; a stage that is still open has ended."""

    def advance(self, done: int, total: int | None = None) -> None:
        """Say how many steps of the stage are done by now, and how many there are if that changed.

        Callbacks of the form ``progress(done, total)`` can be given this method as it is.
        """

    def done(self) -> None:
        """End the stage, if one is open."""


class NoProgress:
    """Tells nobody; what a computation uses that was given no progress."""

    def start(self, description: str, total: int) -> None:
        """Do nothing."""

    def advance(self, done: int, total: int | None = None) -> None:
        """Do nothing."""

    def done(self) -> None:
        """Do nothing."""
