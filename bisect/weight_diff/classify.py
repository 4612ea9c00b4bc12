"""In which way a tensor differs: each way a test, in the order of what it proves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from layerbisect.bisect.weight_diff.blocks import scale_fault
from layerbisect.bisect.weight_diff.holders import Holder
from layerbisect.bisect.weight_diff.loading import INITIAL, never_loaded
from layerbisect.bisect.weight_diff.numbers import (
    EXPLAINED,
    correlation,
    distance,
    fits,
    low_rank,
    norm,
    rounding_norm,
)
from layerbisect.bisect.weight_diff.orders import find_order, sketch
from layerbisect.bisect.weight_diff.packed import PackedOrders
from layerbisect.bisect.weight_diff.pairs import EMBED, HEAD, Pair, load_pair
from layerbisect.bisect.weight_diff.regions import FewValues, differ, few_values, region_fault
from layerbisect.bisect.weight_diff.report import Finding, Kind
from layerbisect.bisect.weight_diff.swaps import Swaps

STALE = "equal to the previous weights"
DRIFT = "a small difference"
UNCORRELATED = "uncorrelated with the other side"
# the correlation of two versions of one tensor
_ALIKE = 0.9
# the relative distance of two versions of one tensor
_DRIFT = 0.3
# a low rank is read from no fewer of the values
_SPARSE = 0.05
# tensors nearer than this are neither swapped nor in another order
_NEAR = 0.02
# fewer values are fitted by anything
_ENOUGH = 8


class Classifier:
    """Says how tensors differ; reads each tensor when it is asked about."""

    def __init__(
        self,
        holders: tuple[Holder, Holder],
        common: Sequence[str],
        differing: Sequence[str],
        previous: Holder | None,
    ) -> None:
        self._holders = holders
        self._labels = (holders[0].label, holders[1].label)
        self._previous = previous
        self._swaps = Swaps(holders, common)
        self._packed = PackedOrders(holders, previous, differing)
        self.mild: set[str] = set()
        """Tensors that changed in few places, and there by no more than an update may do."""

    def classify(self, name: str) -> Finding:
        """Say how one tensor differs; raises LayerBisectError where it cannot be read."""
        pair = load_pair(name, *self._holders, self._previous)
        if pair.first.shape != pair.second.shape:
            return self._other_shape(pair)
        tests: list[Callable[[Pair], Finding | None]] = [self._not_loaded]
        if pair.held is None:
            tests += [self._swapped, self._scaled, self._stale]
        else:
            tests = [self._few, self._not_loaded, self._blocks, self._scaled]
            if pair.apart > _NEAR:
                tests += [self._swapped, self._transposed]
            tests += [self._permuted, self._region, self._update, self._low_rank, self._stale]
        for test in tests:
            found = test(pair)
            if found is not None:
                return found
        return self._remaining(pair)

    def _finding(
        self,
        pair: Pair,
        kind: Kind,
        off: int | None,
        how: str,
        *evidence: str,
        where: str = "",
    ) -> Finding:
        side = "unknown" if off is None else self._labels[off]
        return Finding(pair.name, kind, side, how, pair.apart, pair.unit, where, evidence)

    def _other_shape(self, pair: Pair) -> Finding:
        a, b = pair.first, pair.second
        shapes = f"{list(a.shape)} on {self._labels[0]}, {list(b.shape)} on {self._labels[1]}"
        if a.ndim == 2 and a.shape == b.T.shape and distance(a, b.T) < 0.05:
            return self._finding(pair, "transposed", None, "rows are the other's columns", shapes)
        return self._finding(pair, "shape", None, "shapes differ", shapes)

    def _not_loaded(self, pair: Pair) -> Finding | None:
        found = never_loaded(pair, self._labels)
        if found is None:
            return None
        return self._finding(pair, "not loaded", found.side, found.how, found.evidence)

    def _blocks(self, pair: Pair) -> Finding | None:
        assert pair.held is not None
        if all(held.scale is None for held in pair.held):
            return None
        found = scale_fault(*pair.held, (pair.first, pair.second))
        if found is None:
            return None
        off = found.side if found.side is not None else pair.off()
        return self._finding(pair, "block scales", off, found.how, found.evidence)

    def _scaled(self, pair: Pair) -> Finding | None:
        fit = min(fits(pair.first, pair.second), key=lambda fit: fit.left)
        if fit.left > EXPLAINED or pair.first.numel() < _ENOUGH:
            return None
        first, second = self._labels
        share = f"which explains {1 - fit.left**2:.1%} of the difference"
        if not fit.offset:
            line = f"{second} is {fit.gain:.6g} times {first}, {share}"
            how = f"times {fit.gain:.3g} on {second}"
            return self._finding(pair, "scaled", pair.off(), how, line)
        line = f"{second} is {first} {_signed(fit.offset)}, {share}"
        if pair.name.endswith("norm.weight") and abs(abs(fit.offset) - 1) < 0.02:
            sign = "plus" if fit.offset > 0 else "minus"
            how = f"{sign} 1 on {second}, as where one side stores w and the other 1 + w"
        else:
            how = f"{_signed(fit.offset)} on {second}"
        return self._finding(pair, "offset", pair.off(), how, line)

    def _swapped(self, pair: Pair) -> Finding | None:
        found = self._swaps.find(pair)
        if found is None:
            return None
        mine, theirs = self._labels[found.side], self._labels[1 - found.side]
        line = f"{pair.name} of {mine} is {found.other} of {theirs}"
        if pair.name.endswith(HEAD) and found.other.endswith(EMBED):
            how = "the embedding stands for the head"
            return self._finding(pair, "tied head", found.side, how, line)
        # a side that has one matrix under two names cannot be right
        off = found.side if found.doubled else pair.off()
        return self._finding(pair, "swapped", off, found.how, line)

    def _transposed(self, pair: Pair) -> Finding | None:
        if pair.first.ndim != 2:
            return None
        for moved, how in (
            (pair.second.T, "rows are the other's columns"),
            (pair.second.T.reshape(pair.first.shape), "read as if it were transposed"),
        ):
            if moved.shape != pair.first.shape:
                continue
            left = distance(pair.first, moved)
            if left <= EXPLAINED * pair.apart:
                line = f"transposing leaves {left:.2g} of a difference of {pair.apart:.2g}"
                return self._finding(pair, "transposed", pair.off(), how, line)
        return None

    def _permuted(self, pair: Pair) -> Finding | None:
        how = self._packed.order(pair.name)
        if how is not None:
            return self._finding(pair, "permuted", pair.off(), how, how)
        if pair.first.ndim != 2 or pair.apart < _NEAR:
            return None
        for what in ("rows", "columns"):
            a, b = (sketch(x if what == "rows" else x.T) for x in (pair.first, pair.second))
            order = find_order(a, b, what=what)
            if order is not None:
                kept = "all values are there" if order.exact else "but for a small difference"
                return self._finding(
                    pair, "permuted", pair.off(), order.how, f"{order.how}; {kept}"
                )
        return None

    def _few(self, pair: Pair) -> Finding | None:
        found = few_values(pair.first, pair.second)
        return None if found is None else self._few_values(pair, found)

    def _few_values(self, pair: Pair, found: FewValues) -> Finding:
        stale = self._stale(pair)
        if found.small and stale is not None:
            return stale
        if found.small:
            self.mild.add(pair.name)
        line = f"{pair.name}: {found.share}, by {found.largest:.3g} at most, at {found.where}"
        how = "all others are equal"
        return self._finding(
            pair, "few values", pair.off(), how, line, where=f"values {found.where}"
        )

    def _region(self, pair: Pair) -> Finding | None:
        if pair.first.ndim != 2:
            return None
        found = region_fault(pair, self._holders)
        if found is None:
            return None
        region = found.region
        if pair.stale is not None and correlation(*found.inside(pair)) > _ALIKE:
            # an update that moved some rows alone, as of the tokens that were seen
            return self._stale(pair)
        off = pair.off() if found.off is None else found.off
        if region.shard is not None:
            how = f"shard {region.shard[0]} of {region.shard[1]}"
            return self._finding(pair, "one shard", off, how, *found.evidence, where=region.where)
        inside = found.inside(pair)
        if correlation(*inside) > _ALIKE and distance(*inside) < _DRIFT:
            self.mild.add(pair.name)
        how = f"some {'columns' if region.dim else 'rows'}"
        return self._finding(pair, "rows", off, how, *found.evidence, where=region.where)

    def _update(self, pair: Pair) -> Finding | None:
        """Compare what the two sides changed since the previous weights."""
        if pair.previous is None or pair.stale is not None:
            return None
        a, b = pair.first - pair.previous, pair.second - pair.previous
        if not norm(a) or not norm(b):
            return None
        fit = fits(a, b)[0]
        if fit.left <= EXPLAINED:
            how = f"its update times {fit.gain:.4g} on {self._labels[1]}"
            return self._finding(pair, "scaled", None, how, how)
        if a.ndim == 2:
            order = find_order(sketch(a), sketch(b))
            if order is not None:
                return self._finding(pair, "permuted", None, f"the update's {order.how}", order.how)
        return None

    def _low_rank(self, pair: Pair) -> Finding | None:
        if float(differ(pair.first, pair.second).float().mean()) < _SPARSE:
            # single values are of a low rank, too
            return None
        rounding = rounding_norm(pair.second, 2 * pair.unit)
        found = low_rank(pair.first - pair.second, rounding)
        if found is None:
            return None
        line = (
            f"{pair.name}: a matrix of rank {found.rank} is {found.share:.0%} of the difference, "
            "rounding taken off"
        )
        evidence = [line]
        if pair.stale is not None:
            evidence.append(f"{self._labels[pair.stale]} has the previous weights")
        how = "as if an adapter was merged on one side alone"
        return self._finding(pair, "low rank", pair.stale, how, *evidence)

    def _stale(self, pair: Pair) -> Finding | None:
        if pair.stale is None:
            return None
        return self._finding(
            pair,
            "stale",
            pair.stale,
            STALE,
            f"{self._labels[pair.stale]} equals the previous weights, and "
            f"{self._labels[1 - pair.stale]} does not",
        )

    def _remaining(self, pair: Pair) -> Finding:
        alike = correlation(pair.first, pair.second)
        off = differ(pair.first, pair.second)
        count = int(off.sum())
        if pair.held is None and not count:
            line = f"{pair.name}: its digests differ, and none of {off.numel():,} sampled values"
            how = "in values that were not sampled"
            return self._finding(pair, "different", pair.off(), how, line)
        few = None
        if pair.held is not None:
            few = few_values(pair.first, pair.second, off.numel() // 100)
        if few is not None and not few.small:
            return self._few_values(pair, few)
        line = (
            f"{pair.name}: {count:,} of {off.numel():,} values differ, relative difference "
            f"{pair.apart:.3g}, correlation {alike:.3f}"
        )
        if pair.apart < (_DRIFT if alike > _ALIKE else INITIAL):
            return self._finding(pair, "drift", pair.off(), DRIFT, line)
        if abs(alike) < max(0.1, 4 / math.sqrt(pair.first.numel())) and pair.first.numel() >= 64:
            return self._finding(pair, "not loaded", pair.off(), UNCORRELATED, line)
        return self._finding(pair, "different", pair.off(), "in no known way", line)


def _signed(offset: float) -> str:
    return f"plus {offset:.3g}" if offset > 0 else f"minus {-offset:.3g}"
