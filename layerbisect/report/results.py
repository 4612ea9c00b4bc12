"""Read what commands printed with ``--json``: the parts of a case."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerbisect.accuracy_summary import AccuracySummary
from layerbisect.bisect.verdict import Gap, Verdict
from layerbisect.bisect.verdict_json import record_from_json, verdict_from_json
from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.deterministic import Pair
from layerbisect.kernels.replay.report import Replay
from layerbisect.report.checked import check
from layerbisect.wording import visible

STDIN = "-"
_REPLAY_CODES = {"acquitted": 0, "convicted": 1, "inconclusive": 2}


@dataclass(frozen=True, slots=True)
class VerdictResult:
    """A verdict, of scores or of captures.

    ``planted`` says what a demo had planted, if one did. ``explained`` names the bisections of the
    same case that call each gap of these scores rounding; it is empty where they do not.
    """

    name: str
    verdict: Verdict
    planted: str | None = None
    explained: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The verdict's; ``agree`` where bisections explain it."""
        return "agree" if self.explained else self.verdict.status

    @property
    def exit_code(self) -> int:
        """The verdict's; 0 where bisections explain it."""
        return 0 if self.explained else self.verdict.exit_code


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


def leading(results: Sequence[Result]) -> Result:
    """The result that a case is about: the worst one, and of equals the one that sees deepest."""
    return max(results, key=_weight)


def exit_code(results: Sequence[Result]) -> int:
    """The leading result's: 1 where one is divergent, convicted or failed, else 2 where one could
    not be judged, else 0.
    """
    return leading(results).exit_code


def _weight(result: Result) -> tuple[int, bool, int]:
    # an exit code of 2 says less than one of 1
    severity = {1: 2, 2: 1}.get(result.exit_code, 0)
    if isinstance(result, VerdictResult):
        return severity, bool(result.verdict.culprits), 2 if result.verdict.of_scores else 3
    return severity, False, 1 if isinstance(result, ReplayResult) else 0


def with_explained(results: Sequence[Result]) -> tuple[Result, ...]:
    """Let bisections explain gaps of scores that convict nobody.

    Scores alone cannot tell rounding from a cause that has no shape. A bisection that agrees calls
    the gap of its two sides rounding, and it is of the same tokens where its figures are a pair's
    to the last digit. Scores are explained where each pair that is beyond the tolerance has such a
    bisection; of three pairs two are enough, for the third is their sum.
    """
    agreeing = [
        one
        for one in results
        if isinstance(one, VerdictResult) and not one.verdict.of_scores and one.status == "agree"
    ]
    return tuple(
        replace(one, explained=_explained(one.verdict, agreeing))
        if isinstance(one, VerdictResult) and one.verdict.of_scores
        else one
        for one in results
    )


def _explained(verdict: Verdict, agreeing: Sequence[VerdictResult]) -> tuple[str, ...]:
    scores = verdict.scores
    assert scores is not None
    if verdict.status != "divergent" or verdict.culprits or len(scores.steps) > 1:
        return ()
    found, open_pairs = [], []
    for pair in scores.between:
        names = [one.name for one in agreeing if _same(one.verdict.gap, pair.gap)]
        found += names[:1]
        if not names and (pair.gap.mae > scores.tolerance or pair.gap.nonfinite):
            open_pairs.append(pair)
    rest = len(open_pairs) - (len(found) >= 2 and len(scores.between) == 3)
    return tuple(found) if found and rest <= 0 else ()


def _same(first: Gap | None, second: Gap) -> bool:
    """Whether two gaps are of the same tokens: no two sets of tokens have all figures in common."""
    if first is None or first.rows != second.rows or first.nonfinite or second.nonfinite:
        return False
    figures = [(g.mae, abs(g.signed_mean), g.p95, g.p99, g.max) for g in (first, second)]
    return all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in zip(*figures, strict=True)
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
    if "schema" not in data:
        raise LayerBisectError(f"{path} is no result of a command; {_WANTED}")
    if data["schema"] != 1 or data["schema"] is True:
        raise LayerBisectError(
            f"{path} has schema {data['schema']!r:.40} and this version reads 1; {_WANTED}"
        )
    try:
        result = _result(name, visible(data), str(path))
        check(result)
    except LayerBisectError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise LayerBisectError(
            f"{path} is damaged, or of another version: {_short(error)}; run the command again"
        ) from None
    return result


_WANTED = (
    "give what `layerbisect bisect`, `scores judge`, `replay`, `demo` or `selftest` printed with "
    "--json"
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
    for key, command in (("weights", "weights"), ("training", "training")):
        if key in data and "culprits" in data:
            raise LayerBisectError(
                f"{path} is of `layerbisect {command}`, which has no page; {_WANTED}"
            )
    if "culprits" in data and "coverage" in data:
        return VerdictResult(name, verdict_from_json(data), _planted(data.get("demo")))
    if "replays" in data and "checks" not in data:
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
        said = "nothing was planted"
    else:
        layer = "" if planted["layer"] is None else f" in layer {planted['layer']}"
        place = f"{layer} on the {planted['side']} side"
        said = f"`{planted['fault']}` was planted{place} ({planted['description']})"
    judged = "the verdict is right" if demo["right"] else "the verdict is wrong"
    return f"{said}, and {judged}"
