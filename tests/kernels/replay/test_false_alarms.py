"""Clean replays raise no alarm.

The rate that is stated: a fit convicts beyond ``SYSTEMATIC_Z`` = 8 standard errors, which a normal
deviate is with a chance of 1.2e-15. An output of C channels and H heads is given 2 C + 1 fits, or
H + 2, or as many as it was given experts, so one of 4096 channels raises a systematic alarm with a
chance of 1e-11, and the 208 replays here, each of an engine and of two or more implementations with
up to 129 fits, with one of about 1e-10. By size, a row alarms beyond 4 standard deviations where 3
rows and 1 % of all do: of log-probs, which have one number a row, 3 of 74 rows do so with a chance
of 1e-8, and rows of more numbers with next to none. The bound, the worst case, is never passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import erfc, sqrt

import pytest

from layerbisect.kernels.judging.own_error import SYSTEMATIC_Z
from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.program import run
from layerbisect.kernels.replay.replayer import replay
from layerbisect.kernels.replay.variants import stored_reference
from scripts.operator_bundles import SMALL, Maker

TORCH = "layerbisect.kernels.others.torch_ops"
SIZES = replace(
    SMALL, hidden=64, head_dim=16, intermediate=32, vocab=100, lengths=(33, 40, 1), scored=74
)
# of the points with these names, channels are fitted one by one where a captured one's are
NAMES = {
    "rms_norm": "attn.norm",
    "linear": "attn.out",
    "rope": "attn.q",
    "attention": "attn.context",
    "experts": "mlp.out",
    "add": "mid",
}
SEEDS = 16


def clean_bundles(dtype: str, seed: int) -> Iterator[Bundle]:
    """Draw every operator, with an engine that computes as the low-precision reference does."""
    for bundle in Maker(SIZES, dtype, seed).all():
        (call,) = bundle.calls
        results = (NAMES.get(call.operator, call.results[0]), *call.results[1:])
        bundle = replace(bundle, calls=(replace(call, results=results),))
        yield replace(bundle, captured=run(bundle, partial(stored_reference, bundle)))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_clean_replays_raise_no_alarm(seed: int) -> None:
    dtype = ("bfloat16", "float16", "bfloat16", "float32")[seed % 4]
    replayed = 0
    for bundle in clean_bundles(dtype, seed):
        found = replay(bundle, isolate=False, known=TORCH, repeats=2)
        assert found.status == "acquitted", (bundle.point, found.conclusion)
        ran = [one for one in found.results if one.state == "ran"]
        assert len(ran) >= 2, found.results
        assert {one.state for one in found.results} <= {"ran", "refused", "unavailable"}
        for one in ran:
            assert one.errors and not one.errors.convicted, (bundle.point, one.name, one.errors)
            assert one.errors.rows == 74
        replayed += 1
    assert replayed == 13


def test_the_stated_rate() -> None:
    chance = erfc(SYSTEMATIC_Z / sqrt(2))
    assert chance == pytest.approx(1.2e-15, rel=0.1)
    assert (2 * 4096 + 1) * chance < 1.1e-11
    assert SEEDS * 13 >= 200 and SEEDS * 13 * 4 * 129 * chance < 2e-10
    row = erfc(4 / sqrt(2))
    assert 74 * 73 * 72 / 6 * row**3 < 2e-8
