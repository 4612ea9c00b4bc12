"""Read a verdict back from its JSON.

JSON has no number that is not finite: where a float is wanted, null stands for nan. Fields that
this version does not know are passed over, so that what a later version adds does no harm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from layerbisect.bisect.routing_report import Routing
from layerbisect.bisect.scores.report import PositionGap, ScoreReport, TokenGap
from layerbisect.bisect.token_report import TokenReport
from layerbisect.bisect.verdict import Verdict

_Record = TypeVar("_Record")

# imported for types alone in the modules that name them
_NAMES = {one.__name__: one for one in (PositionGap, Routing, ScoreReport, TokenGap, TokenReport)}


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    """Build the verdict whose `Verdict.to_json` this is.

    Raises ValueError, which names the field, where it is of no verdict.
    """
    return record_from_json(Verdict, data)


def record_from_json(kind: type[_Record], data: Mapping[str, Any]) -> _Record:
    """Build a dataclass from what ``plain(dataclasses.asdict(...))`` made of one.

    Raises ValueError, which names the field, where it is of something else.
    """
    record: _Record = _build(kind, data, "")
    return record


def _parse(annotation: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation):
        if isinstance(value, Mapping):
            return _build(annotation, value, where)
    elif annotation is float:
        if value is None:
            return float("nan")
        if type(value) in (int, float):
            return float(value)
    elif origin is Literal:
        if value in args:
            return value
    elif origin in (UnionType, Union):
        (wanted,) = (one for one in args if one is not type(None))
        return None if value is None else _parse(wanted, value, where)
    elif origin is tuple:
        if isinstance(value, list):
            kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
            if len(kinds) == len(value):
                pairs = zip(kinds, value, strict=True)
                return tuple(_parse(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(pairs))
    elif origin is Mapping or origin is dict:
        if isinstance(value, Mapping):
            return {key: _parse(args[1], v, f"{where}[{key!r}]") for key, v in value.items()}
    elif type(value) is annotation:
        return value
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    raise ValueError(f"{where or 'it'} must be {name.replace('typing.', '')}, got {value!r:.80}")


def _build(kind: Any, raw: Mapping[str, Any], where: str) -> Any:
    hints, required = _fields(kind)
    missing = sorted(required - raw.keys())
    if missing:
        raise ValueError(f"{where or 'it'} lacks {', '.join(missing)}")
    place = f"{where}." if where else ""
    known = {name: value for name, value in raw.items() if name in hints}
    return kind(**{name: _parse(hints[name], v, place + name) for name, v in known.items()})


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    return get_type_hints(kind, localns=_NAMES), frozenset(required)
