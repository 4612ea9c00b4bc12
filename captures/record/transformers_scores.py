"""Score calls of a record by one forward of a transformers causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import TrainerError
from layerbisect.captures.record.call import Call
from layerbisect.captures.record.extraction import TokenScores, scores_at

if TYPE_CHECKING:
    import torch

Padding = Literal["right", "left"]

# implementations that take a mask [batch, 1, query, key] of what is added to the attention scores
_ADDED_MASK = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """What is laid end to end in one row of a batch.

    ``document`` int64 [column] numbers the stretches that see nothing of each other; ``predicting``
    int64 [scored] are the columns whose logits score ``target``, call after call.
    """

    token: NDArray[np.int64]
    position: NDArray[np.int64]
    document: NDArray[np.int64]
    predicting: NDArray[np.int64]
    target: NDArray[np.int64]

    @classmethod
    def of(cls, calls: Sequence[Call]) -> _Row:
        lengths = [len(call.tokens) for call in calls]
        opening = np.zeros(sum(lengths), np.int64)
        predicting = []
        for begin, call in zip(np.cumsum([0, *lengths[:-1]]), calls, strict=True):
            opening[begin + call.starts] = 1
            scored = np.arange(len(call.response)) + len(call.prompt) - 1
            predicting.append(begin + scored)
        return cls(
            np.concatenate([call.tokens for call in calls]),
            np.concatenate([call.positions for call in calls]),
            np.cumsum(opening) - 1,
            np.concatenate(predicting),
            np.concatenate([call.response for call in calls]),
        )

    @property
    def plain(self) -> bool:
        """Whether it is one document of ascending positions, as an ordinary causal mask has it."""
        return not self.document.any() and bool((np.diff(self.position) == 1).all())

    @property
    def told_by_positions(self) -> bool:
        """Whether a document begins just where positions don't go on, which transformers finds."""
        return np.array_equal(np.diff(self.document) == 1, np.diff(self.position) != 1)


def model_scores(
    model: torch.nn.Module,
    calls: Sequence[Call],
    *,
    packed: bool = False,
    padding: Padding = "right",
    temperature: float | None = None,
) -> list[TokenScores]:
    """Score every response token of ``calls`` in one forward, in the model's and grad's mode.

    Args:
        model: a transformers causal language model, or a wrapper with its forward (DDP, PEFT).
        calls: what goes into the batch.
        packed: lay the calls end to end in one row, none of which sees another.
        padding: where shorter rows are filled up, with positions that count each call's own tokens.
        temperature: what the logits are divided by; None for raw scores.

    Raises:
        TrainerError: an ID outside the vocabulary, a context that is not tokens alone, boundaries
            that the attention implementation cannot be told, or logits of another shape.
    """
    import torch

    config = _config(model)
    _check_calls(calls, int(config.vocab_size))
    rows = [_Row.of(calls)] if packed else [_Row.of([call]) for call in calls]
    device = next(model.parameters()).device
    width = max(len(row.token) for row in rows)
    fill = [width - len(row.token) for row in rows]
    before = fill if padding == "left" else [0] * len(rows)

    def padded(part: str, value: int) -> torch.Tensor:
        made = [
            np.pad(getattr(row, part), (b, f - b), constant_values=value)
            for row, f, b in zip(rows, fill, before, strict=True)
        ]
        return torch.from_numpy(np.stack(made)).to(device)

    mask = _mask(model, config, rows, padded("document", -1))
    output = model(
        input_ids=padded("token", 0),
        position_ids=padded("position", 0),
        attention_mask=mask,
        use_cache=False,
    )
    logits: Any = getattr(output, "logits", None)
    shape = None if logits is None else list(logits.shape)
    if shape is None or shape[:2] != [len(rows), width] or len(shape) != 3:
        raise TrainerError(
            f"{type(model).__name__} returned logits {shape} for [{len(rows)}, {width}] tokens; "
            "give a causal language model that returns logits for every token, or a callable"
        )
    counts = [len(row.target) for row in rows]
    at = (
        torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device),
        torch.from_numpy(
            np.concatenate([r.predicting + b for r, b in zip(rows, before, strict=True)])
        ).to(device),
    )
    targets = torch.from_numpy(np.concatenate([row.target for row in rows]))
    scores = scores_at(logits, at, targets, temperature=temperature)
    ends = np.cumsum([len(call.response) for call in calls])[:-1]
    parts = (np.split(s, ends) for s in (scores.logprob, scores.logit, scores.entropy))
    return [TokenScores(*each) for each in zip(*parts, strict=True)]


def describe_model(model: torch.nn.Module) -> tuple[str, dict[str, str]]:
    """Say which engine a model is run by, and what of its settings moves its scores."""
    import torch
    import transformers

    config = _config(model)
    settings = {
        "class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention": str(config._attn_implementation),
        "torch": torch.__version__,
    }
    experts = getattr(config, "_experts_implementation", None)
    return f"transformers {transformers.__version__}", settings | (
        {"experts": str(experts)} if experts else {}
    )


def _config(model: torch.nn.Module) -> Any:
    """The configuration of the model, or of the one that it wraps."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "vocab_size") and hasattr(config, "_attn_implementation"):
            return config
    raise TrainerError(
        f"cannot score with a {type(model).__name__}; give a transformers causal language model, "
        "or a callable that takes calls and returns their log-probs or logits"
    )


def _check_calls(calls: Sequence[Call], vocab: int) -> None:
    for call in calls:
        here = f"call {call.name!r}"
        if call.context:
            raise TrainerError(
                f"{here} was scored with {', '.join(sorted(call.context))} beside its tokens, "
                "which a forward of tokens alone leaves out; give a callable that restores it"
            )
        if call.tokens.max() >= vocab:
            place = int((call.tokens >= vocab).argmax())
            raise TrainerError(
                f"{here} has token ID {call.tokens[place]} at position {place}, outside the "
                f"model's vocabulary of {vocab}; give the model that the record was made with"
            )


def _mask(
    model: torch.nn.Module, config: Any, rows: list[_Row], document: torch.Tensor
) -> torch.Tensor | None:
    """The attention mask that separates documents and hides padding, as transformers takes it."""
    import torch

    padding = document == -1
    if not padding.any() and all(row.told_by_positions for row in rows):
        return None
    if all(row.plain for row in rows):
        return (~padding).long()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation not in _ADDED_MASK or kinds != {"full_attention"}:
        raise TrainerError(
            f"{config._attn_implementation} attention over layers of {', '.join(sorted(kinds))} "
            "cannot be told these calls' documents and positions; score with batch_size=1 or "
            "packed, or load the model with attn_implementation='eager'"
        )
    width = document.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=document.device).tril()
    # a padding column sees itself, so that no row of the softmax is empty
    seen = causal & (document[:, :, None] == document[:, None, :])
    dtype = next(model.parameters()).dtype
    added = torch.zeros(seen.shape, dtype=dtype, device=document.device)
    return added.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
