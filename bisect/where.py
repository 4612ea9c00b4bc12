"""Say where an error sits: positions, sequences, decode rows, experts, heads, channels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerbisect.bisect.side import Side
from layerbisect.kernels.judging import where
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.judging.where import Named, by_expert, by_position

_FEW = 4
_MOST = 0.5


def describe(error: OwnError, side: Side) -> str:
    """Describe where the rows in excess are, and in which heads; a fitted part where none is."""
    rows = error.flat_rows
    position = torch.from_numpy(side.chains.position)[rows]

    def named(hit: torch.Tensor) -> Iterator[Named]:
        phases = side.capture.phases[side.index][rows.numpy()]
        for phase in sorted(set(phases.tolist())):
            yield f"{phase} rows", torch.from_numpy(phases == phase)
        if int(hit.sum()) > _FEW:
            yield from _by_sequence(side, rows, hit)
        yield from by_position(position, hit)
        if error.operator in ("experts", "router") and error.layer is not None:
            ids = side.read(f"layers.{error.layer}.mlp.expert_ids")
            if ids is not None:
                yield from by_expert(ids[rows], hit)

    return where.describe(error, position, named)


def _by_sequence(side: Side, rows: torch.Tensor, hit: torch.Tensor) -> Iterator[Named]:
    """Name the sequences of which most rows are hit; by their common prefix where they share it."""
    numbers = torch.from_numpy(side.capture.rows.sequence[side.index[rows.numpy()]]).long()
    present = numbers.unique().tolist()
    guilty = [n for n in present if float(hit[numbers == n].double().mean()) > _MOST]
    if not 0 < len(guilty) < len(present):
        return
    names = [side.capture.sequences[n].name for n in guilty]
    # a data-parallel rank's sequences begin with its name
    prefixes = {name.partition(".")[0] + "." for name in names if "." in name}
    others = [side.capture.sequences[n].name for n in present if n not in guilty]
    told = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if names[_FEW:] else "")
    if names[1:] and len(prefixes) == 1 and all("." in name for name in names):
        (prefix,) = prefixes
        told = told if any(name.startswith(prefix) for name in others) else f"{prefix}*"
    one = len(names) == 1
    yield f"sequence{'' if one else 's'} {told}", torch.isin(numbers, torch.tensor(guilty))
