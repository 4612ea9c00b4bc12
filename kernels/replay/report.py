"""What a replay says: of each implementation, of the engine's own output, and of both together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from layerbisect.kernels.judging.residuals import Fit

SCHEMA = 1

State = Literal["ran", "garbage", "unwritten", "refused", "unavailable", "crashed"]
"""How an implementation fared: ``garbage`` is an output that has nothing to do with the operator's,
``unwritten`` one with elements that it never wrote, ``refused`` an attribute that it does not know,
``crashed`` an exception, the death of its process, or no answer in time."""


@dataclass(frozen=True, slots=True)
class WorstRow:
    """One of the rows with the largest error: its token, and the error in two measures."""

    position: int
    token: int
    relative: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Errors:
    """An output against float64 on the same input.

    ``relative`` maps quantiles (``p50``, ``p95``, ``p99``, ``max``) to the error of a row over its
    size, both root mean squares (a log-prob's error is in nat). ``ratio``, ``median`` and ``floor``
    are `OwnError`'s: the error as a multiple of what the low-precision reference loses. ``ulps``
    maps ranges of distance from the correctly rounded value, in units in the last place of the
    engine's dtype, to the share of elements in them. ``fits`` is the systematic part.
    ``bound_used`` is the largest error as a share of the worst-case bound, ``beyond_bound`` the
    number of elements past it; both None for a stretch of several operators, which has none.
    ``wrong_choices`` counts rows whose chosen experts are not those with the best scores, near ties
    aside. ``convicted`` says that rounding does not explain it, and ``why`` in words.
    """

    rows: int
    relative: Mapping[str, float]
    ratio: float
    median: float
    floor: float
    worst: tuple[WorstRow, ...]
    ulps: Mapping[str, float]
    fits: tuple[Fit, ...]
    where: str
    bound_used: float | None
    beyond_bound: int | None
    wrong_choices: int | None
    nonfinite: int
    convicted: bool
    why: str


@dataclass(frozen=True, slots=True)
class Variation:
    """How an output changes with what should not matter.

    ``rows`` of ``of`` rows differ in some bit; ``max_ulps`` is the largest change in units in the
    last place, of a number as large as the row's root mean square where it is smaller than that;
    ``how`` says what was varied, such as "alone, in halves, shuffled".
    """

    rows: int
    of: int
    max_ulps: float
    how: str

    @property
    def none(self) -> bool:
        """Whether every bit stayed the same in what was compared."""
        return self.of > 0 and self.rows == 0


@dataclass(frozen=True, slots=True)
class Reproduction:
    """How near an implementation comes to what the engine returned, over the observed rows.

    ``max_ulps`` is `Variation`'s.
    """

    equal_elements: float
    equal_rows: float
    max_ulps: float

    @property
    def exact(self) -> bool:
        """Whether it returns the engine's output bit for bit."""
        return self.equal_elements == 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one implementation.

    ``filled`` names the operators of the stretch that it does not have, for which the low-precision
    reference was run. ``chunks`` is None where rows do not attend. ``time_ms`` is the median on a
    GPU, None elsewhere.
    """

    name: str
    package: str
    mode: str
    family: str
    state: State
    why: str = ""
    filled: tuple[str, ...] = ()
    errors: Errors | None = None
    repeats: Variation | None = None
    batches: Variation | None = None
    chunks: Variation | None = None
    reproduces: Reproduction | None = None
    time_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """One stretch replayed. ``engine`` judges what the engine returned, None if it isn't known.

    ``conclusion`` is one sentence: a bug, or rounding, and which implementation reproduces it.
    """

    point: str
    layer: int | None
    operator: str
    covers: tuple[str, ...]
    label: str
    dtype: str
    device: str
    rows: int
    rows_left_out: int
    engine_facts: Mapping[str, str]
    engine: Errors | None
    results: tuple[Result, ...]
    status: Literal["convicted", "acquitted", "inconclusive"]
    conclusion: str

    @property
    def exit_code(self) -> int:
        """0: rounding explains the engine's output. 1: convicted. 2: it could not be judged."""
        return {"acquitted": 0, "convicted": 1, "inconclusive": 2}[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return the replay as an object of plain values."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}
