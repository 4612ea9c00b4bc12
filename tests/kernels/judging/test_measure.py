"""Rounding is not convicted, whatever its scale; a bug is, and its size is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerbisect.kernels.judging.measure import Output, measure
from layerbisect.kernels.judging.own_error import (
    EXCESS_RATIO,
    EXTREME_RATIO,
    MEDIAN_RATIO,
    SYSTEMATIC_Z,
    OwnError,
)
from layerbisect.kernels.judging.residuals import (
    Direction,
    _fit,
    fits_beyond,
    rounding_noise,
    unique_rows,
    unit_roundoff,
)
from layerbisect.kernels.rounding import rounded

ROWS, HEADS, CHANNELS = 200, 4, 32


def values(seed: int, *shape: int) -> torch.Tensor:
    """Values as activations have them: rows and channels of all sizes, one of each massive."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw, dtype=torch.float64)
    x *= torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=draw))
    x *= torch.exp(torch.randn(shape[-1], generator=draw))
    x[3] *= 30
    x[..., 5] *= 30
    return x


def outputs(exact: torch.Tensor, seed: int, dtype: str = "bfloat16", **given: Any) -> Output:
    """An operator of two roundings in the reference, and of other ones in the engine."""
    draw = torch.Generator().manual_seed(seed + 1)
    kind: torch.dtype = getattr(torch, dtype)

    def computed() -> torch.Tensor:
        parts = exact * torch.rand(exact.shape, generator=draw)
        return rounded(rounded(parts, kind) + rounded(exact - parts, kind), kind)

    return Output(
        point="layers.0.attn.context",
        layer=0,
        operator="attention",
        side="rollout",
        dtype=dtype,
        captured=given.pop("captured", computed()),
        exact=exact,
        low=computed(),
        flat_rows=torch.arange(len(exact)),
        covers=("attention",),
        gains=("all", "head", "channel"),
        **given,
    )


def reasons(error: OwnError) -> tuple[object, ...]:
    return error.median, error.ratio, error.excess, error.extreme, error.fits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_never_convicted(dtype: str) -> None:
    for seed in range(25):
        exact = values(seed, ROWS, HEADS, CHANNELS)
        error = measure(outputs(exact, seed, dtype))
        assert not error.convicted, reasons(error)
        assert error.rows == ROWS and error.nonfinite == error.set_aside == 0
        # far from each threshold
        assert error.median < 0.75 * MEDIAN_RATIO and error.excess < 0.006 and not error.extreme


def test_chance_stays_far_from_the_threshold() -> None:
    # (1 + 4 + 2 * 128) fits each, 26 thousand in all
    deviates = []
    for seed in range(100):
        exact = values(seed, ROWS, HEADS, CHANNELS)
        output = outputs(exact, seed)
        scale = rounding_noise(exact, [output.low], unit_roundoff("bfloat16"))
        error, gain = (output.captured - exact) / scale, exact / scale
        offset = torch.ones_like(exact) / scale
        for moved, axis in ((gain, (1, 2)), (gain, (2,)), (gain, ()), (offset, ())):
            along, weight = error * moved, moved.square()
            if axis:
                along, weight = along.sum(axis), weight.sum(axis)
            deviates.append(_fit(along.reshape(ROWS, -1), weight.reshape(ROWS, -1))[1])
    every = torch.cat(deviates).abs()
    assert len(every) > 20_000
    assert float(every.max()) < 6 < SYSTEMATIC_Z
    assert float((every > 3).double().mean()) < 0.01
    assert 0.5 < float(every.median()) < 0.8


@pytest.mark.parametrize(("factor", "dtype"), [(3e-3, "bfloat16"), (1.3e-3, "bfloat16")])
def test_a_gain_under_the_noise_is_found_and_measured(factor: float, dtype: str) -> None:
    exact = torch.randn(800, HEADS, 64, generator=torch.Generator().manual_seed(0)).double()
    wrong = outputs(exact * (1 + factor), 1, dtype).captured
    error = measure(outputs(exact, 1, dtype, captured=wrong))
    assert error.median < MEDIAN_RATIO and not error.beyond_rounding
    (gain,) = (f for f in error.fits if f.name == "gain")
    assert gain.coefficient == pytest.approx(factor, rel=0.1)
    assert gain.z > SYSTEMATIC_Z


def test_a_gain_in_one_head_is_found_there() -> None:
    exact = torch.randn(800, HEADS, 64, generator=torch.Generator().manual_seed(0)).double()
    moved = exact.clone()
    moved[:, 2] *= 0.995
    wrong = outputs(moved, 1).captured
    error = measure(replace(outputs(exact, 1, captured=wrong), gains=("all", "head")))
    best = error.fits[0]
    assert best.name == "head 2 gain" and best.coefficient == pytest.approx(-0.005, rel=0.1)
    assert {f.name for f in error.fits} <= {"head 2 gain", "gain"}


@pytest.mark.parametrize("kind", ["gain", "offset"])
def test_one_wrong_channel_is_found(kind: str) -> None:
    exact = torch.randn(600, 64, generator=torch.Generator().manual_seed(0)).double()
    moved = exact.clone()
    if kind == "gain":
        moved[:, 9] *= 1.01
    else:
        moved[:, 9] += 0.01
    wrong = outputs(moved, 1).captured
    error = measure(outputs(exact, 1, captured=wrong))
    assert not error.beyond_rounding
    assert [f.name for f in error.fits] == [f"channel 9 {kind}"]
    assert error.fits[0].coefficient == pytest.approx(0.01, rel=0.2)


def test_a_direction_of_its_own_is_fitted() -> None:
    exact = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    way = torch.randn(400, 64, generator=torch.Generator().manual_seed(7)).double()
    wrong = outputs(exact + 0.004 * way, 1).captured
    error = measure(outputs(exact, 1, captured=wrong, directions={"a wrong scale": way}))
    assert [f.name for f in error.fits] == ["a wrong scale"]
    assert error.fits[0].coefficient == pytest.approx(0.004, rel=0.1)


def test_what_only_the_low_precision_reference_explains_is_no_bug() -> None:
    # a table rounded to bfloat16 makes a systematic error that ordinary engines have
    exact = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    table = exact * 1.004
    output = outputs(exact, 1, captured=outputs(table, 5).captured)
    convicted, excused = measure(output), measure(replace(output, low=outputs(table, 6).low))
    assert convicted.fits and not excused.fits


def test_a_fit_that_few_rows_determine_is_worth_less() -> None:
    direction = torch.full((200, 1), 0.01)
    direction[:3] = 10
    error = 0.01 * direction + 1e-5 * torch.randn(
        200, 1, generator=torch.Generator().manual_seed(0)
    )
    coefficient, deviate = _fit(error * direction, direction.square())
    assert float(coefficient) == pytest.approx(0.01, rel=1e-3)
    # the same fit by all rows would be a hundred standard errors from none
    assert float(deviate) < SYSTEMATIC_Z
    alone = _fit((error * direction)[:1], direction.square()[:1])
    assert float(alone[1]) == 0.0


def test_too_few_rows_show_nothing_systematic() -> None:
    exact = torch.randn(63, 64, generator=torch.Generator().manual_seed(0)).double()
    error = measure(outputs(exact, 1, captured=outputs(exact * 1.004, 1).captured))
    assert not error.fits


def test_one_head_of_many_is_not_averaged_away() -> None:
    exact = torch.randn(ROWS, 32, 8, generator=torch.Generator().manual_seed(0)).double()
    wrong = outputs(exact, 1).captured
    wrong[:, 7] *= 1.05
    error = measure(replace(outputs(exact, 1, captured=wrong), gains=()))
    assert error.beyond_rounding and error.median > EXCESS_RATIO


def test_few_rows_far_off_convict_by_their_number_or_by_their_size() -> None:
    exact = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).double()
    output = outputs(exact, 1)

    def off(rows: int, by: float) -> OwnError:
        wrong = output.captured.clone()
        noise = float((output.low - exact).square().mean().sqrt())
        wrong[:rows] += by * noise
        return measure(replace(output, captured=wrong))

    assert not off(9, 10).convicted
    assert off(11, 10).beyond_rounding
    one = off(1, 2 * EXTREME_RATIO)
    assert one.convicted and one.extreme == 1 and not one.beyond_rounding
    assert one.strength > 1


def test_a_massive_row_or_channel_neither_hides_nor_fakes() -> None:
    exact = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)).double()
    exact[0] *= 1e4
    exact[:, 0] *= 1e4
    clean = outputs(exact, 1)
    assert not measure(clean).convicted
    wrong = clean.captured.clone()
    wrong[1:, 1:] *= 1.03
    assert measure(replace(clean, captured=wrong)).median > MEDIAN_RATIO


def test_values_that_are_not_finite_are_counted_apart() -> None:
    exact = values(0, ROWS, 64)
    output = outputs(exact, 1)
    wrong = output.captured.clone()
    wrong[5, 3], wrong[9, 0] = torch.nan, torch.inf
    error = measure(replace(output, captured=wrong))
    assert error.nonfinite == 2 and error.rows == ROWS - 2 and error.convicted
    assert not error.beyond_rounding and error.sample is not None
    assert error.strength == pytest.approx(1e3)


def test_rows_whose_input_was_not_finite_are_nobody_s_fault() -> None:
    exact = values(0, ROWS, 64)
    exact[7] = torch.nan
    output = outputs(exact, 1)
    error = measure(output)
    assert (error.set_aside, error.nonfinite, error.rows) == (1, 0, ROWS - 1)
    assert not error.convicted
    # and they blind nobody to the others
    wrong = output.captured.clone()
    wrong[8:] *= 1.05
    assert measure(replace(output, captured=wrong)).convicted


def test_nothing_left_to_judge_convicts_nobody() -> None:
    exact = torch.full((ROWS, 8), torch.nan).double()
    error = measure(outputs(exact, 1))
    assert error.rows == 0 and error.set_aside == ROWS and not error.convicted


def test_roundings_of_partial_sums_are_allowed_for() -> None:
    # eight ranks, whose parts are added one by one in bfloat16
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(8, 400, 64, generator=draw).double()
    exact = parts.sum(0)
    total = torch.zeros(400, 64).double()
    for part in parts:
        total = rounded(total + rounded(part, torch.bfloat16), torch.bfloat16)
    output = replace(
        outputs(exact, 1, captured=total), low=rounded(exact, torch.bfloat16), gains=()
    )
    assert measure(output).convicted
    one = (0.4 * unit_roundoff("bfloat16")) ** 2 * exact.square().mean()
    ring = 1 + sum(n / 8 for n in range(2, 9))
    allowed = measure(replace(output, variance=(ring * one).expand(400, 64)))
    assert not allowed.convicted and 0.7 < allowed.median < 1.3


def test_a_fit_is_named_once_and_only_beyond_its_least_size() -> None:
    moved = torch.randn(300, 2, 8, generator=torch.Generator().manual_seed(0)).double()
    error = 0.01 * moved + 0.001 * torch.randn(
        300, 2, 8, generator=torch.Generator().manual_seed(1)
    )
    large = Direction(moved, 0.02, lambda x: x.sum(2), lambda at: f"head {at}")
    assert fits_beyond(large, error, error, z=8.0) == []
    found = fits_beyond(replace(large, least=0.001), error, error, z=8.0)
    assert [f.name for f in found] == ["head 0", "head 1"]
    # opposite signs explain nothing in common
    assert fits_beyond(replace(large, least=0.001), error, -error, z=8.0) == []


def test_equal_rows_are_one_observation() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [0.0, 0.0]])
    assert unique_rows(rows).tolist() == [0, 1, 3]
