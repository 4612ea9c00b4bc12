"""Errors of outputs on bundles that no capture made."""

from __future__ import annotations

from layerbisect.kernels.replay.errors import Yardstick
from scripts.operator_bundles import SMALL, Maker


def test_experts_are_named_by_their_places_where_they_have_no_numbers() -> None:
    (bundle,) = [b for b in Maker(SMALL).all() if b.operator == "experts"]
    yardstick = Yardstick(bundle)
    wrong = yardstick.judge.low["y"].clone()
    hit = (bundle.inputs["ids"] == 3).any(1)
    wrong[hit] *= 1.5
    errors = yardstick.errors({"y": wrong})
    assert errors.convicted and errors.where == "tokens routed to expert 3"
