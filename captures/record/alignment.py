"""Check scores that a framework returns response-aligned, against the calls that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import TrainerError
from layerbisect.captures.record.call import Call


def aligned_scores(
    calls: Sequence[Call],
    scores: Mapping[str, Any] | Sequence[Any],
    *,
    tokens: Mapping[str, Any] | Sequence[Any] | None = None,
    masks: Mapping[str, Any] | Sequence[Any] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Pack response-aligned log-probs into a column, and verify whose they are; shift nothing.

    Args:
        calls: what was scored.
        scores: for each call, by name or in their order, float [response] (nat): a tensor or what
            numpy takes.
        tokens: the IDs that the framework returned with them, [response] or [prompt + response].
        masks: its loss masks, [response] of 0 and 1.

    Returns:
        For each call's name, float64 [response]; nan where the call's mask leaves a token out and
        its score is not finite. Ready for `ScoreRecord.with_column`.

    Raises:
        TrainerError: another number of calls or scores, other IDs or another mask than the call's,
            or a score that isn't finite.
    """
    found = _by_name(calls, scores, "scores")
    given = {} if tokens is None else _by_name(calls, tokens, "token IDs")
    masked = {} if masks is None else _by_name(calls, masks, "masks")
    column = {}
    for call in calls:
        here = f"call {call.name!r}"
        if call.name in given:
            _check_tokens(here, call, given[call.name])
        if call.name in masked:
            _check_mask(here, call, masked[call.name])
        column[call.name] = _checked(here, call, found[call.name])
    return column


def _by_name(
    calls: Sequence[Call], values: Mapping[str, Any] | Sequence[Any], what: str
) -> dict[str, NDArray[Any]]:
    if isinstance(values, Mapping):
        lacking = [call.name for call in calls if call.name not in values]
        if lacking:
            raise TrainerError(f"there are no {what} for call {lacking[0]!r}; return all calls'")
        return {call.name: as_numpy(values[call.name]) for call in calls}
    if len(values) != len(calls):
        raise TrainerError(
            f"there are {len(values)} rows of {what} for {len(calls)} calls from "
            f"{calls[0].name!r} on; return one a call, in their order"
        )
    return {call.name: as_numpy(row) for call, row in zip(calls, values, strict=True)}


def as_numpy(values: Any) -> NDArray[Any]:
    """Copy a tensor of any device and dtype, or whatever numpy takes, into an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.array(values)


def _check_tokens(here: str, call: Call, ids: NDArray[Any]) -> None:
    expected = call.tokens if len(ids) == len(call.tokens) else call.response
    if ids.shape != expected.shape:
        raise TrainerError(
            f"{here} came back with {ids.size} token IDs for {len(call.response)} response tokens; "
            "return the response's alone, or the prompt's and the response's"
        )
    wrong = np.flatnonzero(ids != expected)
    if len(wrong):
        place = int(wrong[0]) - (len(expected) - len(call.response))
        raise TrainerError(
            f"{here} came back with token {ids[wrong[0]]} at response position {place}, where the "
            f"record has {expected[wrong[0]]}; return the scores in the record's order of calls"
        )


def _check_mask(here: str, call: Call, mask: NDArray[Any]) -> None:
    if mask.shape != call.mask.shape:
        raise TrainerError(
            f"{here} came back with a mask of {mask.size} values for {len(call.response)} response "
            "tokens"
        )
    wrong = np.flatnonzero(mask != call.mask)
    if len(wrong):
        place = int(wrong[0])
        raise TrainerError(
            f"{here} came back with the mask value {int(mask[place])} at response position "
            f"{place}, where the record has {int(call.mask[place])}; return the saved mask"
        )


def _checked(here: str, call: Call, scores: NDArray[Any]) -> NDArray[np.float64]:
    if scores.dtype.kind not in "fiu" or scores.shape != call.response.shape:
        raise TrainerError(
            f"{here} came back with scores of {scores.dtype} {list(scores.shape)} for "
            f"{len(call.response)} response tokens; return one log-prob for each of them"
        )
    values = scores.astype(np.float64)
    bad = ~np.isfinite(values)
    if (bad & call.mask).any():
        place = int((bad & call.mask).argmax())
        raise TrainerError(
            f"{here} came back with the score {values[place]} at response position {place} "
            f"(token {call.response[place]}); look there for overflow in the trainer's forward"
        )
    return np.where(bad, np.nan, values)
