"""Read a file of token IDs: one JSON value a line, a list of IDs or an object with ``ids``.

::

    [1, 17, 4, 99]
    {"ids": [1, 17, 4, 99], "name": "answer-7", "prompt_length": 2}

``prompt_ids`` is another name of ``ids``, for prompts that something is generated from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import LayerBisectError

KEYS = ("ids", "prompt_ids", "name", "prompt_length")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence; ``prompt_length`` is None where the file does not say it."""

    name: str
    ids: tuple[int, ...]
    prompt_length: int | None = None


def read_tokens(
    path: str | os.PathLike[str], *, vocab: int | None = None, longest: int | None = None
) -> tuple[TokenSequence, ...]:
    """Read and check every line before anything is computed.

    Args:
        vocab: number of tokens that the model knows, if it is at hand.
        longest: number of positions that it has.

    Raises:
        LayerBisectError: what is wrong in the first bad line, by its number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LayerBisectError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LayerBisectError(f"{path} is not text; give JSON lines of token IDs") from None
    found: list[TokenSequence] = []
    names: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        one = _sequence(line, where, f"s{len(found)}")
        if one.name in names:
            raise LayerBisectError(
                f"{where} has the name {one.name!r}, which line {names[one.name]} has too"
            )
        names[one.name] = number
        _check_ids(one.ids, where, vocab, longest)
        found.append(one)
    if not found:
        raise LayerBisectError(f"{path} holds no sequence; give one JSON list of token IDs a line")
    return tuple(found)


def _sequence(line: str, where: str, default: str) -> TokenSequence:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LayerBisectError(f"{where} is not JSON: {error}") from None
    if isinstance(value, list):
        value = {"ids": value}
    elif isinstance(value, dict) and "ids" not in value and "prompt_ids" in value:
        value = {"ids": value["prompt_ids"], **value}
        del value["prompt_ids"]
    if not isinstance(value, dict) or not isinstance(value.get("ids"), list):
        raise LayerBisectError(
            f"{where} holds {line.strip():.40}; give a list of token IDs, or an object with ids"
        )
    if "prompt_ids" in value:
        raise LayerBisectError(f"{where} has ids and prompt_ids, which mean the same; give one")
    unknown = sorted(value.keys() - set(KEYS))
    if unknown:
        raise LayerBisectError(f"{where} has {unknown[0]!r}; the keys are {', '.join(KEYS)}")
    name, prompt = value.get("name", default), value.get("prompt_length")
    if not isinstance(name, str) or not name:
        raise LayerBisectError(f"{where} has the name {name!r}; give a text")
    ids: list[Any] = value["ids"]
    if prompt is not None and (type(prompt) is not int or not 1 <= prompt <= len(ids)):
        raise LayerBisectError(
            f"{where} has prompt_length {prompt!r}; give a number from 1 to its {len(ids)} tokens"
        )
    return TokenSequence(name, tuple(ids), prompt)


def _check_ids(ids: Sequence[object], where: str, vocab: int | None, longest: int | None) -> None:
    if not ids:
        raise LayerBisectError(f"{where} holds no token")
    if longest is not None and len(ids) > longest:
        raise LayerBisectError(
            f"{where} has {len(ids):,} tokens; the model has {longest:,} positions"
        )
    for position, token in enumerate(ids):
        # bool is an int, and 1.0 would be taken for 1
        if type(token) is not int or token < 0 or vocab is not None and token >= vocab:
            last = "on" if vocab is None else f"to {vocab - 1}"
            raise LayerBisectError(
                f"{where} has {token!r:.40} at position {position}; "
                f"token IDs of this model are whole numbers from 0 {last}"
            )
