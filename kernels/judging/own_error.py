"""An operator's own error: its size, its systematic part, and when they convict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerbisect.kernels.judging.residuals import Fit

EXCESS_RATIO = 4.0
"""A row whose error is this many times the low-precision reference's is in excess."""
EXCESS_SHARE = 0.01
EXCESS_ROWS = 3
EXTREME_RATIO = 32.0
"""No rounding makes a row's error this many times the reference's: one such row is enough."""
MEDIAN_RATIO = 2.0
SYSTEMATIC_Z = 8.0
SAMPLED_ROWS = 24


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The errors of some rows, the worst ones among them.

    ``error`` and ``noise`` are [row, head, channel], ``flat_rows`` [row] their places in the
    layout. A few rows, for a side that runs other weights is convicted of hundreds of operators.
    """

    flat_rows: torch.Tensor
    error: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def of(
        cls,
        flat_rows: torch.Tensor,
        error: torch.Tensor,
        noise: torch.Tensor,
        ratio: torch.Tensor,
    ) -> Sample:
        """Keep the rows with the largest ``ratio`` [row], and as many evenly spread ones."""
        count = min(SAMPLED_ROWS, len(ratio))
        spread = torch.linspace(0, len(ratio) - 1, count).long()
        rows = torch.cat([ratio.topk(count).indices, spread]).unique()
        return cls(flat_rows[rows], error[rows].float(), noise[rows].float())


@dataclass(frozen=True, slots=True, eq=False)
class OwnError:
    """One operator's own error on one side.

    ``ratio`` is the 95th percentile over rows of the error in units of the low-precision
    reference's; ``floor`` is the same percentile of that reference itself; ``median`` and
    ``excess`` (share of rows beyond ``EXCESS_RATIO``) say how widespread it is. ``fits`` are the
    systematic parts beyond chance. ``covers`` has more than one operator where points between are
    not observable. ``set_aside`` counts rows whose route is too close to call. ``row_ratio`` [row]
    is each row's error and ``flat_rows`` [row] its place in the layout; ``sample`` is kept for
    convicted operators only; ``parted`` says how q/k norm, rotation and projection were told apart;
    ``acquitted`` why an error beyond rounding changes nothing. ``smallest_gain`` is the smallest
    relative gain of the output that would have convicted (of a log-prob, a factor on the logits),
    None where nothing was measured that has a size.
    """

    point: str
    layer: int | None
    operator: str
    side: str
    rows: int
    ratio: float
    floor: float
    median: float
    excess: float
    nonfinite: int
    fits: tuple[Fit, ...]
    covers: tuple[str, ...]
    set_aside: int
    row_ratio: torch.Tensor
    flat_rows: torch.Tensor
    sample: Sample | None = None
    parted: str = ""
    acquitted: str = ""
    smallest_gain: float | None = None

    @property
    def convicted(self) -> bool:
        """Whether the error is beyond what rounding explains."""
        return not self.acquitted and bool(self.nonfinite or self.far_off or self.fits)

    @property
    def far_off(self) -> bool:
        """Whether its size convicts, in many rows or in one."""
        return self.beyond_rounding or self.extreme > 0

    @property
    def extreme(self) -> int:
        """Count rows that are so far off that each of them convicts."""
        # how near a tie in routing is too near is itself an estimate
        if "router" in self.covers and "experts" in self.covers:
            return 0
        return int((self.row_ratio > EXTREME_RATIO).sum())

    @property
    def beyond_rounding(self) -> bool:
        """Whether its size in many rows convicts."""
        widespread = self.excess >= EXCESS_SHARE and self.excess * self.rows >= EXCESS_ROWS
        return self.rows > 0 and (self.median > MEDIAN_RATIO or widespread)

    @property
    def rests_on_rows(self) -> bool:
        """Whether nothing but a minority of rows in excess convicts."""
        others = self.nonfinite or self.extreme or self.fits or self.median > MEDIAN_RATIO
        return self.convicted and not others

    @property
    def strength(self) -> float:
        """Order convictions: how many times beyond its threshold the error is."""
        if self.acquitted:
            return 0.0
        by_size = max(self.median / MEDIAN_RATIO, self.ratio / EXCESS_RATIO)
        by_fit = max((abs(f.z) / SYSTEMATIC_Z for f in self.fits), default=0.0)
        by_row = float(self.row_ratio.max()) / EXTREME_RATIO if self.extreme else 0.0
        return max(by_size, min(by_row, 10.0), min(by_fit, 10.0), 1e3 if self.nonfinite else 0.0)
