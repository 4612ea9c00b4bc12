"""Compute the numbers of the SmolLM2 case from its captures, and keep them in files of ``work``.

The long computations keep log-probs by token and not means, so that the page can be made again at
once. All arrays have one value a response token, in the order of the layout.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import layerbisect
from layerbisect.bisect.ends import end_errors
from layerbisect.bisect.join import join
from layerbisect.bisect.own_error import own_errors
from layerbisect.bisect.precision import FULL, Precision
from layerbisect.bisect.progress import Progress
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.chains import Chains
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.kernels.rounding import rounded
from scripts.smollm2_engines import Conversation, write_json

KINDS = ("residual", "head", "norm", "linear", "attention")
"""Operator kinds that a dense model has."""
FUSED = "fused: "
"""Begins the names of the runs whose norms are fused with the sum before them, as SGLang's are."""
BF16 = torch.bfloat16

Array = NDArray[np.float64]
Advance = Callable[[int, int], None]


def response_scores(directory: Path, requests: str, conversations: Sequence[Conversation]) -> Array:
    """Read the captured log-probs (nat) of all response tokens of requests ``<requests>-<number>``.

    Raises LayerBisectError where a token was not scored.
    """
    capture = Capture.open(directory, requests=f"{requests}-*")
    rows = capture.scores.rows
    names = [capture.sequences[number].name for number in rows.sequence]
    found = dict(
        zip(zip(names, rows.position.tolist(), strict=True), capture.scores.logprob, strict=True)
    )
    wanted = [
        (f"{requests}-{number}", position)
        for number, one in enumerate(conversations)
        for position in range(len(one.prompt), len(one.tokens))
    ]
    missing = [place for place in wanted if place not in found]
    if missing:
        raise LayerBisectError(f"{directory} has no log-prob of {missing[0]}")
    return np.array([found[place] for place in wanted])


@dataclass(frozen=True)
class Layout:
    """Captures of the same tokens laid out alike, for one reference to run on each.

    Only response tokens are scored. ``place`` int [token] says which response token (over all
    conversations) each scored place of the layout predicts: an answer's last token is left out, as
    a generation never feeds it back.
    """

    sides: Mapping[str, Side]
    place: NDArray[np.intp]

    @property
    def chains(self) -> Chains:
        """Sequences, end to end."""
        return next(iter(self.sides.values())).chains

    @property
    def scored(self) -> torch.Tensor:
        """Places of the layout that are scored (bool [flat])."""
        return torch.from_numpy(self.chains.scored)

    @property
    def target(self) -> torch.Tensor:
        """The token that follows each place (int64 [flat]), -1 where it is not scored."""
        return torch.from_numpy(self.chains.target)


def lay_out(
    captures: Mapping[str, Capture], conversations: Sequence[Conversation], dtype: torch.dtype
) -> Layout:
    """Lay out captures by the rows of the first, which no other may lack."""
    (name, first), *others = captures.items()
    joined = {label: join(first, other) for label, other in others}
    one = next(iter(joined.values()))
    if any(not np.array_equal(one.keys, other.keys) for other in joined.values()):
        raise LayerBisectError("the captures do not hold the same tokens; make them again")
    chains, place = _of_answers(one.chains, conversations)
    sides = {name: Side(first, chains, one.rollout[chains.row], dtype)}
    for label, other in others:
        sides[label] = Side(other, chains, joined[label].trainer[chains.row], dtype)
    return Layout(sides, place)


def _of_answers(
    chains: Chains, conversations: Sequence[Conversation]
) -> tuple[Chains, NDArray[np.intp]]:
    """Drop the targets that are tokens of a prompt."""
    target = chains.target.copy()
    number = np.full(len(target), -1)
    begins = np.cumsum([0, *(len(one.answer) for one in conversations)])
    start = 0
    for length in chains.lengths:
        tokens = chains.token[start : start + length].tolist()
        which = next(n for n, one in enumerate(conversations) if one.tokens[:length] == tokens)
        prompt = len(conversations[which].prompt)
        target[start : start + prompt - 1] = -1
        answer = np.arange(length - prompt)
        number[start + prompt - 1 : start + length - 1] = begins[which] + answer
        start += length
    kept = replace(chains, target=target)
    return kept, number[kept.scored].astype(np.intp)


def scan(model: ReferenceModel, layout: Layout, advance: Advance) -> dict[str, Array]:
    """Read every side's state out in log-probs, at each boundary and after the final norm.

    Returns [boundary, token] a side: the layers' inputs, the last one's output, the final norm, and
    what the engine recorded.
    """
    layers = model.config.num_layers
    position = torch.from_numpy(layout.chains.position)
    scored, found = layout.scored, {}
    for done, (label, side) in enumerate(layout.sides.items()):
        rows = []
        for layer in range(layers + 1):
            stream = side.stream(layer, layers)
            assert stream is not None
            end = model.tail(layer, stream, position, layout.chains.lengths, layout.target)
            rows.append(end[scored])
            advance(done * (layers + 1) + layer + 1, len(layout.sides) * (layers + 1))
        normed = side.read("final_norm")
        assert normed is not None
        rows += [model.logprobs(normed, layout.target)[scored], side.scores()[scored]]
        found[label] = torch.stack([row.double() for row in rows]).numpy()
    return found


def budget_runs() -> dict[str, Precision]:
    """Name the runs of the reference that make the budget: what rounds to bfloat16 in each."""
    low = Precision.all_in(BF16)
    apart = {
        "fp32": FULL,
        "bf16": low,
        **{f"only {kind}": Precision.only(kind, BF16) for kind in KINDS},
        **{f"all but {kind}": Precision.all_but(kind, BF16) for kind in KINDS},
        "all but head and residual": replace(low, head=None, residual=None),
    }
    # what a fused norm makes no difference to is not run again
    fused = [name for name in apart if not name.endswith(("fp32", "linear", "attention"))]
    fused = [name for name in fused if name not in ("only head", "all but norm")]
    return apart | {f"{FUSED}{name}": apart[name] for name in fused}


def budget(model: ReferenceModel, layout: Layout, advance: Advance) -> dict[str, Array]:
    """Run the reference in every way of :func:`budget_runs`; log-probs [token] of each."""
    runs, found = budget_runs(), {}
    position = torch.from_numpy(layout.chains.position)
    embedded = model.embed(torch.from_numpy(layout.chains.token))
    for done, (name, precision) in enumerate(runs.items(), 1):
        if name.startswith(FUSED):
            end = _fused(model, layout, embedded, precision)
        else:
            end = model.tail(
                0, embedded, position, layout.chains.lengths, layout.target, precision=precision
            )
        found[name] = end[layout.scored].double().numpy()
        advance(done, len(runs))
    return found


def _fused(
    model: ReferenceModel, layout: Layout, stream: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """Run the whole reference with each norm fused with the sum that it normalises.

    SGLang's norms take the sum before it is rounded, and round once where the others round twice.
    Returns log-probs [flat].
    """
    position = torch.from_numpy(layout.chains.position)
    total = stream
    for layer in range(model.config.num_layers):
        normed = rounded(model.attn_norm(layer, total), precision.norm)
        q, k, v = model.qkv(layer, normed, position, precision=precision)
        context = model.attention(layer, q, k, v, layout.chains.lengths, precision=precision)
        total = stream + model.attn_out(layer, context, precision=precision)
        stream = rounded(total, precision.residual)
        normed = rounded(model.mlp_norm(layer, total), precision.norm)
        total = stream + model.mlp(layer, normed, precision=precision)
        stream = rounded(total, precision.residual)
    normed = rounded(model.final_norm(total), precision.norm)
    return model.logprobs(normed, layout.target, precision=precision)


def judge(model: ReferenceModel, layout: Layout, advance: Advance) -> list[dict[str, Any]]:
    """Judge every operator of every side on its own captured input."""
    found = []
    layers = model.config.num_layers
    for done, (label, side) in enumerate(layout.sides.items()):
        errors = []
        for layer in range(layers):
            errors += own_errors(model, side, [layer])
            advance(done * layers + layer + 1, len(layout.sides) * layers)
        errors += end_errors(model, side)
        found += [
            {
                "side": label,
                "point": e.point,
                "layer": e.layer,
                "operator": e.operator,
                "rows": e.rows,
                "p95": e.ratio,
                "median": e.median,
                "floor": e.floor,
                "excess": e.excess,
                "convicted": e.convicted,
                "fits": [f"{f.name} {f.coefficient:+.3g} (z {f.z:.1f})" for f in e.fits],
            }
            for e in errors
        ]
    return found


def verdict(
    rollout: Capture, trainer: Capture, model: Path, path: Path, progress: Progress
) -> None:
    """Bisect, and keep the verdict as data (``path``) and as printed (``.txt`` beside it)."""
    from rich.console import Console

    from layerbisect.terminal.verdict import render_verdict

    found = layerbisect.bisect(rollout, trainer, model=model, probe="search", progress=progress)
    text = io.StringIO()
    render_verdict(found, Console(file=text, width=100, color_system=None))
    path.with_suffix(".txt").write_text(text.getvalue())
    write_json(path, found.to_json())


def score_bias(model: ReferenceModel, layout: Layout) -> dict[str, float]:
    """Score one set of float32 logits in several ways: each one's signed mean error (nat)."""
    side = list(layout.sides.values())[-1]
    normed = side.read("final_norm")
    assert normed is not None
    weight = model.logits(torch.eye(model.config.hidden), 0, model.config.vocab).T.float()
    target = layout.target[layout.scored, None]
    logits = normed[layout.scored].float() @ weight.T
    exact = torch.log_softmax(logits.double(), -1).gather(-1, target)
    ways = {
        "log(softmax)": torch.softmax(logits, -1).gather(-1, target).log(),
        "log_softmax": torch.log_softmax(logits, -1).gather(-1, target),
        "logit - logsumexp": logits.gather(-1, target) - torch.logsumexp(logits, -1, keepdim=True),
    }
    return {name: float((found.double() - exact).mean()) for name, found in ways.items()}
