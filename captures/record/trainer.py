"""Collect C: score a record's responses with the frozen trainer, and with gradients enabled.

``C0``, ``C1``, ... are forwards in eval mode without gradients, at one state of the weights;
``C.grad`` is the forward as training runs it, in the mode that the trainer had. Beside ``C0`` stand
the chosen logit and the entropy where the trainer's logits are seen. Whether they agree is not
judged here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import RecordError, TrainerError
from layerbisect.captures.record.alignment import aligned_scores, as_numpy
from layerbisect.captures.record.call import GRADIENT, Call, Definition, Scoring
from layerbisect.captures.record.extraction import TokenScores, scores_at
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.module_state import (
    evaluating,
    same_random_state,
    weights_digest,
)
from layerbisect.captures.record.transformers_scores import (
    Padding,
    describe_model,
    model_scores,
)

if TYPE_CHECKING:
    import torch

Scorer = Callable[[Sequence[Call]], Sequence[Any]]
"""Scores the calls of one batch, and returns for each of them, in their order, one of: its
response-aligned log-probs [response]; the logits of its tokens [prompt + response, vocab]; or
TokenScores."""


def score(
    record: ScoreRecord,
    trainer: torch.nn.Module | Scorer,
    path: str | os.PathLike[str] | None = None,
    *,
    repeats: int = 2,
    grad: bool = True,
    batch_size: int = 1,
    packed: bool = False,
    padding: Padding = "right",
    module: torch.nn.Module | None = None,
    engine: str = "",
    definition: Definition = "raw",
    weight_version: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreRecord:
    """Score the responses of a record with a trainer: ``C0``, ``C1``, ... and ``C.grad``.

    Columns that the record has already are kept, and those that lack are added: what was broken off
    goes on. Each column is saved when it is whole. Modes of the module and torch's random state are
    afterwards what they were, whatever happens. That weights stay the same is seen by reading all
    their bytes, once at first and once a column, see `weights_digest`.

    Args:
        record: what to score.
        trainer: a transformers causal language model, or a callable for anything else, see
            ``Scorer``. It is called with gradients off, and for ``C.grad`` on.
        path: file that the record is saved to after each column; None to save nothing, as on all
            ranks but one where several score together.
        repeats: how many frozen forwards.
        grad: whether to add the gradient-enabled forward.
        batch_size: calls that are scored together.
        packed: a batch is laid end to end in one row. With a callable it says what that one does.
        padding: where a model's shorter rows are filled up.
        module: the module behind a callable: put into eval mode, and its weights digested.
        engine: the engine behind a callable, such as ``megatron-core 0.16.1``.
        definition: which distribution a callable's scores are of.
        weight_version: the state of the weights, by the trainer's own count.
        progress: called with the calls scored so far and those to score in all.

    Returns:
        The record with its new columns.

    Raises:
        TrainerError: what came back is no score of these calls, or weights changed meanwhile.
        RecordError: all columns are there already, or were scored by other weights.
    """
    import torch

    if batch_size < 1 or repeats < 0:
        raise TrainerError(f"got batch_size {batch_size} and repeats {repeats}; score something")
    wanted = [f"C{number}" for number in range(repeats)] + ([GRADIENT] if grad else [])
    missing = [column for column in wanted if column not in record.columns]
    if not missing:
        raise RecordError(
            f"the record has {', '.join(wanted) or 'no column to add'} already, and scores are "
            f"never overwritten; ask for more repeats, or {afresh(record)}"
        )
    settings: dict[str, str] = {}
    scorer: Scorer
    if isinstance(trainer, torch.nn.Module):
        module = trainer
        engine, settings = describe_model(trainer)
        settings |= {} if packed or batch_size == 1 else {"padding": padding}

        def scorer(calls: Sequence[Call]) -> Sequence[TokenScores]:
            return model_scores(module, calls, packed=packed, padding=padding)
    else:
        scorer = trainer
    digest = None if module is None else weights_digest(module)
    _check_same_weights(record, wanted, digest, settings.get("dtype"))
    calls = list(record)
    batches = [calls[i : i + batch_size] for i in range(0, len(calls), batch_size)]
    scoring = Scoring(
        definition=definition,
        engine=engine,
        weight_version=weight_version,
        digest=digest,
        packed=packed,
        batches=tuple(tuple(call.name for call in batch) for batch in batches),
    )
    for number, column in enumerate(missing):
        tell = _Told(progress, number * len(calls), len(missing) * len(calls))
        with same_random_state():
            if column == GRADIENT:
                mode = "train" if module is not None and module.training else "eval"
                with torch.enable_grad():
                    columns = _score_all(column, batches, scorer, tell)
            else:
                mode = "eval"
                with evaluating(module), torch.no_grad():
                    columns = _score_all(column, batches, scorer, tell)
        if module is not None and weights_digest(module) != digest:
            raise TrainerError(
                f"the weights changed while {column} was scored; hold the optimizer and every "
                "weight update back until all of C is collected"
            )
        how = {"gradients": "on" if column == GRADIENT else "off"}
        how |= {} if module is None else {"mode": mode}
        for name, values in columns.items():
            record = record.with_column(name, values, replace(scoring, settings=settings | how))
        if path is not None:
            record.save(path)
    return record


@dataclass(frozen=True, slots=True)
class _Told:
    """Passes on how many calls are scored, counting those of earlier columns."""

    progress: Callable[[int, int], None] | None
    before: int
    total: int

    def __call__(self, done: int) -> None:
        if self.progress is not None:
            self.progress(self.before + done, self.total)


def _check_same_weights(
    record: ScoreRecord, wanted: list[str], digest: str | None, dtype: str | None
) -> None:
    for column in wanted:
        known = record.info.columns.get(column)
        if known is None or not digest or not known.digest or known.digest == digest:
            continue
        before = known.settings.get("dtype")
        if dtype and before and dtype != before:
            # the digest is of the bytes, which another dtype changes with the same checkpoint
            raise RecordError(
                f"{column} was scored in {before} and the trainer computes in {dtype} now; load it "
                f"in {before} (--dtype {before}) to add repeats, or {afresh(record)}"
            )
        raise RecordError(
            f"{column} was scored by weights of digest {known.digest:.8} and the trainer has "
            f"{digest:.8} now; load the former to add repeats, or {afresh(record)}"
        )


def afresh(record: ScoreRecord) -> str:
    """Say how to score a record whose C cannot be added to."""
    there = [column for column in record.columns if column.startswith("C")]
    opened = "record" if record.path is None else f"ScoreRecord.open({str(record.path)!r})"
    listed = ", ".join(map(repr, there))
    return f"score a copy that has no C, made by `{opened}.without({listed}).save(COPY)`"


def _score_all(
    column: str, batches: list[list[Call]], scorer: Scorer, tell: _Told
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Score every batch: column name to call name to scores, with companions for ``C0``."""
    companions = ("logit", "entropy") if column == "C0" else ()
    found: dict[str, dict[str, NDArray[np.float64]]] = {column: {}}
    found |= {f"{column}.{what}": {} for what in companions}
    for number, batch in enumerate(batches, 1):
        answers = scorer(batch)
        if not hasattr(answers, "__len__"):
            raise TrainerError(
                f"the trainer returned {answers!r:.40} ({type(answers).__name__}) in {column} "
                f"for {len(batch)} calls from {batch[0].name!r} on; return a list with one row of "
                "scores a call, in their order"
            )
        if len(answers) != len(batch):
            raise TrainerError(
                f"the trainer returned {len(answers)} rows of scores in {column} for "
                f"{len(batch)} calls from {batch[0].name!r} on; return one a call, in their order"
            )
        scores = [_as_scores(call, answer) for call, answer in zip(batch, answers, strict=True)]
        try:
            found[column] |= aligned_scores(batch, [s.logprob for s in scores])
            for what in companions:
                seen = [getattr(s, what) for s in scores if isinstance(s, TokenScores)]
                if len(seen) == len(batch):
                    found[f"{column}.{what}"] |= aligned_scores(batch, seen)
        except TrainerError as error:
            raise TrainerError(f"{column}: {error}") from None
        tell(min(number * len(batches[0]), sum(map(len, batches))))
    # where some calls came without logits, the companions would be of some calls only
    whole = len(found[column])
    return {name: values for name, values in found.items() if len(values) == whole}


@dataclass(frozen=True, slots=True, eq=False)
class _Aligned:
    """Response-aligned log-probs whose logits nobody showed."""

    logprob: NDArray[Any]


def _as_scores(call: Call, answer: Any) -> TokenScores | _Aligned:
    """Take what a scorer returned for one call; full logits are scored with the shift."""
    if isinstance(answer, TokenScores):
        return answer
    if getattr(answer, "ndim", 1) != 2:
        return _Aligned(as_numpy(answer))
    import torch

    logits = torch.as_tensor(answer)
    if len(logits) != len(call.tokens):
        raise TrainerError(
            f"call {call.name!r} came back with logits {list(logits.shape)} for its "
            f"{len(call.tokens)} tokens; return a row for each token of prompt and response"
        )
    at = torch.arange(len(call.prompt) - 1, len(call.tokens) - 1, device=logits.device)
    return scores_at(logits, (at,), torch.from_numpy(call.response))
