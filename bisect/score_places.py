"""The tests for shapes that lie in where a gap is."""

from __future__ import annotations

from collections.abc import Callable

from layerbisect.bisect.score_cached import cached_prefix
from layerbisect.bisect.score_chunks import chunk_order
from layerbisect.bisect.score_first import all_but_first_token, first_token_only
from layerbisect.bisect.score_lag import shift
from layerbisect.bisect.score_pairing import swapped_samples, unrelated_scores
from layerbisect.bisect.score_period import multiples
from layerbisect.bisect.score_report import Finding
from layerbisect.bisect.score_responses import mispaired_samples, some_responses
from layerbisect.bisect.score_sample import PairSample
from layerbisect.bisect.score_step import from_position

TESTS: tuple[Callable[[PairSample], Finding | None], ...] = (
    shift,
    chunk_order,
    swapped_samples,
    mispaired_samples,
    unrelated_scores,
    first_token_only,
    all_but_first_token,
    from_position,
    multiples,
    cached_prefix,
    some_responses,
)
"""Each looks at one pair of columns, and returns what it found, or None."""
