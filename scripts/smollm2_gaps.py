"""Tables of gaps: how large, made of what, predicted or not, and gone with its cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.wording import nat, percent
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


def correlation(first: Array, second: Array) -> float:
    """Correlation over tokens; 0 where one of the two is constant."""
    if not first.std() or not second.std():
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def with_error(difference: Array) -> str:
    """Write a mean absolute difference with its standard error over tokens."""
    error = float(np.abs(difference).std() / np.sqrt(len(difference)))
    return f"{nat(mae(difference))} ± {nat(error)}"


def gaps(scores: Mapping[str, Array], greedy: NDArray[np.bool_], again: Array) -> str:
    """Each pair's gap on the response tokens, all and by how they were decoded.

    ``again`` are the scores of another replay.
    """
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
                    f"{d.mean():+.4f} ± {d.std() / len(d) ** 0.5:.4f}",
                    f"{(d**2).mean() / 2:.4f}",
                    nat(float(np.sqrt((d**2).mean()))),
                    nat(float(np.quantile(size, 0.95))),
                    nat(float(np.quantile(size, 0.99))),
                    nat(float(size.max())),
                ]
            )
    head = ["pair", "tokens", "mean abs.", "signed mean", "half mean square", "rms", "p95", "p99"]
    repeat = np.abs(again - scores["B"])
    return table([*head, "max"], rows) + (
        f"\nA second replay differs from B by {nat(float(repeat.max()))} at most.\n"
    )


def layers(carried: Mapping[str, Array]) -> str:
    """What each layer adds to the gap, for scans [boundary, token] of the three sides."""
    names = [f"layer {n}" for n in range(len(carried["A"]) - 3)] + ["final norm", "head"]
    sizes = {name: np.abs(pair(carried, name)).mean(1) for name in PAIRS}
    shares = {name: np.diff(size**2) / size[-1] ** 2 for name, size in sizes.items()}
    rows = []
    for row, made_by in enumerate(names):
        cells = [made_by]
        for name in PAIRS:
            cells += [nat(float(sizes[name][row + 1])), f"{shares[name][row]:.1%}"]
        rows.append(cells)
    head = ["made by"]
    for name in PAIRS:
        head += [f"{name} after it", "share"]
    parts = [
        f"{name}: the {len(names) - 2} layers {share[:-2].sum():.1%}, the final norm "
        f"{share[-2]:.1%}, the head {share[-1]:.1%}"
        for name, share in shares.items()
    ]
    return table(head, rows) + "\nOf the squared gap:\n" + bullets(parts)


def budget(runs: Mapping[str, Array], kinds: Sequence[str]) -> str:
    """Each kind's share, and whether the shares close to the whole."""
    exact = runs["fp32"]
    whole, fused = (mae(runs[name] - exact) for name in ("bf16", "fused: bf16"))
    share = {kind: mae(runs[f"only {kind}"] - exact) for kind in kinds}
    in_fused = {
        kind: mae(runs.get(f"fused: only {kind}", runs[f"only {kind}"]) - exact) for kind in kinds
    }
    without = {kind: mae(runs[f"all but {kind}"] - exact) for kind in kinds}
    cost = {kind: whole**2 - value**2 for kind, value in without.items()}
    sums = [sum(v**2 for v in values.values()) ** 0.5 for values in (share, in_fused)]
    rows = [
        [
            kind,
            nat(share[kind]),
            f"{share[kind] ** 2 / sums[0] ** 2:.0%}",
            nat(without[kind]),
            nat(_root(cost[kind])),
            nat(in_fused[kind]),
        ]
        for kind in sorted(kinds, key=lambda kind: -share[kind])
    ]
    left_out = _root(sum(cost.values()))
    rows.append(["**in quadrature**", nat(sums[0]), "", "", nat(left_out), nat(sums[1])])
    rows.append(["**all in bf16**", nat(whole), "", "", nat(whole), nat(fused)])
    rows.append(
        ["**ratio**", f"{sums[0] / whole:.3f}", "", "", f"{left_out / whole:.3f}"]
        + [f"{sums[1] / fused:.3f}"]
    )
    head = ["operators", "they alone in bf16", "share of squares", "all but they", "so they cost"]
    return table([*head, "they alone, fused norms"], rows)


def _root(square: float) -> float:
    """Square root that keeps the sign, for differences of squares that noise makes negative."""
    return float(np.sign(square) * abs(square) ** 0.5)


def closing(
    runs: Mapping[str, Array], scores: Mapping[str, Array], normed: Mapping[str, Array]
) -> str:
    """Distances from fp32 and the gaps that they predict.

    ``scores`` are what the engines recorded at the tokens of ``runs``, ``normed`` what the
    reference reads out of their final hidden states in full.
    """
    exact = runs["fp32"]
    names = {"A": "A, SGLang generating", "B": "B, SGLang replaying", "C": "C, transformers"}
    rows = []
    for side, name in names.items():
        error, whole = scores[side] - exact, _left(runs, side, "bf16")
        rows.append([name, with_error(error), nat(whole), f"{mae(error) / whole:.2f}"])
    head = ["side", "distance from fp32", "the reference's, in its form", "ratio"]
    text = table(head, rows)
    rows = []
    for what, ends, run in (("", scores, "bf16"), (" before the head", normed, "all but head")):
        for name in PAIRS:
            first, second = (
                {side: ends[side] - exact for side in ends}[s] for s in name.split("-")
            )
            predicted = math.hypot(*(_left(runs, side, run) for side in name.split("-")))
            measured = first - second
            together = correlation(first, second)
            squares = mae(first) ** 2 + mae(second) ** 2
            rows.append(
                [
                    f"{name}{what}",
                    with_error(measured),
                    nat(predicted),
                    f"{mae(measured) / predicted:.2f}",
                    f"{together:+.2f}",
                    nat(_root(squares - 2 * together * mae(first) * mae(second))),
                ]
            )
    head = ["gap", "measured", "predicted", "ratio", "errors correlate", "predicted with that"]
    return text + "\n" + table(head, rows)


def _left(runs: Mapping[str, Array], side: str, run: str) -> float:
    """Distance of a run from fp32, with the norms as the side has them."""
    name = run if side == "C" else f"fused: {run}"
    return mae(runs[name] - runs["fp32"])


def raised(
    measured: Mapping[str, Mapping[str, Array]], runs: Mapping[str, Array], place: NDArray[np.intp]
) -> str:
    """The B-C gap with parts in fp32 on both sides, and what was predicted.

    ``measured`` maps what was raised (nothing, ``head``, ``stream``, ``head stream``) to the scores
    of B and C; ``place`` are the tokens of ``runs`` among them.
    """
    exact = runs["fp32"]
    shares = {
        "head": [mae(runs["only head"] - exact)] * 2,
        "residual": [_left(runs, side, "only residual") for side in "BC"],
    }
    raising = {
        "": ("nothing", ()),
        "head": ("head", ("head",)),
        "stream": ("residual stream", ("residual",)),
        "head stream": ("both", ("head", "residual")),
    }
    gap = mae(pair(measured[""], "B-C")[place])
    whole = math.hypot(*(_left(runs, side, "bf16") for side in "BC"))
    rows = []
    for parts, scores in measured.items():
        name, kinds = raising[parts]
        run = f"all but {' and '.join(kinds)}" if kinds else "bf16"
        left = [_left(runs, side, run) for side in "BC"]
        errors = [scores[side][place] - exact for side in "BC"]
        removed = sum(share**2 for kind in kinds for share in shares[kind])
        rows.append(
            [
                name,
                with_error(errors[0] - errors[1]),
                nat(_root(gap**2 - removed)),
                nat(gap * float(math.hypot(*left)) / whole),
                *(f"{nat(mae(e))} ({nat(value)})" for e, value in zip(errors, left, strict=True)),
                f"{correlation(errors[0], errors[1]):+.2f}",
            ]
        )
    head = [
        "in fp32 on both sides",
        "B-C measured",
        "by the shares",
        "by the reference",
        "B from fp32 (reference)",
        "C from fp32 (reference)",
        "errors correlate",
    ]
    return table(head, rows)


def exact_sides(
    scores: Mapping[str, Array],
    own: Mapping[str, Array],
    before: float,
    verdict: Mapping[str, Any],
    scoring: Mapping[str, float],
) -> str:
    """The gaps with both sides in fp32: ``scores`` on the same tokens, ``own`` on the server's own.

    ``before`` is the B-C gap in bf16, ``verdict`` that of bisecting the two captures, and
    ``scoring`` the signed mean errors of ways to score one set of logits.
    """
    rows = []
    on_same = [("B-C, the same tokens", pair(scores, "B-C"))]
    on_own = [(f"{name}, the fp32 server's own answers", pair(own, name)) for name in PAIRS]
    for name, d in on_same + on_own:
        size = np.abs(d)
        rows.append(
            [name, f"{len(d)}", nat(mae(d)), nat(float(d.mean())), nat(float(size.max()))]
            + [percent(float((d == 0).mean()))]
        )
    head = ["pair in fp32", "tokens", "mean abs.", "signed mean", "max", "equal to the bit"]
    equal = [d["bitwise_equal"] == 1 for d in verdict["differences"]]
    predicted = verdict["rounding_budget"]["predicted_gap"]
    left = mae(pair(scores, "B-C"))
    lines = [
        f"B-C was {nat(before)} nat in bf16 and is "
        + (f"{before / left:,.0f} times smaller." if left else "gone altogether."),
        f"{sum(equal)} of the {len(equal)} points of the two fp32 captures are equal to the bit in "
        "every row.",
        f"Bisecting the two fp32 captures: **{verdict['status']}**; the budget predicts "
        f"{predicted:.1e} nat.",
        "Scores of one set of fp32 logits in torch on this CPU are off by, in the signed mean: "
        + ", ".join(f"`{way}` {value:+.1e} nat" for way, value in scoring.items())
        + ".",
    ]
    return table(head, rows) + "\n" + bullets(lines)
