"""Own error of what belongs to no layer: the embedding, the final norm, the head."""

from __future__ import annotations

import torch

from layerbisect.bisect.directions import norm_eps_direction, norm_eps_unit
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.points import boundary
from layerbisect.kernels.judging.measure import Output, OwnError, measure
from layerbisect.kernels.judging.residuals import (
    ONE_ROUNDING,
    order_freedom,
    unique_rows,
    unit_roundoff,
)

_STEP = 1e-4
_LOGITS_AT_ONCE = 2**23
# what is left of a near certain token's error, in unit roundoffs
_LEAST_NOISE = 0.1


def end_errors(model: ReferenceModel, side: Side) -> list[OwnError]:
    """Judge the embedding, the final norm and the head on ``side``, as far as they are visible."""
    found = [_embedding(model, side), _final_norm(model, side), _head(model, side)]
    return [error for error in found if error is not None]


def _embedding(model: ReferenceModel, side: Side) -> OwnError | None:
    name = "embed" if side.has("embed") else boundary(0, model.config.num_layers)
    captured = side.read(name)
    if captured is None:
        return None
    token = torch.from_numpy(side.chains.token)
    rows = side.fresh
    rows = rows[unique_rows(token[rows][:, None])]
    exact = model.embed(token[rows])
    size = exact.square().mean(1, keepdim=True).sqrt().expand_as(exact)
    return measure(
        Output(
            point=name,
            layer=None,
            operator="embedding",
            side=side.label,
            dtype=side.dtype,
            captured=captured[rows],
            exact=exact,
            # a lookup has no rounding of its own: only the table's values are rounded
            low=model.embed(token[rows], precision=side.low),
            flat_rows=rows,
            covers=("embedding",),
            gains=("all",),
            # what errs by nothing gives no estimate: one rounding of the row's size is allowed
            noise=ONE_ROUNDING * unit_roundoff(side.dtype) * size,
        )
    )


def _final_norm(model: ReferenceModel, side: Side) -> OwnError | None:
    stream = side.stream(model.config.num_layers, model.config.num_layers)
    captured = side.read("final_norm")
    if stream is None or captured is None:
        return None
    rows = side.fresh
    rows = rows[unique_rows(stream[rows])]
    exact = model.final_norm(stream[rows])
    return measure(
        Output(
            point="final_norm",
            layer=None,
            operator="norm",
            side=side.label,
            dtype=side.dtype,
            captured=captured[rows],
            exact=exact,
            low=model.final_norm(stream[rows], precision=side.low),
            flat_rows=rows,
            covers=("norm",),
            gains=("all", "channel"),
            directions={"eps": norm_eps_direction(exact, stream[rows], model.config.eps)},
            units={"eps": norm_eps_unit(stream[rows])},
        )
    )


def _head(model: ReferenceModel, side: Side) -> OwnError | None:
    """Judge logits and log-softmax together: from the final norm's output to the log-prob."""
    covers: tuple[str, ...] = ("head",)
    normed = low_normed = side.read("final_norm")
    if normed is None or low_normed is None:
        stream = side.stream(model.config.num_layers, model.config.num_layers)
        if stream is None:
            return None
        covers = ("norm", "head")
        normed = model.final_norm(stream)
        low_normed = model.final_norm(stream, precision=side.low)
    scores = side.scores()
    rows = torch.nonzero(torch.from_numpy(side.chains.scored) & ~torch.isnan(scores)).squeeze(1)
    if not len(rows):
        return None
    target = torch.from_numpy(side.chains.target)[rows]
    exact = model.logprobs(normed[rows], target).double()
    moved = model.logprobs(normed[rows] * (1 + _STEP), target).double()
    low = model.logprobs(low_normed[rows], target, precision=side.low).double()
    noise = _head_noise(model, normed[rows], target, exact, low, side.dtype)
    return measure(
        Output(
            point="logprob",
            layer=None,
            operator="head",
            side=side.label,
            dtype=side.dtype,
            captured=scores[rows, None],
            exact=exact[:, None],
            low=low[:, None],
            flat_rows=rows,
            covers=covers,
            directions={
                "logit scale": (moved - exact)[:, None] / _STEP,
                "offset": torch.ones_like(exact)[:, None],
            },
            noise=noise[:, None] * order_freedom(side.dtype),
        )
    )


def _head_noise(
    model: ReferenceModel,
    normed: torch.Tensor,
    target: torch.Tensor,
    exact: torch.Tensor,
    low: torch.Tensor,
    dtype: str,
) -> torch.Tensor:
    """Standard deviation (nat) of rounding in each row's log-prob: float64 [row].

    A log-prob moves by the error of its own logit, and by that of every logit times its
    probability in the other direction. Each logit is rounded at its own size, so rows differ.
    """
    own_logit = model.target_logit(normed, target).double()
    own = exact.exp()
    # its own logit counts 1 - p; below it counts p, as all others do
    variance = ((1 - own).square() - own.square()) * _spacing(own_logit, dtype).square()
    normalizer = own_logit - exact
    vocab = model.config.vocab
    step = max(1, _LOGITS_AT_ONCE // len(target))
    for start in range(0, vocab, step):
        logits = model.logits(normed, start, min(start + step, vocab)).double()
        chance = (logits - normalizer[:, None]).exp()
        variance += (chance * _spacing(logits, dtype)).square().sum(1)
    noise = (variance.clamp_min(0.0) / 12).sqrt() + _LEAST_NOISE * unit_roundoff(dtype)
    # sums in float32 lose more than their last rounding
    return noise * ((low - exact) / noise).square().mean().sqrt().clamp_min(1.0)


def _spacing(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Distance between neighbouring numbers of ``dtype`` at the size of ``values``."""
    return torch.exp2(values.abs().clamp_min(1e-6).log2().floor()) * (2 * unit_roundoff(dtype))
