"""Faults of rotary embedding, of positions, and of the order of q/k norm and rotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_attention import angles, rope_base, rotated
from layerbisect.fault_tools import attribute_replaced, forward_replaced
from scripts.planted.fault import Control, ModelFault

if TYPE_CHECKING:
    import torch

LINEAR_FACTOR = 4.0
YARN_FACTOR, YARN_FAST, YARN_SLOW, YARN_LENGTH = 32.0, 32.0, 1.0, 4096
ATTENTION_FACTOR = 0.1 * math.log(16) + 1
COMPRESSION, UNCOMPRESSED = 4, 16
PADDING = 3


def _yarn(base: float, half: int, rounded: bool) -> torch.Tensor:
    """By how much YaRN slows each pair of channels down: float64 [half].

    Between two bounds, which are numbers of pairs, the factor goes from 1 to YARN_FACTOR.
    """
    import torch

    def bound(turns: float) -> float:
        return half * math.log(YARN_LENGTH / (turns * 2 * math.pi)) / math.log(base)

    low, high = bound(YARN_FAST), bound(YARN_SLOW)
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    pairs = torch.arange(half, dtype=torch.float64)
    ramp = ((pairs - max(low, 0)) / (min(high, 2 * half - 1) - max(low, 0))).clamp(0, 1)
    return ramp / YARN_FACTOR + (1 - ramp)


def yarn_bounds_rounded(model: Any, layer: int) -> AbstractContextManager[None]:
    frequencies = model.model.rotary_emb.inv_freq
    base = float(model.config.rope_parameters["rope_theta"])
    # the model has no YaRN: what rounding its bounds changes is planted alone
    right, wrong = (_yarn(base, len(frequencies), rounded) for rounded in (False, True))
    changed = (frequencies.double() * (wrong / right).to(frequencies.device)).float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        return own(q, k, *angles(model, changed, positions, cos.dtype))

    return rotated(model, layer, rotate)


def _everywhere(
    model: Any, change: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]
) -> AbstractContextManager[None]:
    """Let every layer's angles come from changed frequencies (float32 [pair]) and positions."""
    rotary = model.model.rotary_emb

    def forward(own: Any, hidden: Any, position_ids: Any) -> Any:
        frequencies, positions = change(rotary.inv_freq.float(), position_ids)
        return angles(model, frequencies, positions, hidden.dtype)

    return forward_replaced(rotary, forward)


def scaling_ignored(model: Any, layer: int) -> AbstractContextManager[None]:
    # the model has no scaling: what is planted is the ratio of both angles
    return _everywhere(model, lambda frequencies, at: (frequencies * LINEAR_FACTOR, at))


def attention_factor_of_one(model: Any, layer: int) -> AbstractContextManager[None]:
    rotary, frequencies = model.model.rotary_emb, model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        # the model has no factor, which then is right; the wrong one is as much too small
        factor = rotary.attention_scaling / ATTENTION_FACTOR
        with attribute_replaced(rotary, "attention_scaling", factor):
            return own(q, k, *angles(model, frequencies, positions, cos.dtype))

    return rotated(model, layer, rotate)


def compressed_positions(model: Any, layer: int) -> AbstractContextManager[None]:
    import torch

    frequencies = model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        at = torch.where(positions < UNCOMPRESSED, positions, positions // COMPRESSION)
        wrong = angles(model, frequencies, at, cos.dtype)
        return own(q, k, cos, sin)[0], own(q, k, *wrong)[1]

    return rotated(model, layer, rotate)


def decoded_past_the_padding(model: Any, layer: int) -> AbstractContextManager[None]:
    frequencies = model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        if q.shape[2] == 1:
            cos, sin = angles(model, frequencies, positions + PADDING, cos.dtype)
        return own(q, k, cos, sin)

    return rotated(model, layer, rotate)


def padding_counted(model: Any, layer: int) -> AbstractContextManager[None]:
    return _everywhere(model, lambda frequencies, at: (frequencies, at + PADDING))


@contextmanager
def norm_after_rope(model: Any, layer: int) -> Iterator[None]:
    attention = model.model.layers[layer].self_attn
    if not hasattr(attention, "q_norm"):
        raise LayerBisectError(
            f"norm-after-rope needs a model with q/k norms; {type(model).__name__} has none"
        )
    norms = [attention.q_norm, attention.k_norm]
    q_norm, k_norm = (norm.forward for norm in norms)

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        q, k = own(q, k, cos, sin)
        return q_norm(q), k_norm(k)

    with (
        forward_replaced(norms[0], lambda own, x: x),
        forward_replaced(norms[1], lambda own, x: x),
        rotated(model, layer, rotate),
    ):
        yield


FAULTS: tuple[ModelFault, ...] = (
    ModelFault(
        name="yarn-bounds-rounded",
        component="rope",
        operator="rope",
        point="attn.q",
        form=yarn_bounds_rounded,
        reports=("vllm-project/vllm#27722",),
        description="YaRN's correction range is rounded to whole channels: a few turn too fast "
        "or too slowly",
        changes=0.9,
    ),
    ModelFault(
        name="rope-scaling-ignored",
        component="rope",
        operator="rope",
        point="attn.q",
        form=scaling_ignored,
        reports=("modelscope/ms-swift#6056",),
        description="a linear scaling of positions is dropped: every layer turns four times as far",
        layers="all",
        changes=0.9,
    ),
    ModelFault(
        name="rope-parameters-unread",
        component="rope",
        operator="rope",
        point="attn.q",
        form=rope_base,
        reports=("modelscope/ms-swift#6056",),
        description="what the configuration says of RoPE is not read: a default base is used",
        changes=0.9,
    ),
    ModelFault(
        name="rope-attention-factor-of-one",
        component="rope",
        operator="rope",
        point="attn.q",
        form=attention_factor_of_one,
        reports=("turboderp-org/exllamav3#259",),
        description="cosine and sine lack YaRN's attention factor, 1.277",
        changes=1.0,
    ),
    ModelFault(
        name="compressed-key-positions",
        component="positions",
        operator="rope",
        point="attn.k",
        form=compressed_positions,
        reports=("AMD-AGI/Primus#930",),
        description="from position 16 on keys are rotated by a fourth of their position, as are "
        "compressed ones",
        where=rf"positions >= {UNCOMPRESSED}\b",
        changes=0.5,
    ),
    ModelFault(
        name="decode-counts-the-padding",
        component="positions",
        operator="rope",
        point="attn.q",
        form=decoded_past_the_padding,
        reports=("huggingface/trl#469",),
        description="decode counts positions from the left padding, its prefill from the prompt",
        passes="decode",
        where=r"decode rows|positions >= 8\b",
        changes=0.8,
    ),
    ModelFault(
        name="qk-norm-after-rope",
        component="qk_norm",
        operator="norm",
        point="attn.q",
        form=norm_after_rope,
        reports=("vllm-project/vllm-metal#660",),
        description="queries and keys are normed after they are rotated, not before",
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="positions-count-the-padding",
        description="positions begin at 3, as under left padding: only distances count",
        reports=("huggingface/trl#469",),
        form=padding_counted,
    ),
)
