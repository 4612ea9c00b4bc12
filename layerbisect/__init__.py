"""Find the layer, the operator and the side behind a log-prob gap.

::

    with layerbisect.capture(model, "captures/trainer"):
        model(input_ids=ids)
    verdict = layerbisect.bisect("captures/rollout", "captures/trainer", model="models/policy")
    layerbisect.replay("captures/rollout", model="models/policy", layer=9, operator="attention")

    scores = layerbisect.ScoreRecord.open("run.safetensors")
    verdict = layerbisect.judge([scores])

Importing this needs neither torch nor an engine; what does is imported where it is used.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from layerbisect.captures.errors import LayerBisectError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from layerbisect.bisect.locate import bisect
    from layerbisect.bisect.progress import Progress
    from layerbisect.bisect.replay import replay
    from layerbisect.bisect.scores.judge import judge
    from layerbisect.bisect.verdict import Verdict
    from layerbisect.captures.capture import capture
    from layerbisect.captures.record.file import ScoreRecord
    from layerbisect.captures.store import Capture

    __version__: str

__all__ = [
    "Capture",
    "LayerBisectError",
    "ScoreRecord",
    "Verdict",
    "__version__",
    "bisect",
    "capture",
    "judge",
    "replay",
]

_HOMES = {
    "Capture": "layerbisect.captures.store",
    "ScoreRecord": "layerbisect.captures.record.file",
    "Verdict": "layerbisect.bisect.verdict",
    "capture": "layerbisect.captures.capture",
    "judge": "layerbisect.bisect.scores.judge",
    "replay": "layerbisect.bisect.replay",
}


class _CallableFolder(ModuleType):
    """The folder `layerbisect.bisect`, which can be called like the function that it is for.

    Python sets a submodule as an attribute of its package, where it would hide a function of the
    same name as soon as anything imports `layerbisect.bisect.join`.
    """

    def __call__(
        self,
        rollout: str | PathLike[str] | Capture,
        trainer: str | PathLike[str] | Capture,
        *,
        model: str | PathLike[str],
        forced: Sequence[str | PathLike[str] | Capture] = (),
        probe: Literal["auto", "scan", "search"] = "auto",
        carried: str | PathLike[str] | None = None,
        record: str | PathLike[str] | ScoreRecord | None = None,
        progress: Progress | None = None,
    ) -> Verdict:
        """Compare two captures of the same tokens; see `layerbisect.bisect.locate.bisect`."""
        from layerbisect.bisect.locate import bisect

        return bisect(
            rollout,
            trainer,
            model=model,
            forced=forced,
            probe=probe,
            carried=carried,
            record=record,
            progress=progress,
        )


# every import of anything below passes here first, so that no order of imports undoes it
importlib.import_module("layerbisect.bisect").__class__ = _CallableFolder


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            found: Any = version("layerbisect")
        except PackageNotFoundError:
            # a checkout on the path, not installed
            found = "0+checkout"
    elif name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
