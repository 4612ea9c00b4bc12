"""Find a tensor among those of the other side: what a swap of names or numbers does."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from layerbisect.bisect.weight_diff.holders import Holder
from layerbisect.captures.errors import LayerBisectError

_SAMPLE = 256
_ALIKE = 0.9


class Lookup:
    """Small samples of one side's tensors by shape, read when a shape is first asked for."""

    def __init__(self, holder: Holder, names: Iterable[str]) -> None:
        self._holder = holder
        self._names: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            self._names.setdefault(holder.shape(name), []).append(name)
        self._samples: dict[tuple[int, ...], torch.Tensor] = {}

    def alike(self, name: str, values: torch.Tensor) -> str | None:
        """Name the tensor but ``name`` itself whose sample is most like that of ``values``."""
        shape = tuple(values.shape)
        names = self._names.get(shape, [])
        if len(names) < 2 or values.numel() < 8:
            return None
        if shape not in self._samples:
            self._samples[shape] = torch.stack([self._sample(n) for n in names])
        match = self._samples[shape] @ _sampled(values)
        if name in names:
            match[names.index(name)] = -1.0
        best = int(match.argmax())
        return names[best] if float(match[best]) > _ALIKE else None

    def _sample(self, name: str) -> torch.Tensor:
        try:
            return _sampled(self._holder.get(name).numbers())
        except LayerBisectError:
            # said of this tensor where it is compared itself
            return torch.zeros(min(_SAMPLE, _count(self._holder.shape(name))))


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Take strided values, [k], centred and of norm 1; zeros where they are constant."""
    size = min(_SAMPLE, values.numel())
    # the same number for every tensor of a shape
    places = torch.arange(size) * values.numel() // size
    taken = torch.nan_to_num(values.reshape(-1)[places].float(), 0.0, 0.0, 0.0)
    taken = taken - taken.mean()
    length = torch.linalg.vector_norm(taken)
    return (
        taken / length if float(length) > 1e-6 * float(values[..., :1].abs().max()) else taken * 0
    )
