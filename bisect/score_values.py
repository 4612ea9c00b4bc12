"""The tests for shapes of values: what two columns' numbers alone reveal, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable

from layerbisect.bisect.score_filters import penalty, renormalised
from layerbisect.bisect.score_grid import filled, rounded
from layerbisect.bisect.score_offset import constant_offset
from layerbisect.bisect.score_report import Finding
from layerbisect.bisect.score_sample import PairSample
from layerbisect.bisect.score_scale import divided, other_scale, positive
from layerbisect.bisect.score_tail import a_few_tokens, one_sided
from layerbisect.bisect.score_temperature import temperature

TESTS: tuple[Callable[[PairSample], Finding | None], ...] = (
    constant_offset,
    temperature,
    divided,
    other_scale,
    positive,
    renormalised,
    penalty,
    rounded,
    filled,
    one_sided,
    a_few_tokens,
)
