"""Read from a transformers forward call which token each of its rows is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures import kv_lanes
from layerbisect.captures.batch import Batch
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import Phase
from layerbisect.captures.lanes import Fed, Lane, Names, feed

if TYPE_CHECKING:
    import torch

_OLD_CACHE_NAME = "past_key_values"


def cache_name(model: torch.nn.Module) -> str:
    """What ``model``'s forward calls its KV cache, as an argument and in its output.

    transformers renamed ``past_key_values`` to ``cache`` in 5.24. Raises LayerBisectError for a
    model, or a wrapper around one (DDP, PEFT), that takes neither.
    """
    for module in model.modules():
        for name in ("cache", _OLD_CACHE_NAME):
            if name in inspect.signature(module.forward).parameters:
                return name
    raise LayerBisectError(
        f"the forward of {type(model).__name__} takes neither cache nor {_OLD_CACHE_NAME}; "
        "give a causal language model of transformers"
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call of a model.

    ``batch`` is what its rows are; ``past`` counts the columns that the KV cache held before, and
    ``width`` those that are new; ``kept`` int64 [logits column] says for which new columns logits
    are computed; ``problems`` tells what keeps these rows from being compared.
    """

    batch: Batch
    fed: Fed
    before: tuple[Lane, ...]
    past: int
    width: int
    kept: NDArray[np.int64]
    cache: Any
    problems: tuple[str, ...]


def read_call(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Names
) -> Call | str:
    """Read a call of a causal language model, or say in a sentence why it cannot be."""
    given = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    # transformers still takes the old name beside the new one, which goes first
    cache = given.get(cache_name(model), given.get(_OLD_CACHE_NAME))
    ids: torch.Tensor | None = given.get("input_ids")
    if ids is None:
        return "a call with inputs_embeds has no token IDs and was not recorded; pass input_ids"
    token = ids.detach().reshape(-1, ids.shape[-1]).cpu().numpy().astype(np.int64)
    lanes_count, width = token.shape
    past = kv_lanes.held(cache)
    problems: list[str] = []
    seen, valid = _valid(given.get("attention_mask"), lanes_count, past, width, problems)
    before = tuple(Lane.blank() for _ in range(lanes_count))
    if past:
        before, unknown = kv_lanes.recall(cache, seen)
        problems += [unknown] if unknown else []
    position = _positions(given.get("position_ids"), lanes_count, past, width)
    restart = valid & (position == 0)
    # left padding shifts the default positions, so 0 there is not where a sequence begins
    fed = feed(before, token, valid, restart, names)
    if len(fed.leaves_open) < len(fed.sequences) and _attends_across(model, given, cache):
        problems.append(
            "sequences packed into one row attended to each other: call the model with "
            "position_ids that restart, use_cache=False and no attention_mask"
        )
    if not np.array_equal(position.reshape(-1)[fed.index], fed.rows.position):
        problems.append(
            "position_ids differ from the tokens' places in their sequences, so q and k are "
            "rotated by other angles; pass position_ids that count from 0 in each sequence"
        )
    phase: Phase = "forward" if cache is None else "prefill"
    if past and width == 1:
        phase = "decode"
    batch = Batch(phase, fed.sequences, fed.rows, token.size, fed.index, fed.context)
    kept = _kept(given.get("logits_to_keep", 0), width)
    return Call(batch, fed, before, past, width, kept, cache, tuple(problems))


def _valid(
    mask: Any, lanes: int, past: int, width: int, problems: list[str]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which held and which new columns are tokens and not padding, bool [lane, column] each."""
    whole = np.ones((lanes, past + width), bool)
    if mask is not None and getattr(mask, "ndim", None) == 2:
        given = mask.detach().cpu().numpy().astype(bool)
        # a mask of the new columns alone leaves those held as they are
        whole[:, -min(given.shape[1], past + width) :] = given[:, : past + width]
    elif mask is not None:
        problems.append(
            "attention_mask is not of two dimensions: its rows were taken as causal and unpadded"
        )
    return whole[:, :past], whole[:, past:]


def _positions(ids: Any, lanes: int, past: int, width: int) -> NDArray[np.int64]:
    """The position by which each new column is rotated, int64 [lane, column]."""
    if ids is None or ids.ndim > 2:
        default = np.arange(past, past + width, dtype=np.int64)
    else:
        default = ids.detach().cpu().numpy().astype(np.int64)
    return np.broadcast_to(default, (lanes, width))


def _attends_across(model: Any, given: Mapping[str, Any], cache: Any) -> bool:
    """Whether transformers gave packed sequences an ordinary causal mask; flash takes position_ids.

    It separates them only without a mask and without a cache, and makes a cache by default.
    """
    if "flash" in str(model.config._attn_implementation):
        return False
    use_cache = given.get("use_cache")
    if use_cache is None:
        checkpointing = model.training and getattr(model, "is_gradient_checkpointing", False)
        use_cache = model.config.use_cache and not checkpointing
    cached = cache is not None or bool(use_cache)
    return cached or given.get("attention_mask") is not None


def _kept(keep: Any, width: int) -> NDArray[np.int64]:
    columns = np.arange(width, dtype=np.int64)
    if isinstance(keep, int):
        return columns[-keep:] if keep else columns
    picked: NDArray[np.int64] = columns[keep.detach().cpu().numpy()]
    return picked
