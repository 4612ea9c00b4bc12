"""What is found where a frozen and a training forward of one module are compared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from layerbisect.bisect.verdict import EXIT_CODES, Coverage, Gap, Status, plain
from layerbisect.captures.forward_mode import ForwardMode

SCHEMA = 1
CauseKind = Literal["dropout", "routing", "numerics", "rounding"]


@dataclass(frozen=True, slots=True)
class Apart:
    """How two forwards' values of one point differ.

    ``differing`` of ``rows`` are not equal bit for bit. ``size`` is the 99th percentile over rows
    of the relative difference, None for expert numbers; ``allowed`` is the size that roundings in
    the captured dtype make between this point and the one compared before it. Where it can be, the
    size is of rows alone that have seen no token which another expert was given; ``rerouted``
    counts the others.
    """

    point: str
    rows: int
    differing: int
    size: float | None
    allowed: float
    nonfinite: int = 0
    rerouted: int = 0

    @property
    def beyond(self) -> bool:
        """Whether it is more than rounding: numbers of experts are not rounded."""
        return self.size is None or not self.size <= self.allowed


@dataclass(frozen=True, slots=True)
class Cause:
    """What explains that values differ from ``point`` on.

    ``after`` is the point compared before it, None at the beginning; ``modules`` are those whose
    doing it is, where they are known.
    """

    kind: CauseKind
    point: str
    after: str | None
    size: float | None
    modules: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class RouteOrigin:
    """Why one layer sends tokens to other experts in the training forward.

    Of ``flips`` among ``rows``: ``inherited`` where the router was given something else, ``logits``
    where it made other logits of the same, ``choice`` where it chose otherwise by the same logits,
    ``unknown`` where the points that would tell are not captured. ``logits_size`` is the 99th
    percentile of the relative difference that logits have on an equal input, None without such.
    """

    layer: int
    rows: int
    flips: int
    inherited: int
    logits: int
    choice: int
    unknown: int
    logits_size: float | None


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Whether a backward computed values again, and as before.

    ``setting`` is what the model was told, empty without one. ``differing`` are the points whose
    values are others, in the order of computation, of ``points`` that were computed again over
    ``rows`` rows; ``inner`` of these are no input of a layer or its attention, which may have been
    kept. ``causes`` explain the first in each stretch of them.
    """

    setting: str = ""
    rows: int = 0
    points: int = 0
    inner: int = 0
    differing: tuple[Apart, ...] = ()
    causes: tuple[Cause, ...] = ()

    @property
    def seen(self) -> bool:
        """Whether anything was computed again."""
        return self.points > 0

    @property
    def wrong(self) -> bool:
        """Whether what was computed again differs by more than rounding."""
        return any(cause.kind != "rounding" for cause in self.causes)


@dataclass(frozen=True, slots=True)
class TrainingVerdict:
    """Whether a training forward computes what the frozen forward of the same module computes.

    ``first`` is the first point, in the order of computation, whose values are not equal bit for
    bit; ``causes`` explain it, and where more than what was inherited appears further on.
    ``points`` are all that differ. ``gap`` is training minus frozen. ``mode`` is that of the
    training forward. ``bool(verdict)`` is True when the two agree.
    """

    status: Status
    gap: Gap | None
    first: Apart | None
    causes: tuple[Cause, ...]
    routing: tuple[RouteOrigin, ...]
    recomputed: Recomputed
    mode: ForwardMode | None
    points: tuple[Apart, ...]
    coverage: Coverage
    reasons: tuple[str, ...]
    next: str
    labels: tuple[str, str]
    schema: int = field(default=SCHEMA)

    def __bool__(self) -> bool:
        return self.status == "agree"

    @property
    def exit_code(self) -> int:
        """0 agree, 1 divergent, 2 could not judge."""
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``; non-finite numbers become None."""
        data = plain(dataclasses.asdict(self))
        assert isinstance(data, dict)
        return {"schema": data.pop("schema"), **data}
