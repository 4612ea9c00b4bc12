"""Take the carried gap that a live trainer read out, where it is of the runs compared."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import numpy as np

from layerbisect.bisect.budget import GAP_FACTOR
from layerbisect.bisect.carried_gap import CarriedGap
from layerbisect.bisect.case import Case
from layerbisect.captures.carried import (
    CarriedFile,
    in_key_order,
    rows_digest,
    states_digest,
    weights_digest,
)
from layerbisect.captures.chains import first_of_each
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture


@dataclass(frozen=True, slots=True)
class LiveGap:
    """What a live trainer carried, and how far its scores are from those of its capture.

    ``drift`` is the mean absolute difference (nat) of the trainer's log-probs of the same tokens in
    the tail's own forward and in the capture.
    """

    carried: CarriedGap
    drift: float
    path: str
    trainer: Capture

    def check(self, predicted: float, freedom: float) -> None:
        """Raise LayerBisectError where ``drift`` is more than rounding: another run wrote the file.

        The tail runs other batches than the job, so one engine may round both apart by as much as
        two engines do: by ``predicted`` (nat), with the margins that a gap is allowed. A clean
        pair's own gap is no larger, so that no fraction of the gap can be the limit; beyond
        rounding the limit is far below the gap. With C this near, the gap between the rollout and
        the tail's C is within the limit of the captures' gap, too.
        """
        allowed = GAP_FACTOR * freedom * predicted
        if not self.drift <= allowed:
            different = (
                f"another run of the trainer, whose log-probs are {self.drift:.4g} nat from those "
                f"of the capture, where rounding makes {allowed:.4g} at most"
            )
            raise LayerBisectError(_refusal(self.path, different, self.trainer))


def read_live(path: str | PathLike[str], case: Case) -> LiveGap:
    """Read the file of a live trainer.

    Raises:
        LayerBisectError: it is of other captures, of other rows of them, of another model or its
            other weights, or of another run of the rollout.
    """
    found = CarriedFile.read(path)
    rollout, trainer = (side.capture for side in case.sides)
    labels = (rollout.info.label, trainer.info.label)
    tokens = int(np.count_nonzero(case.joined.chains.scored))
    weights = weights_digest(trainer.info.fingerprints)
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
    elif found.states != states_digest(rollout):
        different = f"another run of the rollout, with other states than {rollout.directory} has"
    elif found.weights and weights and found.weights != weights:
        different = f"a trainer with other weights than {trainer.directory} was captured with"
    if different:
        raise LayerBisectError(_refusal(path, different, trainer))
    own = in_key_order(case.joined.chains, case.sides[1].scores().numpy())
    told = np.array(found.scores, float)
    known = np.isfinite(own)
    if not known.any():
        raise LayerBisectError(
            f"{path} cannot be told from another run's, as {trainer.directory} holds no log-prob "
            "of its tokens; capture the point logprob, too, or leave the file out"
        )
    # a score that one of them alone has is not near
    drift = np.abs(told - own)[known]
    mean = float(np.where(np.isnan(drift), np.inf, drift).mean())
    at = {one.boundary: one.gap for one in found.gaps}
    carried = CarriedGap(at, found.mode, found.forwards, "trainer")
    return LiveGap(carried, mean, f"{path}", trainer)


def _refusal(path: object, different: str, trainer: Capture) -> str:
    return (
        f"{path} does not fit the captures: it is of {different}; give the one that the "
        f"job wrote beside {trainer.directory}, or leave it out"
    )


def _rows(capture: Capture) -> str:
    return rows_digest(capture.keys.key[first_of_each(capture.keys)])
