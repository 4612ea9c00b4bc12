"""What the scores' own conditions say: definitions, weights, and updates that one side missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerbisect.bisect.scores.decision_map import CLEAR, SIDES, Standing
from layerbisect.bisect.scores.report import StepReport
from layerbisect.captures.record.call import Scoring, is_score

UNNAMED = "default"
"""What SGLang calls weights that nobody named."""


def conditions(records: Sequence[Mapping[str, Scoring]]) -> tuple[str, ...]:
    """Say which columns were not scored alike, so that their difference means nothing.

    ``records`` are the columns of the records that are judged as one step.
    """
    said = []
    definitions: dict[str, set[str]] = {}
    versions: dict[str, set[str]] = {}
    digests: dict[tuple[str, str], set[str]] = {}
    held: dict[tuple[str | None, str], set[str]] = {}
    for columns in records:
        for column, scoring in columns.items():
            if not is_score(column) or column == "behavior":
                continue
            if scoring.definition != "unknown":
                definitions.setdefault(column, set()).add(scoring.definition)
            if scoring.weight_version:
                versions.setdefault(column, set()).add(scoring.weight_version)
            if scoring.digest:
                digests.setdefault((SIDES[column[0]], scoring.worker), set()).add(scoring.digest)
            if scoring.digest and column[0] in "AB":
                # weights that are sharded in another way have another digest
                layout = scoring.settings.get("tp_size")
                held.setdefault((layout, scoring.digest), set()).add(scoring.worker)
    if len(set().union(*definitions.values())) > 1:
        listed = ", ".join(f"{c} {' and '.join(sorted(d))}" for c, d in definitions.items())
        said.append(
            f"the columns are different probabilities ({listed}): score all of them raw (a server "
            "with SGLANG_RETURN_ORIGINAL_LOGPROB=1 does at any temperature, and `scores collect` "
            "is told by --original-logprobs)"
        )
    for label, letters in (("rollout", "AB"), ("trainer", "C")):
        named = {column: v for column, v in versions.items() if column[0] in letters}
        if len(set().union(*named.values())) > 1:
            listed = ", ".join(f"{c} under {' and '.join(sorted(v))}" for c, v in named.items())
            said.append(f"the {label}'s weights changed between its scores ({listed}); score again")
        elif any(len(d) > 1 for (side, _), d in digests.items() if side == label):
            said.append(f"the {label}'s weights changed between its scores; score again")
    for layout in {layout for layout, _ in held}:
        holders = {digest: workers for (of, digest), workers in held.items() if of == layout}
        if len(set().union(*holders.values())) > 1 < len(holders):
            listed = "; ".join(f"{', '.join(sorted(w))} {d[:8]}" for d, w in holders.items())
            said.append(
                f"workers hold different weights (digests {listed}): their scores compare weights, "
                "and not kernels; install the same ones and replay again"
            )
    return tuple(said)


def stale(
    weights: Mapping[str, str],
    names: Mapping[str, str],
    before: Sequence[StepReport],
    step: int | None,
    standing: Standing,
) -> tuple[str, tuple[str, ...]] | None:
    """Say which side missed an update, and the evidence; None where nothing shows it.

    Needs B and C apart, at least twice as far as at the step before, and one side's weights to be
    those of that step while the other's are not: by digests on both sides, or by their names where
    both sides used the same name before.
    """
    last = before[-1] if before else None
    if last is None or standing.letter in ("A", "B"):
        return None
    opened = [
        pair
        for pair in standing.apart
        if pair.first[0] in "AB"
        and pair.second[0] == "C"
        and pair.gap.mae > CLEAR * last.maes.get(pair.name, float("inf"))
    ]
    if not opened:
        return None
    both = {"rollout", "trainer"}
    alike = len(set(last.versions.values())) == 1
    for now, then, usable, what in (
        (weights, last.weights, True, "weights"),
        (names, last.versions, alike, "weight version"),
    ):
        if not usable or now.keys() != both or then.keys() != both:
            continue
        same = {side for side in both if now[side] == then[side]}
        if len(same) != 1:
            return None
        side = same.pop()
        other = "trainer" if side == "rollout" else "rollout"
        return side, (
            f"from step {last.step} to step {step} the {other}'s {what} changed and the {side}'s "
            "did not",
            *(
                f"{pair.name} went from {last.maes[pair.name]:.6f} to {pair.gap.mae:.6f} nat"
                for pair in opened
            ),
        )
    return None


def versions(columns: Mapping[str, Scoring]) -> str | None:
    """Say where the two sides name their weights differently; None where they don't."""
    named = {
        label: {s.weight_version for c, s in columns.items() if c[0] in letters} - {None, UNNAMED}
        for label, letters in (("rollout", "AB"), ("trainer", "C"))
    }
    if all(len(names) == 1 for names in named.values()) and named["rollout"] != named["trainer"]:
        rollout, trainer = (names.pop() for names in named.values())
        return (
            f"the rollout calls its weights {rollout!r} and the trainer {trainer!r}: where both "
            "count alike, these are other weights"
        )
    return None
