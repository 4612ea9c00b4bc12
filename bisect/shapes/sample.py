"""Two columns of a record side by side, as the tests for shapes read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.record.call import Call


@dataclass(frozen=True, slots=True, eq=False)
class PairSample:
    """Some responses' scores by two columns, laid end to end; differences are first minus second.

    Attributes:
        first_name, second_name: the columns, such as ``A`` and ``B0``.
        first, second: float64 [token], nat; nan where nobody scored.
        token: int64 [token]. call: int64 [token], which of the calls.
        index: int64 [token], position in the response, from 0.
        active: bool [token], in the mask and scored on both sides.
        lengths, prompt_lengths: int64 [call].
        prompt: int64 [call], the same for calls with the same prompt.
        cached_first, cached_second: int64 [call], prompt tokens from the prefix cache, -1 where
            nobody said.
        entropy: float64 [token], entropy (nat) of the distribution that a column scored: of the
            second where it has one, else of the first, else of any other; None where none has.
        entropy_of: which column ``entropy`` belongs to, or "".
        names: what each call is called. groups: what it belongs to.
        noise: mean absolute difference (nat) of the repeats of these columns; 0 where repeats are
            equal, nan where there are none.
        natural: mean absolute difference (nat) that the third of A, B and C has to the nearer one
            of these columns; nan where it was not recorded.
    """

    first_name: str
    second_name: str
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    token: NDArray[np.int64]
    call: NDArray[np.int64]
    index: NDArray[np.int64]
    active: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    prompt: NDArray[np.int64]
    cached_first: NDArray[np.int64]
    cached_second: NDArray[np.int64]
    entropy: NDArray[np.float64] | None
    entropy_of: str
    names: tuple[str, ...]
    groups: tuple[str, ...]
    noise: float
    natural: float = float("nan")

    @classmethod
    def of(
        cls, calls: Sequence[Call], first: str, second: str, *, noise: float = float("nan")
    ) -> PairSample:
        """Lay the calls' columns ``first`` and ``second`` end to end."""
        lengths = np.array([len(c.response) for c in calls], np.int64)

        def column(name: str) -> NDArray[np.float64]:
            return np.concatenate([c.scores[name] for c in calls])

        def cached(name: str) -> NDArray[np.int64]:
            return np.array([c.cached.get(name, -1) for c in calls], np.int64)

        one, other = column(first), column(second)
        mask = np.concatenate([c.mask for c in calls])
        held = (c.removesuffix(".entropy") for c in calls[0].scores if c.endswith(".entropy"))
        names = dict.fromkeys((second, first, *held))
        others = [c for c in ("A", "B0", "C0") if c in calls[0].scores]
        third = [column(c) for c in others if c[0] not in first[0] + second[0]]
        apart = [np.abs(values - own) for values in third for own in (one, other)]
        prompts: dict[bytes, int] = {}
        known = [n for n in names if f"{n}.entropy" in calls[0].scores]
        return cls(
            first_name=first,
            second_name=second,
            first=one,
            second=other,
            token=np.concatenate([c.response for c in calls]),
            call=np.repeat(np.arange(len(calls)), lengths),
            index=np.concatenate([np.arange(n) for n in lengths]),
            active=mask & np.isfinite(one) & np.isfinite(other),
            lengths=lengths,
            prompt_lengths=np.array([len(c.prompt) for c in calls], np.int64),
            prompt=np.array(
                [prompts.setdefault(c.prompt.tobytes(), len(prompts)) for c in calls], np.int64
            ),
            cached_first=cached(first),
            cached_second=cached(second),
            entropy=column(f"{known[0]}.entropy") if known else None,
            entropy_of=known[0] if known else "",
            names=tuple(c.name for c in calls),
            groups=tuple(c.group for c in calls),
            noise=noise,
            natural=min(
                (float(np.nanmean(gap[mask])) for gap in apart if np.isfinite(gap[mask]).any()),
                default=float("nan"),
            ),
        )

    @property
    def name(self) -> str:
        """Such as ``A-B0``."""
        return f"{self.first_name}-{self.second_name}"

    @property
    def difference(self) -> NDArray[np.float64]:
        """First minus second of the active tokens, float64 [active] (nat)."""
        return (self.first - self.second)[self.active]

    @property
    def position(self) -> NDArray[np.int64]:
        """Place in prompt and response together, int64 [token]."""
        return self.prompt_lengths[self.call] + self.index
