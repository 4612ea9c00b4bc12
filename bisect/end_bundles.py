"""Operator bundles of what belongs to no layer: the final norm and the head."""

from __future__ import annotations

from dataclasses import replace

import torch

from layerbisect.bisect.bundle_rows import described, held, stored
from layerbisect.bisect.bundles import ROWS
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.weights import EMBED, FINAL_NORM, HEAD
from layerbisect.captures.points import boundary
from layerbisect.kernels.judging.residuals import unique_rows
from layerbisect.kernels.replay.bundle import Bundle, Call


def end_bundles(model: ReferenceModel, side: Side, *, rows: int = ROWS) -> list[Bundle]:
    """Make bundles of the final norm and of the head, as far as ``side`` shows them."""
    stream_name = boundary(model.config.num_layers, model.config.num_layers)
    stream, normed = side.read(stream_name), side.read("final_norm")
    made = []
    norm = Call(
        "rms_norm",
        {"x": stream_name, "weight": "norm.weight"},
        ("final_norm",),
        {"eps": model.config.eps},
    )
    weight = model.tensor(FINAL_NORM)
    if stream is not None and normed is not None:
        kept = side.fresh
        kept = kept[unique_rows(stream[kept])][:rows]
        bundle = described(side, "final_norm", None, "norm", ("norm",), kept, kept)
        made.append(
            replace(
                bundle,
                calls=(norm,),
                inputs={stream_name: stored(side, stream[kept])},
                weights={"norm.weight": held(side, weight)},
                captured={"final_norm": stored(side, normed[kept])},
            )
        )
    if normed is None and stream is None:
        return made
    scores = side.scores()
    kept = torch.nonzero(torch.from_numpy(side.chains.scored) & ~torch.isnan(scores)).squeeze(1)
    kept = kept[:rows]
    if not len(kept):
        return made
    head = Call("linear", {"x": "final_norm", "weight": "lm_head.weight"}, ("logits",))
    score = Call("logprob", {"logits": "logits", "targets": "targets"}, ("logprob",))
    inputs, weights = (
        {},
        {"lm_head.weight": held(side, model.tensor(EMBED if model.config.tied else HEAD))},
    )
    if normed is not None:
        calls: tuple[Call, ...] = (head, score)
        inputs["final_norm"] = stored(side, normed[kept])
    else:
        assert stream is not None
        calls = (norm, head, score)
        inputs[stream_name] = stored(side, stream[kept])
        weights["norm.weight"] = held(side, weight)
    inputs["targets"] = torch.from_numpy(side.chains.target)[kept]
    covers = ("head",) if normed is not None else ("norm", "head")
    bundle = described(side, "logprob", None, "head", covers, kept, kept)
    captured = {"logprob": scores[kept]}
    made.append(replace(bundle, calls=calls, inputs=inputs, weights=weights, captured=captured))
    return made
