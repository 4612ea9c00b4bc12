"""Figures of the published three-way comparison, and what can be recomputed from them.

The experiments ran on Qwen3-30B-A3B with SGLang and Megatron-core in Miles, on eight MI355X GPUs.
All values are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# one token of Case 1's fault run: rollout 0, sample 3, response position 22, token ID 374
OUTLIER: Mapping[str, float] = {
    "A": -0.6760863423347473,
    "B0": -0.6931847333908081,
    "B1": -1.1369221210479736,
    "C0": -1.1369222402572632,
    "C1": -1.1369222402572632,
}
OUTLIER_DIFFERENCES: Mapping[tuple[str, str], str] = {
    ("A", "B0"): "+0.017098",
    ("B0", "C0"): "+0.443738",
    ("A", "C0"): "+0.460836",
    ("B0", "B1"): "+0.443737",
    ("B1", "C0"): "+0.000000",
    ("C0", "C1"): "+0.000000",
}

# Case 3's fault run: rollout 1, sample 15, response position 1, token ID 0
STALE_TOKEN: Mapping[str, float] = {
    "A": -11.931213379,
    "B0": -11.931213379,
    "B1": -11.931213379,
    "C0": -27.088520050,
    "C1": -27.088520050,
}
STALE_DIFFERENCES: Mapping[tuple[str, str], str] = {
    ("A", "B0"): "0.000000000",
    ("B0", "B1"): "0.000000000",
    ("C0", "C1"): "0.000000000",
    ("B0", "C0"): "15.157306671",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Mean absolute differences of one published run."""

    name: str
    a_b: float
    b_c: float
    a_c: float


CLEAN = Run("clean", 0.009756, 0.009218, 0.009337)
CASE_1 = (
    CLEAN,
    Run("fault", 0.100791, 0.009306, 0.102758),
    Run("fixed", 0.006772, 0.008432, 0.007703),
)
CASE_2 = (
    CLEAN,
    Run("fault", 0.008086, 0.102164, 0.102420),
    Run("fixed", 0.006334, 0.007119, 0.007712),
)
DETERMINISTIC = (
    Run("off", 0.016305, 0.015165, 0.014710),
    Run("on", 0.007984, 0.008799, 0.008446),
)
B_REPEAT: Mapping[str, float] = {
    "deterministic off": 0.017180,
    "deterministic on": 0.008333,
    "case 1 fault": 0.008069,
    "case 2 fault": 0.008341,
}
# Case 1's fault run by response position, of 1,024 tokens in 8 responses
FIRST_TOKEN, LATER_TOKENS = 0.00000799, 0.101585
RESPONSES, TOKENS = 8, 1024

# B-C of Case 3's fault run by rollout
CASE_3: Mapping[int, float] = {0: 0.009747, 1: 10.951996, 2: 0.012223}
CASE_3_LATER: Mapping[str, float] = {"clean": 0.012532, "fixed": 0.012838}
TEMPERATURE: Mapping[float, float] = {0.9: 0.009959, 0.8: 0.014414}

# passes and their mean pairwise difference: within a worker, over workers, through a router
WORKERS: Mapping[str, tuple[int, float]] = {
    "within one worker": (5, 0.010828),
    "over four workers": (4, 0.013921),
    "through the router": (5, 0.012633),
}

# a probability of 0.10 in the rollout and of 0.12 in the trainer
RATIO = (0.10, 0.12, "-2.3026", "-2.1203", "0.1823", "1.20")
# top-k of 2 over these probabilities
TOP_K = ((0.50, 0.30, 0.20), 2, (0.625, 0.375, 0.0))
OFFSET = 0.10
PASS = 0.01


def recomputed() -> list[tuple[str, str, str]]:
    """What, published, recomputed: each line of arithmetic that the published figures allow."""
    import math
    from itertools import combinations

    rows: list[tuple[str, str, str]] = []
    for (first, second), said in OUTLIER_DIFFERENCES.items():
        found = OUTLIER[first] - OUTLIER[second]
        rows.append((f"outlier token, {first}-{second}", said, f"{found:+.6f}"))
    for (first, second), said in STALE_DIFFERENCES.items():
        found = STALE_TOKEN[first] - STALE_TOKEN[second]
        rows.append((f"case 3 token, {first}-{second}", said, f"{found:.9f}"))
    mixed = (RESPONSES * FIRST_TOKEN + (TOKENS - RESPONSES) * LATER_TOKENS) / TOKENS
    rows.append(("case 1, A-B from its split by position", f"{CASE_1[1].a_b:.6f}", f"{mixed:.6f}"))
    rollout, trainer, *said_ratio = RATIO
    values = math.log(rollout), math.log(trainer), math.log(trainer / rollout), trainer / rollout
    names = ("log 0.10", "log 0.12", "their difference", "its ratio")
    for name, said, found, digits in zip(names, said_ratio, values, (4, 4, 4, 2), strict=True):
        rows.append((name, said, f"{found:.{digits}f}"))
    shares, k, kept = TOP_K
    mass = sum(sorted(shares)[-k:])
    for share, said_share in zip(shares, kept, strict=True):
        found = share / mass if share in sorted(shares)[-k:] else 0.0
        rows.append((f"top-k of 2 makes of {share:.2f}", f"{said_share:g}", f"{found:g}"))
    pairs = len(list(combinations(range(WORKERS["within one worker"][0]), 2)))
    rows.append(("pairs of five passes", "10", str(pairs)))
    return rows


def bounds() -> list[tuple[str, float, float, float]]:
    """Each run's A-C with the least and the most that A-B and B-C allow: |a - b| and a + b.

    Signed differences close token by token, so mean sizes obey the triangle inequality.
    """
    runs = [("deterministic " + r.name, r) for r in DETERMINISTIC]
    runs += [("case 1 " + r.name, r) for r in CASE_1] + [("case 2 " + r.name, r) for r in CASE_2]
    return [(name, abs(r.a_b - r.b_c), r.a_c, r.a_b + r.b_c) for name, r in runs]
