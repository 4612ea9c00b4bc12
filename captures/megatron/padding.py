"""Tell tokens from padding in a batch [b, s] of Megatron-core, by the masks it is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

# queries of a 4-D mask that are looked at together: bounds what is copied from the device at once
_QUERIES = 1024


def read_tokens(
    given: Mapping[str, Any],
    lanes: int,
    column: NDArray[np.int64],
    total: int,
    problems: list[str],
) -> NDArray[np.bool_]:
    """Which columns of each sequence are tokens, bool [lane, column]; all, where no mask tells.

    Args:
        given: the call's arguments. ``padding_mask`` [b, s] is True at padding; ``attention_mask``
            is either nonzero at tokens [b, s], or True where a query must not look [b or 1, 1,
            query, column], and hides padding from itself.
        lanes: b, the sequences of the batch.
        column: int64 [column], which of a sequence's ``total`` columns this rank holds. Masks are
            cut likewise, but for the last dimension of four, which has all columns.
        problems: gets a sentence where a mask cannot be read, or is not causal.
    """
    valid = np.ones((lanes, len(column)), bool)
    padding, mask = given.get("padding_mask"), given.get("attention_mask")
    for name, flat in (("padding_mask", padding), ("attention_mask", mask)):
        if flat is None or flat.ndim == 4:
            continue
        if tuple(flat.shape) != valid.shape:
            problems.append(
                f"{name} of shape {list(flat.shape)} is not cut as input_ids of "
                f"{list(valid.shape)} are, and no padding was taken from it"
            )
            continue
        told = flat.detach().cpu().numpy().astype(bool)
        valid &= told if name == "attention_mask" else ~told
    if mask is not None and mask.ndim == 4:
        shape = (1, len(column), total)
        fits = tuple(mask.shape[1:]) == shape and len(mask) in (1, lanes)
        if fits and str(mask.dtype) == "torch.bool":
            _look(mask.detach(), valid, column, problems)
        else:
            problems.append(
                f"attention_mask is {mask.dtype} of shape {list(mask.shape)} and not torch.bool of "
                f"{[lanes, *shape]}: rows were taken as causal and unpadded"
            )
    return valid


def _look(
    mask: torch.Tensor,
    valid: NDArray[np.bool_],
    column: NDArray[np.int64],
    problems: list[str],
) -> None:
    """Clear ``valid`` where a mask [b or 1, 1, query, column] hides a column from itself.

    Any other column has to see all tokens up to itself, and nothing else.
    """
    import torch

    query, at = torch.arange(len(column)), torch.from_numpy(column)
    for lane in range(len(valid)):
        hidden = mask[lane % len(mask), 0]
        own = hidden[query.to(hidden.device), at.to(hidden.device)]
        valid[lane] &= ~own.cpu().numpy()
        # columns that other context-parallel ranks hold are taken as tokens
        token = np.ones(hidden.shape[1], bool)
        token[column] = valid[lane]
        for start in range(0, len(column), _QUERIES):
            part = slice(start, start + _QUERIES)
            prefix = token & (np.arange(len(token)) <= column[part, None])
            wrong = (hidden[part].cpu().numpy() == prefix).any(1) & valid[lane, part]
            if wrong.any():
                problems.append(
                    f"attention_mask is not causal at column {column[part][wrong][0]} of sequence "
                    f"{lane}: its row has not seen its prefix and nothing else; pass one sequence "
                    "a row, or pack them with packed_seq_params"
                )
                break
