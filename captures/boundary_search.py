"""Choose the layer boundaries to probe for the carried gap: all, or those that a search needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Mode = Literal["scan", "search"]


def probe_boundaries(
    visible: Sequence[int],
    mode: Mode,
    probe: Callable[[int], float],
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, float]:
    """Probe boundaries for what they carry (nat), by boundary number.

    ``scan`` probes every visible boundary. ``search`` probes the ends and then goes on halving the
    interval with the largest step, until that is a single layer: about log2 of the layers in probes
    for one culprit. It can miss contributions that cancel inside an interval; a scan cannot.
    ``progress`` is called with probes done and, as far as known, to do.
    """
    at: dict[int, float] = {}
    everything = mode == "scan" or len(visible) <= 3
    expected = len(visible) if everything else 2 + 2 * len(visible).bit_length()

    def at_boundary(layer: int) -> None:
        if layer not in at:
            at[layer] = probe(layer)
            if progress is not None:
                progress(len(at), max(expected, len(at)))

    for layer in visible if everything else (visible[0], visible[-1]):
        at_boundary(layer)
    while not everything and (halved := _to_halve(at, visible)) is not None:
        at_boundary(halved)
    return at


def _to_halve(at: dict[int, float], visible: Sequence[int]) -> int | None:
    """The boundary in the middle of the interval with the largest step, if one is worth it."""
    probed = sorted(at)
    gaps = [
        (at[b] ** 2 - at[a] ** 2, a, b)
        for a, b in zip(probed, probed[1:], strict=False)
        if visible.index(b) - visible.index(a) > 1
    ]
    whole = max(at[probed[-1]] ** 2, 1e-300)
    # an interval is worth halving while it makes a fifth of the gap or more
    open_steps = [(step, a, b) for step, a, b in gaps if step > 0.2 * whole]
    if not open_steps:
        return None
    _, a, b = max(open_steps)
    return visible[(visible.index(a) + visible.index(b)) // 2]
