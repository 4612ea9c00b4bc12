"""Tables of the SmolLM2 case: from numbers to Markdown, and into the page between its markers.

<!-- smollm2: gaps -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from layerbisect.captures.errors import LayerBisectError
from layerbisect.wording import nat

_BLOCK = re.compile(r"(<!-- smollm2: (?P<name>[a-z0-9]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """Replace what stands between the markers of each block.

    Raises LayerBisectError where the page and the blocks do not name the same.
    """
    names = {match["name"] for match in _BLOCK.finditer(page)}
    if names != set(blocks):
        differ = ", ".join(sorted(names ^ set(blocks)))
        raise LayerBisectError(f"the page's markers and the computed tables differ in: {differ}")
    return _BLOCK.sub(lambda m: f"{m[1]}{blocks[m['name']].strip()}\n{m[3]}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table; every column but the first is set to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def bullets(lines: Iterable[str]) -> str:
    """Write a list."""
    return "".join(f"- {line}\n" for line in lines)


def setup(
    environment: Mapping[str, str], answers: Sequence[tuple[int, int, float]], model: str
) -> str:
    """What was run: versions, and ``answers`` as (prompt tokens, response tokens, temperature)."""
    greedy = sum(length for _, length, temperature in answers if not temperature)
    tokens = sum(length for _, length, _ in answers)
    lines = [
        f"{model}, {len(answers)} prompts of {min(p for p, *_ in answers)} to "
        f"{max(p for p, *_ in answers)} tokens (chat template included)",
        f"{tokens} response tokens: {greedy} decoded greedily, {tokens - greedy} sampled at "
        "temperature 1, all in one batch",
        *(f"{name} {value}" for name, value in environment.items()),
    ]
    return bullets(lines)


def own(errors: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Own error of every operator by side, over layers; ``names`` maps sides to their columns."""
    rows = []
    for suffix in dict.fromkeys(_suffix(e) for e in errors):
        cells = [f"`{suffix}`"]
        for side in names:
            found = [e for e in errors if e["side"] == side and _suffix(e) == suffix]
            median = float(np.median([e["median"] for e in found]))
            worst = max(e["p95"] for e in found)
            cells.append(f"{median:.2f} ({worst:.2f})")
        rows.append(cells)
    convicted = [e for e in errors if e["convicted"]]
    said = (
        f"\n{len(convicted)} of {len(errors)} operators judged are convicted"
        + (": " + "; ".join(map(_conviction, convicted)) if convicted else "")
        + ".\n"
    )
    return table(["point", *names.values()], rows) + said


def _suffix(error: Mapping[str, Any]) -> str:
    point: str = error["point"]
    number = error["layer"]
    if number is None:
        return point
    suffix = point.removeprefix(f"layers.{number}.")
    # a layer's output is the next layer's input
    return "output" if suffix == point or suffix == "output" else suffix


def _conviction(error: Mapping[str, Any]) -> str:
    fits = "".join(f", {fit}" for fit in error["fits"])
    return (
        f"{error['side']} `{error['point']}` (median {error['median']:.2f}, 95th percentile "
        f"{error['p95']:.2f}, {error['excess']:.1%} of rows in excess{fits})"
    )


def naive(rows: Sequence[Mapping[str, float]], carried: Sequence[float]) -> str:
    """Metrics of the whole tensor against ours, at each boundary; ``carried`` in nat."""
    lines = [
        [
            f"{row['layer']}",
            f"{row['largest']:.0f}" if row["largest"] >= 1 else f"{row['largest']:.2f}",
            f"{row['max_difference']:.3g}",
            f"{row['relative']:.4f}",
            f"{row['one_minus_cosine']:.1e}",
            f"{row['ours']:.4f}",
            nat(gap),
        ]
        for row, gap in zip(rows, carried, strict=True)
    ]
    head = [
        "boundary",
        "largest value",
        "largest difference",
        "relative error",
        "1 - cosine",
        "median of ours by row",
        "carried gap (nat)",
    ]
    top = max(rows, key=lambda row: row["largest"])
    where = (
        f"\nThe largest value stands at position {top['at_position']:.0f}, "
        f"channel {top['at_channel']:.0f}.\n"
    )
    return table(head, lines) + where


def harm(spoiled: Mapping[str, float], rows: Sequence[Mapping[str, float]], gap: float) -> str:
    """What spoiling all rows but the massive one does to each metric, ``gap`` being A-C's."""
    layer = int(spoiled["layer"])
    clean, before = rows[layer], rows[layer - 1]
    head = ["", "relative error", "1 - cosine", "median of ours by row", "nat"]
    lines = [
        [
            name,
            f"{row['relative']:.4f}",
            f"{row['one_minus_cosine']:.1e}",
            f"{row['ours']:.4f}",
            cost,
        ]
        for name, row, cost in (
            (f"both engines, boundary {layer - 1}", before, ""),
            (f"both engines, boundary {layer}", clean, ""),
            (f"{spoiled['noise']:.0%} noise, boundary {layer}", spoiled, nat(spoiled["nat"])),
        )
    ]
    share = spoiled["nat"] / gap
    return table(head, lines) + (
        f"\nThe noise is in {spoiled['rows'] - spoiled['massive_rows']:.0f} of "
        f"{spoiled['rows']:.0f} rows and costs {share:.1f} times the whole gap A-C.\n"
    )


def equal(rows: Sequence[Mapping[str, Any]], pairs: Sequence[str]) -> str:
    """Share of values that are equal to the bit, by point and pair of sides."""
    lines = [[f"`{row['point']}`", *(f"{row[name]:.0%}" for name in pairs)] for row in rows]
    return table(["values equal to the bit", *pairs], lines)


def verdict(text: str) -> str:
    """What `layerbisect bisect` prints."""
    return f"```\n{text.strip()}\n```\n"
