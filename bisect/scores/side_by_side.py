"""Two runs side by side: before a fix and after it, and against a control.

Responses differ from run to run, so runs are compared by what each response shows. Whether a run is
back within the control's range is a permutation test over responses: shuffled among the two runs,
how often do they lie so far apart?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.judge import compared_columns
from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.file import ScoreRecord

CHANCE = 0.01
"""A run of which any measure would lie as far off in fewer cases is out of the control's range."""

SHUFFLES = 19_999
_CELLS = 1 << 24


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one gap at one step (nat; ``outliers`` counts tokens).

    ``chance`` is that of a run like the control lying so far above it in this measure, and
    ``within`` whether that is no less than 0.01 over the number of measures; both None without a
    control.
    """

    step: int | None
    pair: str
    measure: str
    before: float | None
    after: float
    control: float | None
    chance: float | None
    within: bool | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measures, and whether the fixed run is back within the control's range."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def status(self) -> Literal["within", "out of range", "no control"]:
        """``no control`` where no measure has one to be held against; notes say which have none."""
        if any(row.within is False for row in self.rows):
            return "out of range"
        return "within" if any(row.within for row in self.rows) else "no control"


_MEASURES: Mapping[str, Callable[[NDArray[np.float64]], float]] = {
    "signed mean": lambda d: float(d.mean()),
    "MAE": lambda d: float(np.abs(d).mean()),
    "p95": lambda d: float(np.quantile(np.abs(d), 0.95)),
    "p99": lambda d: float(np.quantile(np.abs(d), 0.99)),
    "max": lambda d: float(np.abs(d).max()),
}


def compare_runs(
    before: Sequence[ScoreRecord],
    after: Sequence[ScoreRecord],
    control: Sequence[ScoreRecord] = (),
    *,
    seed: int = 0,
) -> Comparison:
    """Compare each measure of each gap, step by step.

    Args:
        before: the run that motivated the fix. after: the run with the fix.
        control: a run without the fault.
        seed: of the shuffles, of which there are 19,999.

    Raises:
        RecordError: a run that holds none of the gaps of the fixed one.
    """
    runs = [_differences(run) for run in (before, after, control)]
    rows: list[Row] = []
    notes: list[str] = []
    generator = np.random.default_rng(seed)
    for (step, pair), fixed in runs[1].items():
        was, ruler = runs[0].get((step, pair)), runs[2].get((step, pair))
        if was is None:
            notes.append(f"the run before has no {pair}{_at(step)}")
        if control and ruler is None:
            notes.append(f"the control has no {pair}{_at(step)}")
        for name, measure in _MEASURES.items():
            chance = None if ruler is None else _chance(fixed, ruler, measure, name, generator)
            rows.append(
                Row(
                    step,
                    pair,
                    name,
                    None if was is None else measure(np.concatenate(was)),
                    measure(np.concatenate(fixed)),
                    None if ruler is None else measure(np.concatenate(ruler)),
                    chance,
                    None,
                )
            )
        if ruler is not None:
            rows.append(_outliers(step, pair, was, fixed, ruler))
    if not rows:
        raise RecordError("the fixed run holds no two of A, B0 and C0; collect them first")
    absent = sorted(
        {_at(step) for run in (runs[0], runs[2]) for step, _ in run if run}
        - {_at(step) for step, _ in runs[1]}
    )
    notes += [f"the fixed run has no scores{step}: it was not seen past there" for step in absent]
    tries = sum(row.chance is not None for row in rows)
    placed = [
        row if row.chance is None else replace(row, within=row.chance * tries >= CHANCE)
        for row in rows
    ]
    return Comparison(tuple(placed), tuple(dict.fromkeys(notes)))


_Differences = Mapping[tuple[int | None, str], list[NDArray[np.float64]]]


def _differences(run: Sequence[ScoreRecord]) -> _Differences:
    """Each gap's differences (nat), a response an array, by step and pair."""
    found: dict[tuple[int | None, str], list[NDArray[np.float64]]] = {}
    for record in run:
        for first, second in compared_columns(record.info.columns):
            key = record.info.step, f"{first}-{second}"
            for call in record:
                difference = (call.scores[first] - call.scores[second])[call.mask]
                difference = difference[np.isfinite(difference)]
                if len(difference):
                    found.setdefault(key, []).append(difference)
    return found


def _chance(
    run: list[NDArray[np.float64]],
    control: list[NDArray[np.float64]],
    measure: Callable[[NDArray[np.float64]], float],
    name: str,
    generator: np.random.Generator,
) -> float:
    """How often shuffled responses lie so far above the control, or off it for the signed mean."""
    values = np.array([measure(d) for d in (*run, *control)])
    first = np.arange(len(values)) < len(run)

    def apart(picked: NDArray[np.bool_]) -> NDArray[np.float64]:
        total = picked @ values
        difference = total / len(run) - (values.sum() - total) / len(control)
        return np.asarray(np.abs(difference) if name == "signed mean" else difference)

    seen = float(apart(first[None])[0]) - 1e-12
    more = 0
    step = max(1, _CELLS // len(values))
    for start in range(0, SHUFFLES, step):
        rows = min(step, SHUFFLES - start)
        picked = generator.permuted(np.tile(first, (rows, 1)), axis=1)
        more += int((apart(picked) >= seen).sum())
    return (more + 1) / (SHUFFLES + 1)


def _outliers(
    step: int | None,
    pair: str,
    before: list[NDArray[np.float64]] | None,
    run: list[NDArray[np.float64]],
    control: list[NDArray[np.float64]],
) -> Row:
    """Tokens beyond the control's largest; m of them have a chance of (n / (n + control))^m."""
    largest = max(float(np.abs(d).max()) for d in control)

    def beyond(differences: list[NDArray[np.float64]]) -> int:
        return sum(int((np.abs(d) > largest).sum()) for d in differences)

    tokens = sum(map(len, run))
    chance = (tokens / (tokens + sum(map(len, control)))) ** beyond(run)
    return Row(
        step,
        pair,
        "outliers",
        None if before is None else float(beyond(before)),
        float(beyond(run)),
        0.0,
        chance,
        None,
    )


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
