"""Which rows of a side go into an operator bundle, in which dtype, and from which engine."""

from __future__ import annotations

import numpy as np
import torch

from layerbisect.bisect.side import Side
from layerbisect.kernels.replay.bundle import Bundle


def described(
    side: Side,
    point: str,
    layer: int | None,
    operator: str,
    covers: tuple[str, ...],
    kept: torch.Tensor,
    observed: torch.Tensor,
) -> Bundle:
    """Describe the rows ``kept`` (int64 [row], places in the layout) and the engine."""
    info = side.capture.info
    place = torch.full((len(side.chains.row),), -1)
    place[kept] = torch.arange(len(kept))
    seen = place[observed]
    return Bundle(
        point=point,
        layer=layer,
        operator=operator,
        covers=covers,
        dtype=side.dtype,
        calls=(),
        inputs={},
        weights={},
        captured={},
        position=torch.from_numpy(side.chains.position)[kept],
        token=torch.from_numpy(side.chains.token)[kept],
        observed=seen[seen >= 0],
        engine={
            **info.environment,
            "engine": info.engine,
            "version": info.engine_version,
            "device": info.device,
        },
        label=side.label,
        rows_left_out=int((seen < 0).sum()),
    )


def whole_sequences(side: Side, most: int) -> torch.Tensor:
    """Places of the first sequences that have no more than ``most`` rows together."""
    ends = np.cumsum(side.chains.lengths)
    count = max(1, int(np.searchsorted(ends, most, side="right")))
    return torch.arange(int(ends[count - 1]))


def lengths_of(side: Side, rows: int) -> tuple[int, ...]:
    count = int(np.searchsorted(np.cumsum(side.chains.lengths), rows)) + 1
    return side.chains.lengths[:count]


def stored(side: Side, values: torch.Tensor) -> torch.Tensor:
    """Give values the engine's dtype where they are in it, and else the wider one they need."""
    if not values.is_floating_point():
        return values
    narrow = values.to(getattr(torch, side.dtype))
    same = torch.equal(narrow.to(values.dtype).nan_to_num(), values.nan_to_num())
    return narrow if same else values.float()


def held(side: Side, weight: torch.Tensor) -> torch.Tensor:
    """Give a weight the dtype that the engine holds it in."""
    return weight.to(getattr(torch, side.dtype))
