"""The tests that score arrays alone allow, by the name under which each is ruled out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.cached import cached_prefix
from layerbisect.bisect.shapes.chunks import chunk_order
from layerbisect.bisect.shapes.fill import filled
from layerbisect.bisect.shapes.filters import penalty, renormalised
from layerbisect.bisect.shapes.first import all_but_first_token, first_token_only
from layerbisect.bisect.shapes.grid import rounded
from layerbisect.bisect.shapes.lag import shift
from layerbisect.bisect.shapes.offset import constant_offset
from layerbisect.bisect.shapes.pairing import swapped_samples, unrelated_scores
from layerbisect.bisect.shapes.period import multiples
from layerbisect.bisect.shapes.responses import mispaired_samples, some_responses
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.scale import divided, other_scale, positive
from layerbisect.bisect.shapes.step import from_position
from layerbisect.bisect.shapes.tail import a_few_tokens, one_sided
from layerbisect.bisect.shapes.temperature import temperature

Test = Callable[[PairSample], Finding | None]

CAUSES: Mapping[str, Test] = {
    "constant offset": constant_offset,
    "temperature": temperature,
    "log-probs divided by T": divided,
    "scores of another scale": other_scale,
    "positive log-probs": positive,
    "renormalised top-p/top-k": renormalised,
    "penalty on seen tokens": penalty,
    "rounded scores": rounded,
    "padding filled with a value": filled,
    "shift": shift,
    "chunk order": chunk_order,
    "swapped samples": swapped_samples,
    "mispaired samples": mispaired_samples,
}
"""Each names what was done to the scores."""

PLACES: Mapping[str, Test] = {
    "unrelated scores": unrelated_scores,
    "first token only": first_token_only,
    "all but the first token": all_but_first_token,
    "from a position on": from_position,
    "multiples of a chunk or page": multiples,
    "cached prefix": cached_prefix,
    "some responses": some_responses,
}
"""Each says which tokens are apart, and not why."""

SPREAD: Mapping[str, Test] = {"one-sidedness": one_sided, "a few tokens against all": a_few_tokens}
"""Each describes how a gap is spread; none of them convicts."""

PAIRING = ("swapped samples", "mispaired samples")
"""Of CAUSES, what may befall a few of thousands of responses."""

IMPOSSIBLE = ("positive log-probs", "padding filled")
"""How findings begin that no sound score makes."""

ALL: Mapping[str, Test] = {**CAUSES, **PLACES, **SPREAD}
