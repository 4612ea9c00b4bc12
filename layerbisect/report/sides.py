"""How each side looks in charts."""

from __future__ import annotations

from collections.abc import Sequence

from layerbisect.report.palette import BLUE, ORANGE, PURPLE


def side_colour(labels: Sequence[str], side: str) -> str:
    """Colour of a side: the first's, the second's, or that of neither alone (both, unknown)."""
    return {labels[0]: BLUE, labels[1]: ORANGE}.get(side, PURPLE)


def side_marker(labels: Sequence[str], side: str) -> str:
    """Marker of a side."""
    return {labels[0]: "circle", labels[1]: "square"}.get(side, "diamond")
