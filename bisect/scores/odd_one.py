"""Is it always the same one of three columns that differs from both others?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from layerbisect.bisect.shapes.chance import log_choose
from layerbisect.captures.record.call import Call

BLOCK = 64
"""Tokens that are taken for one draw: what makes neighbours differ is shared between them."""


class OddOneOut:
    """Counts, block by block, which of A, B and C is farthest from the two others.

    Were the three exchangeable, each would be the odd one in a third of the blocks.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        """``columns`` are those of the letters A, B and C."""
        self._columns = columns
        self._blocks = 0
        self._odd = dict.fromkeys(columns, 0)

    def add(self, call: Call) -> None:
        """Take in a call."""
        scores = np.array([call.scores[column] for column in self._columns.values()])
        used = scores[:, call.mask & np.isfinite(scores).all(0)]
        for start in range(0, used.shape[1], BLOCK):
            a, b, c = used[:, start : start + BLOCK]
            apart = [float(np.abs(one - other).mean()) for one, other in ((b, c), (a, c), (a, b))]
            self._blocks += 1
            if min(apart) < max(apart):
                self._odd["ABC"[int(np.argmin(apart))]] += 1

    def chance(self, letter: str) -> float:
        """How often exchangeable columns leave ``letter`` the odd one in so many blocks."""
        n, k = self._blocks, self._odd[letter]
        logs = [
            log_choose(n, i) - i * math.log(3) + (n - i) * math.log(2 / 3) for i in range(k, n + 1)
        ]
        largest = max(logs)
        # any of the three may be the odd one
        total = largest + math.log(3 * sum(math.exp(log - largest) for log in logs))
        return math.exp(min(0.0, total))
