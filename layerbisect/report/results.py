"""Read what commands printed with ``--json``: the parts of a case."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerbisect.accuracy_summary import AccuracySummary
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.verdict_json import record_from_json, verdict_from_json
from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.deterministic import Pair
from layerbisect.kernels.replay.report import Replay

STDIN = "-"
_REPLAY_CODES = {"acquitted": 0, "convicted": 1, "inconclusive": 2}


@dataclass(frozen=True, slots=True)
class VerdictResult:
    """A verdict, of scores or of captures.

    ``planted`` says what a demo had planted, if one did. ``rounding`` is the gap (nat) that
    rounding alone makes, by a bisection of the same case, where that explains all gaps of scores
    that convict nobody; None elsewhere.
    """

    name: str
    verdict: Verdict
    planted: str | None = None
    rounding: float | None = None

    @property
    def status(self) -> str:
        """The verdict's; ``agree`` where rounding explains it."""
        return self.verdict.status if self.rounding is None else "agree"

    @property
    def exit_code(self) -> int:
        """The verdict's; 0 where rounding explains it."""
        return self.verdict.exit_code if self.rounding is None else 0

    @property
    def of_scores(self) -> bool:
        """Whether A, B and C were judged, and no captures."""
        return self.verdict.scores is not None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Operators replayed.

    ``left_out`` maps a point to why it was not; ``pairs`` are the deterministic comparison, where
    it was asked for.
    """

    name: str
    replays: tuple[Replay, ...]
    left_out: Mapping[str, str]
    pairs: tuple[Pair, ...] | None = None

    @property
    def status(self) -> str:
        """``convicted`` where any is, else ``inconclusive`` where any is, else ``acquitted``."""
        found = {one.status for one in self.replays}
        return next((s for s in ("convicted", "inconclusive") if s in found), "acquitted")

    @property
    def exit_code(self) -> int:
        """0 acquitted, 1 convicted, 2 inconclusive or nothing replayed."""
        return _REPLAY_CODES[self.status] if self.replays else 2


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """How often verdicts were right."""

    name: str
    summary: AccuracySummary

    @property
    def status(self) -> str:
        """``measured``: a share is no verdict."""
        return "measured"

    @property
    def exit_code(self) -> int:
        """0."""
        return 0


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What `layerbisect selftest --json` printed."""

    name: str
    data: Mapping[str, Any]

    @property
    def status(self) -> str:
        """``passed`` or ``failed``."""
        return "passed" if self.data["passed"] else "failed"

    @property
    def exit_code(self) -> int:
        """0 where every verdict is right, else 1."""
        return 0 if self.data["passed"] else 1


Result = VerdictResult | ReplayResult | AccuracyResult | SelfTestResult


def exit_code(results: Sequence[Result]) -> int:
    """1 where a result is divergent or convicted, else 2 where one could not be judged, else 0."""
    codes = {result.exit_code for result in results}
    return next((code for code in (1, 2) if code in codes), 0)


def with_rounding(results: Sequence[Result]) -> tuple[Result, ...]:
    """Let a bisection explain gaps of scores that convict nobody.

    Scores alone cannot tell rounding from a cause that has no shape. A bisection that agrees has
    predicted what gap rounding makes between two engines of this model and dtype: pairs whose mean
    gap is no larger are explained by it.
    """
    budgets = [
        one.verdict.rounding_budget
        for one in results
        if isinstance(one, VerdictResult) and not one.of_scores and one.status == "agree"
    ]
    predicted = max((budget.predicted_gap for budget in budgets if budget is not None), default=0.0)
    return tuple(
        replace(one, rounding=predicted)
        if isinstance(one, VerdictResult) and _within(one.verdict, predicted)
        else one
        for one in results
    )


def _within(verdict: Verdict, predicted: float) -> bool:
    scores = verdict.scores
    return (
        scores is not None
        and verdict.status == "divergent"
        and not verdict.culprits
        and all(pair.gap.mae <= predicted and not pair.gap.nonfinite for pair in scores.pairs)
    )


def read_result(path: str | Path) -> Result:
    """Read a result's file, or stdin where it is ``-``.

    Raises LayerBisectError: no file there, or none that a command printed with ``--json``.
    """
    if str(path) == STDIN:
        name, text = "stdin", sys.stdin.buffer.read()
    else:
        name, text = Path(path).stem, _bytes(Path(path))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayerBisectError(f"{path} is no JSON ({_short(error)}); {_WANTED}") from None
    if not isinstance(data, dict):
        raise LayerBisectError(f"{path} holds {data!r:.40} and no result; {_WANTED}")
    if data.get("schema") != 1:
        raise LayerBisectError(
            f"{path} has schema {data.get('schema')!r:.40} and this version reads 1; {_WANTED}"
        )
    try:
        return _result(name, data, str(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayerBisectError(
            f"{path} is damaged, or of another version: {_short(error)}; run the command again"
        ) from None


_WANTED = (
    "give files that `layerbisect bisect`, `scores judge`, `replay` or `selftest` wrote with --json"
)


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        what = "a directory"
        if (path / "capture.json").exists():
            what = "a capture and no result: compare two with `layerbisect bisect`"
        raise LayerBisectError(f"{path} is {what}; {_WANTED}")
    if path.suffix == ".safetensors":
        raise LayerBisectError(
            f"{path} holds tensors and no result: judge a record of scores first, with "
            f"`layerbisect scores judge {path} --json > scores.json`"
        )
    return path.read_bytes()


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _result(name: str, data: Mapping[str, Any], path: str) -> Result:
    if "culprits" in data and "coverage" in data:
        return VerdictResult(name, verdict_from_json(data), _planted(data.get("demo")))
    if "replays" in data:
        if data.get("error"):
            raise LayerBisectError(f"{path} says that nothing was replayed: {data['error']}")
        pairs = data.get("deterministic")
        return ReplayResult(
            name,
            tuple(record_from_json(Replay, one) for one in data["replays"]),
            {point: str(why) for point, why in data["left_out"].items()},
            None if pairs is None else tuple(record_from_json(Pair, one) for one in pairs),
        )
    if "accuracy" in data:
        return AccuracyResult(name, record_from_json(AccuracySummary, data["accuracy"]))
    if "tried" in data and "passed" in data:
        return SelfTestResult(name, data)
    raise LayerBisectError(
        f"{path} holds {', '.join(sorted(map(str, data))[:6]) or 'nothing'}, which is no result "
        f"that can be shown; {_WANTED}"
    )


def _planted(demo: Mapping[str, Any] | None) -> str | None:
    if demo is None:
        return None
    planted = demo["planted"]
    if planted is None:
        said = "nothing"
    else:
        layer = "" if planted["layer"] is None else f" in layer {planted['layer']}"
        said = f"{planted['fault']}{layer} on the {planted['side']} side ({planted['description']})"
    judged = "the verdict is right" if demo["right"] else "the verdict is wrong"
    return f"{said}; {judged}"
