"""Operator bundles: what one stretch of a layer was given and what the engine made of it.

A bundle is one safetensors file that needs nothing beside it::

    inputs/NAME     a row each: what went in, in the dtype that the engine stored
    weights/NAME    what the operators need of the model
    captured/NAME   what the engine itself returned, by result; may be missing
    rows/position, rows/token, rows/observed, rows/variance

and in the header's ``layerbisect.bundle`` the rest of `Bundle` as JSON. A stretch is one operator
where the engine shows the points on both of its sides, and several where it hides what lies between
(projection, q/k norm and rotary embedding of queries, say): its ``calls``, in order.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.implementation import OPERATORS

SCHEMA = 1
HEADER_KEY = "layerbisect.bundle"
DTYPES = ("bfloat16", "float16", "float32")


class BundleError(LayerBisectError):
    """A bundle that cannot be replayed, and what to do."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator of a stretch.

    ``tensors`` maps the operator's arguments to names of inputs, weights or earlier results;
    ``results`` names what it returns. With ``heads`` a result [row, head * channel] is taken apart
    into that many heads.
    """

    operator: str
    tensors: Mapping[str, str]
    results: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    heads: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A stretch of operators with all that it takes to run it again.

    ``point`` is what the stretch makes, ``operator`` the verdict's word for it, ``covers`` the
    operators in it. ``dtype`` is the engine's. ``inputs`` are [row, ...]; ``captured`` maps the
    last call's results to what the engine returned. ``observed`` int64 [n] numbers the rows that
    count, each once: others are there because attention reads them. ``variance`` [row, channel] is
    rounding that adding the ranks' partial sums puts on the output besides. ``expert_numbers``
    gives the model's number of each expert whose weights are here. ``engine`` says which engine,
    version, device and settings made it, and ``acquitted`` why an error beyond rounding is known to
    change nothing.
    """

    point: str
    layer: int | None
    operator: str
    covers: tuple[str, ...]
    dtype: str
    calls: tuple[Call, ...]
    inputs: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    captured: Mapping[str, torch.Tensor]
    position: torch.Tensor
    token: torch.Tensor
    observed: torch.Tensor
    variance: torch.Tensor | None = None
    expert_numbers: tuple[int, ...] = ()
    engine: Mapping[str, str] = field(default_factory=dict)
    label: str = "engine"
    acquitted: str = ""
    rows_left_out: int = 0

    @property
    def storage(self) -> torch.dtype:
        """The engine's dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def rows(self) -> int:
        """Number of rows, those included that only attention reads."""
        return len(self.position)

    @property
    def attends(self) -> bool:
        """Whether rows read one another, so that only whole sequences can be run alone."""
        return any(call.operator == "attention" for call in self.calls)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each unit that can be run alone: a sequence where rows attend, else a row."""
        for call in self.calls:
            if call.operator == "attention":
                return tuple(call.attributes["lengths"])
        return (1,) * self.rows

    def only(self, units: Sequence[int]) -> Bundle:
        """Return the stretch with these units of ``lengths`` alone, in this order."""
        lengths = self.lengths
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        spans = [torch.arange(starts[u], starts[u] + lengths[u]) for u in units]
        rows = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
        # where each row that is kept went, -1 for those that are not
        at = torch.full((self.rows,), -1)
        at[rows] = torch.arange(len(rows))
        kept = at[self.observed]
        chosen = tuple(lengths[u] for u in units)
        return replace(
            self,
            calls=tuple(
                replace(c, attributes={**c.attributes, "lengths": chosen})
                if c.operator == "attention"
                else c
                for c in self.calls
            ),
            inputs={n: t[rows] for n, t in self.inputs.items()},
            captured={n: t[rows] for n, t in self.captured.items()},
            position=self.position[rows],
            token=self.token[rows],
            observed=kept[kept >= 0],
            variance=None if self.variance is None else self.variance[rows],
        )

    def check(self) -> None:
        """Raise BundleError where the calls, tensors and rows don't fit together."""
        _check(self)


def save_bundle(bundle: Bundle, path: Path) -> None:
    """Write a bundle, under a temporary name first; raises BundleError for one that isn't whole."""
    bundle.check()
    tensors = {
        f"{group}/{name}": tensor.detach().cpu().contiguous().clone()
        for group in ("inputs", "weights", "captured")
        for name, tensor in getattr(bundle, group).items()
    }
    for name in ("position", "token", "observed", "variance"):
        if getattr(bundle, name) is not None:
            tensors[f"rows/{name}"] = getattr(bundle, name).contiguous().clone()
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {HEADER_KEY: json.dumps(_facts(bundle))})
    os.replace(partial, path)


def load_bundle(path: Path) -> Bundle:
    """Read a bundle; raises BundleError for a file that is none, and says what is wrong with it."""
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(HEADER_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BundleError(f"{path} is no operator bundle: {error}; export it again") from None
    return bundle_from(header, tensors, path)


def bundle_from(header: str | None, tensors: dict[str, torch.Tensor], path: Path) -> Bundle:
    """Make a bundle of what its file holds: the text under ``HEADER_KEY``, and the tensors.

    Raises BundleError, which names ``path``, where they are none or don't fit together.
    """
    if header is None:
        raise BundleError(
            f"{path} is a safetensors file without the header {HEADER_KEY!r}, so no operator "
            "bundle; make one with `layerbisect replay CAPTURE --export DIR`"
        )
    try:
        bundle = _bundle(json.loads(header), tensors)
    except (ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{path} is damaged: {error}; export it again") from None
    bundle.check()
    return bundle


_TENSOR_FIELDS = ("inputs", "weights", "captured", "position", "token", "observed", "variance")


def _facts(bundle: Bundle) -> dict[str, Any]:
    facts = {
        f.name: getattr(bundle, f.name)
        for f in dataclasses.fields(bundle)
        if f.name not in _TENSOR_FIELDS
    }
    facts["calls"] = [dataclasses.asdict(call) for call in bundle.calls]
    return {"schema": SCHEMA, **facts}


def _bundle(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Bundle:
    if facts.pop("schema", None) != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}, which this version reads")
    calls = tuple(
        Call(**{**raw, "results": tuple(raw["results"]), "attributes": _tuples(raw["attributes"])})
        for raw in facts.pop("calls")
    )
    groups: dict[str, dict[str, torch.Tensor]] = {"inputs": {}, "weights": {}, "captured": {}}
    rows: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        (rows if group == "rows" else groups[group])[name] = tensor
    rest: dict[str, Any] = {**_tuples(facts), **groups, **rows}
    return Bundle(calls=calls, **rest)


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}


def _check(bundle: Bundle) -> None:
    what = f"the bundle of {bundle.point}"
    if bundle.dtype not in DTYPES:
        raise BundleError(
            f"{what} is in {bundle.dtype}, and only {', '.join(DTYPES)} can be replayed"
        )
    if not bundle.calls:
        raise BundleError(f"{what} calls no operator; export it again")
    for name, tensor in ({**bundle.inputs, **bundle.captured}).items():
        if len(tensor) != bundle.rows:
            raise BundleError(f"{name} has {len(tensor)} rows and {what} has {bundle.rows}")
    if bundle.observed.numel() and not (
        0 <= int(bundle.observed.min()) <= int(bundle.observed.max()) < bundle.rows
    ):
        raise BundleError(f"{what} observes rows that it has not: it has {bundle.rows}")
    known = {*bundle.inputs, *bundle.weights}
    for call in bundle.calls:
        _check_call(call, known, what)
        known |= set(call.results)
    last = bundle.calls[-1].results
    if unknown := sorted(set(bundle.captured) - set(last)):
        raise BundleError(f"{what} captured {unknown[0]!r}, which no call of it returns")


def _check_call(call: Call, known: set[str], what: str) -> None:
    if call.operator not in OPERATORS:
        raise BundleError(
            f"{what} calls {call.operator!r}, and the operators are {', '.join(OPERATORS)}"
        )
    arguments, attributes, results = OPERATORS[call.operator]
    for argument in arguments:
        if not argument.endswith("?") and argument not in call.tensors:
            raise BundleError(f"{what} gives {call.operator} no {argument!r}; export it again")
    for argument, name in call.tensors.items():
        if argument not in {a.removesuffix("?") for a in arguments}:
            raise BundleError(f"{what} gives {call.operator} {argument!r}, which it does not take")
        if name not in known:
            raise BundleError(
                f"{what} lacks {name!r}, which {call.operator} reads; export it again"
            )
    if unknown := sorted(call.attributes.keys() - set(attributes)):
        raise BundleError(
            f"{what} sets {unknown[0]!r} to {call.attributes[unknown[0]]!r}, and {call.operator} "
            f"has only {', '.join(attributes) or 'no attributes'}"
        )
    if len(call.results) != len(results):
        raise BundleError(f"{what} names {len(call.results)} results of {call.operator}")
