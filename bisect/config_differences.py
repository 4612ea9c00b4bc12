"""Settings of the model's configuration that change its numbers, and differ.

What differs accuses nobody: it says where to look, and why shapes differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.store import Capture

Setting = bool | int | float | str
Settings = Mapping[str, Setting]

_PLAIN = (
    "rms_norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
    "hidden_act",
    "head_dim",
    "attention_bias",
    "tie_word_embeddings",
)
# what says, by being there, that a configuration is whole enough to have no scaling where it is
# silent of it
_OF_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
_APART = ("rope_theta", "partial_rotary_factor")
_SAME = 1e-6
"""Numbers that went through float32 on their way into a configuration differ by less."""
MODEL = "the model directory"


def settings_of(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Read what changes numbers from a config.json, of transformers 4 or 5, in one spelling.

    What is absent, null or no plain value is left out, for its default is the engine's.
    """
    found = {name: config.get(name) for name in _PLAIN} | _rope(config)
    if "use_sliding_window" in config:
        # a window that is not used is kept in config.json, and dropped by the loaded configuration
        window = config.get("sliding_window") if config["use_sliding_window"] else None
        found["sliding_window"] = "unused" if window is None else window
    return {name: value for name, value in found.items() if isinstance(value, Setting)}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    if not any(name in config for name in _OF_ROPE):
        return {}
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        # of several kinds of layers
        return {}
    found: dict[str, Any] = {}
    for name in _APART:
        found[name] = config.get(name) if given.get(name) is None else given[name]
    found["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    if found["rope_type"] != "default":
        inside = [name for name in given if name not in ("rope_type", "type", *_APART)]
        found |= {f"rope_scaling {name}": given[name] for name in inside}
    return found


def apart(first: Settings, second: Settings) -> list[str]:
    """List the settings that both have, and not the same."""
    return [name for name in first if name in second and not _alike(first[name], second[name])]


def told_apart(first: Mapping[str, Any], second: Mapping[str, Any], named: tuple[str, str]) -> str:
    """Say which settings of two configurations differ, as the end of a sentence; "" if none."""
    ours, theirs = settings_of(first), settings_of(second)
    return "".join(
        f"; {name} is {_shown(ours[name])} in {named[0]} and {_shown(theirs[name])} in {named[1]}"
        for name in apart(ours, theirs)
    )


def config_in(directory: str | PathLike[str]) -> dict[str, Any]:
    """Read a model directory's config.json, which must be there."""
    raw: dict[str, Any] = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    return raw


def with_settings(
    verdict: Verdict, captures: tuple[Capture, Capture], directory: str | PathLike[str]
) -> Verdict:
    """Say after the verdict's first reason what the sides ran with that differs.

    From each other or from the model directory, with both sides' values among their environments.
    """
    sides = {one.label: settings_of(one.info.model_config) for one in captures}
    model = settings_of(config_in(directory))
    first, second = sides.values()
    names = [
        name
        for name in dict.fromkeys([*first, *second])
        if any(name in apart(*two) for two in combinations((first, second, model), 2))
    ]
    if not names:
        return verdict
    head, *others = verdict.reasons or ("",)
    said = [_sentence(name, sides, model) for name in names]
    facts = {
        label: {f"config {name}": _shown(found[name]) for name in names if name in found}
        for label, found in sides.items()
    }
    return replace(
        verdict,
        reasons=tuple(reason for reason in (head, *said, *others) if reason),
        environments={
            label: {**known, **facts.get(label, {})}
            for label, known in verdict.environments.items()
        },
    )


def _sentence(name: str, sides: Mapping[str, Settings], model: Settings) -> str:
    given = {label: found[name] for label, found in sides.items() if name in found}
    off = {
        label: v for label, v in given.items() if name not in model or not _alike(v, model[name])
    }
    (label, value), *more = off.items()
    if more and _alike(more[0][1], value):
        said = f"both sides ran with {name} {_shown(value)}"
    else:
        said = f"{label} ran with {name} {_shown(value)}"
        said += "".join(f", {other} with {_shown(theirs)}" for other, theirs in more)
    return said + (f", and {MODEL} has {_shown(model[name])}" if name in model else "")


def _alike(first: Setting, second: Setting) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return math.isclose(first, second, rel_tol=_SAME)


def _shown(value: Setting) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
