"""Measure the difference of two columns call by call, in memory that the input does not grow.

All figures are over the tokens that the loss mask keeps and that both columns score.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import PairReport, PositionGap, TokenGap
from layerbisect.bisect.token_report import DistributionMeasure
from layerbisect.bisect.verdict import Gap
from layerbisect.captures.record.call import Call

EXACT = 1 << 18
"""So many differences are kept as they are; quantiles of more come from a histogram."""

WORST = 10
# the bits of a float32 that name its bin: sign, exponent and 11 bits of its fraction, so that a
# bin's width is 0.05 % of its values
_SHIFT = 12
_BINS = 1 << (31 - _SHIFT)


class Tail:
    """Mean, quantiles and maximum of signed differences (nat)."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.float64]] = []
        self._pending = 0
        self._histogram: NDArray[np.int64] | None = None
        self.count = 0
        self._sum = self._absolute = self._max = 0.0

    def add(self, difference: NDArray[np.float64]) -> None:
        """Take in finite differences, float64 [token]."""
        if not len(difference):
            return
        size = np.abs(difference)
        self.count += len(difference)
        self._sum += float(difference.sum())
        self._absolute += float(size.sum())
        self._max = max(self._max, float(size.max()))
        self._kept.append(size)
        self._pending += len(size)
        if self._pending > EXACT:
            self._spill()

    @property
    def exact(self) -> bool:
        """Whether every difference is still kept as it is."""
        return self._histogram is None

    @property
    def mae(self) -> float:
        """Mean absolute difference; nan where there is none."""
        return self._absolute / self.count if self.count else float("nan")

    @property
    def max(self) -> float:
        """Largest absolute difference."""
        return self._max

    def gap(self) -> Gap | None:
        """Summarize; None where nothing was added."""
        if not self.count:
            return None
        p95, p99 = self._quantiles((0.95, 0.99))
        return Gap(self.mae, self._sum / self.count, p95, p99, self._max, self.count)

    def _spill(self) -> None:
        if self._histogram is None:
            self._histogram = np.zeros(_BINS, np.int64)
        bits = np.concatenate(self._kept).astype(np.float32).view(np.uint32) >> _SHIFT
        self._histogram += np.bincount(bits, minlength=_BINS)
        self._kept, self._pending = [], 0

    def _quantiles(self, shares: tuple[float, float]) -> tuple[float, float]:
        if self.exact:
            found = np.quantile(np.concatenate(self._kept), shares)
            return float(found[0]), float(found[1])
        self._spill() if self._kept else None
        assert self._histogram is not None
        below = np.cumsum(self._histogram)
        places = np.searchsorted(below, [share * (self.count - 1) + 1 for share in shares])
        middle = ((places.astype(np.uint32) << _SHIFT) + (1 << (_SHIFT - 1))).view(np.float32)
        return float(middle[0]), float(middle[1])


class WorstTokens:
    """The tokens with the largest absolute differences, of any number."""

    def __init__(self, keep: int = WORST) -> None:
        self._keep = keep
        self._heap: list[tuple[float, int, TokenGap]] = []
        # two equal differences are not told apart by what cannot be compared
        self._order: Iterator[int] = count()

    def add(
        self,
        call: Call,
        first: NDArray[np.float64],
        second: NDArray[np.float64],
        at: NDArray[np.intp],
    ) -> None:
        """Take in a call's scores, [response] each, at the places ``at``."""
        size = np.abs(first[at] - second[at])
        if len(size) > self._keep:
            top = np.argpartition(size, -self._keep)[-self._keep :]
            at, size = at[top], size[top]
        for place, error in zip(at.tolist(), size.tolist(), strict=True):
            if len(self._heap) == self._keep and error <= self._heap[0][0]:
                continue
            worst = TokenGap(
                call.name,
                place,
                int(call.response[place]),
                float(first[place]),
                float(second[place]),
                float(first[place] - second[place]),
            )
            push = heapq.heappush if len(self._heap) < self._keep else heapq.heapreplace
            push(self._heap, (error, -next(self._order), worst))

    def listed(self) -> tuple[TokenGap, ...]:
        """The tokens, the worst first."""
        return tuple(worst for _, _, worst in sorted(self._heap, key=lambda e: (-e[0], -e[1])))


class PositionBins:
    """The gap by position, in bins 0, 1, 2-3, 4-7, ..., of any number of tokens."""

    def __init__(self) -> None:
        # count, sum of sizes, sum
        self._bins = np.zeros((32, 3))

    def add(self, position: NDArray[np.integer], difference: NDArray[np.float64]) -> None:
        """Take in finite differences (nat) of tokens at positions, [token] each."""
        # frexp's exponent is the number of bits, exactly
        bits = np.frexp(position.astype(np.float64))[1]
        for column, weights in enumerate((None, np.abs(difference), difference)):
            self._bins[:, column] += np.bincount(bits, weights, minlength=32)

    def report(self) -> tuple[PositionGap, ...]:
        """The bins that hold tokens."""
        return tuple(
            PositionGap(
                start=(1 << bits) >> 1,
                stop=1 << bits,
                tokens=int(tokens),
                mae=float(size / tokens),
                signed_mean=float(total / tokens),
            )
            for bits, (tokens, size, total) in enumerate(self._bins)
            if tokens
        )


class PairMeasure:
    """Measures ``first`` minus ``second``."""

    def __init__(self, first: str, second: str) -> None:
        self.first, self.second = first, second
        self.whole, self._first_token, self._later = Tail(), Tail(), Tail()
        self._worst = WorstTokens()
        self._distribution = DistributionMeasure()
        self._bins = PositionBins()

    def add(self, call: Call) -> None:
        """Take in a call."""
        first, second = call.scores[self.first], call.scores[self.second]
        at = np.flatnonzero(call.mask & np.isfinite(first) & np.isfinite(second))
        if not len(at):
            return
        difference = first[at] - second[at]
        self.whole.add(difference)
        self._distribution.add(difference)
        start = int(at[0] == 0)
        self._first_token.add(difference[:start])
        self._later.add(difference[start:])
        self._worst.add(call, first, second, at)
        self._bins.add(at, difference)

    def report(self) -> PairReport | None:
        """Summarize; None where no token is scored by both."""
        gap = self.whole.gap()
        if gap is None:
            return None
        return PairReport(
            name=f"{self.first}-{self.second}",
            first=self.first,
            second=self.second,
            gap=gap,
            first_token=self._first_token.gap(),
            later=self._later.gap(),
            by_position=self._bins.report(),
            worst=self._worst.listed(),
            exact_quantiles=self.whole.exact,
            distribution=self._distribution.report(),
        )
