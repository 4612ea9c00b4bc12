"""Rotary position embedding, in the half style of GPT-NeoX, Llama and Qwen3, or interleaved.

Channel c of the first half and channel c of the second are a pair, or with ``interleaved`` (GPT-J,
DeepSeek-V3) channels 2c and 2c + 1. A pair is turned by the angle ``position * inv_freq[c]``:

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

(Su et al. 2021, arXiv:2104.09864.) Scaled forms change only ``inv_freq``: *linear* divides it,
*llama3* divides the slow channels and blends in between (Llama 3.1), *yarn* blends by the number of
turns and also scales queries and keys (Peng et al. 2023, arXiv:2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from layerbisect.kernels.rounding import require_compute_dtype, rounded

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RopeConfig(Protocol):
    """What the frequencies are made from; ``rope_scaling`` is None for the default type."""

    @property
    def head_dim(self) -> int:
        """Channels of one head."""

    @property
    def rope_theta(self) -> float:
        """Base of the geometric series of frequencies."""

    @property
    def rope_scaling(self) -> Mapping[str, Any] | None:
        """The scaling's ``rope_type`` and parameters, named as in config.json."""


def rope_frequencies(config: RopeConfig) -> torch.Tensor:
    """Return the angle a position in each channel pair: float32 [channel / 2], in radians.

    Always computed in float32, whatever the compute dtype: every engine does so, so these rounded
    numbers are the model's definition and not an error. Raises ValueError for an unknown type.
    """
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = torch.reciprocal(torch.pow(config.rope_theta, exponent))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(inv_freq, scaling)
    if kind == "yarn":
        return _yarn(config, scaling)
    raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")


def rope_attention_scaling(config: RopeConfig) -> float:
    """Return the factor on cosine and sine: 1 for every type but yarn."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])
    mscale, over = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and over:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, over)
    return _yarn_scale(factor, 1.0)


def rope(
    x: torch.Tensor,
    position: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Turn ``x`` [row, head, channel] by the positions [row] of its rows, or turn it back.

    ``inv_freq`` is [channel / 2]. ``x`` is float32 or float64, and so is the result. The
    low-precision form rounds cosine and sine, both products, and their sum. Raises TypeError for
    another dtype and ValueError when the shapes don't fit.
    """
    require_compute_dtype("x", x)
    if x.ndim != 3 or x.shape[-1] != 2 * len(inv_freq):
        raise ValueError(f"x must have shape [row, head, {2 * len(inv_freq)}], got {list(x.shape)}")
    if position.shape != x.shape[:1]:
        raise ValueError(f"position must have shape [{len(x)}], got {list(position.shape)}")
    angle = position.to(x.dtype)[:, None] * inv_freq.to(x.dtype)
    factor = 1.0 / attention_scaling if inverse else attention_scaling
    cos = rounded(angle.cos() * factor, round_to)[:, None]
    sin = rounded(angle.sin() * factor, round_to)[:, None]
    if inverse:
        sin = -sin
    first, second = pairs(x, interleaved)
    turned = torch.empty_like(x)
    turned_first, turned_second = pairs(turned, interleaved)
    turned_first[:] = rounded(first * cos, round_to) - rounded(second * sin, round_to)
    turned_second[:] = rounded(second * cos, round_to) + rounded(first * sin, round_to)
    return rounded(turned, round_to)


def pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of ``x``: the first channel of every pair, and the second."""
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _llama3(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Divide what turns less than ``low_freq_factor`` times over the original context."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    slow = wavelength > original / low
    fast = wavelength < original / high
    return torch.where(slow, inv_freq / factor, torch.where(fast, inv_freq, blended))


def _yarn(config: RopeConfig, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Blend divided frequencies (few turns) into plain ones (many), by a ramp over channels."""
    channels, theta = config.head_dim, config.rope_theta
    original = scaling["original_max_position_embeddings"]

    def channel_of(turns: float) -> float:
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel_of(scaling.get("beta_fast") or 32)
    high = channel_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    if low == high:
        # keeps the ramp's division finite
        high += 0.001
    pair = torch.arange(channels // 2, dtype=torch.float32)
    plain = 1 - torch.clamp((pair - low) / (high - low), 0, 1)
    factor = float(scaling["factor"])
    period = torch.pow(theta, torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    return torch.reciprocal(factor * period) * (1 - plain) + torch.reciprocal(period) * plain


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
