"""Which sequence each token of a batch belongs to, over calls that share a KV cache.

A lane is one row of a batch: the columns that it has been fed, padding included. Several sequences
may lie in one lane, packed one after the other; the last one is open, and the next call with the
same cache continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.format import SequenceInfo
from layerbisect.captures.rows import Rows
from layerbisect.captures.scores import Pending

# stands for a token that nobody saw
_UNSEEN = -1


@dataclass(frozen=True, slots=True)
class Lane:
    """What one row of a batch has been fed so far.

    ``token`` int64 [column] and ``valid`` bool [column] (False for padding) cover the columns that
    the cache holds. ``starts`` lists the columns at which sequences begin, ``opened`` those
    sequences. ``pending`` is the logits of the last row, which score the token to come.
    """

    token: NDArray[np.int64]
    valid: NDArray[np.bool_]
    starts: tuple[int, ...] = ()
    opened: tuple[SequenceInfo, ...] = ()
    pending: Pending | None = None

    @classmethod
    def blank(cls) -> Lane:
        """Nothing fed yet."""
        return cls(np.empty(0, np.int64), np.empty(0, bool))

    @classmethod
    def unseen(cls, valid: NDArray[np.bool_]) -> Lane:
        """Fed with tokens that nobody saw; ``valid`` bool [column] says which are no padding."""
        return cls(np.full(len(valid), _UNSEEN, np.int64), valid)

    @property
    def prefix(self) -> NDArray[np.int64]:
        """Tokens of the open sequence."""
        start = self.starts[-1] if self.starts else 0
        return self.token[start:][self.valid[start:]]

    def cropped(self, columns: int) -> Lane:
        """Forget the columns from ``columns`` on, as the cache did."""
        if columns >= len(self.token):
            return self
        left = sum(start < columns for start in self.starts)
        return Lane(
            self.token[:columns], self.valid[:columns], self.starts[:left], self.opened[:left]
        )


class Names:
    """Names sequences in the order in which they begin, and keeps a name to one list of tokens.

    Args:
        names: what to call the first sequences; a later one is ``s{number}``, counted from 0.
        salts: what else is in the scoring context of the first sequences.
    """

    def __init__(self, names: Sequence[str] = (), salts: Sequence[str] = ()) -> None:
        self.renamed: list[tuple[str, str]] = []
        self._given = list(names)
        self._salts = list(salts)
        self._count = 0
        self._known: dict[str, tuple[str, list[int]]] = {}

    def begin(self, tokens: list[int]) -> SequenceInfo:
        """Name a new sequence that begins with ``tokens``."""
        number, self._count = self._count, self._count + 1
        wish = self._given[number] if number < len(self._given) else f"s{number}"
        salt = self._salts[number] if number < len(self._salts) else ""
        sequence, _ = self._claim(wish, salt, tokens)
        if sequence.name != wish:
            self.renamed.append((wish, sequence.name))
        return sequence

    def go_on(
        self, sequence: SequenceInfo, prefix: list[int], tokens: list[int]
    ) -> tuple[SequenceInfo, bool]:
        """Continue a sequence, under a name of its own where other tokens have taken that one.

        It is so when one cache was continued in two ways, as by a beam search or after a crop.
        Also says whether this capture had seen the prefix under that name.
        """
        sequence, seen = self._claim(sequence.name, sequence.salt, [*prefix, *tokens])
        return sequence, seen >= len(prefix)

    def _claim(self, wish: str, salt: str, tokens: list[int]) -> tuple[SequenceInfo, int]:
        copy = 0
        while True:
            name = f"{wish}~{copy}" if copy else wish
            known_salt, known = self._known.get(name, (salt, []))
            shorter = min(len(known), len(tokens))
            if known_salt == salt and known[:shorter] == tokens[:shorter]:
                self._known[name] = (salt, max(known, tokens, key=len))
                return SequenceInfo(name, salt), len(known)
            copy += 1


@dataclass(frozen=True, slots=True)
class Fed:
    """What one call feeds, row by row.

    ``sequences`` and ``rows`` are as a pass has them; ``index`` int64 [row] is each row's place in
    the flattened batch; ``context`` holds tokens before these rows that no row of this capture is.
    ``lanes`` are the lanes afterwards. ``continues`` maps a sequence (by number) to the lane that
    it was open in before, ``leaves_open`` to the one that it is open in afterwards.
    """

    sequences: tuple[SequenceInfo, ...]
    rows: Rows
    index: NDArray[np.int64]
    context: Rows
    lanes: tuple[Lane, ...]
    continues: dict[int, int]
    leaves_open: dict[int, int]


def feed(
    lanes: Sequence[Lane],
    token: NDArray[np.int64],
    valid: NDArray[np.bool_],
    restart: NDArray[np.bool_],
    names: Names,
) -> Fed:
    """Feed a batch to its lanes.

    Args:
        lanes: the lanes before, one a row of the batch.
        token: int64 [lane, column], the new tokens.
        valid: bool [lane, column], False for padding.
        restart: bool [lane, column], where a sequence begins even though one is open.
        names: names new sequences.
    """
    sequences: list[SequenceInfo] = []
    rows, contexts, index = [Rows.empty()], [Rows.empty()], [np.empty(0, np.int64)]
    after: list[Lane] = []
    continues: dict[int, int] = {}
    leaves_open: dict[int, int] = {}
    for number, lane in enumerate(lanes):
        grown = replace(
            lane,
            token=np.concatenate([lane.token, token[number]]),
            valid=np.concatenate([lane.valid, valid[number]]),
        )
        columns = np.flatnonzero(valid[number])
        for piece in np.split(columns, np.flatnonzero(restart[number, columns])):
            if not len(piece):
                continue
            this, fresh = len(sequences), bool(restart[number, piece[0]])
            prefix = lane.token[:0] if fresh else lane.prefix
            new = token[number, piece].tolist()
            if fresh or not lane.opened:
                info = names.begin([*prefix.tolist(), *new])
                start = len(lane.token) + int(piece[0]) if not len(prefix) else 0
                starts, opened = (*grown.starts, start), (*grown.opened, info)
            else:
                info, seen = names.go_on(lane.opened[-1], prefix.tolist(), new)
                if not seen and not (prefix == _UNSEEN).any():
                    contexts.append(_rows(this, prefix, 0))
                starts, opened = grown.starts, (*grown.opened[:-1], info)
                continues[this] = number
            grown = replace(grown, starts=starts, opened=opened, pending=None)
            sequences.append(info)
            rows.append(_rows(this, token[number, piece], len(prefix)))
            index.append((number * token.shape[1] + piece).astype(np.int64))
        if len(columns):
            leaves_open[len(sequences) - 1] = number
        after.append(grown)
    return Fed(
        tuple(sequences),
        Rows.concatenate(rows),
        np.concatenate(index),
        Rows.concatenate(contexts),
        tuple(after),
        continues,
        leaves_open,
    )


def _rows(sequence: int, token: NDArray[np.int64], first: int) -> Rows:
    return Rows.of(np.full(len(token), sequence), np.arange(first, first + len(token)), token)
