"""Which kinds of operator round their intermediates, and through which dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

KINDS = ("norm", "residual", "linear", "attention", "router", "experts", "head")


@dataclass(frozen=True)
class Precision(Mapping[str, torch.dtype | None]):
    """The dtype that each kind of operator rounds through; None keeps the compute dtype.

    ``norm``: all RMS norms, those of queries and keys included. ``residual``: the embedding and the
    residual sums. ``linear``: query, key, value and output projections and dense MLPs.
    ``attention``: rotary embedding and attention. ``router``: router logits and routing.
    ``experts``: routed experts and their weighted sum. ``head``: the logits.
    """

    norm: torch.dtype | None = None
    residual: torch.dtype | None = None
    linear: torch.dtype | None = None
    attention: torch.dtype | None = None
    router: torch.dtype | None = None
    experts: torch.dtype | None = None
    head: torch.dtype | None = None

    @classmethod
    def full(cls) -> Precision:
        """Round nothing."""
        return cls()

    @classmethod
    def all_in(cls, dtype: torch.dtype | None) -> Precision:
        """Round every kind: the low-precision reference."""
        return cls(**dict.fromkeys(KINDS, dtype))

    @classmethod
    def only(cls, kind: str, dtype: torch.dtype | None) -> Precision:
        """Round one kind and nothing else; raises ValueError for an unknown kind."""
        return cls(**{_known(kind): dtype})

    @classmethod
    def all_but(cls, kind: str, dtype: torch.dtype | None) -> Precision:
        """Round every kind except one; raises ValueError for an unknown kind."""
        _known(kind)
        return cls(**{each: dtype for each in KINDS if each != kind})

    def __getitem__(self, kind: str) -> torch.dtype | None:
        if kind not in KINDS:
            raise KeyError(kind)
        dtype: torch.dtype | None = getattr(self, kind)
        return dtype

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


FULL = Precision.full()
