"""The smallest gain that a judgement states is one that it convicts, and no much smaller one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerbisect.kernels.judging.measure import SYSTEMATIC_SIZE, Output, measure
from layerbisect.kernels.judging.own_error import MEDIAN_RATIO, SYSTEMATIC_Z, OwnError
from layerbisect.kernels.judging.residuals import Direction, _fit, fits_beyond, smallest_beyond
from tests.kernels.judging.test_measure import outputs, values


def judged(exact: torch.Tensor, seed: int, dtype: str, gain: float = 0.0) -> OwnError:
    captured = outputs(exact * (1 + gain), seed, dtype).captured
    return measure(outputs(exact, seed + 100, dtype, captured=captured))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [40, 70, 400])
def test_half_as_much_again_is_convicted_and_a_quarter_is_not(dtype: str, rows: int) -> None:
    for seed in range(8):
        exact = values(seed, rows, 2, 16)
        said = judged(exact, seed, dtype).smallest_gain
        assert said is not None
        for share in (1.5, -1.5, 2.0):
            assert judged(exact, seed, dtype, share * said).convicted, (seed, share, said)
        for share in (0.25, -0.25):
            assert not judged(exact, seed, dtype, share * said).convicted, (seed, share, said)


def test_what_limits_it() -> None:
    many = values(0, 4000, 4, 32)
    bulk, few = (judged(rows, 0, "bfloat16").smallest_gain for rows in (many, many[:40]))
    assert bulk is not None and few is not None
    # rows enough make chance small, and a smaller coefficient is no bug that anyone would see
    assert SYSTEMATIC_SIZE <= bulk < 1.1 * SYSTEMATIC_SIZE
    # too few rows for a fit, and only the size of the error is left
    assert 2 * bulk < few < 0.02
    float32 = judged(many, 0, "float32").smallest_gain
    assert float32 is not None and float32 < 1e-5


def test_a_gain_that_is_fitted_by_no_direction_is_told_by_its_size() -> None:
    exact = values(0, 400, 64)
    fitted = measure(outputs(exact, 0))
    unfitted = measure(replace(outputs(exact, 0), gains=()))
    assert fitted.smallest_gain is not None and unfitted.smallest_gain is not None
    assert unfitted.smallest_gain > 2 * fitted.smallest_gain
    for share, convicted in ((1.5, True), (0.5, False)):
        wrong = outputs(exact * (1 + share * unfitted.smallest_gain), 0).captured
        again = measure(replace(outputs(exact, 100, captured=wrong), gains=()))
        assert again.convicted is convicted
        assert (again.median > MEDIAN_RATIO) is convicted


def test_another_direction_that_the_gain_moves_along_counts() -> None:
    exact = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    alone = measure(outputs(exact, 0)).smallest_gain
    # nearly a gain, of which less is no bug: its coefficient counts in units of a twentieth
    other = torch.randn(400, 64, generator=torch.Generator().manual_seed(1)).double()
    way = (exact + 0.05 * other) / 20
    both = measure(outputs(exact, 0, directions={"eps": way})).smallest_gain
    assert alone is not None and both is not None and both < 0.7 * alone
    wrong = outputs(exact * (1 + 1.5 * both), 0).captured
    found = measure(outputs(exact, 100, captured=wrong, directions={"eps": way}))
    assert [fit.name for fit in found.fits] == ["eps"]


def test_of_a_log_prob_it_is_a_factor_on_the_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    exact, way = torch.randn(2, 300, 1, generator=draw).double()
    output = replace(
        outputs(exact, 0), gains=(), directions={"logit scale": way}, noise=0.004 * way.abs() + 0.01
    )
    said = measure(output).smallest_gain
    assert said is not None
    wrong = exact + 1.5 * said * way
    assert measure(replace(output, captured=wrong)).convicted
    assert not measure(replace(output, captured=exact + 0.25 * said * way)).convicted


def test_copies_have_no_gain_below_what_rounding_takes_back() -> None:
    exact = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    output = replace(outputs(exact, 0), captured=exact, low=exact, noise=1e-4 * exact.abs())
    assert measure(output).smallest_gain == 2**-8


def test_nothing_measured_says_nothing() -> None:
    exact = torch.full((100, 8), torch.nan).double()
    assert measure(outputs(exact, 0)).smallest_gain is None
    zero = torch.zeros(100, 8).double()
    output: Output = replace(outputs(zero, 0), captured=zero, low=zero, noise=torch.ones(100, 8))
    assert measure(output).smallest_gain is None


@pytest.mark.parametrize("rows", [2, 4, 20, 300])
def test_a_fit_finds_what_is_said_with_room_for_another_draw(rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    moved = torch.randn(rows, 1, 16, generator=draw).double()
    error, reference = 0.1 * torch.randn(2, rows, 1, 16, generator=draw).double()
    low = error - reference
    way = Direction(moved, 0.0, lambda v: v.sum((1, 2))[:, None], lambda at: "gain")
    least = smallest_beyond(way, moved, error, low, z=SYSTEMATIC_Z)
    if rows < 5:
        # too few to be sure of anything
        assert least == torch.inf
        return
    weight = moved.square().sum((1, 2))[:, None]
    deviates = [
        float(_fit(((e + bug) * moved).sum((1, 2))[:, None], weight)[1].abs())
        for bug in (least * moved, -least * moved)
        for e in (error, low)
    ]
    assert SYSTEMATIC_Z < min(deviates) < 1.5 * SYSTEMATIC_Z
    for share, found in ((1, True), (-1, True), (0.25, False)):
        bug = share * least * moved
        assert bool(fits_beyond(way, error + bug, low + bug, z=SYSTEMATIC_Z)) is found
