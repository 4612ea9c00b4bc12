"""Split a gap: what the trainer's own routes make of it, what its weights do, and the rest.

Besides the trainer's capture it needs one or two more of the same trainer on the same tokens, in
which the rollout's experts were forced on it, without their weights and with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.join import join
from layerbisect.bisect.routing_report import GapSplit
from layerbisect.bisect.same_weights import refuse_other_weights
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.rows import PrefixKeys
from layerbisect.captures.store import Capture, ScoreTable


def split_gap(rollout: Capture, trainer: Capture, forced: Sequence[Capture]) -> GapSplit:
    """Compare the rollout's log-probs with the trainer's, as it is and with routes forced.

    Raises:
        LayerBisectError: a capture with the trainer's own routes among ``forced``, or two that were
            forced alike; one of another trainer, of other weights or other tokens, or with other
            routes than the rollout's; or no log-prob in common. One sentence.
    """
    if trainer.info.routes != "own":
        raise LayerBisectError(
            f"the trainer's capture {trainer.directory} has routes that were forced; give the one "
            "with its own routes as the trainer's, and this one as a forced one"
        )
    by_kind: dict[str, Capture] = {}
    unchecked = []
    for capture in forced:
        kind = capture.info.routes
        if kind == "own":
            raise LayerBisectError(
                f"{capture.directory} was captured with the model's own routes; a forced capture "
                f"is one that `layerbisect capture --routes {rollout.directory}` made"
            )
        if kind in by_kind:
            raise LayerBisectError(
                f"{by_kind[kind].directory} and {capture.directory} were both captured with routes "
                f"{kind}; give one of each kind"
            )
        by_kind[kind] = capture
        _refuse_another_trainer(trainer, capture)
        _refuse_other_routes(rollout, capture)
        if not refuse_other_weights(trainer, capture):
            unchecked.append(
                f"that {capture.directory} ran the trainer's weights is not checked, as no point "
                "of both shows it: capture all points"
            )
    columns = _columns(rollout, trainer, list(by_kind.values()))
    first, second, *others = columns
    gaps = {
        kind: float(np.abs(first - column).mean())
        for kind, column in zip(by_kind, others, strict=True)
    }
    own = float(np.abs(first - second).mean())
    some, more = gaps.get("forced"), gaps.get("forced with weights")
    return GapSplit(len(first), own, some, more, _parts(own, some, more), tuple(unchecked))


def _parts(own: float, forced: float | None, with_weights: float | None) -> dict[str, float]:
    if forced is None:
        assert with_weights is not None
        return {"routes and weights": own - with_weights, "rest": with_weights}
    if with_weights is None:
        return {"routes": own - forced, "rest": forced}
    return {"routes": own - forced, "weights": forced - with_weights, "rest": with_weights}


def _refuse_another_trainer(trainer: Capture, forced: Capture) -> None:
    ours, theirs = trainer.info, forced.info
    what = (
        ("label", ours.label, theirs.label),
        ("engine", ours.engine, theirs.engine),
        ("dtype", ours.dtype, theirs.dtype),
        ("weight version", ours.weight_version, theirs.weight_version),
    )
    for name, mine, yours in what:
        if mine != yours:
            raise LayerBisectError(
                f"{forced.directory} is no capture of the same trainer as {trainer.directory}: its "
                f"{name} is {yours!r} and not {mine!r}; force the routes in the trainer that is "
                "compared"
            )
    common = ours.fingerprints.keys() & theirs.fingerprints.keys()
    other = [n for n in sorted(common) if ours.fingerprints[n] != theirs.fingerprints[n]]
    if other:
        raise LayerBisectError(
            f"{forced.directory} ran other weights than {trainer.directory}: {len(other)} of "
            f"{len(common)} tensors differ, such as {other[0]}; capture both at one state"
        )


def _refuse_other_routes(rollout: Capture, forced: Capture) -> None:
    """Raise where the experts used were not those that the rollout chose."""
    joined = join(rollout, forced)
    for layer in rollout.info.moe_layers:
        name = f"layers.{layer}.mlp.expert_ids"
        if name not in rollout.points or name not in forced.points:
            continue
        both = rollout.has(name)[joined.rollout] & forced.has(name)[joined.trainer]
        if not both.any():
            continue
        ours = np.sort(rollout.read(name, joined.rollout[both]), axis=1)
        used = np.sort(forced.read(name, joined.trainer[both]), axis=1)
        same = ours.shape == used.shape
        other = int((ours != used).any(1).sum()) if same else len(ours)
        if other:
            raise LayerBisectError(
                f"{forced.directory} used other experts than {rollout.directory} chose in {other} "
                f"of {len(ours)} rows of layer {layer}; force this rollout's routes"
            )


def _columns(
    rollout: Capture, trainer: Capture, forced: Sequence[Capture]
) -> list[NDArray[np.float64]]:
    """Log-probs (float64 [token], nat) of the same tokens from each capture."""
    tables = [_by_key(capture.scores) for capture in (rollout, trainer)]
    wanted = np.intersect1d(tables[0][0], tables[1][0])
    if not len(wanted):
        raise LayerBisectError(
            f"{rollout.directory} and {trainer.directory} have no log-prob in common, so there is "
            "no gap to split; capture the point logprob on both sides"
        )
    for capture in forced:
        tables.append(_by_key(capture.scores))
        lacking = int((~np.isin(wanted, tables[-1][0])).sum())
        if lacking:
            raise LayerBisectError(
                f"{capture.directory} lacks the log-probs of {lacking} of the {len(wanted)} tokens "
                f"that {rollout.directory} and {trainer.directory} have; capture the same tokens"
            )
    columns = np.stack([values[np.searchsorted(keys, wanted)] for keys, values in tables])
    finite = np.isfinite(columns).all(0)
    if not finite.any():
        raise LayerBisectError(
            f"no token has a finite log-prob in all of {len(columns)} captures; capture raw "
            "log-probs, before any filter of the sampler"
        )
    return list(columns[:, finite])


def _by_key(table: ScoreTable) -> tuple[NDArray[np.void], NDArray[np.float64]]:
    """Sort log-probs by their tokens' keys, the first of each."""
    keys: PrefixKeys = table.keys
    known = np.flatnonzero(keys.known)
    unique, first = np.unique(keys.key[known], return_index=True)
    return unique, table.logprob[known[first]]
