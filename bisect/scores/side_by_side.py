"""Two runs side by side: before a fix and after it, and against a control.

Responses differ from run to run, so runs are compared by what each prompt shows. A run is back
within the control's range unless prompts like the control's would seldom lie so far above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.prompts import (
    FEWEST,
    Chance,
    Measure,
    Prompts,
    chance_of_mean,
    differences,
    outliers,
)
from layerbisect.captures.errors import RecordError
from layerbisect.captures.record.file import ScoreRecord

CHANCE = 0.01
"""A run of which any measure would lie as far off in fewer cases is out of the control's range."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one gap at one step (nat; ``outliers`` counts prompts).

    ``chance`` bounds from above that of a run like the control lying so far above it in this
    measure, and ``within`` says whether that is no less than 0.01 over the number of measures. Both
    are None without a control, where there are too few prompts for the chance to be so small, and
    for ``max``, which grows with the number of tokens: its tokens are judged by ``outliers``.
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
    def status(self) -> Literal["within", "out of range", "too few", "no control"]:
        """``too few`` where a gap with a control had too few prompts for its MAE to be judged.

        ``no control`` where no gap has one. Notes say which have none, or too few prompts.
        """
        if any(row.within is False for row in self.rows):
            return "out of range"
        held = [row.within for row in self.rows if row.measure == "MAE" and row.control is not None]
        if not held:
            return "no control"
        return "within" if all(held) else "too few"


_SHOWN: Mapping[str, Callable[[NDArray[np.float64]], float]] = {
    "signed mean": lambda d: float(d.mean()),
    "MAE": lambda d: float(np.abs(d).mean()),
    "p95": lambda d: float(np.quantile(np.abs(d), 0.95)),
    "p99": lambda d: float(np.quantile(np.abs(d), 0.99)),
    "max": lambda d: float(np.abs(d).max()),
}

_JUDGED: Mapping[str, Measure] = {
    "signed mean": Measure(signed=True),
    "MAE": Measure(),
    "p95": Measure(quantile=0.95),
    "p99": Measure(quantile=0.99),
}


def compare_runs(
    before: Sequence[ScoreRecord],
    after: Sequence[ScoreRecord],
    control: Sequence[ScoreRecord] = (),
) -> Comparison:
    """Compare each measure of each gap, step by step.

    Args:
        before: the run that motivated the fix. after: the run with the fix.
        control: a run without the fault.

    Raises:
        RecordError: a run that holds none of the gaps of the fixed one.
    """
    runs = [differences(run) for run in (before, after, control)]
    rows: list[Row] = []
    chances: list[Chance | None] = []
    notes: list[str] = []
    for (step, pair), fixed in runs[1].items():
        was, ruler = runs[0].get((step, pair)), runs[2].get((step, pair))
        if was is None:
            notes.append(f"the run before has no {pair}{_at(step)}")
        if control and ruler is None:
            notes.append(f"the control has no {pair}{_at(step)}")
        for measure, shown in _SHOWN.items():
            old, clean = (None if run is None else shown(_all(run)) for run in (was, ruler))
            rows.append(Row(step, pair, measure, old, shown(_all(fixed)), clean, None, None))
            if ruler is None or measure not in _JUDGED:
                chances.append(None)
            else:
                chances.append(chance_of_mean(fixed, ruler, _JUDGED[measure]))
        if ruler is not None:
            beyond, chance = outliers(fixed, ruler)
            gone = None if was is None else float(outliers(was, ruler)[0])
            rows.append(Row(step, pair, "outliers", gone, float(beyond), 0.0, None, None))
            chances.append(chance)
    if not rows:
        raise RecordError("the fixed run holds no two of A, B0 and C0; collect them first")
    absent = sorted(
        {_at(step) for run in (runs[0], runs[2]) for step, _ in run if run}
        - {_at(step) for step, _ in runs[1]}
    )
    notes += [f"the fixed run has no scores{step}: it was not seen past there" for step in absent]
    tries = sum(chance is not None and chance.least < 1 for chance in chances)
    placed = [_placed(*one, tries) for one in zip(rows, chances, strict=True)]
    for (step, pair), fixed in runs[1].items():
        if (step, pair) in runs[2]:
            counts = len(fixed), len(runs[2][step, pair])
            notes += _too_few([r for r in placed if (r.step, r.pair) == (step, pair)], counts)
    return Comparison(tuple(placed), tuple(dict.fromkeys(notes)))


def _placed(row: Row, chance: Chance | None, tries: int) -> Row:
    if chance is None or chance.least * tries > CHANCE or chance.least == 1:
        return row
    return replace(row, chance=chance.seen, within=chance.seen * tries >= CHANCE)


def _too_few(rows: Sequence[Row], prompts: tuple[int, int]) -> list[str]:
    """Say which of a gap's measures could not have been out of range, whatever the run."""
    mute = [row.measure for row in rows if row.within is None and row.measure != "max"]
    if not mute:
        return []
    where = _at(rows[0].step)
    if "MAE" in mute:
        return [
            f"too few prompts to tell{where}: the fixed run has {prompts[0]}, the control "
            f"{prompts[1]}; give each at least {FEWEST}"
        ]
    listed = " and ".join(mute)
    return [f"too few prompts or tokens to tell by {listed}{where}; the other measures can"]


def _all(prompts: Prompts) -> NDArray[np.float64]:
    return np.concatenate(list(prompts.values()))


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
