"""Settings of an engine, read from the words of its command or from what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from layerbisect.captures.errors import LayerBisectError

Kind = Literal["value", "values", "switch", "off", "optional"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a command sets a field.

    Args:
        field: the engine's own name of the setting.
        names: how the flag may be spelled, the usual one first.
        kind: ``switch`` turns on and ``off`` turns off without a value, ``optional`` does either
            (``--x``, ``--no-x``), ``values`` takes all words up to the next flag.
    """

    field: str
    names: tuple[str, ...]
    kind: Kind = "value"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is known of an engine's settings.

    Args:
        values: by field; from a command those that it gives, from a server all.
        told: how a field was given.
        spans: where in the command's words it was given, as (start, stop).
        unknown: flags that nothing here knows.
        whole: whether a field that is not there is one that the engine does not have.
    """

    values: Mapping[str, Any]
    told: Mapping[str, str] = field(default_factory=dict)
    spans: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    whole: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` where none is known, or where it is None."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int = 1) -> int:
        """The value of a field that counts; raises LayerBisectError for one that does not."""
        value = self.get(name, default)
        try:
            return int(value)
        except (TypeError, ValueError):
            raise LayerBisectError(
                f"{self.say(name)} is no whole number; correct the command"
            ) from None

    def say(self, name: str) -> str:
        """How a field was given, or what it is."""
        if name in self.told:
            return self.told[name]
        return f"{name} {self.values[name]}" if name in self.values else f"no {name}"


def read_words(words: Sequence[str], flags: Sequence[Flag], start: int = 0) -> Settings:
    """Read a command's words from ``start`` on; of a flag's mentions the last counts.

    Raises LayerBisectError for a flag that lacks its value.
    """
    known = {name: flag for flag in flags for name in flag.names}
    known |= {
        f"--no-{name.removeprefix('--')}": flag
        for flag in flags
        if flag.kind == "optional"
        for name in flag.names
    }
    values: dict[str, Any] = {}
    told: dict[str, str] = {}
    spans: dict[str, tuple[tuple[int, int], ...]] = {}
    unknown: list[str] = []
    at = start
    while at < len(words):
        name, equals, attached = words[at].partition("=")
        stop = at + 1
        if not name.startswith("--") or name == "--":
            at = stop
            continue
        while stop < len(words) and not words[stop].startswith("--") and not equals:
            stop += 1
        flag = known.get(name)
        if flag is None:
            unknown.append(name)
            at = stop
            continue
        if flag.kind in ("switch", "off", "optional"):
            stop = at + 1
            values[flag.field] = flag.kind != "off" and name in flag.names
            told[flag.field] = name
        else:
            given = [attached] if equals else list(words[at + 1 : stop])
            if not given:
                raise LayerBisectError(f"{name} has no value; give one after it")
            if flag.kind == "value":
                given, stop = given[:1], at + 1 if equals else at + 2
            values[flag.field] = given if flag.kind == "values" else given[0]
            told[flag.field] = f"{name} {' '.join(given)}"
        spans[flag.field] = (*spans.get(flag.field, ()), (at, stop))
        at = stop
    return Settings(values, told, spans, tuple(dict.fromkeys(unknown)))
