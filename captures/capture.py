"""Capture a trainer's model while a context is open, whichever engine it is of."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.model import is_megatron

if TYPE_CHECKING:
    from layerbisect.captures.megatron.capture import MegatronCapture
    from layerbisect.captures.megatron.model import Model
    from layerbisect.captures.store import Capture
    from layerbisect.captures.transformers_capture import ModelCapture


def capture(
    model: Model,
    directory: str | PathLike[str],
    *,
    points: str | Sequence[str] = "coarse",
    label: str = "trainer",
    names: Sequence[str] | None = None,
    salts: Sequence[str] | None = None,
    vocab: int | None = None,
    routes: str | PathLike[str] | Capture | None = None,
    route_weights: bool = False,
    only: str | PathLike[str] | Capture | None = None,
) -> ModelCapture | MegatronCapture:
    """Capture a trainer's model over every forward call inside the context.

    ::

        with layerbisect.capture(model, "captures/trainer"):
            model(input_ids=ids, attention_mask=mask, position_ids=positions)

    The model computes the same bits as without.

    With transformers, whole sequences, padded (``attention_mask``) or packed (``position_ids`` that
    restart at 0), a prefill in chunks, decode steps over a KV cache and ``model.generate`` are all
    recorded; calls that share a cache continue its sequences.

    In a Megatron-core job every rank enters the context with the same directory and its own list of
    model chunks, and runs its forward as ever, with ``input_ids`` on every pipeline stage. Padded
    and packed (``PackedSeqParams``) sequences, tensor, sequence, context, pipeline and expert
    parallelism are recorded, each rank's part by itself: no collective is added.

    A training forward is recorded, too, and what its backward computes again (gradient
    checkpointing, ``recompute_granularity``) is kept apart from it, if the backward runs inside the
    context. Gradients are the same bits as without.

    Args:
        model: a Llama, Qwen3 or Qwen3-MoE causal language model of transformers, or Megatron-core's
            GPTModel; wrapped (DDP, Float16Module, PEFT) or not, and Megatron's as a list of chunks.
        directory: where to write; a new directory, or an empty one.
        points: patterns as :func:`layerbisect.captures.points.select` takes them.
        label: what to call this side in a verdict.
        names: names of the sequences in the order in which they begin, ``s0``, ``s1``, ... without.
            A name that already stands for other tokens is told apart by a suffix, with a warning.
            Data-parallel replicas count each for itself: ``dp1.s0``.
        salts: what else is in the scoring context of each sequence (an adapter, an image).
        vocab: tokens in the vocabulary, where Megatron pads it; the padding is left out.
        routes: a capture, or its directory, whose experts the model must use for the tokens that
            both have seen; the weights are those that the model's own router gives these experts.
            The computation is another one then, so call the model without gradients.
        route_weights: use that capture's weights, too.
        only: a capture, or its directory; of a Megatron job's batches only the sequences that it
            holds, too, are recorded.

    Raises:
        LayerBisectError: a model that cannot be captured, a pattern that matches nothing, or routes
            that are not those of all the model's layers with experts.
        CaptureError: on entering, where the directory already holds something.

    Warns:
        CaptureWarning: once, on leaving, if something kept the capture from being whole. A capture
            whose context ended by an exception stays unfinished; its passes can be read.
    """
    if not isinstance(points, str) and not (
        isinstance(points, Sequence) and all(isinstance(one, str) for one in points)
    ):
        raise LayerBisectError(
            f"points is {points!r}; give a pattern such as 'coarse', or a list of patterns"
        )
    if not isinstance(directory, str | PathLike) or not fspath(directory):
        raise LayerBisectError(
            f"the capture's directory is {directory!r}; name a new directory, or an empty one"
        )
    if is_megatron(model):
        from layerbisect.captures.megatron.capture import MegatronCapture

        return MegatronCapture(
            model,
            directory,
            points=points,
            label=label,
            names=names,
            salts=salts,
            vocab=vocab,
            routes=routes,
            route_weights=route_weights,
            only=only,
        )
    from layerbisect.captures.transformers_capture import ModelCapture

    if not isinstance(model, Sequence) and not hasattr(model, "modules"):
        raise LayerBisectError(
            f"got {model!r:.40} for the model; give a transformers model or Megatron's GPTModel"
        )
    if vocab is not None or only is not None:
        raise LayerBisectError(
            f"got vocab={vocab} and only={only}, which are for Megatron-core's GPTModel, and a "
            f"{type(model).__name__}; leave them out"
        )
    if isinstance(model, Sequence):
        raise LayerBisectError(
            f"got a list of {len(model)} models and no Megatron GPTModel in the first; give one "
            "model, or a Megatron job's own list of chunks"
        )
    return ModelCapture(
        model,
        directory,
        points=points,
        label=label,
        names=names,
        salts=salts,
        routes=routes,
        route_weights=route_weights,
    )
