"""Hold an answer of the locator against the truth."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.planted.fault import SIDES, Truth

PARTS = ("layer", "operator", "side")


def right(truths: Sequence[Truth], answer: Mapping[str, Any]) -> dict[str, bool]:
    """Say whether an answer names what was planted, and nothing else, by part and as a whole.

    A part is right where the set of what the culprits say of it is the set of what was planted:
    one culprit too many is wrong, as is one too few. ``all`` is of layer, operator and side
    together. ``where`` is whether the culprit of each truth that has a place says it. A culprit on
    both sides is one on each.
    """
    said = [c | {"side": side} for c in answer["culprits"] for side in _sides(c["side"])]
    found = {part: {getattr(t, part) for t in truths} == {c[part] for c in said} for part in PARTS}
    planted = {_named(t) for t in truths}
    found["all"] = planted == {_named(c) for c in said}
    found["where"] = all(
        any(_named(t) == _named(c) and _tells(t.where, c) for c in said) for t in truths
    )
    return found


def _named(one: Truth | Mapping[str, Any]) -> tuple[int | None, str | None, str]:
    if isinstance(one, Truth):
        return one.layer, one.operator, one.side
    return one["layer"], one["operator"], one["side"]


def _sides(said: str) -> tuple[str, ...]:
    return SIDES if said == "both" else (said,)


def _tells(where: str, culprit: Mapping[str, Any]) -> bool:
    text = "\n".join([culprit["where"], *culprit["evidence"]])
    return re.search(where, text) is not None


def accuses(answer: Mapping[str, Any]) -> bool:
    """Whether an answer blames anybody or anything: of a control, an error."""
    return bool(answer["culprits"]) or answer["status"] == "divergent"


def told(answer: Mapping[str, Any]) -> str:
    """An answer in few words."""
    if not answer["culprits"]:
        return str(answer["status"])
    return "; ".join(
        f"{c['operator'] or 'a stretch'} {'-' if c['layer'] is None else c['layer']} {c['side']}"
        for c in answer["culprits"]
    )
