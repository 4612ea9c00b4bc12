"""Run the implementations of one bundle, in a process that they may take down.

``python -m layerbisect.kernels.replay.worker BUNDLE JOURNAL DEVICE TIMES KNOWN [NAME ...]`` appends
to the journal what it starts and what comes of it, and leaves alone what is in the journal.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bench import Bench
from layerbisect.kernels.replay.bundle import Bundle, load_bundle
from layerbisect.kernels.replay.examine import engine_errors, examine
from layerbisect.kernels.replay.journal import Journal
from layerbisect.kernels.replay.variants import Variant, variants

AGAIN = 75
"""Exit code of a worker whose device is of no more use: another one should go on."""
REFUSED = 64
"""Exit code of a worker that cannot do what is asked, which it says on the last line of stderr."""
STARTED = "-- layerbisect: an implementation is started"
"""Line on stderr before each of them."""

KNOWN = "layerbisect.kernels.replay.known"
"""Module whose ``implementations(operator, device)`` lists what can be run."""


def work(
    bundle: Bundle,
    journal: Journal,
    *,
    device: str,
    times: int,
    known: str = KNOWN,
    names: Sequence[str] | None = None,
    expendable: bool = False,
) -> bool:
    """Go through the implementations that the journal has no result of.

    ``names`` are those that are wanted, None for all. In a process that is ``expendable`` this ends
    after a crash on a GPU, which leaves the device unusable for it, and returns False. Raises
    LayerBisectError for a name that no implementation has.
    """
    bench = Bench(bundle, device)
    # a bundle that does not fit together is no implementation's fault, nor is the time this takes
    assert bench.judge.exact and bench.judge.low
    if journal.engine is None:
        journal.add("engine", engine_errors(bench))
    module = importlib.import_module(known)
    listed = variants(bundle, lambda operator: module.implementations(operator, device))
    all_names = [one.name for one in listed]
    if unknown := sorted(set(names or ()) - set(all_names)):
        operators = ", ".join(dict.fromkeys(call.operator for call in bundle.calls))
        raise LayerBisectError(
            f"no implementation of {operators} is called {unknown[0]!r}: there are "
            f"{', '.join(all_names)}"
        )
    journal.add("known", all_names)
    for one in listed:
        if one.name in journal.results or (names is not None and one.name not in names):
            continue
        if isinstance(one, Variant):
            journal.add("started", one.result(state="crashed"))
            if expendable:
                # what is said after this is a last word, if it dies
                print(STARTED, file=sys.stderr, flush=True)
        result = examine(bench, one, times) if isinstance(one, Variant) else one
        journal.add("result", result)
        if expendable and result.state == "crashed" and device != "cpu":
            return False
    journal.add("finished", True)
    return True


def main(arguments: Sequence[str]) -> int:
    """Work as the command line says, and return the exit code."""
    bundle, path, device, times, known, *names = arguments
    journal = Journal(Path(path))
    try:
        done = work(
            load_bundle(Path(bundle)),
            journal,
            device=device,
            times=int(times),
            known=known,
            names=names or None,
            expendable=True,
        )
    except LayerBisectError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except Exception:
        # nothing that an implementation did: those errors are results
        journal.add("failed", traceback.format_exc())
        raise
    return 0 if done else AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
