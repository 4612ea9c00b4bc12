"""Verdicts with the parts that a section is about."""

from collections.abc import Sequence

from layerbisect.bisect.verdict import (
    Coverage,
    CoveredRows,
    Culprit,
    Gap,
    LayerEvidence,
    Points,
    Probe,
    RoundingBudget,
    Verdict,
)
from layerbisect.report.blocks import Chart, Section

GAP = Gap(mae=0.1, signed_mean=-0.01, p95=0.3, p99=0.4, max=0.5, rows=636)
SCAN = Probe("scan", 10)
BUDGET = RoundingBudget(
    predicted_gap=0.06,
    shares={"norm": 0.02, "residual": 0.03, "head": 0.0},
    whole=0.04,
    quadrature=0.036,
    distances={"rollout": 0.1, "trainer": 0.04},
    rows=636,
)


def layers(carried: Sequence[float | None]) -> tuple[LayerEvidence, ...]:
    """Layers whose boundaries carry these gaps (nat), one more than there are layers."""
    pairs = zip(carried[:-1], carried[1:], strict=True)
    return tuple(LayerEvidence(n, *pair, {}, {}) for n, pair in enumerate(pairs))


def culprit(layer: int | None, side: str = "rollout") -> Culprit:
    return Culprit(
        layer=layer,
        point=f"layers.{layer}.attn.q" if layer is not None else "logits",
        operator="rope" if layer is not None else "head",
        side=side,
        share_of_gap=0.8,
        own_error=162.0,
        floor=1.1,
        where="all rows",
        evidence=("it errs",),
    )


def verdict(
    carried: Sequence[float | None] = (),
    *,
    culprits: tuple[Culprit, ...] = (),
    gap: Gap | None = GAP,
    budget: RoundingBudget | None = BUDGET,
    probe: Probe | None = SCAN,
    labels: tuple[str, str] = ("rollout", "trainer"),
) -> Verdict:
    return Verdict(
        status="divergent" if culprits else "agree",
        gap=gap,
        culprits=culprits,
        ruled_out=(),
        rounding_budget=budget,
        coverage=Coverage(Points(3, ()), CoveredRows(640, 0)),
        next="nothing to do",
        layers=layers(carried) if carried else (),
        probe=probe,
        labels=labels,
    )


def charts(section: Section | None) -> dict[str, Chart]:
    """A section's charts by their names."""
    assert section is not None
    return {one.id: one for one in section.blocks if isinstance(one, Chart)}
