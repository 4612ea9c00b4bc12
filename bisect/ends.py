"""Own error of what belongs to no layer: the embedding, the final norm, the head."""

from __future__ import annotations

import torch

from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.points import boundary
from layerbisect.kernels.judging.directions import STEP, norm_eps_direction, norm_eps_unit
from layerbisect.kernels.judging.logprob_noise import logprob_noise
from layerbisect.kernels.judging.measure import Output, measure
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.judging.residuals import ONE_ROUNDING, unique_rows, unit_roundoff

_LOGITS_AT_ONCE = 2**23


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
    moved = model.logprobs(normed[rows] * (1 + STEP), target).double()
    low = model.logprobs(low_normed[rows], target, precision=side.low).double()
    vocab = model.config.vocab
    step = max(1, _LOGITS_AT_ONCE // len(target))
    noise = logprob_noise(
        (
            model.logits(normed[rows], start, min(start + step, vocab)).double()
            for start in range(0, vocab, step)
        ),
        model.target_logit(normed[rows], target).double(),
        exact,
        low,
        side.dtype,
        hidden=model.config.hidden,
    )
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
                "logit scale": (moved - exact)[:, None] / STEP,
                "offset": torch.ones_like(exact)[:, None],
            },
            noise=noise[:, None],
        )
    )
