"""Differences of one sign, and differences that a few tokens make: descriptions of a gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores.report import Finding
from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.bisect.shapes.tokens import (
    BIAS,
    Tokens,
    binomial_tail,
    chance_of_mean,
    explained,
    mae,
)

FEW = 0.02
"""Share of tokens that are a few."""

FAR = 10.0
"""A token far from the others differs by so many times their mean, and by LEAST."""

LEAST = 0.2
ENOUGH = 4
UNEVEN = 8.0
"""How much more often than the mean token a natural outlier may fall on one token ID, response or
position: some are unlikelier than others, and outliers of neighbours come together."""


def one_sided(sample: PairSample) -> Finding | None:
    """Find differences that have one sign far more often than chance; says nothing of a cause."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    difference = tokens.difference
    sign = 1.0 if np.clip(difference, -1, 1).mean() > 0 else -1.0
    gain = sign * difference - BIAS
    clear = np.abs(gain) > max(BIAS, 0.5 * mae(difference))
    if clear.sum() < 32:
        return None
    kept = tokens.where(clear)
    signs = np.sign(gain[clear])
    share = float((signs > 0).mean())
    if share < 0.75:
        return None
    chance = chance_of_mean(signs, kept, 0.2)
    if chance > 1e-6:
        return None
    higher = sample.first_name if sign > 0 else sample.second_name
    other = sample.second_name if sign > 0 else sample.first_name
    return Finding(
        test="one-sidedness",
        pair=sample.name,
        side=None,
        summary=f"{higher} is higher than {other} on {share:.1%} of the tokens that differ clearly",
        evidence=(
            f"{int((signs > 0).sum())} of {len(signs)} differences beyond half of the mean one",
            f"signed mean {difference.mean():+.6f} nat, mean absolute {mae(difference):.6f}",
        ),
        false_alarm=chance,
        explains=0.0,
        tokens=len(tokens),
        mae=mae(difference),
    )


def a_few_tokens(sample: PairSample) -> Finding | None:
    """Find that a few tokens which share something make the gap; describes, and accuses nobody."""
    tokens = Tokens.of(sample)
    if tokens is None:
        return None
    size = np.abs(tokens.difference)
    bulk = float(size[size <= np.quantile(size, 1 - FEW)].mean())
    far = size > max(FAR * bulk, LEAST)
    many = int(far.sum())
    share = float(size[far].sum() / size.sum())
    if many < ENOUGH or far.mean() > 2 * FEW or share < 0.5:
        return None
    tries, best = 0, (1.0, "", far)
    for said, member in _groups(tokens, far, sample.names):
        tries += 1
        inside = int((far & member).sum())
        rate = min(0.5, UNEVEN * float(member.mean()))
        chance = binomial_tail(inside, many, rate)
        # it must make most of their gap, and most of what it holds must be far as well
        made = float(size[far & member].sum() / size[far].sum())
        if made < 0.8 or far[member].mean() < 0.5:
            chance = 1.0
        best = min(best, (chance, said, member), key=lambda entry: entry[0])
    chance, said, member = best
    chance = min(1.0, tries * chance)
    if chance > 1e-3:
        return None
    kept = far & member
    worst = np.argsort(-size)[:5]
    return Finding(
        test="a few tokens against all",
        pair=sample.name,
        side=None,
        summary=f"{many} of {len(tokens)} tokens make {share:.0%} of the gap, and "
        f"{int(kept.sum())} of them {said}",
        evidence=(
            f"without them the mean absolute difference is {mae(tokens.difference[~far]):.6f} nat, "
            f"with them {mae(tokens.difference):.6f}",
            "the largest: "
            + ", ".join(
                f"{tokens.difference[i]:+.4f} at position {tokens.index[i]} of response "
                f"{sample.names[tokens.call[i]]} (ID {tokens.token[i]})"
                for i in worst
            ),
        ),
        false_alarm=chance,
        explains=explained(tokens.difference, np.where(kept, 0.0, tokens.difference)),
        tokens=int(kept.sum()),
        mae=mae(tokens.difference[kept]),
        where=said,
    )


def _groups(
    tokens: Tokens, far: NDArray[np.bool_], names: Sequence[str]
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """What far tokens may share: a phrase for it, and all tokens that share it, bool [token]."""
    before = np.full(len(tokens), -1)
    follows = (np.diff(tokens.call) == 0) & (np.diff(tokens.index) == 1)
    before[1:][follows] = tokens.token[:-1][follows]
    kinds = (
        ("have token ID {}", tokens.token),
        ("follow token ID {}", before),
        ("stand at response position {}", tokens.index),
        ("stand in response {}", tokens.call),
    )
    for said, kind in kinds:
        values, counts = np.unique(kind[far], return_counts=True)
        for value in values[np.argsort(-counts)[:3]]:
            if value >= 0:
                called = names[value] if kind is tokens.call else value
                yield said.format(called), kind == value
    for said, kind in (kinds[0], kinds[1]):
        low, high = int(kind[far].min()), int(kind.max())
        if low >= 0:
            yield said.format(f"{low} to {high}"), kind >= low
