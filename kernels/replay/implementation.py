"""Implementations of an operator: ours in Triton, torch's, an engine's own.

A module that knows some offers ``implementations(operator, device)``. It imports the package that
they come from only inside that call, and answers an ``Unavailable`` with the reason where one of
them cannot run here.

All implementations of an operator take the same arguments, by keyword, and return the same tensors,
whatever the package behind them calls them; ``OPERATORS`` lists both. Tensors come in the dtype
that the engine stored them in and results go back in the dtype of the first argument, unless the
table says otherwise. An attribute that is left out is as the implementation itself has it: where a
norm rounds is a difference between implementations, and no property of the model. One that does not
know an argument's value raises ``Unsupported``: nothing is ever computed by another implementation
in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["fast", "deterministic", "unspecified"]

OPERATORS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # operator: tensors (those that end in ? may be left out), attributes, results
    "rms_norm": (("x", "weight", "residual?"), ("eps", "rounds_before_weight"), ("y",)),
    "linear": (("x", "weight", "bias?"), (), ("y",)),
    "rope": (
        ("x", "position", "inv_freq"),
        ("attention_scaling", "interleaved"),
        ("y",),
    ),
    "attention": (
        ("q", "k", "v", "sinks?"),
        ("lengths", "queries", "scale", "sliding_window"),
        ("context",),
    ),
    "router": (
        ("logits", "bias?"),
        (
            "top_k",
            "renormalise",
            "scoring",
            "softmax_after_top_k",
            "groups",
            "top_groups",
            "scaling",
        ),
        ("weights", "ids"),
    ),
    "swiglu": (("gate", "up"), (), ("y",)),
    "experts": (("x", "ids", "weights", "gate_up", "down"), (), ("y",)),
    "combine": (("outputs", "ids"), (), ("y",)),
    "logprob": (("logits", "targets"), ("shards",), ("logprob",)),
    "add": (("stream", "delta"), (), ("y",)),
}
"""Every operator's tensors, attributes and results, in the order of the reference's arguments."""


class Unsupported(ValueError):
    """An implementation that cannot do what is asked, in one sentence with the value received."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator.

    ``name`` is the same for what belongs together in several operators (``triton-fast``);
    ``package`` says where it comes from, with its version. ``mode`` is what it claims: a
    ``deterministic`` one gives a row the same bits whatever runs beside it. ``family`` pairs a fast
    and a deterministic implementation that are the two settings of one switch.
    """

    name: str
    operator: str
    package: str
    run: Callable[..., Any]
    mode: Mode = "unspecified"
    family: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """An implementation that cannot run here, and why, in words that follow a colon."""

    name: str
    operator: str
    why: str
