"""What metrics that are taken over a whole tensor make of massive activations, and what ours do."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch

from layerbisect.bisect.metrics import point_difference
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.points import boundary
from scripts.smollm2_numbers import Array, Layout

HARM = 0.05
"""Relative size of the noise that spoils a stream."""
HARMED_LAYER = 12
"""The first layer that a massive activation enters in this model."""


def naive(layout: Layout, layers: int) -> list[dict[str, float]]:
    """Compare the first and the last side's stream at each boundary, as one would by hand."""
    first, *_, last = layout.sides.values()
    fresh = layout.chains.fresh
    position, token = layout.chains.position[fresh], layout.chains.token[fresh]
    found = []
    for layer in range(layers + 1):
        name = boundary(layer, layers)
        a, b = (_stream(side, name)[fresh] for side in (first, last))
        row, channel = np.unravel_index(int(np.abs(b).argmax()), b.shape)
        found.append(
            {
                "layer": layer,
                "largest": float(np.abs(b).max()),
                "at_position": int(position[row]),
                "at_channel": int(channel),
                "max_difference": float(np.abs(a - b).max()),
                **_pooled(a, b),
                "ours": point_difference(name, a, b, position, token).median,
            }
        )
    return found


def _stream(side: Side, name: str) -> Array:
    values = side.read(name)
    assert values is not None
    stream: Array = values.double().numpy()
    return stream


def _pooled(a: Array, b: Array) -> dict[str, float]:
    norms = np.linalg.norm(a), np.linalg.norm(b)
    return {
        "relative": float(np.linalg.norm(a - b) / norms[1]),
        "one_minus_cosine": float(1 - (a * b).sum() / norms[0] / norms[1]),
    }


def equal_values(layout: Layout, layers: int) -> list[dict[str, object]]:
    """Share of single values that two sides have equal to the bit, at some points.

    Where the values are equal both engines round alike, and what they lose is no gap.
    """
    inner = ("attn.norm", "attn.q", "attn.context", "attn.out", "mid", "mlp.norm", "mlp.out")
    points = [f"layers.0.{suffix}" for suffix in inner]
    shown = [layer for layer in (1, 2, 4, 8, 16) if layer < layers]
    points += [boundary(layer, layers) for layer in (*shown, layers)]
    fresh = layout.chains.fresh
    found: list[dict[str, object]] = []
    for point in points:
        values = {label: _stream(side, point)[fresh] for label, side in layout.sides.items()}
        shares = {
            f"{a}-{b}": float((values[a] == values[b]).mean()) for a, b in combinations(values, 2)
        }
        found.append({"point": point, **shares})
    return found


def harm(model: ReferenceModel, layout: Layout) -> dict[str, float]:
    """Spoil one side's stream at one layer in every row but the massive one, and measure it.

    Returns the naive metrics of the spoiled stream against the whole one, ours, and what the spoil
    costs in nats.
    """
    side = list(layout.sides.values())[-1]
    chains = layout.chains
    name = boundary(HARMED_LAYER, model.config.num_layers)
    whole = _stream(side, name)
    noise = np.random.default_rng(0).standard_normal(whole.shape)
    massive = np.abs(whole).max(1) > 0.5 * np.abs(whole).max()
    noise[massive] = 0.0
    spoiled = whole * (1 + HARM * noise)
    ends = [
        model.tail(
            HARMED_LAYER,
            torch.from_numpy(stream),
            torch.from_numpy(chains.position),
            chains.lengths,
            layout.target,
        )[layout.scored].double()
        for stream in (whole, spoiled)
    ]
    fresh = chains.fresh
    position, token = chains.position[fresh], chains.token[fresh]
    return {
        "layer": HARMED_LAYER,
        "noise": HARM,
        "massive_rows": int(massive[fresh].sum()),
        "rows": int(fresh.sum()),
        **_pooled(spoiled[fresh], whole[fresh]),
        "ours": point_difference(name, spoiled[fresh], whole[fresh], position, token).median,
        "nat": float((ends[0] - ends[1]).abs().mean()),
    }
