"""The command to run next, after scores were judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerbisect.bisect.scores.decision_map import Standing
from layerbisect.bisect.scores.report import RepeatReport
from layerbisect.bisect.verdict import Culprit, Status
from layerbisect.captures.record.call import Scoring, replays

_LAYERS = (
    "capture both sides on these tokens (LAYERBISECT_CAPTURE in the server, `layerbisect capture` "
    "in the trainer) and run `layerbisect bisect ROLLOUT TRAINER --model DIR`"
)

_PATH = (
    "compare the scores that the engine returned with those that reach the trainer; where they are "
    "the same, capture generation and replay in the server and run `layerbisect bisect SERVER "
    "SERVER --rollout-requests 'gen-*' --trainer-requests 'replay-*' --labels decode,prefill "
    "--model DIR`"
)


def next_step(
    status: Status,
    culprits: Sequence[Culprit],
    standing: Standing,
    moved: Sequence[RepeatReport],
    columns: Mapping[str, Scoring],
) -> str:
    """Say what to run next, and why."""
    if status == "agree":
        return (
            "nothing to do; judge again after the next weight update (`layerbisect scores judge`)"
        )
    if status == "unstable":
        letters = " and ".join(sorted({report.letter for report in moved})) or "a side"
        return (
            f"make {letters} repeat first: one worker, one batch composition, deterministic "
            "kernels (SGLang: --enable-deterministic-inference), no dropout; then "
            "`layerbisect scores collect` again"
        )
    if status == "inconclusive":
        return "score again as said above, with `layerbisect scores collect`"
    if not replays(columns, "C"):
        return (
            "`layerbisect scores trainer RECORD --model DIR` adds C, without which no side is seen"
        )
    if not replays(columns, "B"):
        return (
            "`layerbisect scores collect URL --saved RECORD --out RECORD` adds B, between A and C"
        )
    if not culprits:
        if standing.letter == "A":
            return _PATH
        if standing.letter == "C":
            return f"`layerbisect weights ROLLOUT TRAINER` first; where they agree, {_LAYERS}"
        return f"what gap rounding alone makes, only layers can tell: {_LAYERS}"
    first = culprits[0]
    if first.operator == "weights":
        return (
            "`layerbisect weights ROLLOUT TRAINER --previous OLD`, then follow the update through "
            "export, transfer and installation"
        )
    if first.operator is None and first.side == "rollout":
        return _PATH
    if first.operator is None:
        return _LAYERS
    return (
        "watch the scoring function and what follows it with ScoreSteps of "
        "`layerbisect.captures.score_steps.watch`: it names the step that changes the scores"
    )
