"""Read a verdict back from its JSON.

JSON has no number that is not finite: where a float is wanted, null stands for nan. Fields that
this version does not know are passed over, so that what a later version adds does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from layerbisect.bisect.routing_report import Routing
from layerbisect.bisect.scores.report import PositionGap, ScoreReport, TokenGap
from layerbisect.bisect.token_report import TokenReport
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.parsing import Parser

_Record = TypeVar("_Record")
# imported for types alone in the modules that name them
_NAMED = (PositionGap, Routing, ScoreReport, TokenGap, TokenReport)
_PARSER = Parser({one.__name__: one for one in _NAMED}, lenient=True)


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    """Build the verdict whose `Verdict.to_json` this is.

    Raises ValueError, which names the field, where it is of no verdict.
    """
    return _PARSER.build(Verdict, data)


def record_from_json(kind: type[_Record], data: Mapping[str, Any]) -> _Record:
    """Build a dataclass from what ``plain(dataclasses.asdict(...))`` made of one.

    Raises ValueError, which names the field, where it is of something else.
    """
    return _PARSER.build(kind, data)
