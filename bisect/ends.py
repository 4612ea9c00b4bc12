"""Own error of what belongs to no layer: the embedding, the final norm, the head."""

from __future__ import annotations

import torch

from layerbisect.bisect.directions import norm_eps_direction
from layerbisect.bisect.measure import OwnError, each_channel, measure
from layerbisect.bisect.precision import Precision
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.residuals import unique_rows, unit_roundoff
from layerbisect.bisect.side import Side, boundary

_STEP = 1e-4


def end_errors(model: ReferenceModel, side: Side) -> list[OwnError]:
    """Judge the embedding, the final norm and the head on ``side``, as far as they are visible."""
    found = [_embedding(model, side), _final_norm(model, side), _head(model, side)]
    return [error for error in found if error is not None]


def _fresh(side: Side) -> torch.Tensor:
    return torch.nonzero(torch.from_numpy(side.chains.fresh)).squeeze(1)


def _embedding(model: ReferenceModel, side: Side) -> OwnError | None:
    name = "embed" if side.has("embed") else "layers.0.input"
    captured = side.read(name)
    if captured is None:
        return None
    token = torch.from_numpy(side.chains.token)
    rows = _fresh(side)
    rows = rows[unique_rows(token[rows][:, None])]
    dtype = getattr(torch, side.dtype)
    exact = model.embed(token[rows])
    # a lookup has no rounding of its own: allow for one, of the table's values to the dtype
    return measure(
        point=name,
        layer=None,
        operator="embedding",
        side=side.label,
        captured=captured[rows],
        exact=exact,
        low=exact.to(dtype).to(exact.dtype),
        unit=unit_roundoff(side.dtype),
        directions={"gain": exact},
        covers=("embedding",),
        flat_rows=rows,
    )


def _final_norm(model: ReferenceModel, side: Side) -> OwnError | None:
    stream = side.read(boundary(model.config.num_layers, model.config.num_layers))
    captured = side.read("final_norm")
    if stream is None or captured is None:
        return None
    rows = _fresh(side)
    rows = rows[unique_rows(stream[rows])]
    exact = model.final_norm(stream[rows])
    return measure(
        point="final_norm",
        layer=None,
        operator="norm",
        side=side.label,
        captured=captured[rows],
        exact=exact,
        low=model.final_norm(stream[rows], precision=_low(side)),
        unit=unit_roundoff(side.dtype),
        directions={
            "gain": exact,
            each_channel: exact,
            "eps": norm_eps_direction(exact, stream[rows], model.config.eps),
        },
        covers=("norm",),
        flat_rows=rows,
    )


def _head(model: ReferenceModel, side: Side) -> OwnError | None:
    """Judge logits and log-softmax together: from the final norm's output to the log-prob."""
    covers: tuple[str, ...] = ("head",)
    normed = side.read("final_norm")
    low_normed = normed
    if normed is None:
        stream = side.read(boundary(model.config.num_layers, model.config.num_layers))
        if stream is None:
            return None
        covers = ("norm", "head")
        normed = model.final_norm(stream)
        low_normed = model.final_norm(stream, precision=_low(side))
    assert low_normed is not None
    scores = side.scores()
    rows = torch.nonzero(torch.from_numpy(side.chains.scored) & ~torch.isnan(scores)).squeeze(1)
    if not len(rows):
        return None
    target = torch.from_numpy(side.chains.target)[rows]
    exact = model.logprobs(normed[rows], target).double()
    moved = model.logprobs(normed[rows] * (1 + _STEP), target).double()
    low = model.logprobs(low_normed[rows], target, precision=_low(side)).double()
    # a likely token's logit and the normalizer share their error: it shrinks with 1 - p
    shrink = (1 - exact.exp()).clamp_min(1e-3)
    size = ((low - exact) / shrink).square().mean().sqrt().clamp_min(unit_roundoff(side.dtype))
    return measure(
        point="logprob",
        layer=None,
        operator="head",
        side=side.label,
        captured=scores[rows, None],
        exact=exact[:, None],
        low=low[:, None],
        unit=unit_roundoff(side.dtype),
        directions={
            "logit scale": (moved - exact)[:, None] / _STEP,
            "offset": torch.ones_like(exact)[:, None],
        },
        covers=covers,
        flat_rows=rows,
        noise=(shrink * size)[:, None],
    )


def _low(side: Side) -> Precision:
    return Precision.all_in(getattr(torch, side.dtype))
