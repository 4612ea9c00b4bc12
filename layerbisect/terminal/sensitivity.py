"""How small a fault a verdict could have seen: one line, and a table on demand."""

from __future__ import annotations

from collections.abc import Sequence

from layerbisect.bisect.verdict import SmallestFault, Verdict
from layerbisect.terminal.table import Column, Table
from layerbisect.wording import count

STRETCH = "several in one"
"""What a stretch of operators is called whose points in between are not seen."""


def smallest_words(verdict: Verdict) -> str:
    """Say in one sentence what would have been convicted, by operator; "" where nothing is known.

    Of both sides the one that sees less counts; operators that see alike are told together.
    """
    by_operator: dict[str | None, list[SmallestFault]] = {}
    for one in verdict.sensitivity:
        by_operator.setdefault(one.operator, []).append(one)
    outputs: dict[str, list[str]] = {}
    apart = []
    for found in sorted(by_operator.values(), key=_least):
        worst = max(found, key=lambda one: one.gain)
        alone = f" of the {worst.side}" if len(found) < len(verdict.labels) else ""
        if worst.of == "logits":
            apart.append(f"a factor on the logits{alone} off by {gain_words(worst.gain)}")
        elif worst.operator is None:
            apart.append(f"{gain_words(worst.gain)} of what leaves several operators{alone} in one")
        else:
            outputs.setdefault(gain_words(worst.gain), []).append(_name(worst) + alone)
    told = [f"{gain} in {', '.join(names)}" for gain, names in outputs.items()]
    gains = ["the whole output off by " + "; ".join(told)] if told else []
    return "; ".join([*gains, *apart])


def sensitivity_table(verdict: Verdict) -> Table:
    """One line an operator and side, and the place where the least would have been seen."""
    table = Table(
        (
            Column("operator", "name"),
            Column("side", "words"),
            Column("smallest"),
            Column("of", "name"),
            Column("judged in", "name"),
            Column("least seen at", "words"),
        ),
        keys=2,
    )
    for one in verdict.sensitivity:
        judged = count(one.layers, "layer") if one.layers else ""
        table.add(_name(one), one.side, gain_words(one.gain), one.of, judged, one.point)
    return table


def gain_words(gain: float) -> str:
    """Write how far a factor is from one, in percent where that is no string of zeros."""
    return f"{gain * 100:.2g} %" if 1e-5 <= gain < 1 else f"{gain:.1e}"


def _name(one: SmallestFault) -> str:
    # the norms of the layers may not be seen alone
    last = one.operator == "norm" and not one.layers
    return "final norm" if last else one.operator or STRETCH


def _least(found: Sequence[SmallestFault]) -> float:
    return max(one.gain for one in found)
