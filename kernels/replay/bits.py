"""How far apart two outputs are: bit by bit, and in units in the last place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ULP_RANGES = (0, 1, 2, 4, 16)
"""Upper ends of the ranges of a histogram of distances; one more range lies above the last."""


def same_bits(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Say of each element whether all its bits are the same: a nan equals itself, 0 is not -0."""
    kind = _AS_BITS[first.element_size()]
    return first.contiguous().view(kind) == second.contiguous().view(kind)


def spacing(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of ``dtype`` at the size of ``values``: float64.

    Of numbers below the smallest normal one, that between subnormal numbers.
    """
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.smallest_normal)
    return torch.exp2(torch.frexp(size).exponent.double() - 1) * info.eps


def ulps_apart(values: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance in units in the last place of ``dtype``, as large as they are at ``other``.

    Float64 of the same shape; nan or infinite where one of the two is.
    """
    return (values.double() - other.double()).abs() / spacing(other, dtype)


def most_ulps(values: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest distance in units in the last place of ``dtype``, over elements that are finite.

    As large as they are at ``other``, or at the root mean square over the last dimension where that
    is larger: what is left of terms that cancel is not measured by its own size.
    """
    size = other.double().abs()
    if size.ndim > 1:
        size = torch.maximum(size, size.square().mean(-1, keepdim=True).sqrt())
    apart = (values.double() - other.double()).abs() / spacing(size, dtype)
    apart = apart[apart.isfinite()]
    return float(apart.max()) if apart.numel() else 0.0


def ulp_histogram(
    values: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> Mapping[str, float]:
    """Share of elements by distance from the correctly rounded value of ``dtype``.

    Values in a wider dtype are rounded first. Elements that are not finite are left out.
    """
    right = exact.to(dtype)
    apart = ulps_apart(values.to(dtype), right, dtype)
    apart = apart[apart.isfinite()]
    found, below, last = {}, -1, ULP_RANGES[-1]
    for upper in ULP_RANGES:
        inside = (apart > below) & (apart <= upper)
        found["0" if upper == 0 else f"<={upper}"] = _share(inside)
        below = upper
    return {**found, f">{last}": _share(apart > last)}


def _share(mask: torch.Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0


def changed_rows(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    """Say which rows differ in some bit of some result, and by how much at most (`most_ulps`).

    The results of ``first`` and ``second`` have the same names, shapes and dtypes. Integers, and
    numbers that are not finite, count as changed and are not measured.
    """
    changed, most = [], 0.0
    for name, values in first.items():
        other = second[name]
        changed.append((~same_bits(values, other)).reshape(len(values), -1).any(1))
        if values.is_floating_point():
            most = max(most, most_ulps(values, other, dtype))
    return torch.stack(changed).any(0), most
