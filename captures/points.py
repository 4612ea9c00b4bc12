"""Names of the places in a decoder-only model that every engine's capture shares.

A point is one tensor with a row a token. Its name is the same in every engine, so that two captures
can be compared without knowing how either engine is written::

    embed
    layers.9.input  layers.9.attn.norm  layers.9.attn.q  ...  layers.9.mlp.out
    layers.15.output  final_norm  logits  logprob

Layers are numbered from 0 over the whole model, whatever pipeline stage holds them.

``mlp.expert_in`` is what arrives at the expert of each slot, and ``mlp.expert_out`` what comes back
from it, weighted: the slots add up to the routed part of ``mlp.out``. Their slots are those of
``mlp.expert_ids`` in the same capture.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerbisect.captures.errors import LayerBisectError

# in the order in which a decoder layer computes them
LAYER_DIMS: dict[str, tuple[str, ...]] = {
    "input": ("row", "hidden"),
    "attn.norm": ("row", "hidden"),
    "attn.q": ("row", "head", "channel"),
    "attn.k": ("row", "kv_head", "channel"),
    "attn.v": ("row", "kv_head", "channel"),
    "attn.context": ("row", "head", "channel"),
    "attn.out": ("row", "hidden"),
    "mid": ("row", "hidden"),
    "mlp.norm": ("row", "hidden"),
    "mlp.router_logits": ("row", "expert"),
    "mlp.expert_ids": ("row", "slot"),
    "mlp.expert_weights": ("row", "slot"),
    "mlp.expert_in": ("row", "slot", "hidden"),
    "mlp.expert_out": ("row", "slot", "hidden"),
    "mlp.out": ("row", "hidden"),
    "output": ("row", "hidden"),
}
MOE_SUFFIXES = (
    "mlp.router_logits",
    "mlp.expert_ids",
    "mlp.expert_weights",
    "mlp.expert_in",
    "mlp.expert_out",
)
MODEL_DIMS: dict[str, tuple[str, ...]] = {
    "embed": ("row", "hidden"),
    "final_norm": ("row", "hidden"),
    "logits": ("row", "vocab"),
    "logprob": ("row",),
}
LARGE = ("logits", "mlp.expert_in", "mlp.expert_out")
"""Points many times as large as the stream, which are only recorded where they are asked for."""

COARSE = ("layers.*.input", "layers.*.output", "final_norm", "logprob")
"""Layer boundaries and scores: what a first capture holds."""

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(.+)")


@dataclass(frozen=True, slots=True)
class Point:
    """A parsed point name; ``layer`` is None for what belongs to no layer."""

    name: str
    layer: int | None
    suffix: str
    dims: tuple[str, ...]


def parse(name: str) -> Point:
    """Parse a point name; raises LayerBisectError where no engine has such a point."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in LAYER_DIMS:
        return Point(name, int(match[1]), match[2], LAYER_DIMS[match[2]])
    if name in MODEL_DIMS:
        return Point(name, None, name, MODEL_DIMS[name])
    raise LayerBisectError(f"unknown point {name!r}; points look like 'layers.9.attn.context'")


def all_points(num_layers: int, moe: bool | Sequence[int] = False) -> tuple[str, ...]:
    """Name every point of a model in the order of computation.

    ``moe`` says whether the layers route to experts, or which do. Only the last layer has an
    ``output``: every other layer's output is the next one's ``input``.
    """
    sparse = range(num_layers) if moe is True else () if moe is False else moe
    names = ["embed"]
    for layer in range(num_layers):
        for suffix in LAYER_DIMS:
            if suffix in MOE_SUFFIXES and layer not in sparse:
                continue
            if suffix == "output" and layer != num_layers - 1:
                continue
            names.append(f"layers.{layer}.{suffix}")
    return (*names, "final_norm", "logits", "logprob")


def is_large(name: str) -> bool:
    """Say whether a point is one of `LARGE`."""
    return parse(name).suffix in LARGE


def boundary(layer: int, num_layers: int) -> str:
    """Name the residual stream at a layer boundary, 0 to ``num_layers``."""
    return f"layers.{layer}.input" if layer < num_layers else f"layers.{layer - 1}.output"


def select(
    patterns: str | Iterable[str], num_layers: int, moe: bool | Sequence[int] = False
) -> tuple[str, ...]:
    """Expand patterns to the points of one model, in the order of computation.

    A pattern is a point name with ``*`` and ``?``, ``coarse`` (layer boundaries and scores),
    ``all``, or a layer such as ``layers.9`` (its points, and the stream that leaves it). The last
    two leave out what is `LARGE`. Several are given as a sequence or separated by commas.
    Raises LayerBisectError for a pattern that matches nothing.
    """
    wanted = patterns.split(",") if isinstance(patterns, str) else list(patterns)
    if not wanted:
        raise LayerBisectError("no points were asked for; ask for 'coarse', say")
    every = all_points(num_layers, moe)
    chosen: set[str] = set()
    for pattern in (text.strip() for text in wanted):
        matched = _matching(pattern, every)
        if not matched:
            raise LayerBisectError(
                f"no point matches {pattern!r} in a model of {num_layers} layers; "
                "use 'coarse', 'all', 'layers.9', or a pattern such as 'layers.*.attn.out'"
            )
        chosen.update(matched)
    return tuple(name for name in every if name in chosen)


def _matching(pattern: str, every: Sequence[str]) -> list[str]:
    if pattern == "all":
        return [name for name in every if not is_large(name)]
    if pattern == "coarse":
        return [name for name in every if any(fnmatch.fnmatchcase(name, c) for c in COARSE)]
    if match := re.fullmatch(r"layers\.(\d+)", pattern):
        # what the layer makes of its input is only seen where the next one starts
        after = f"layers.{int(match[1]) + 1}.input"
        inside = [n for n in every if n.startswith(f"{pattern}.") and not is_large(n)]
        return inside + [name for name in every if name == after]
    return [name for name in every if fnmatch.fnmatchcase(name, pattern)]
