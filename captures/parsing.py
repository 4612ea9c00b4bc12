"""Build dataclasses from parsed JSON, and say in which field it differs from what they hold."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")
_LARGEST = sys.float_info.max


class Parser:
    """Builds records from what ``json.loads`` made of them.

    Args:
        names: classes that annotations name and that their modules import for types alone.
        lenient: pass over fields that are not known, take a whole number for a float, and null for
            one that is not finite, which JSON cannot hold.
    """

    def __init__(self, names: Mapping[str, type] | None = None, *, lenient: bool = False) -> None:
        self._names = dict(names or {})
        self._lenient = lenient
        self._known: dict[Any, tuple[dict[str, Any], frozenset[str]]] = {}

    def build(self, kind: type[_Record], raw: Mapping[str, Any], where: str = "it") -> _Record:
        """Build a dataclass; raises ValueError, which names the field, where ``raw`` is of none."""
        hints, required = self._fields(kind)
        unknown, missing = sorted(raw.keys() - hints.keys()), sorted(required - raw.keys())
        if missing or (unknown and not self._lenient):
            raise ValueError(f"{where} has unknown fields {unknown} and lacks {missing}")
        found = {name: raw[name] for name in hints if name in raw}
        return kind(
            **{name: self._parse(hints[name], v, f"{where}.{name}") for name, v in found.items()}
        )

    def _parse(self, annotation: Any, value: Any, where: str) -> Any:
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation is Any:
            return value
        if dataclasses.is_dataclass(annotation):
            if isinstance(value, Mapping):
                kind: Any = annotation
                return self.build(kind, value, where)
        elif annotation is float and self._lenient:
            if value is None:
                return float("nan")
            if type(value) in (int, float) and -_LARGEST <= value <= _LARGEST:
                return float(value)
        elif origin is Literal:
            if value in args:
                return value
        elif origin in (UnionType, Union):
            (wanted,) = (one for one in args if one is not type(None))
            return None if value is None else self._parse(wanted, value, where)
        elif origin is tuple:
            if isinstance(value, list):
                kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
                if len(kinds) == len(value):
                    pairs = zip(kinds, value, strict=True)
                    return tuple(
                        self._parse(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(pairs)
                    )
        elif origin is Mapping:
            if isinstance(value, Mapping):
                return {k: self._parse(args[1], v, f"{where}[{k!r}]") for k, v in value.items()}
        elif type(value) is annotation:
            return value
        words = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        raise ValueError(f"{where} must be {words.replace('typing.', '')}, got {value!r:.80}")

    def _fields(self, kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
        if kind not in self._known:
            required = {
                f.name
                for f in dataclasses.fields(kind)
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            }
            hints = get_type_hints(kind, localns=self._names)
            self._known[kind] = hints, frozenset(required)
        return self._known[kind]
