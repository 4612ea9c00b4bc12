"""What must hold before any layer is blamed; what fails here is named instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from layerbisect.bisect.join import repeats
from layerbisect.bisect.metrics import score_gap
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side, boundary
from layerbisect.bisect.verdict import Gap
from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError
from layerbisect.captures.fingerprint import fingerprint
from layerbisect.captures.store import Capture

MIN_ROWS = 16
"""Fewer joined rows than this are too few to judge."""

# the reference's name for a setting, and the checkpoint configuration's
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


def check_same_model(rollout: Capture, trainer: Capture) -> None:
    """Raise LayerBisectError when the captures are of models of different shapes."""
    for name in _SIZES.values():
        a, b = (c.info.model_config.get(name) for c in (rollout, trainer))
        if a is not None and b is not None and a != b:
            raise LayerBisectError(
                f"the captures are of different models: {name} is {a} in {rollout.directory} and "
                f"{b} in {trainer.directory}"
            )
    if rollout.info.num_layers != trainer.info.num_layers:
        raise LayerBisectError(
            f"the captures are of different models: {rollout.info.num_layers} layers in "
            f"{rollout.directory} and {trainer.info.num_layers} in {trainer.directory}"
        )


def check_model_fits(model: ReferenceModel, directory: object, capture: Capture) -> None:
    """Raise ModelDirectoryError when the model directory is not of the captured model's shape."""
    for ours, theirs in _SIZES.items():
        captured = capture.info.model_config.get(theirs)
        if captured is not None and captured != getattr(model.config, ours):
            raise ModelDirectoryError(
                f"the model directory does not fit: {theirs} is {getattr(model.config, ours)} in "
                f"{directory} and {captured} in {capture.directory}; give the checkpoint that was "
                "captured"
            )
    name = next((n for n in capture.points if n.endswith((".input", ".output", "embed"))), None)
    if name is not None and capture.has(name).any():
        first = np.flatnonzero(capture.has(name))[:1]
        width = capture.read(name, first).shape[1]
        if width != model.config.hidden:
            raise ModelDirectoryError(
                f"the model directory does not fit: hidden size is {model.config.hidden} in "
                f"{directory} and {name} has {width} channels in {capture.directory}"
            )


def different_weights(model: ReferenceModel, side: Side) -> tuple[list[str], int]:
    """Compare the captured fingerprints with the model directory's tensors.

    Returns the names of those that differ, and how many were compared.
    """
    names = set(model.tensor_names())
    dtype = getattr(torch, side.dtype)
    different = []
    compared = 0
    for name, digest in side.capture.info.fingerprints.items():
        if name not in names:
            continue
        compared += 1
        stored = model.tensor(name)
        # an engine casts a float32 checkpoint on loading, and may keep norms as they are stored
        if digest not in (fingerprint(stored), fingerprint(stored.to(dtype))):
            different.append(name)
    return sorted(different), compared


def missing_boundaries(side: Side, num_layers: int) -> list[str]:
    """Name the layer boundaries that this capture was to hold and does not."""
    wanted = set(side.capture.info.points)
    return [
        name
        for layer in range(num_layers + 1)
        if (name := boundary(layer, num_layers)) in wanted and not side.has(name)
    ]


def repeat_gap(capture: Capture) -> Gap | None:
    """Measure an engine against itself: log-probs of tokens that the capture holds repeatedly."""
    first, again = repeats(capture.scores.keys)
    if not len(first):
        return None
    return score_gap(capture.scores.logprob[first], capture.scores.logprob[again])


def model_does_not_fit(alike: Sequence[object], judged: int) -> str | None:
    """Say, in a sentence, when both sides differ from the model directory in the same way."""
    if judged and len(alike) > judged / 2:
        return (
            f"both sides differ from the model directory in the same way, in {len(alike)} of "
            f"{judged} operators: it does not hold the weights or the settings that they ran; "
            "give --model the checkpoint in use"
        )
    return None
