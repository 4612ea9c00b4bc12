"""Variants: one implementation's name run over all calls of a stretch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from layerbisect.kernels.replay import program
from layerbisect.kernels.replay.bundle import Bundle, Call
from layerbisect.kernels.replay.implementation import Implementation, Mode, Unavailable
from layerbisect.kernels.replay.program import Run
from layerbisect.kernels.replay.report import Result

REFERENCE = "reference"
"""Name of the low-precision reference as an implementation."""

WIDE = {"router": torch.float32, "logprob": torch.float32}
"""Dtype of floating results of operators that do not return that of their first argument."""


class GarbageError(Exception):
    """An output that cannot be an operator's, and why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One name's implementations by operator.

    ``filled`` names the operators of the stretch that it does not have, for which the low-precision
    reference is run, and ``why`` why not where that is known.
    """

    name: str
    package: str
    mode: Mode
    family: str
    runs: dict[str, Run]
    filled: tuple[str, ...] = ()
    why: str = ""

    def choose(self, bundle: Bundle, seen: Seen) -> Callable[[Call], Run]:
        """Return what computes each call of the bundle, for `program.run`.

        ``seen`` is told each call that is this variant's own, with its arguments, before it is run.
        """

        def chosen(call: Call) -> Run:
            run = self.runs.get(call.operator)
            if run is None:
                return stored_reference(bundle, call)
            return partial(_checked, run, call, seen)

        return chosen

    def result(self, **rest: Any) -> Result:
        """Return a Result of this variant."""
        rest.setdefault("why", self.why)
        return Result(self.name, self.package, self.mode, self.family, filled=self.filled, **rest)


Seen = Callable[[Call, dict[str, Any]], None]


def variants(
    bundle: Bundle, known: Callable[[str], Sequence[Implementation | Unavailable]]
) -> list[Variant | Result]:
    """List what can be run on a bundle, the low-precision reference first.

    ``known`` returns the implementations of an operator. A name that cannot run here in any
    operator of the stretch is a Result that says why.
    """
    operators = list(dict.fromkeys(call.operator for call in bundle.calls))
    found = [one for operator in operators for one in known(operator)]
    runs = {call.operator: stored_reference(bundle, call) for call in bundle.calls}
    reference = Variant(REFERENCE, "layerbisect", "unspecified", "", runs)
    listed: list[Variant | Result] = [reference]
    for name in dict.fromkeys(one.name for one in found):
        listed.append(_variant(name, [one for one in found if one.name == name], operators))
    return listed


def _variant(
    name: str, own: Sequence[Implementation | Unavailable], operators: Sequence[str]
) -> Variant | Result:
    here = [one for one in own if isinstance(one, Implementation)]
    lacking = [one for one in own if isinstance(one, Unavailable)]
    why = "; ".join(dict.fromkeys(one.why for one in lacking))
    if not here:
        return Result(name, "", "unspecified", "", "unavailable", why)
    modes = {one.mode for one in here}
    runs = {one.operator: one.run for one in here}
    return Variant(
        name=name,
        package=here[0].package,
        mode=modes.pop() if len(modes) == 1 else "unspecified",
        family=next((one.family for one in here if one.family), ""),
        runs=runs,
        filled=tuple(operator for operator in operators if operator not in runs),
        why=why,
    )


def stored_reference(bundle: Bundle, call: Call) -> Run:
    """Return the low-precision reference of a call as an implementation, in the engine's dtypes."""

    def run(**arguments: Any) -> tuple[torch.Tensor, ...]:
        made = program.low_reference(bundle, call)(**arguments)
        dtype = WIDE.get(call.operator, bundle.storage)
        results = made if isinstance(made, tuple) else (made,)
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in results)

    return run


def _checked(run: Run, call: Call, seen: Seen, **arguments: Any) -> tuple[torch.Tensor, ...]:
    seen(call, arguments)
    made = run(**arguments)
    results = made if isinstance(made, tuple) else (made,)
    if len(results) != len(call.results) or not all(isinstance(t, torch.Tensor) for t in results):
        kinds = ", ".join(type(t).__name__ for t in results)
        raise GarbageError(
            f"{call.operator} returned {kinds} where {len(call.results)} tensors are due"
        )
    return results
