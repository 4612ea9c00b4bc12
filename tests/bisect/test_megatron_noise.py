"""Attention of the real megatron-core where what it is made from is not captured: no fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from layerbisect.bisect.locate import bisect
from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from tests.bisect.making import Engine, random_tokens, rewrite

pytest.importorskip("megatron.core", reason="CI has megatron-core")

pytestmark = pytest.mark.slow

COARSE = ("embed", "final_norm", "logprob")


def _named(ends: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name in COARSE or name.endswith(ends)


def test_context_of_hidden_keys_and_values(tmp_path: Path) -> None:
    # a context of few keys errs along few directions, which one draw of rounding understates
    model = make_tiny(
        tmp_path / "model", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8,
        top_k=2, vocab=512, seed=4,
    )  # fmt: skip
    tokens = random_tokens(512, [64] * 4, 4)
    rollout = Engine.load(model, "rollout", attention="sdpa", experts="grouped_mm").capture(
        tmp_path / "rollout", tokens
    )
    trainer = tmp_path / "trainer"
    forward = {"do": "forward", "tokens": tokens, "capture": str(trainer), "points": "all"}
    run_job({"model": str(model), "steps": [forward | {"vocab": 512}]})
    how = {name: point.how for name, point in Capture.open(trainer).points.items()}
    for at, seen in enumerate((("q",), ("v", "k"), ("norm", "v"), ("q", "out"))):
        ends = (".input", ".output", ".context", *(f".attn.{name}" for name in seen))
        pair = [
            rewrite(
                whole,
                tmp_path / f"{whole.name}-{at}",
                points=_named(ends),
                how=how.__getitem__ if whole == trainer else lambda name: "observed",
            )
            for whole in (rollout, trainer)
        ]
        verdict = bisect(*pair, model=model)
        assert verdict.status == "agree", (seen, verdict.culprits)
