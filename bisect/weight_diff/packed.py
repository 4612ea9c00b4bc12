"""Whether matrices that engines pack into one, q, k and v or gate and up, came apart wrongly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from layerbisect.bisect.weight_diff.holders import Holder
from layerbisect.bisect.weight_diff.orders import find_order, packing_that_cancels, sketch
from layerbisect.captures.errors import LayerBisectError

_PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedOrders:
    """Looks at all matrices of a pack together, once."""

    def __init__(
        self, holders: tuple[Holder, Holder], previous: Holder | None, differing: Iterable[str]
    ) -> None:
        self._holders = holders
        self._previous = previous
        self._differing = frozenset(differing)
        self._known: dict[tuple[str, ...], str | None] = {}

    def order(self, name: str) -> str | None:
        """Say in which order one side packed what ``name`` was packed into; None if in none."""
        stem, kind = name.removesuffix(".weight").rpartition(".")[::2]
        kinds = next((k for k in _PACKED if kind in k), ())
        members = tuple(f"{stem}.{k}.weight" for k in kinds)
        if sum(member in self._differing for member in members) < 2:
            return None
        if members not in self._known:
            try:
                self._known[members] = self._look(members)
            except LayerBisectError:
                # said of each tensor by itself
                self._known[members] = None
        return self._known[members]

    def _look(self, members: tuple[str, ...]) -> str | None:
        sketches, heights = [], []
        for holder in self._holders:
            values = [holder.get(member).numbers() for member in members]
            if any(v.ndim != 2 or v.shape[1] != values[0].shape[1] for v in values):
                return None
            heights.append([len(v) for v in values])
            sketches.append(torch.cat([sketch(v) for v in values]))
        first, second = sketches
        if heights[0] != heights[1] or not torch.isfinite(first + second).all():
            return None
        names = [m.removesuffix(".weight").rpartition(".")[2] for m in members]
        parts = dict(zip(names, heights[0], strict=True))
        packed = "+".join(names)
        found = find_order(first, second, parts)
        if found is not None:
            return f"rows of {packed} {found.how}"
        cancels = packing_that_cancels(first - second, parts)
        return None if cancels is None else f"the update's rows of {packed} {cancels}"
