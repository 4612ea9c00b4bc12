"""What must hold before any layer is blamed; what fails here is named instead."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import numpy as np

from layerbisect.bisect.config_differences import config_in, told_apart
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError
from layerbisect.captures.points import boundary, parse
from layerbisect.captures.store import Capture

MIN_ROWS = 16
"""Fewer rows than this are too few to judge."""
DTYPES = ("bfloat16", "float16", "float32")
"""What the reference can round as."""

# the reference's name for a setting, and the checkpoint configuration's
_SIZES = {
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts"),
}


def check_dtype(capture: Capture) -> None:
    """Raise LayerBisectError for a dtype whose rounding the reference does not know."""
    if capture.info.dtype not in DTYPES:
        raise LayerBisectError(
            f"{capture.directory} was computed in {capture.info.dtype}, and the reference knows "
            f"only {', '.join(DTYPES)}; capture a run in one of them"
        )


def check_same_model(rollout: Capture, trainer: Capture) -> None:
    """Raise LayerBisectError when the captures are of models of different shapes."""
    sizes = [_sizes(capture) for capture in (rollout, trainer)]
    for name, ours in sizes[0].items():
        theirs = sizes[1].get(name, ours)
        if ours != theirs:
            raise LayerBisectError(
                f"the captures are of different models: {name} is {ours} in {rollout.directory} "
                f"and {theirs} in {trainer.directory}"
            )
    ours_of, theirs_of = (_shapes(capture) for capture in (rollout, trainer))
    for suffix in ours_of.keys() & theirs_of.keys():
        (name, mine), (other, yours) = ours_of[suffix], theirs_of[suffix]
        if mine != yours:
            raise LayerBisectError(
                f"the captures are of different models: a row of {name} has shape {list(mine)} in "
                f"{rollout.directory}, and one of {other} {list(yours)} in {trainer.directory}"
                + told_apart(
                    rollout.info.model_config,
                    trainer.info.model_config,
                    (f"{rollout.label}'s configuration", f"{trainer.label}'s"),
                )
            )


def check_model_fits(
    model: ReferenceModel, directory: str | PathLike[str], capture: Capture
) -> None:
    """Raise ModelDirectoryError when the model directory is not of the captured model's shape."""
    for name, captured in _sizes(capture).items():
        ours = next(key for key, names in _SIZES.items() if name in names)
        if captured != getattr(model.config, ours):
            raise ModelDirectoryError(
                f"the model directory does not fit: {name} is {getattr(model.config, ours)} in "
                f"{directory} and {captured} in {capture.directory}; give the checkpoint that was "
                "captured"
            )
    dims = _dims(model)
    for name, shape in _shapes(capture).values():
        expected = tuple(dims[dim] for dim in parse(name).dims[1:])
        if shape != expected:
            raise ModelDirectoryError(
                f"the model directory does not fit: a row of {name} has shape {list(shape)} in "
                f"{capture.directory}, and {directory} makes it {list(expected)}"
                + told_apart(
                    capture.info.model_config,
                    config_in(directory),
                    (f"{capture.label}'s configuration", "the directory's"),
                )
                + "; give the checkpoint that was captured"
            )
    if capture.vocab is not None and capture.vocab != model.config.vocab:
        raise ModelDirectoryError(
            f"the log-probs in {capture.directory} are over {capture.vocab} tokens, and the "
            f"vocabulary of {directory} has {model.config.vocab}; where the rest pads it, capture "
            f"with vocab={model.config.vocab}"
        )
    highest = int(capture.rows.token.max())
    if highest >= model.config.vocab:
        raise ModelDirectoryError(
            f"the model directory does not fit: {capture.directory} holds the token {highest}, and "
            f"{directory} has a vocabulary of {model.config.vocab}"
        )


def too_little(rows: int, usable: int, points: int) -> list[str]:
    """Say what there is too little of to judge: joined rows, whole sequences, common points."""
    reasons = []
    if rows < MIN_ROWS:
        reasons.append(
            f"only {rows} rows are in both captures, and at least {MIN_ROWS} are needed; "
            "capture more tokens"
        )
    elif usable < MIN_ROWS:
        reasons.append(
            f"only {usable} of the {rows} rows in both captures have all rows before them in both, "
            f"and at least {MIN_ROWS} are needed; capture whole sequences "
            "(flush the prefix cache first)"
        )
    if not points:
        reasons.append("the captures have no point in common; capture the same points")
    return reasons


def missing_boundaries(side: Side, num_layers: int) -> str | None:
    """Say which layer boundaries a capture was to hold and does not."""
    wanted = set(side.capture.info.points)
    missing = [
        name
        for layer in range(num_layers + 1)
        if (name := boundary(layer, num_layers)) in wanted and not side.has(name)
    ]
    if not missing:
        return None
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return (
        f"{side.label} was to hold {missing[0]} and does not{more}; "
        f"see `layerbisect show {side.capture.directory}` for why"
    )


def _sizes(capture: Capture) -> dict[str, int]:
    """What a capture says of its model's sizes, by the names of config.json."""
    config = capture.info.model_config
    given = {name: config.get(name) for names in _SIZES.values() for name in names}
    given["num_hidden_layers"] = capture.info.num_layers
    return {name: value for name, value in given.items() if isinstance(value, int)}


def _shapes(capture: Capture) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of each kind of point one that the capture holds, with the shape of its rows."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in capture.points:
        suffix = parse(name).suffix
        if suffix in found or suffix in ("logits", "logprob"):
            continue
        held = np.flatnonzero(capture.has(name))
        if len(held):
            found[suffix] = name, capture.read(name, held[:1]).shape[1:]
    return found


def _dims(model: ReferenceModel) -> Mapping[str, int]:
    config = model.config
    return {
        "hidden": config.hidden,
        "head": config.heads,
        "kv_head": config.kv_heads,
        "channel": config.head_dim,
        "expert": config.experts,
        "slot": config.top_k,
    }
