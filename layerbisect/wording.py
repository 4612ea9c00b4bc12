"""Numbers and counts in words, the same in everything that is printed."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerbisect.captures.forward_mode import ForwardMode


def nat(value: float | None) -> str:
    """Write a log-prob difference, without its unit."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def times(value: float | None) -> str:
    """Write a ratio."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.1f}x" if abs(value) < 9.95 else f"{value:.3g}x" if value < 1e4 else ">1e4x"


def percent(value: float | None) -> str:
    """Write a share; one too small to show is not called nothing."""
    if value is None or not math.isfinite(value):
        return "-"
    if 0 < abs(value) < 0.005:
        return "<1 %" if value > 0 else "> -1 %"
    return f"{value * 100:.0f} %"


def count(number: int, noun: str) -> str:
    """Write a number of things: ``1 row``, ``2 rows``, ``640,000 rows``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def size(number: int) -> str:
    """Write a number of bytes."""
    value = float(number)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Write names in backticks, and how many more there are beyond ``limit``."""
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    rest = len(names) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def bar(value: float | None, largest: float, width: int, mark: str) -> str:
    """Draw a value as a bar of at most ``width`` marks; what is not nothing shows one."""
    if value is None or not math.isfinite(value) or value <= 0 or largest <= 0:
        return ""
    return mark * max(1, round(width * min(value / largest, 1.0)))


def mode_words(mode: ForwardMode) -> str:
    """Say in which mode a model was called."""
    parts = [
        f"{'train' if mode.training else 'eval'} mode",
        f"{'with' if mode.gradients else 'without'} gradients",
    ]
    if mode.dropout:
        parts.append(f"dropout in {count(len(mode.dropout), 'module')}")
    parts += [mode.recompute] if mode.recompute else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in mode.noise.items())])


_COMMAND = re.compile(r"`(layerbisect (?!scores [^` ]+`)[^` ]+ [^`]+)`(?:, )?")
"""A command that says on what; one alone in backticks is only named."""


def commands_in(text: str) -> Iterator[tuple[str, bool]]:
    """Tell commands to copy (True) from the words around them."""
    for at, part in enumerate(_COMMAND.split(text)):
        if part.strip():
            yield part.strip(), bool(at % 2)


_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Characters that draw nothing, steer a terminal, or turn text around."""


def visible(value: Any) -> Any:
    """Replace characters that are not seen by escapes such as ``\\x1b``, in all text below it."""
    if isinstance(value, str):
        if value.isascii() and value.isprintable():
            return value
        return "".join(
            character
            if character in "\n\t" or unicodedata.category(character) not in _UNSEEN
            else character.encode("unicode_escape", "surrogatepass").decode("ascii")
            for character in value
        )
    if isinstance(value, Mapping):
        return {visible(key): visible(one) for key, one in value.items()}
    return [visible(one) for one in value] if isinstance(value, list) else value
