"""What a verdict shows and is not reached by: all own errors, and both sides' environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerbisect.bisect.verdict import OperatorError
from layerbisect.captures.store import Capture
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.wording import mode_words


def operator_errors(errors: Mapping[str, Sequence[OwnError]]) -> tuple[OperatorError, ...]:
    """List the own errors of each side (by label), in the order of computation."""
    return tuple(
        OperatorError(
            point=e.point,
            layer=e.layer,
            operator=e.operator,
            covers=e.covers,
            side=label,
            rows=e.rows,
            own_error=float(e.ratio),
            floor=float(e.floor),
            convicted=e.convicted,
        )
        for label, found in errors.items()
        for e in sorted(found, key=_stage)
    )


def _stage(error: OwnError) -> int:
    """0 before the layers, 1 in them, 2 after them; sorting keeps their order inside of each."""
    if error.layer is not None:
        return 1
    return 0 if error.operator == "embedding" else 2


def environment(capture: Capture) -> dict[str, str]:
    """What is known of the engine, machine and settings that a capture was made with, by name."""
    info = capture.info
    facts = {
        "engine": info.engine,
        "engine_version": info.engine_version,
        "device": info.device,
        "dtype": info.dtype,
        "weight_version": info.weight_version or "",
        "routes": info.routes,
        "parallel": ", ".join(f"{name} {size}" for name, size in info.parallel.items()),
        "modes": "; ".join(mode_words(mode) for mode in capture.modes),
        "phases": ", ".join(dict.fromkeys(one.phase for one in capture.passes)),
    }
    known = {name: value for name, value in facts.items() if value}
    return {**known, **{k: v for k, v in info.environment.items() if k not in known}}
