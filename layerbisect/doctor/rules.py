"""Rules over one setting, as data: the tables of each engine are lists of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from layerbisect.doctor.arguments import Settings
from layerbisect.doctor.check import Check, State


@dataclass(frozen=True, slots=True)
class Finding:
    """A check of a command, and how the command is mended.

    Args:
        check: what is told.
        add: words that the command needs.
        drop: fields whose flags the command is better without.
    """

    check: Check
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """What one setting does where it is set.

    Args:
        field: the setting.
        name: what it is called in a check.
        state: of that check.
        effect: what it does to a capture, or to the numbers in it.
        advice: what to do about it.
        when: whether a value is one that does it; by default any that is true.
        add: words to put into the command in its place.
        tried: see `layerbisect.doctor.check.Check`.
    """

    field: str
    name: str
    state: State
    effect: str
    advice: str = ""
    when: Callable[[Any], bool] = bool
    add: tuple[str, ...] = ()
    tried: bool = False


def apply(rules: Iterable[Rule], settings: Settings) -> Iterator[Finding]:
    """Yield what the rules find in these settings."""
    for rule in rules:
        value = settings.get(rule.field)
        if value is None or not rule.when(value):
            continue
        said = settings.say(rule.field)
        check = Check(rule.name, rule.state, said, rule.advice, rule.effect, rule.tried)
        mended = rule.state == "problem"
        yield Finding(check, rule.add if mended else (), (rule.field,) if mended else ())


def above(least: int) -> Callable[[Any], bool]:
    """Say whether a value is a number above ``least``; what is no number is not."""

    def is_above(value: Any) -> bool:
        try:
            return float(value) > least
        except (TypeError, ValueError):
            return False

    return is_above


def other_than(*values: str) -> Callable[[Any], bool]:
    """Say whether a value is none of these."""
    return lambda value: str(value) not in values
