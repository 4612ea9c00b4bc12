"""Rows: one token's slice of every point, identified by the prefix of tokens it has seen.

On disk a row carries (sequence, position, token). The prefix key is computed on reading, from the
tokens of the sequence up to and including the row's own; so packing, padding, chunked prefill,
decode steps and sample order need no description of their layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import CaptureError

_Int = TypeVar("_Int", np.int32, np.int64)

KEY_DTYPE = np.dtype([("high", np.uint64), ("low", np.uint64)])


@dataclass(frozen=True, slots=True)
class Rows:
    """Which token each row belongs to.

    ``sequence`` int32 [row] indexes the capture's sequences, ``position`` int32 [row] counts from
    0 within the sequence, ``token`` int64 [row] is the token's ID.
    """

    sequence: NDArray[np.int32]
    position: NDArray[np.int32]
    token: NDArray[np.int64]

    @classmethod
    def of(cls, sequence: object, position: object, token: object) -> Rows:
        """Build from anything array-like; raises CaptureError for what are no such numbers."""
        rows = cls(
            _integers("sequence", sequence, np.int32),
            _integers("position", position, np.int32),
            _integers("token", token, np.int64),
        )
        lengths = (len(rows.sequence), len(rows.position), len(rows.token))
        if len(set(lengths)) != 1:
            raise CaptureError(f"sequence, position and token have unequal lengths {lengths}")
        return rows

    @classmethod
    def empty(cls) -> Rows:
        """No rows."""
        return cls.of([], [], [])

    @classmethod
    def concatenate(cls, parts: Sequence[Rows]) -> Rows:
        """Lay parts end to end."""
        if not parts:
            return cls.empty()
        return cls(
            np.concatenate([part.sequence for part in parts]),
            np.concatenate([part.position for part in parts]),
            np.concatenate([part.token for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Rows:
        """Pick rows by index or mask."""
        return Rows(self.sequence[index], self.position[index], self.token[index])


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Each row's key (``KEY_DTYPE`` [row]), and whether its whole prefix was seen (bool [row])."""

    key: NDArray[np.void]
    known: NDArray[np.bool_]


def _integers(what: str, values: object, dtype: type[_Int]) -> NDArray[_Int]:
    array = np.asarray(values).reshape(-1)
    if not len(array):
        return np.empty(0, dtype)
    if array.dtype.kind not in "iu":
        raise CaptureError(f"{what} must be integers, got {array.dtype}")
    if array.min() < 0 or array.max() > np.iinfo(dtype).max:
        raise CaptureError(
            f"{what} must lie from 0 to {np.iinfo(dtype).max}, got {array.min()} to {array.max()}"
        )
    return array.astype(dtype)


def prefix_keys(
    rows: Rows, seen: Rows, salts: Sequence[str], names: Sequence[str] = ()
) -> PrefixKeys:
    """Identify each row by the tokens from its sequence's start up to its own.

    ``seen`` holds every (sequence, position, token) that the capture knows, the rows themselves
    included; ``salts`` holds, for each sequence, whatever else is in its scoring context, and
    ``names`` what to call it in an error. Rows of a sequence with a hole before them are not known.
    Raises CaptureError when a sequence has two tokens at one position.

    A key is the sum over the prefix, in two lanes of 64 bits, of a hash of (position, token), plus
    a hash of the salt: equal prefixes have equal keys, and two different ones collide with a
    probability of about 2**-128.
    """
    everything = Rows.concatenate([seen, rows])
    key = np.zeros(len(rows), KEY_DTYPE)
    known = np.zeros(len(rows), bool)
    if not len(rows):
        return PrefixKeys(key, known)
    order = np.lexsort((everything.position, everything.sequence))
    sequence, position, token = (
        everything.sequence[order],
        everything.position[order],
        everything.token[order],
    )
    same = (sequence[1:] == sequence[:-1]) & (position[1:] == position[:-1])
    clash = np.flatnonzero(same & (token[1:] != token[:-1]))
    if len(clash):
        at = clash[0]
        name = repr(names[sequence[at]]) if len(names) else str(sequence[at])
        raise CaptureError(
            f"sequence {name} holds two tokens at position {position[at]}: "
            f"{token[at]} and {token[at + 1]}; give each token list a sequence name of its own"
        )
    first = np.concatenate([[True], ~same])
    sequence, position, token = sequence[first], position[first], token[first]
    starts = np.flatnonzero(np.concatenate([[True], sequence[1:] != sequence[:-1]]))
    start_of = np.repeat(starts, np.diff(np.append(starts, len(sequence))))
    # without a hole, a sequence's n-th seen position is n
    unbroken = position == np.arange(len(sequence)) - start_of
    lanes = []
    for lane in (0, 1):
        total = np.cumsum(_mix(position, token, lane), dtype=np.uint64)
        before = np.where(start_of > 0, total[start_of - 1], np.uint64(0))
        salt = np.array([_salt(text, lane) for text in salts], np.uint64)
        lanes.append(total - before + salt[sequence])
    where = _locate(sequence, position, rows)
    key["high"], key["low"] = lanes[0][where], lanes[1][where]
    known[:] = unbroken[where]
    return PrefixKeys(key, known)


def places(sequence: NDArray[np.int32], position: NDArray[np.int32]) -> NDArray[np.int64]:
    """Number (sequence, position) so that the numbers sort by sequence, then by position."""
    return (sequence.astype(np.int64) << 32) + position


def find(rows: Rows, sequence: NDArray[np.int32], position: NDArray[np.int32]) -> NDArray[np.intp]:
    """Say where in ``rows`` each (sequence, position) is: int [n], -1 where it is not."""
    if not len(rows) or not len(sequence):
        return np.full(len(sequence), -1, np.intp)
    held, wanted = places(rows.sequence, rows.position), places(sequence, position)
    order = np.argsort(held, kind="stable")
    slot = np.searchsorted(held[order], wanted).clip(max=len(held) - 1)
    return np.where(held[order][slot] == wanted, order[slot], -1)


def parent_keys(keys: NDArray[np.void], rows: Rows) -> NDArray[np.void]:
    """Return the key of each row's prefix without its own token (``KEY_DTYPE`` [row]).

    For a row at position 0 that is the key of the empty prefix in its scoring context.
    """
    parents = np.empty(len(rows), KEY_DTYPE)
    for lane, name in enumerate(("high", "low")):
        parents[name] = keys[name] - _mix(rows.position, rows.token, lane)
    return parents


def _locate(
    sequence: NDArray[np.int32], position: NDArray[np.int32], rows: Rows
) -> NDArray[np.intp]:
    stride = np.int64(max(position.max(), rows.position.max())) + 1
    return np.searchsorted(
        sequence.astype(np.int64) * stride + position,
        rows.sequence.astype(np.int64) * stride + rows.position,
    )


def _mix(position: NDArray[np.int32], token: NDArray[np.int64], lane: int) -> NDArray[np.uint64]:
    """Hash (position, token) with the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    golden = np.uint64((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)[lane])
    with np.errstate(over="ignore"):
        x = token.astype(np.uint64) * golden
        x ^= (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        for _ in range(2):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
            x += golden
    return x


def _salt(text: str, lane: int) -> int:
    if not text:
        return 0
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, salt=bytes([lane])).digest()
    )
