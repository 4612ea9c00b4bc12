"""The verdict: the whole answer, with what was ruled out and what could not be seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from layerbisect.bisect.routing_report import Routing
    from layerbisect.bisect.scores.report import ScoreReport
    from layerbisect.bisect.token_report import TokenReport

OTHER_WEIGHTS = "its weights differ from the model directory"
"""What the evidence of a culprit begins with whose weights are known to be others."""
SCHEMA = 1
Tail = Literal["reference", "trainer"]
Status = Literal["agree", "divergent", "unstable", "inconclusive"]
EXIT_CODES: Mapping[Status, int] = {
    "agree": 0,
    "divergent": 1,
    "unstable": 2,
    "inconclusive": 2,
}


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference of two sides' log-probs of the same tokens, first minus second, in nats.

    ``signed_mean`` keeps the sign; the others are of absolute differences. ``nonfinite`` rows are
    counted apart and enter none of the figures. ``source`` says what was compared: the scores that
    the engines returned, or, where a capture holds none, the states read out by a common tail.
    """

    mae: float
    signed_mean: float
    p95: float
    p99: float
    max: float
    rows: int
    nonfinite: int = 0
    source: Literal["scores", "read-out"] = "scores"
    unit: str = "nat"


@dataclass(frozen=True, slots=True)
class Culprit:
    """What the evidence convicts.

    ``layer`` is None for what is no layer's; ``operator`` is None where the points between are not
    captured, and the evidence then says which operators it may be. ``side`` is a capture's label,
    ``both`` or ``unknown``. ``own_error`` and ``floor`` are in units of what the low-precision
    reference loses on the same input (95th percentile over rows). ``share_of_gap`` is of the
    squared gap, and None where the boundaries around it were not probed. Of a culprit that scores
    convict, ``own_error`` is its tokens' mean difference over that of the two columns which agree,
    and ``share_of_gap`` the part of the absolute gap that its shape explains.
    """

    layer: int | None
    point: str
    operator: str | None
    side: str
    share_of_gap: float | None
    own_error: float
    floor: float
    where: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A hypothesis that the evidence excludes."""

    hypothesis: str
    evidence: str


@dataclass(frozen=True, slots=True)
class RoundingBudget:
    """What gap is normal for this model in this dtype (mean absolute, nat).

    ``shares`` holds, for each kind of operator, the distance from full precision when that kind
    alone rounds; ``whole`` that of the whole low-precision model, and ``quadrature`` the root of
    the summed squares of the shares, which meets ``whole`` when the roundings are independent.
    ``predicted_gap`` is what rounding alone makes between the two sides; ``distances`` are the
    sides' own distances from full precision.
    """

    predicted_gap: float
    shares: Mapping[str, float]
    whole: float
    quadrature: float
    distances: Mapping[str, float]
    rows: int


@dataclass(frozen=True, slots=True)
class LayerEvidence:
    """One layer: the gap carried into it (nat) and each side's largest own error in it."""

    layer: int
    carried_in: float | None
    carried_out: float | None
    own_error: Mapping[str, float]
    worst_point: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PointDifference:
    """How two sides' values of one point differ over joined rows.

    Relative errors are by row, with each channel scaled by its own size, so that neither an
    outlier row nor a massive channel sets them. ``worst_rows`` are (position, token, error).
    """

    point: str
    rows: int
    bitwise_equal: float
    nonfinite: int
    median: float
    p95: float
    p99: float
    max: float
    worst_rows: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Points:
    """How many points both sides showed, and which wanted ones are missing on a side."""

    compared: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CoveredRows:
    """How many rows were joined, and how many of either side were left out."""

    joined: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was seen, and what could not be."""

    points: Points
    rows: CoveredRows
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """How the carried gap was located: a scan of all boundaries or a search, and its cost.

    ``tail`` is what ran from the boundaries on: the reference, a part of the model a forward, or
    the live trainer, all of it. Carried gaps up to ``floor`` (nat) may be the tail's own rounding;
    shares are of what is beyond it, in squares.
    """

    mode: Literal["scan", "search"]
    forwards: int
    tail: Tail = "reference"
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class SmallestFault:
    """The smallest fault of one operator that would have been convicted on these rows.

    ``gain`` is a relative one on the operator's output, or of the head on the logits (``of``), in
    the place where the least would have been seen (``point``, ``layer``; None for what is no
    layer's): what is larger is seen in all of them. ``layers`` counts those in which the operator
    was judged and does not err. ``operator`` is None for stretches of several: the gain is then one
    of what leaves the stretch, in which an operator's own may be diluted.
    """

    operator: str | None
    side: str
    of: Literal["output", "logits"]
    gain: float
    point: str
    layer: int | None
    layers: int


@dataclass(frozen=True, slots=True)
class OperatorError:
    """One operator's own error on one side, in units of what the low-precision reference loses.

    ``own_error`` is the 95th percentile over ``rows`` and ``floor`` the same percentile of that
    reference itself. ``covers`` names all operators of a stretch whose inner points are not
    captured. ``convicted`` says that rounding does not explain it, which a systematic part may
    convict where the size does not.
    """

    point: str
    layer: int | None
    operator: str
    covers: tuple[str, ...]
    side: str
    rows: int
    own_error: float
    floor: float
    convicted: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole answer.

    ``reasons`` says, in sentences, why the status is what it is. ``scores`` holds the figures where
    A, B and C were judged, and ``routing`` how both sides route, where they show it.
    ``sensitivity`` says how large a fault of each operator had to be to be seen. ``own_errors`` are
    those of all operators that were judged, in the order of computation, ``tokens`` what is shown
    of single tokens, and ``environments`` what is known of each side's engine, machine and
    settings, by its label (of scores, by column).
    ``bool(verdict)`` is True when the sides agree.
    """

    status: Status
    gap: Gap | None
    culprits: tuple[Culprit, ...]
    ruled_out: tuple[RuledOut, ...]
    rounding_budget: RoundingBudget | None
    coverage: Coverage
    next: str
    reasons: tuple[str, ...] = ()
    layers: tuple[LayerEvidence, ...] = ()
    differences: tuple[PointDifference, ...] = ()
    probe: Probe | None = None
    labels: tuple[str, str] = ("rollout", "trainer")
    scores: ScoreReport | None = None
    routing: Routing | None = None
    sensitivity: tuple[SmallestFault, ...] = ()
    own_errors: tuple[OperatorError, ...] = ()
    tokens: TokenReport | None = None
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    schema: int = field(default=SCHEMA)

    def __bool__(self) -> bool:
        return self.status == "agree"

    @property
    def of_scores(self) -> bool:
        """Whether scores alone were judged; captures may have been judged with a record of them."""
        return self.scores is not None and not self.differences and not self.layers

    @property
    def exit_code(self) -> int:
        """0 agree, 1 divergent, 2 could not judge."""
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``; non-finite numbers become None."""
        data = plain(dataclasses.asdict(self))
        assert isinstance(data, dict)
        return {"schema": data.pop("schema"), **data}


def squared_above(gap: float, floor: float) -> float:
    """Square of what is in a gap (nat) beside the tail's rounding, which adds in squares."""
    return max(gap**2 - floor**2, 0.0)


def plain(value: Any) -> Any:
    """Turn tuples into lists and non-finite numbers into None, as strict JSON wants them."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
