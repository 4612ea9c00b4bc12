"""Take the carried gap that a live trainer read out, where it is of the captures compared."""

from __future__ import annotations

from os import PathLike

import numpy as np

from layerbisect.bisect.carried_gap import CarriedGap
from layerbisect.bisect.case import Case
from layerbisect.captures.carried import CarriedFile, rows_digest
from layerbisect.captures.chains import first_of_each
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture


def read_live(path: str | PathLike[str], case: Case) -> CarriedGap:
    """Read the file of a live trainer.

    Raises:
        LayerBisectError: it is of other captures, of other rows of them, or of another model.
    """
    found = CarriedFile.read(path)
    rollout, trainer = (side.capture for side in case.sides)
    labels = (rollout.info.label, trainer.info.label)
    tokens = int(np.count_nonzero(case.joined.chains.scored))
    different = ""
    if (found.rollout, found.trainer) != labels:
        different = (
            f"labels {found.rollout!r} and {found.trainer!r}, not {labels[0]!r} and {labels[1]!r}"
        )
    elif found.num_layers != case.layers:
        different = f"a model of {found.num_layers} layers, not {case.layers}"
    elif found.rows != _rows(rollout):
        different = f"other rows than {rollout.directory} has, or than were chosen of it"
    elif found.tokens != tokens:
        different = f"{found.tokens} tokens, where the captures have {tokens} in common"
    if different:
        raise LayerBisectError(
            f"{path} does not fit the captures: it is of {different}; give the one that the "
            f"job wrote beside {trainer.directory}, or leave it out"
        )
    at = {one.boundary: one.gap for one in found.gaps}
    return CarriedGap(at, found.mode, found.forwards, "trainer")


def _rows(capture: Capture) -> str:
    return rows_digest(capture.keys.key[first_of_each(capture.keys)])
