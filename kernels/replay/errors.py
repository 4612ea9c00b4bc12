"""An output's errors against float64 on the same input, and whether rounding explains them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from layerbisect.kernels.judging.measure import quantile
from layerbisect.kernels.judging.own_error import EXTREME_RATIO, OwnError
from layerbisect.kernels.judging.where import Named, by_expert, by_position, describe
from layerbisect.kernels.replay.bits import ulp_histogram
from layerbisect.kernels.replay.bounded import bound, bound_given_choice, wrong_rows
from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.judge import Judge, Results
from layerbisect.kernels.replay.report import Errors, WorstRow

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
_WORST = 5
_NAMED_FITS = 3
_TINY = 1e-300


class Yardstick:
    """What a bundle's outputs are measured by: its references, and the bound of its operator."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.judge = Judge(bundle)

    def errors(self, produced: Results, acquitted: str = "") -> Errors:
        """Measure an output ([row, ...] by result) over the rows that are observed.

        With ``acquitted`` an error beyond rounding is known to change nothing, for that reason.
        """
        bundle, own = self.bundle, self.judge.judge(produced)
        rows = own.flat_rows
        exact = self.judge.references(produced)[0][rows]
        values = produced[self.judge.result].double()
        values = values.reshape(bundle.rows, *exact.shape[1:])[rows]
        error = _root_mean_square(values - exact)
        if bundle.calls[-1].operator != "logprob":
            error = error / _root_mean_square(exact).clamp_min(_TINY)
        used = self._bound_used(produced, values, exact, rows)
        chosen = wrong_rows(bundle, produced)
        wrong = None if chosen is None else int(chosen[rows].sum())
        beyond = None if used is None else int((used > 1).sum())
        found = (not acquitted and (own.convicted or bool(beyond))) or bool(wrong)
        return Errors(
            rows=own.rows,
            relative={name: quantile(error, q) for name, q in _QUANTILES.items()},
            ratio=own.ratio,
            median=own.median,
            floor=own.floor,
            worst=_worst(bundle, own, error),
            ulps=ulp_histogram(values, exact, bundle.storage),
            fits=own.fits,
            where=describe(own, bundle.position[rows], lambda hit: _named(bundle, rows, hit)),
            bound_used=None if used is None else float(used.max()) if used.numel() else 0.0,
            beyond_bound=beyond,
            wrong_choices=wrong,
            nonfinite=own.nonfinite,
            convicted=found,
            why="; ".join([*_reasons(own, beyond, wrong), *([acquitted] if acquitted else [])]),
        )

    @cached_property
    def _bound(self) -> torch.Tensor | None:
        return bound(self.bundle)

    def _bound_used(
        self, produced: Results, values: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Error of each element as a share of its bound: [row, ...], None where it has none."""
        allowed = bound_given_choice(self.bundle, produced)
        allowed = self._bound if allowed is None else allowed
        if allowed is None:
            return None
        allowed = allowed[rows].reshape(exact.shape)
        return torch.where(values == exact, 0.0, (values - exact).abs() / allowed.clamp_min(_TINY))


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).square().mean(1).sqrt()


def _worst(bundle: Bundle, own: OwnError, error: torch.Tensor) -> tuple[WorstRow, ...]:
    order = own.row_ratio.topk(min(_WORST, own.rows)).indices.tolist()
    return tuple(
        WorstRow(
            position=int(bundle.position[own.flat_rows[at]]),
            token=int(bundle.token[own.flat_rows[at]]),
            relative=float(error[at]),
            ratio=float(own.row_ratio[at]),
        )
        for at in order
    )


def _named(bundle: Bundle, rows: torch.Tensor, hit: torch.Tensor) -> Iterator[Named]:
    yield from by_position(bundle.position[rows], hit)
    call = bundle.calls[-1]
    if call.operator == "experts":
        ids = bundle.inputs[call.tensors["ids"]][rows]
        if bundle.expert_numbers:
            ids = torch.tensor([*bundle.expert_numbers, -1])[ids]
        yield from by_expert(ids, hit)


def _reasons(own: OwnError, beyond: int | None, wrong: int | None) -> Sequence[str]:
    """Say in words what convicts, or how large the error is where nothing does."""
    found = []
    if own.nonfinite:
        found.append(f"{own.nonfinite} rows hold NaN or infinity")
    if beyond:
        found.append(f"{beyond} elements lie beyond the worst-case bound")
    if wrong:
        found.append(f"{wrong} rows chose other experts than those with the best scores")
    if own.beyond_rounding or not own.convicted:
        excess = f", {own.excess:.1%} of rows in excess" if own.excess else ""
        found.append(
            f"error {own.ratio:.1f}x rounding at the 95th percentile of {own.rows} rows "
            f"({own.floor:.1f}x for the low-precision reference){excess}"
        )
    elif own.extreme:
        found.append(
            f"{own.extreme} of {own.rows} rows err more than {EXTREME_RATIO:.0f}x rounding, "
            f"{float(own.row_ratio.max()):.0f}x the worst"
        )
    for fit in own.fits[:_NAMED_FITS]:
        found.append(
            f"systematic, {fit.name} {fit.coefficient:+.4g} "
            f"({abs(fit.z):.0f} standard errors from none)"
        )
    return found
