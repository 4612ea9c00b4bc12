"""What a temperature can make of a token's probability, whatever the other tokens' are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

VOCAB = 2**18
"""Tokens of the largest vocabularies, rounded up."""


def outside(raw: Array, scaled: Array, sharper: float) -> Array:
    """How far (nat) ``scaled`` is from any log-prob that logits times ``sharper`` may give.

    With p the raw probability, the score becomes log p^b / (p^b + S), with S the sum of the other
    tokens' powers: (1-p)^b where one of them has all of the rest, (V-1)^(1-b) times as much where
    V - 1 share it evenly, and between the two elsewhere. Natural noise adds a little; another
    change of the distribution is not held by this.

    Args:
        raw, scaled: log-probs [token] (nat).
        sharper: the inverse b of the temperature.
    """
    own = sharper * np.minimum(raw, -1e-9)
    one = sharper * np.log(-np.expm1(np.minimum(raw, -1e-9)))
    every = one + (1 - sharper) * np.log(VOCAB - 1)
    ends = np.stack([own - np.logaddexp(own, one), own - np.logaddexp(own, every)])
    far: Array = np.maximum(ends.min(0) - scaled, 0) + np.maximum(scaled - ends.max(0), 0)
    return far
