"""Run a variant on a bundle, and tell an output with errors from one that is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from layerbisect.kernels.replay import program
from layerbisect.kernels.replay.bundle import Bundle, Call
from layerbisect.kernels.replay.errors import Yardstick
from layerbisect.kernels.replay.implementation import Unsupported
from layerbisect.kernels.replay.judge import Judge, Results
from layerbisect.kernels.replay.poison import poisoned_empty
from layerbisect.kernels.replay.variants import WIDE, GarbageError, Variant

GARBAGE_ERROR = 0.9
GARBAGE_CORRELATION = 0.3
"""An output whose relative error is above the one and whose correlation with the exact output is
below the other has nothing to do with it: all zeros have an error of 1, and what is unrelated one
of 1 or more."""

_OTHER_POISON = 1000.0
_NAMED = 4
_TINY = 1e-300


OwnCall = tuple[Call, dict[str, Any]]


class UnwrittenError(Exception):
    """An output that depends on memory which was never written."""


class RaisedError(Exception):
    """What an implementation raised: the type and the first line of the message."""


@contextmanager
def running(device: str, poison: float = torch.nan) -> Iterator[None]:
    """Run an implementation in here, with ``poison`` in memory that is not written.

    What it raises becomes a RaisedError, but for Unsupported and GarbageError.
    """
    try:
        with torch.no_grad(), poisoned_empty(poison):
            yield
            if device != "cpu":
                # errors of kernels show when they are waited for
                torch.cuda.synchronize(device)
    except (Unsupported, GarbageError):
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise RaisedError(f"{type(error).__name__}: {first}") from error


@dataclass(eq=False)
class Bench:
    """A bundle on a device, with its judge: where variants are run.

    ``bundle`` has finite inputs and weights, on the CPU. What is run is a copy on ``device``, in
    memory whose unwritten parts hold NaN; results come back to the CPU, where they are judged.
    """

    bundle: Bundle
    device: str

    @cached_property
    def yardstick(self) -> Yardstick:
        """What outputs of the whole bundle are measured by."""
        return Yardstick(self.bundle)

    @property
    def judge(self) -> Judge:
        """The references of the whole bundle."""
        return self.yardstick.judge

    @cached_property
    def _weights(self) -> Mapping[str, torch.Tensor]:
        return {n: t.to(self.device, copy=True) for n, t in self.bundle.weights.items()}

    def run(
        self,
        variant: Variant,
        bundle: Bundle | None = None,
        *,
        own_calls: list[OwnCall] | None = None,
        poison: float = torch.nan,
    ) -> Results:
        """Run ``variant`` on the bundle, or on a part of it.

        ``own_calls`` is given the calls that are the variant's own, with copies of what they read.
        """

        def seen(call: Call, given: dict[str, Any]) -> None:
            if own_calls is not None:
                copies = {
                    n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()
                }
                own_calls.append((call, copies))

        bundle = bundle or self.bundle
        # a kernel that writes into its inputs must not spoil them for the next one
        inputs = {n: t.to(self.device, copy=True) for n, t in bundle.inputs.items()}
        placed = replace(bundle, inputs=inputs, weights=self._weights)
        with running(self.device, poison):
            made = program.run(placed, variant.choose(placed, seen))
        return {name: values.cpu() for name, values in made.items()}

    def first_run(self, variant: Variant) -> Results:
        """Run ``variant`` on all rows, and check that what it returns is an output at all.

        Raises GarbageError and UnwrittenError where it isn't.
        """
        made = self.run(variant)
        self._check_weights()
        self._check_kind(made)
        self._check_finite(variant, made)
        self._check_related(made)
        return made

    def _check_weights(self) -> None:
        for name, weight in self._weights.items():
            if not torch.equal(weight.cpu(), self.bundle.weights[name]):
                # the next one gets another copy
                del self._weights
                raise GarbageError(f"it wrote into {name}, which it is given to read")

    def _check_kind(self, made: Results) -> None:
        call = self.bundle.calls[-1]
        first = next(iter(call.tensors.values()))
        given = {**self.bundle.inputs, **self.bundle.weights}.get(first)
        own = self.bundle.storage if given is None else given.dtype
        allowed = {WIDE[call.operator]} if call.operator in WIDE else {own, self.bundle.storage}
        for name, exact in self.judge.exact.items():
            values = made[name]
            if values.shape != exact.shape:
                raise GarbageError(
                    f"{name} has the shape {list(values.shape)}, not {list(exact.shape)}"
                )
            if not exact.is_floating_point():
                if values.is_floating_point() or values.dtype == torch.bool:
                    raise GarbageError(f"{name} is {values.dtype}, not an integer type")
            elif values.dtype not in allowed:
                due = " or ".join(sorted(map(str, allowed)))
                raise GarbageError(f"{name} is {values.dtype}, not {due}")

    def _check_finite(self, variant: Variant, made: Results) -> None:
        judge, again = self.judge, None
        for name, values in made.items():
            if not values.is_floating_point():
                self._check_choice(name, values)
                continue
            due = judge.exact[name].isfinite() & judge.low[name].isfinite()
            bad = due & ~values.isfinite()
            count = int(bad.sum())
            if not count:
                continue
            again = again or self.run(variant, poison=_OTHER_POISON)
            moved = int((bad & again[name].isfinite()).sum())
            if moved:
                raise UnwrittenError(
                    f"{moved} of {values.numel()} elements of {name} are what the memory held "
                    f"before, or made from it{self._rows(bad)}"
                )
            raise GarbageError(
                f"{count} of {values.numel()} elements of {name} are NaN or infinite where the "
                f"exact ones are not{self._rows(bad)}"
            )

    def _check_choice(self, name: str, ids: torch.Tensor) -> None:
        experts = program.value(self.bundle, self.bundle.calls[-1].tensors["logits"]).shape[1]
        unwritten = ids == torch.iinfo(ids.dtype).min
        if bool(unwritten.any()):
            raise UnwrittenError(
                f"{int(unwritten.sum())} of {ids.numel()} elements of {name} were never written"
                f"{self._rows(unwritten)}"
            )
        wrong = (ids < 0) | (ids >= experts)
        if bool(wrong.any()):
            raise GarbageError(
                f"{int(wrong.sum())} of {ids.numel()} elements of {name} are no expert of "
                f"{experts}, {int(ids[wrong][0])} for example"
            )

    def _check_related(self, made: Results) -> None:
        rows = self.bundle.observed
        exact = self.judge.references(made)[0]
        values = made[self.judge.result].double().reshape(exact.shape)[rows]
        exact = exact[rows]
        known = exact.isfinite() & values.isfinite()
        exact, values = exact[known], values[known]
        error = float((values - exact).norm() / exact.norm().clamp_min(_TINY))
        if error < GARBAGE_ERROR:
            return
        alike = correlation(values, exact)
        if alike < GARBAGE_CORRELATION:
            raise GarbageError(
                f"{self.judge.result} has nothing to do with the exact output: its relative error "
                f"is {error:.3g}, its correlation with it {alike:.2f}"
            )

    def _rows(self, bad: torch.Tensor) -> str:
        """Say which rows these elements (bool [row, ...]) are in where not all are."""
        hit = bad.reshape(len(bad), -1).any(1)
        if bool(hit.all()):
            return ""
        at = torch.nonzero(hit).flatten().tolist()
        named = ", ".join(map(str, at[:_NAMED])) + (", ..." if at[_NAMED:] else "")
        return f", in row{'' if len(at) == 1 else 's'} {named} of {len(bad)}"


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Pearson's correlation of two float64 tensors of [n], 0 where one of them is constant."""
    first, second = first - first.mean(), second - second.mean()
    size = float(first.norm() * second.norm())
    return float(first @ second) / size if size > 0 else 0.0
