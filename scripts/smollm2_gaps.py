"""Tables of gaps: how large, made of what, predicted or not, and gone with its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.wording import bar, nat, percent
from scripts.smollm2_page import bullets, table

Array = NDArray[np.float64]

PAIRS = ("A-B", "B-C", "A-C")


def mae(difference: Array) -> float:
    """Mean absolute value."""
    return float(np.abs(difference).mean())


def pair(scores: Mapping[str, Array], name: str) -> Array:
    """Difference of the two sides that ``name`` (``A-B``) names."""
    first, second = name.split("-")
    return scores[first] - scores[second]


def with_error(difference: Array) -> str:
    """Write a mean absolute difference with its standard error over tokens."""
    error = float(np.abs(difference).std() / np.sqrt(len(difference)))
    return f"{nat(mae(difference))} ± {nat(error)}"


def gaps(scores: Mapping[str, Array], greedy: NDArray[np.bool_]) -> str:
    """Each pair's gap on the response tokens, all and by how they were decoded."""
    rows = []
    for name in PAIRS:
        for kind, mask in (("all", greedy | ~greedy), ("greedy", greedy), ("sampled", ~greedy)):
            d = pair(scores, name)[mask]
            size = np.abs(d)
            rows.append(
                [
                    f"{name}, {kind}",
                    f"{len(d)}",
                    with_error(d),
                    f"{d.mean():+.4f}",
                    nat(float(np.sqrt((d**2).mean()))),
                    nat(float(np.quantile(size, 0.95))),
                    nat(float(np.quantile(size, 0.99))),
                    nat(float(size.max())),
                ]
            )
    head = ["pair", "tokens", "mean abs.", "signed mean", "rms", "p95", "p99", "max"]
    return table(head, rows)


def layers(carried: Mapping[str, Array]) -> str:
    """What each layer adds to the gap, for scans [boundary, token] of the three sides."""
    names = [f"layer {n}" for n in range(len(carried["A"]) - 3)] + ["final norm", "head"]
    sizes = {name: np.abs(pair(carried, name)).mean(1) for name in PAIRS}
    shares = {name: np.diff(size**2) / size[-1] ** 2 for name, size in sizes.items()}
    largest = max(float(share.max()) for share in shares.values())
    rows = []
    for row, made_by in enumerate(names):
        cells = [made_by]
        for name in PAIRS:
            cells += [nat(float(sizes[name][row + 1])), percent(float(shares[name][row]))]
        rows.append([*cells, f"`{bar(float(shares['A-C'][row]), largest, 20, '#'):20}`"])
    head = ["made by"]
    for name in PAIRS:
        head += [f"{name} after it", "share"]
    parts = [
        f"{name}: the {len(names) - 2} layers {percent(float(share[:-2].sum()))}, the final norm "
        f"{percent(float(share[-2]))}, the head {percent(float(share[-1]))}"
        for name, share in shares.items()
    ]
    return table([*head, "share of A-C"], rows) + "\nOf the squared gap:\n" + bullets(parts)


def budget(runs: Mapping[str, Array], kinds: Sequence[str]) -> str:
    """Each kind's share, and whether the shares close to the whole."""
    exact = runs["fp32"]
    whole = mae(runs["bf16"] - exact)
    share = {kind: mae(runs[f"only {kind}"] - exact) for kind in kinds}
    without = {kind: mae(runs[f"all but {kind}"] - exact) for kind in kinds}
    squares = sum(value**2 for value in share.values())
    rows = [
        [
            kind,
            nat(share[kind]),
            percent(share[kind] ** 2 / squares),
            nat(without[kind]),
            nat(_root(whole**2 - without[kind] ** 2)),
        ]
        for kind in sorted(kinds, key=lambda kind: -share[kind])
    ]
    left_out = sum(whole**2 - without[kind] ** 2 for kind in kinds)
    rows.append(["**in quadrature**", nat(squares**0.5), "", "", nat(_root(left_out))])
    rows.append(["**everything in bf16**", nat(whole), "", "", nat(whole)])
    head = ["operators", "they alone in bf16", "share of squares", "all but they", "so they cost"]
    closing = (
        f"\nThe shares in quadrature are {squares**0.5 / whole:.3f} of the whole; the costs by "
        f"leaving out are {_root(left_out) / whole:.3f} of it.\n"
    )
    return table(head, rows) + closing


def _root(square: float) -> float:
    """Square root that keeps the sign, for differences of squares that noise makes negative."""
    return float(np.sign(square) * abs(square) ** 0.5)


def closing(runs: Mapping[str, Array], scores: Mapping[str, Array]) -> str:
    """Distances from fp32 and the gaps that they predict; ``scores`` at the places of ``runs``."""
    exact = runs["fp32"]
    error = {name: values - exact for name, values in scores.items()}
    whole = mae(runs["bf16"] - exact)
    names = {"A": "A, SGLang generating", "B": "B, SGLang replaying", "C": "C, transformers"}
    rows = [[names[n], with_error(e), f"{mae(e) / whole:.2f}"] for n, e in error.items()]
    rows.append(["the reference in bf16", with_error(runs["bf16"] - exact), "1.00"])
    text = table(["side", "distance from fp32", "over the reference's"], rows)
    rows = []
    for name in PAIRS:
        first, second = name.split("-")
        measured = mae(error[first] - error[second])
        distances = mae(error[first]), mae(error[second])
        correlation = float(np.corrcoef(error[first], error[second])[0, 1])
        apart = sum(d**2 for d in distances)
        rows.append(
            [
                name,
                with_error(error[first] - error[second]),
                nat(2**0.5 * whole),
                nat(apart**0.5),
                f"{correlation:+.2f}",
                nat((apart - 2 * correlation * distances[0] * distances[1]) ** 0.5),
                f"{measured / (2**0.5 * whole):.2f}",
            ]
        )
    head = [
        "pair",
        "measured",
        "predicted by the budget",
        "by the sides' distances",
        "their errors correlate",
        "with that",
        "measured over predicted",
    ]
    return text + "\n" + table(head, rows)


def raised(
    measured: Mapping[str, Mapping[str, Array]], runs: Mapping[str, Array], place: NDArray[np.intp]
) -> str:
    """The B-C gap with parts in fp32 on both sides, and what was predicted.

    ``measured`` maps what was raised (``""``, ``head``, ``stream``, ``head stream``) to the scores
    of B and C.
    """
    exact = runs["fp32"]
    whole = mae(runs["bf16"] - exact)
    share = {kind: mae(runs[f"only {kind}"] - exact) for kind in ("head", "residual")}
    kinds = {"": [], "head": ["head"], "stream": ["residual"], "head stream": ["head", "residual"]}
    gap = mae(pair(measured[""], "B-C")[place])
    rows = []
    for parts, scores in measured.items():
        removed = kinds[parts]
        name = f"all but {' and '.join(removed)}" if removed else "bf16"
        left = mae(runs[name] - exact)
        rows.append(
            [
                {"": "nothing", "stream": "residual stream", "head stream": "both"}.get(
                    parts, parts
                ),
                with_error(pair(scores, "B-C")[place]),
                nat(_root(gap**2 - 2 * sum(share[kind] ** 2 for kind in removed))),
                nat(gap * left / whole),
                with_error(scores["B"][place] - exact),
                with_error(scores["C"][place] - exact),
                nat(left),
            ]
        )
    head = [
        "in fp32 on both sides",
        "B-C measured",
        "by the shares",
        "by the reference",
        "B from fp32",
        "C from fp32",
        "reference from fp32",
    ]
    return table(head, rows)


def exact_sides(
    scores: Mapping[str, Array], own: Mapping[str, Array], before: float, verdict: Mapping[str, Any]
) -> str:
    """The gap with both sides in fp32: ``scores`` on the same tokens, ``own`` on the server's own.

    ``before`` is the B-C gap in bf16, ``verdict`` that of bisecting the two captures.
    """
    rows = []
    for name, d in (
        ("B-C, the same tokens", pair(scores, "B-C")),
        ("A-B, the server's own answers in fp32", pair(own, "A-B")),
    ):
        size = np.abs(d)
        rows.append([name, f"{len(d)}", f"{mae(d):.2e}", f"{d.mean():+.1e}", f"{size.max():.1e}"])
    text = table(["pair in fp32", "tokens", "mean abs.", "signed mean", "max"], rows)
    predicted = verdict["rounding_budget"]["predicted_gap"]
    return text + (
        f"\nThe B-C gap is {before / mae(pair(scores, 'B-C')):,.0f} times smaller than in bf16; "
        f"bisecting the two fp32 captures predicts {predicted:.1e} nat and says "
        f"**{verdict['status']}**: {'; '.join(verdict['reasons'])}.\n"
    )
