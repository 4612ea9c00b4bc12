"""Look up which experts a capture's engine gave to a token, to force them in another engine.

How much of a gap is left with the rollout's experts forced in the trainer, and with their weights
forced too, says how much of it routing made. A token is known by the prefix that it has seen, so
neither layout, batching nor order of the two engines matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import RoutesFrom
from layerbisect.captures.points import parse
from layerbisect.captures.rows import PrefixKeys
from layerbisect.captures.store import Capture

if TYPE_CHECKING:
    import torch

IDS, WEIGHTS = "mlp.expert_ids", "mlp.expert_weights"


class Choice(NamedTuple):
    """The experts of some rows in one layer.

    ``found`` bool [row] says for which rows they are known; ``ids`` int64 [row, slot] are -1 and
    ``weights`` float32 [row, slot] NaN for the others. Slots are in the captured order.
    """

    found: NDArray[np.bool_]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows that hold a layer's experts, by key.

    ``key`` is sorted and has each key once; the rows of key i are
    ``order[first[i] : first[i] + count[i]]``, in the order of the capture.
    """

    key: NDArray[np.void]
    order: NDArray[np.intp]
    first: NDArray[np.intp]
    count: NDArray[np.intp]


class Routes:
    """Experts, and weights where wanted, of a capture's tokens; build with :meth:`of`.

    ``layers`` are those whose experts the capture holds. Values are read when they are looked up,
    for the rows looked up alone.
    """

    def __init__(self, capture: Capture, *, weights: bool) -> None:
        self.capture = capture
        self.weights = weights
        suffixes = (IDS, WEIGHTS) if weights else (IDS,)
        held = {
            suffix: frozenset(
                layer
                for name, seen in capture.points.items()
                if (layer := parse(name).layer) is not None
                and name.endswith(f".{suffix}")
                and seen.how != "not_observable"
            )
            for suffix in suffixes
        }
        self.layers = frozenset.intersection(*held.values())
        self._tables: dict[bytes, _Table] = {}
        self._table_of: dict[int, _Table] = {}
        self._varying: dict[int, set[bytes]] = {}

    @property
    def kind(self) -> RoutesFrom:
        """What a capture in which these are forced says of its routes."""
        return "forced with weights" if self.weights else "forced"

    @classmethod
    def of(cls, capture: Capture | str | os.PathLike[str], *, weights: bool = False) -> Routes:
        """Open the routes of a capture, or of its directory.

        Args:
            weights: whether the experts' weights are wanted, too.

        Raises:
            CaptureError: no capture there, or a damaged one.
            LayerBisectError: the capture holds no experts, or not the weights that are wanted.
        """
        opened = capture if isinstance(capture, Capture) else Capture.open(capture)
        routes = cls(opened, weights=weights)
        if not routes.layers:
            raise routes._lacking("")
        return routes

    def require(self, layers: Iterable[int]) -> None:
        """Raise LayerBisectError unless the capture holds the experts of all these layers."""
        lacking = sorted(set(layers) - self.layers)
        if lacking:
            some = ", ".join(map(str, lacking[:8]))
            raise self._lacking(f" of layers {some}{', ...' if lacking[8:] else ''}")

    def _lacking(self, where: str) -> LayerBisectError:
        what = "expert_ids and expert_weights" if self.weights else "expert_ids"
        wanted = f"layers.*.{IDS}" + (f",layers.*.{WEIGHTS}" if self.weights else "")
        return LayerBisectError(
            f"{self.capture.directory} holds no {what}{where}, which forcing its routes needs; "
            f"capture it with points={wanted!r} or 'all'"
        )

    def look_up(self, layer: int, keys: PrefixKeys) -> Choice:
        """Look up the experts of rows (``keys``: [row]) in one layer.

        Where the capture holds a row more than once, the first counts; :meth:`problems` tells where
        that matters. A row to which its engine gave no expert (ID -1) is not found.

        Raises:
            CaptureError: the layer's shards do not tile it.
            LayerBisectError: the capture does not hold the layer's experts.
        """
        self.require([layer])
        table = self._table(layer)
        rows = len(keys.key)
        found: NDArray[np.bool_] = np.zeros(rows, bool)
        if len(table.key):
            slot = np.searchsorted(table.key, keys.key).clip(max=len(table.key) - 1)
            found = keys.known & (table.key[slot] == keys.key)
        if not found.any():
            return Choice(found, np.empty((rows, 0), np.int64), None)
        slot = slot[found]
        self._note_varying(layer, table, np.unique(slot))
        at: NDArray[np.intp] = table.order[table.first[slot]]
        read = self.capture.read(f"layers.{layer}.{IDS}", at).astype(np.int64)
        routed: NDArray[np.bool_] = np.all(read >= 0, axis=1)
        ids = np.full((rows, read.shape[1]), -1, np.int64)
        ids[found] = np.where(routed[:, None], read, -1)
        weights = None
        if self.weights:
            weights = np.full(ids.shape, np.nan, np.float32)
            weights[found] = self.capture.read(f"layers.{layer}.{WEIGHTS}", at)
        found[np.flatnonzero(found)[~routed]] = False
        return Choice(found, ids, weights)

    def problems(self, rows: int, kept: int) -> list[str]:
        """Say in sentences what was not forced as wanted.

        Args:
            rows: how many rows were computed with these routes forced.
            kept: how many of them kept their own in some layer.
        """
        name = self.capture.directory
        found = []
        if kept:
            which = f"all {rows}" if kept == rows else f"{kept} of {rows}"
            found.append(
                f"{which} rows kept their own routes, as {name} has none for their tokens or an "
                "error says why (rows that pad sequences count too, where a job passes no mask); "
                "capture both sides on the same token IDs and with the same salts"
            )
        for layer, varying in sorted(self._varying.items()):
            found.append(
                f"{len(varying)} rows have other experts of layer {layer} in one pass of {name} "
                "than in another, and the first were forced; open it with requests= so that only "
                "the passes that are meant are read"
            )
        return found

    def _table(self, layer: int) -> _Table:
        if layer not in self._table_of:
            usable = self.capture.keys.known & self.capture.has(f"layers.{layer}.{IDS}")
            if self.weights:
                usable &= self.capture.has(f"layers.{layer}.{WEIGHTS}")
            # the layers' points are usually in the same passes, and share one table then
            mask = np.packbits(usable).tobytes()
            if mask not in self._tables:
                self._tables[mask] = self._sorted(np.flatnonzero(usable))
            self._table_of[layer] = self._tables[mask]
        return self._table_of[layer]

    def _sorted(self, rows: NDArray[np.intp]) -> _Table:
        keys = self.capture.keys.key[rows]
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(rows)])
        return _Table(ordered[first], rows[order], first, np.diff(first, append=len(rows)))

    def _note_varying(self, layer: int, table: _Table, slot: NDArray[np.intp]) -> None:
        """Remember which of the keys at ``slot`` the capture holds with different experts."""
        slot = slot[table.count[slot] > 1]
        if not len(slot):
            return
        count = table.count[slot]
        starts = np.cumsum(count) - count
        place = np.repeat(table.first[slot] - starts, count) + np.arange(count.sum())
        ids = np.sort(self.capture.read(f"layers.{layer}.{IDS}", table.order[place]), axis=1)
        other = (ids != np.repeat(ids[starts], count, axis=0)).any(axis=1)
        different = np.logical_or.reduceat(other, starts)
        if different.any():
            keys = table.key[slot[different]]
            self._varying.setdefault(layer, set()).update(key.tobytes() for key in keys)


def wanted(
    capture: Capture | str | os.PathLike[str] | None, weights: bool, moe_layers: Iterable[int]
) -> Routes | None:
    """Open the routes to force in all of a model's layers with experts, if any are to be.

    Raises:
        CaptureError: no capture there, or a damaged one.
        LayerBisectError: a model without experts, a layer of which the capture has none, or
            ``weights`` without a capture.
    """
    if capture is None:
        if weights:
            raise LayerBisectError("route_weights needs routes: give the capture that has them")
        return None
    layers = tuple(moe_layers)
    if not layers:
        raise LayerBisectError("no routes can be forced in a model without experts; leave them out")
    routes = Routes.of(capture, weights=weights)
    routes.require(layers)
    return routes


def check_choice(choice: Choice, *, experts: int, slots: int) -> None:
    """Raise LayerBisectError for experts that a router with these numbers cannot have chosen."""
    ids = choice.ids[choice.found]
    if not len(ids):
        return
    if ids.shape[1] != slots:
        raise LayerBisectError(
            f"the routes name {ids.shape[1]} experts a row where this router chooses {slots}; "
            "force those of a capture of the same model"
        )
    if ids.max() >= experts:
        raise LayerBisectError(
            f"the routes name expert {ids.max()} of {experts}; "
            "force those of a capture of the same model"
        )
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise LayerBisectError(
            "the routes name an expert twice in one row, which no top-k does; "
            "look at the expert_ids of that capture first"
        )


def at_experts(
    scores: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a top-k choose given experts in some rows.

    Args:
        scores: [row, expert], of which the top k were taken.
        own: values and indices [row, slot] of that top-k.
        rows: int64 [n], the rows to change; ``ids``: int64 [n, slot], their experts.
    """
    values, indices = own
    chosen = scores.index_select(0, rows).gather(1, ids).to(values.dtype)
    return values.index_copy(0, rows, chosen), indices.index_copy(0, rows, ids)


def holding(weights: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The narrower of ``dtype`` and float32 that holds captured ``weights`` (float32) exactly.

    SGLang has them in float32 where a trainer in bfloat16 rounds them. That rounding is part of
    what the two weights differ by, so forced ones must not have it.
    """
    import torch

    exact = torch.equal(weights.to(dtype).to(weights.dtype), weights)
    return dtype if exact else torch.promote_types(dtype, weights.dtype)
