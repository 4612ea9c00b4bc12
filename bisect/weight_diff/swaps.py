"""Whether a side has under one name what the other has under another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from layerbisect.bisect.weight_diff.digests import DigestLookup
from layerbisect.bisect.weight_diff.holders import Holder
from layerbisect.bisect.weight_diff.lookup import Lookup
from layerbisect.bisect.weight_diff.numbers import EXPLAINED, distance
from layerbisect.bisect.weight_diff.pairs import Pair
from layerbisect.captures.errors import LayerBisectError

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
# two of one tensor, an update or a quantisation apart
_SAME = 0.2


@dataclass(frozen=True, slots=True)
class Swap:
    """``side`` (0, 1) has under its name what the other side calls ``other``.

    ``doubled`` says that it has the same under ``other``, too.
    """

    side: int
    other: str
    doubled: bool
    how: str


class Swaps:
    """Looks a tensor up among those of the other side."""

    def __init__(self, holders: tuple[Holder, Holder], common: Sequence[str]) -> None:
        self._holders = holders
        self._lookups = tuple(Lookup(holder, common) for holder in holders)
        self._digests = tuple(DigestLookup(holder, common) for holder in holders)

    def find(self, pair: Pair) -> Swap | None:
        """Find what a side has in place of this tensor; None where it is no other tensor."""
        return self._by_digest(pair.name) if pair.held is None else self._by_value(pair)

    def _by_value(self, pair: Pair) -> Swap | None:
        for side, mine, own in ((0, pair.first, pair.second), (1, pair.second, pair.first)):
            other = self._lookups[1 - side].alike(pair.name, mine)
            if other is None:
                continue
            try:
                match = self._holders[1 - side].get(other).numbers()
                if distance(mine, match) > min(_SAME, EXPLAINED * distance(mine, own)):
                    continue
                back = self._holders[side].get(other).numbers()
            except LayerBisectError:
                # said of that tensor where it is compared itself
                continue
            mutual = distance(back, own) < _SAME
            doubled = not mutual and distance(back, mine) < _SAME
            return Swap(side, other, doubled, _exchanged(pair.name, other, mutual))
        return None

    def _by_digest(self, name: str) -> Swap | None:
        for side in (0, 1):
            snapshot = self._holders[side].snapshot
            if snapshot is None or snapshot.info.values:
                continue
            other = self._digests[1 - side].alike(name, snapshot)
            if other is not None:
                back = self._digests[1 - side].alike(other, snapshot) == name
                return Swap(side, other, False, _exchanged(name, other, back))
        return None


def _exchanged(name: str, other: str, mutual: bool) -> str:
    """Say what was exchanged, alike for every tensor of one fault."""
    mine, theirs = _NUMBERS.findall(name), _NUMBERS.findall(other)
    if _NUMBERS.sub("*", name) != _NUMBERS.sub("*", other):
        parts = [n.removesuffix(".weight").rpartition(".")[2] for n in (name, other)]
        said = " and ".join(sorted(parts))
    else:
        place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        numbers = sorted((mine[place], theirs[place]), key=int)
        said = f"{'experts' if place else 'layers'} {' and '.join(numbers)}"
    return f"{said} exchanged" if mutual else f"{said}: one in place of the other"
