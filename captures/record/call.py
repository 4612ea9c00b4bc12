"""The record of a run's log-probs: who scored which token of which call, and how.

A *call* is one prompt and one response, as one call of the model saw them: a conversation of
several turns, or one with tools, is several calls of one group. A *column* holds one score for
every response token of every call:

``A``
    recorded at generation. Never overwritten.
``B0``, ``B1``, ...
    prefill replays of the same IDs in the rollout engine.
``C0``, ``C1``, ...
    forwards of the frozen trainer.
``C.grad``
    the trainer's forward with gradients enabled.
``behavior``
    the probability with which the token was really drawn, after filters and penalties, where the
    objective needs it beside the raw one.

Beside a column may stand ``B0.logit``, the chosen token's logit, and ``B0.entropy``, the entropy
in nats of the distribution that it was drawn from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import RecordError
from layerbisect.captures.format import SCHEMA

Definition = Literal["raw", "temperature", "behavior", "unknown"]
"""Which distribution a score is of: softmax of the logits, of the logits over the temperature, what
the sampler drew from after filters and penalties, or nobody said."""

GRADIENT = "C.grad"
"""The column of the gradient-enabled forward."""

_LARGEST = 1e6
"""No model's score is larger; what stands for none often is."""

_SCORE = re.compile(r"A|B\d+|C\d+|C\.grad|behavior")
_COLUMN = re.compile(rf"(?:{_SCORE.pattern})(?:\.logit|\.entropy)?")


def is_score(column: str) -> bool:
    """Say whether a column holds log-probs, and not what stands beside them."""
    return _SCORE.fullmatch(column) is not None


def replays(columns: Mapping[str, Any] | tuple[str, ...], letter: str) -> tuple[str, ...]:
    """The repeats ``B0``, ``B1``, ... (or of ``C``) among ``columns``, by their number."""
    found = [c for c in columns if re.fullmatch(rf"{letter}\d+", c)]
    return tuple(sorted(found, key=lambda column: int(column[1:])))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a column was obtained.

    ``cache`` says how the prefix cache was prepared (``flushed``, ``warm``, or ``none`` where there
    is none). ``batches`` lists the names of the calls that were scored together, in their order;
    ``packed`` says that they were laid end to end in one row. ``through`` is the router that the
    requests went through. ``digest`` stands for the weights that scored, where they were looked at;
    digests are comparable within one side only.
    """

    definition: Definition = "raw"
    engine: str = ""
    worker: str = ""
    through: str = ""
    weight_version: str | None = None
    digest: str | None = None
    cache: str = "none"
    packed: bool = False
    batches: tuple[tuple[str, ...], ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a record is of: everything that is the same in all its calls.

    ``step`` counts the policy's updates before this rollout; ``sampling`` are the settings of the
    generation as they were sent; ``columns`` says how each column was obtained.
    """

    model: str = ""
    model_revision: str = ""
    tokenizer_revision: str = ""
    step: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Scoring] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the model, and what every column says of its response tokens.

    Attributes:
        name: the call's own name in the record.
        prompt: token IDs, int64 [prompt]. response: token IDs, int64 [response].
        mask: bool [response], the tokens that take part in the objective.
        positions: int64 [prompt + response], as the position embedding got them.
        starts: where each document begins among these tokens that later tokens cannot see past,
            int64 [document], the first of them 0.
        scores: column name to float64 [response], in nats (a logit has no unit). A token that the
            mask leaves out may be nan: nobody scored it.
        group: what it belongs to: the prompt of several samples, or a conversation.
        turn: its place in a conversation.
        cached: prompt tokens that came from the prefix cache, by column.
        context: what else the model saw: adapter, digests of images, ...
    """

    name: str
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    mask: NDArray[np.bool_]
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    scores: Mapping[str, NDArray[np.float64]]
    group: str = ""
    turn: int = 0
    cached: Mapping[str, int] = field(default_factory=dict)
    context: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        prompt: Any,
        response: Any,
        scores: Mapping[str, Any],
        *,
        mask: Any = None,
        positions: Any = None,
        starts: Any = None,
        group: str = "",
        turn: int = 0,
        cached: Mapping[str, int] | None = None,
        context: Mapping[str, str] | None = None,
    ) -> Call:
        """Build a call from anything that numpy takes, and check it.

        All tokens take part, positions count from 0 and nothing is packed where it isn't said.

        Raises:
            RecordError: what is wrong with it, with the value.
        """
        here = f"call {name!r}"
        asked, given = (
            _integers(here, "prompt", prompt, "token IDs"),
            _integers(here, "response", response, "token IDs"),
        )
        total = len(asked) + len(given)
        call = cls(
            name=name,
            prompt=asked,
            response=given,
            mask=_mask(here, mask, len(given)),
            positions=np.arange(total)
            if positions is None
            else _integers(here, "positions", positions, "positions"),
            starts=np.zeros(1, np.int64)
            if starts is None
            else _integers(here, "starts", starts, "places"),
            scores={column: _floats(here, column, values) for column, values in scores.items()},
            group=group or name,
            turn=turn,
            cached=dict(cached or {}),
            context=dict(context or {}),
        )
        call.check()
        return call

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and response, int64 [prompt + response]."""
        return np.concatenate([self.prompt, self.response])

    def check(self) -> None:
        """Raise RecordError where lengths, IDs, positions, boundaries or scores cannot be."""
        here, total = f"call {self.name!r}", len(self.prompt) + len(self.response)
        if not len(self.prompt) or not len(self.response):
            raise RecordError(
                f"{here} has {len(self.prompt)} prompt tokens and {len(self.response)} response "
                "tokens; a score needs a token before it and a token to score"
            )
        for what, ids in (("prompt", self.prompt), ("response", self.response)):
            if ids.min() < 0:
                place = int(ids.argmin())
                raise RecordError(f"{here} has token ID {ids[place]} at {what} position {place}")
        if len(self.positions) != total:
            raise RecordError(f"{here} has {len(self.positions)} positions for {total} tokens")
        starts = self.starts
        if not len(starts) or starts[0] or (np.diff(starts) < 1).any() or starts[-1] >= total:
            raise RecordError(
                f"{here} has documents that start at {starts.tolist()!r:.60}; give 0 first and "
                f"ascending places below its {total} tokens"
            )
        for column, values in self.scores.items():
            if _COLUMN.fullmatch(column) is None:
                raise RecordError(
                    f"{here} has a column {column!r}; the columns are A, B0, B1, ..., C0, C1, ..., "
                    "C.grad, behavior, and each of them with .logit or .entropy"
                )
            if values.shape != self.response.shape:
                raise RecordError(
                    f"{here} has {len(values)} scores in {column} for {len(self.response)} "
                    "response tokens"
                )
            nobody = np.isnan(values) & ~self.mask
            wrong = ~(np.abs(values) <= _LARGEST) & ~nobody
            if wrong.any():
                place = int(wrong.argmax())
                raise RecordError(
                    f"{here} has the score {values[place]} in {column} at response position "
                    f"{place} (token {self.response[place]}); give scores as they were computed, "
                    "or leave the token out by the mask and its score nan"
                )
        for column, count in self.cached.items():
            if not 0 <= count <= total:
                raise RecordError(f"{here} has {count} cached tokens of {total} in {column}")


def _integers(here: str, what: str, values: Any, kind: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" and array.size:
        raise RecordError(
            f"{here} has {what} of {array.dtype} {list(array.shape)}; give one row of {kind}, as "
            "integers"
        )
    return array.astype(np.int64)


def _floats(here: str, column: str, values: Any) -> NDArray[np.float64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise RecordError(
            f"{here} has {column} of {array.dtype} {list(array.shape)}; give one row of scores, as "
            "numbers"
        )
    return array.astype(np.float64)


def _mask(here: str, values: Any, length: int) -> NDArray[np.bool_]:
    if values is None:
        return np.ones(length, np.bool_)
    array = np.asarray(values)
    if array.shape != (length,):
        raise RecordError(f"{here} has a mask of {array.size} values for {length} response tokens")
    odd = ~np.isin(array, (0, 1))
    if odd.any():
        place = int(odd.argmax())
        raise RecordError(
            f"{here} has the mask value {array[place]!s} at response position {place}; give 0 or 1"
        )
    return array.astype(np.bool_)
