"""Whether two captures are of a frozen and a training forward of the same module."""

from __future__ import annotations

from layerbisect.bisect.gate import MIN_ROWS
from layerbisect.bisect.join import Joined
from layerbisect.bisect.training_causes import active_words
from layerbisect.bisect.training_report import Apart, Recomputed
from layerbisect.captures.store import Capture
from layerbisect.wording import count

BALANCING = "e_score_correction_bias"
"""What the names of biases that balance a router end with."""


def unjudged(
    sides: tuple[Capture, Capture],
    joined: Joined,
    points: tuple[Apart, ...],
    again: Recomputed,
    recompute: bool,
) -> tuple[str, ...]:
    """Say in sentences why these captures, frozen and training, cannot be judged.

    ``recompute``: what was recomputed must have been seen.
    """
    frozen, training = sides
    found = []
    if len(joined) < MIN_ROWS:
        found.append(
            f"only {count(len(joined), 'row')} are in both captures, and at least {MIN_ROWS} are "
            "needed; capture longer sequences"
        )
    if all(point.point == "logprob" for point in points):
        found.append("no point is in both captures; capture both with the same points")
    weights = [name for name in changed(sides) if not name.endswith(BALANCING)]
    if weights:
        found.append(
            f"the weights are not the same ({count(len(weights), 'tensor')}, {weights[0]} first); "
            "capture both forwards before the optimizer's step"
        )
    for side, name in zip(sides, ("frozen", "training"), strict=True):
        if len(side.modes) > 1:
            found.append(
                f"{side.directory} holds forwards in {len(side.modes)} modes (training or not, "
                f"with gradients or not); capture the {name} forward alone"
            )
    if drops := [drop for mode in frozen.modes for drop in mode.dropout]:
        found.append(f"the frozen forward drops, too: {active_words(drops)}; use model.eval()")
    if not any(mode.gradients for mode in training.modes):
        found.append(
            f"{training.directory} was captured without gradients; capture a training forward"
        )
    if recompute and not again.seen:
        model = "" if again.setting else ", of a model that recomputes its activations"
        found.append(f"no recomputation was seen; run the backward inside the capture{model}")
    elif recompute and not again.inner:
        found.append(
            "what was recomputed was captured at inputs alone, which are kept; capture points "
            "inside of layers"
        )
    return tuple(found)


def changed(sides: tuple[Capture, Capture]) -> list[str]:
    """Tensors of which the two captures have different fingerprints."""
    first, second = (side.info.fingerprints for side in sides)
    return [name for name, digest in first.items() if second.get(name, digest) != digest]
