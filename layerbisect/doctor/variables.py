"""What variables of an environment do: to SGLang's plugin, to a capture, to the numbers in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import metadata

from layerbisect.captures.numerics_environment import VARIABLES as NUMERICS
from layerbisect.doctor.check import Check

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN = "layerbisect"
PLATFORM = "SGLANG_PLATFORM"
PLUGINS = "SGLANG_PLUGINS"
OWN_PLATFORM = "layerbisect_cpu"
PREFIX = "LAYERBISECT_"
CAPTURE = "LAYERBISECT_CAPTURE"
VARIABLES = (
    "LAYERBISECT_CAPTURE",
    "LAYERBISECT_LABEL",
    "LAYERBISECT_ONLY",
    "LAYERBISECT_POINTS",
    "LAYERBISECT_REQUESTS",
    "LAYERBISECT_ROUND",
    "LAYERBISECT_TAIL",
    "LAYERBISECT_WEIGHTS",
    "LAYERBISECT_WEIGHTS_FIRST",
    "LAYERBISECT_WEIGHTS_FORM",
)
"""What is read by the plugin, or by the hook of miles and slime."""

ALIKE = "set it alike on both sides, or leave it unset"
_HIDES = {
    "SGLANG_USE_AITER": "hides attn.k and attn.v of decode steps in dense Qwen3, where a fused "
    "kernel writes them to the cache: they are told as not seen"
}
_ON = ("1", "true", "yes", "on")


def plugin(environment: Mapping[str, str]) -> Check:
    """Say whether a server started with this environment loads layerbisect's plugin."""
    found = [e for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == PLUGIN]
    name = "SGLang plugin"
    if not found:
        return Check(
            name,
            "missing",
            f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}",
            "pip install layerbisect in the environment that runs SGLang",
        )
    if len(found) > 1:
        return Check(name, "problem", f"{len(found)} of them", "keep one installed layerbisect")
    allowed = environment.get(PLUGINS, "")
    if allowed and PLUGIN not in [one.strip() for one in allowed.split(",")]:
        return Check(
            name,
            "problem",
            f"{PLUGINS}={allowed} leaves it out",
            f"{PLUGINS}={allowed},{PLUGIN}",
            "SGLang loads only the plugins that are named: nothing is captured",
            tried=False,
        )
    platform = environment.get(PLATFORM, "")
    if platform not in ("", OWN_PLATFORM):
        return Check(
            name,
            "problem",
            f"{PLATFORM}={platform} leaves it out",
            f"unset {PLATFORM}",
            "SGLang leaves out every other package that has a platform, and layerbisect has one: "
            "nothing is captured",
            tried=False,
        )
    return Check(name, "ok", f"{found[0].value}, inert unless {CAPTURE} is set")


def own_variables(environment: Mapping[str, str]) -> Check:
    """A server captures where LAYERBISECT_CAPTURE is set, which is easily forgotten."""
    found = {k: v for k, v in sorted(environment.items()) if k.startswith(PREFIX)}
    if environment.get(PLATFORM):
        found[PLATFORM] = environment[PLATFORM]
    if not found:
        return Check(
            "variables", "ok", f"no {PREFIX}* is set: servers started here capture nothing"
        )
    said = ", ".join(f"{name}={value}" for name, value in found.items())
    unknown = [name for name in found if name not in (*VARIABLES, PLATFORM)]
    if unknown:
        known = [name.removeprefix(PREFIX) for name in VARIABLES]
        near = difflib.get_close_matches(unknown[0].removeprefix(PREFIX), known, 1)
        meant = f"did you mean {PREFIX}{near[0]}" if near else f"known are {', '.join(VARIABLES)}"
        return Check("variables", "problem", said, f"nothing reads {', '.join(unknown)}; {meant}")
    if CAPTURE in found:
        return Check("variables", "ok", said, "an SGLang server started here captures")
    if "LAYERBISECT_WEIGHTS" in found:
        advice = "an SGLang server started here writes snapshots of its weights, and captures none"
        return Check("variables", "ok", said, advice)
    if found.keys() == {PLATFORM}:
        return Check("variables", "ok", said)
    return Check("variables", "problem", said, f"captures nothing until {CAPTURE} is set")


def numerics(environment: Mapping[str, str]) -> tuple[Check, ...]:
    """Say which variables that change numbers are set, and what each does."""
    return tuple(_numerics(environment)) or (
        Check(
            "numbers",
            "ok",
            f"none of the {len(NUMERICS)} variables is set that are known to change them",
        ),
    )


def _numerics(environment: Mapping[str, str]) -> Iterator[Check]:
    for one in NUMERICS:
        if one.name not in environment:
            continue
        value = environment[one.name]
        hides = _HIDES.get(one.name) if value.lower() in _ON else None
        effect = one.effect + (f"; {hides}" if hides else "")
        found = f"{value!r}, read by {one.who}"
        yield Check(one.name, "note", found, ALIKE, effect, tried=one.name == "TRITON_INTERPRET")
