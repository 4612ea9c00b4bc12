"""Compare a tensor of which at least one side holds digests and a sample alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from layerbisect.bisect.weight_diff.holders import Holder
from layerbisect.bisect.weight_diff.numbers import equal_but_for_dtype
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.weights.format import SCALE, Extent, digest, torch_dtype
from layerbisect.captures.weights.store import StoredPart, WeightSnapshot, cut, strided


@dataclass(frozen=True, slots=True)
class Look:
    """Whether digests agree, and samples ([k] each) at the same places where they do not."""

    state: Literal["same", "cast", "different"]
    samples: tuple[torch.Tensor, torch.Tensor] | None = None


def has_values(holder: Holder) -> bool:
    """Whether a side holds values, and not digests alone."""
    return holder.snapshot is None or holder.snapshot.info.values


def stored_alike(name: str, first: Holder, second: Holder) -> bool | None:
    """Whether two snapshots' digests agree; None where their layouts or dtypes differ."""
    if first.snapshot is None or second.snapshot is None:
        return None
    names = [name] + ([name + SCALE] if name + SCALE in first.snapshot else [])
    alike = True
    for each in names:
        if each not in second.snapshot:
            return None
        mine, theirs = _digests(first.snapshot, each), _digests(second.snapshot, each)
        if mine.keys() != theirs.keys():
            return None
        alike &= mine == theirs
    return alike


def compare_digests(name: str, first: Holder, second: Holder) -> Look:
    """Compare a tensor by digests over all bytes.

    Raises LayerBisectError, saying why, where digests cannot be compared.
    """
    alike = stored_alike(name, first, second)
    if alike:
        return Look("same")
    if not has_values(first) and not has_values(second):
        if alike is None:
            raise LayerBisectError("both sides hold digests alone, of other parts or dtypes")
        return Look("different", _both_sampled(name, first, second))
    if has_values(first):
        turned = compare_digests(name, second, first)
        return Look(turned.state, turned.samples[::-1] if turned.samples else None)
    assert first.snapshot is not None
    state: Literal["same", "cast", "different"] = "same"
    samples = []
    held = second.get(name)
    if (name + SCALE in first.snapshot) != (held.scale is not None):
        raise LayerBisectError("one side holds digests of quantised values, the other no such")
    pairs = [(name, held.values)]
    if held.scale is not None:
        pairs.append((name + SCALE, held.scale))
    for each, values in pairs:
        for part in first.snapshot.parts(each):
            if part.header.whole != tuple(values.shape):
                raise LayerBisectError(
                    f"shapes are {list(part.header.whole)} and {list(values.shape)}, "
                    "and digests cannot be cut"
                )
            wanted = torch_dtype(part.header.dtype)
            mine = cut(part, values).contiguous()
            if digest(mine.to(wanted)) != part.header.digest:
                state = "different"
            elif mine.dtype != wanted and state == "same":
                state = "cast"
            if each == name:
                stored = first.snapshot.sampled(part, name)
                samples.append((stored, strided(part, values)))
    if state == "different" and all(_same_sample(*pair) for pair in samples) and held.scale is None:
        narrower = held.values.itemsize < torch_dtype(_dtype(first.snapshot, name)).itemsize
        if narrower:
            # rounding cannot be undone: only the other way round could digests be compared
            raise LayerBisectError("digests of a wider dtype than the other side's values")
    joined = torch.cat([a.float() for a, _ in samples]), torch.cat([b.float() for _, b in samples])
    return Look(state, joined if state == "different" else None)


class DigestLookup:
    """Find a tensor of digests alone among another side's tensors."""

    def __init__(self, holder: Holder, names: Iterable[str]) -> None:
        self._holder = holder
        self._by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            self._by_shape.setdefault(holder.shape(name), []).append(name)
        self._known: dict[tuple[str, tuple[Extent, ...], str], str | None] = {}

    def alike(self, name: str, digests: WeightSnapshot) -> str | None:
        """Name another tensor that has the digests of ``name``."""
        parts = digests.parts(name)
        for other in self._by_shape.get(digests.shape(name), ()):
            if other != name and all(
                self._digest(other, part) == part.header.digest for part in parts
            ):
                return other
        return None

    def _digest(self, name: str, part: StoredPart) -> str | None:
        """Digest what the other side has in a part's place; None where that cannot be."""
        key = (name, part.header.extents, part.header.dtype)
        if key not in self._known:
            try:
                self._known[key] = self._made(name, part)
            except LayerBisectError:
                # said of that tensor where it is compared itself
                self._known[key] = None
        return self._known[key]

    def _made(self, name: str, part: StoredPart) -> str | None:
        snapshot = self._holder.snapshot
        if snapshot is not None and not snapshot.info.values:
            return _digests(snapshot, name).get((part.header.extents, part.header.dtype))
        values = cut(part, self._holder.get(name).values).contiguous()
        return digest(values.to(torch_dtype(part.header.dtype)))


def _both_sampled(name: str, first: Holder, second: Holder) -> tuple[torch.Tensor, torch.Tensor]:
    assert first.snapshot is not None and second.snapshot is not None
    theirs = {p.header.extents: p for p in second.snapshot.parts(name)}
    mine, other = [], []
    for part in first.snapshot.parts(name):
        mine.append(first.snapshot.sampled(part, name).float())
        other.append(second.snapshot.sampled(theirs[part.header.extents], name).float())
    return torch.cat(mine), torch.cat(other)


def _same_sample(stored: torch.Tensor, values: torch.Tensor) -> bool:
    return torch.equal(stored.float(), values.float()) or equal_but_for_dtype(stored, values)


def _digests(snapshot: WeightSnapshot, name: str) -> dict[object, str]:
    return {(p.header.extents, p.header.dtype): p.header.digest for p in snapshot.parts(name)}


def _dtype(snapshot: WeightSnapshot, name: str) -> str:
    return snapshot.parts(name)[0].header.dtype
