"""Faults of which keys a token sees: group sizes in the causal limit, windows, padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from scripts.planted.attending import Attention, at_attention, shared_kv_heads
from scripts.planted.fault import Control, Form, ModelFault

if TYPE_CHECKING:
    import torch

WINDOW = 16
"""Keys of the window; 512 and 4096 in the reports."""
PADS, LEAK = 8, -7.0
"""Pad tokens, and what their scores get in place of minus infinity."""
FROM_WINDOW = r"positions (>= )?1[5-9]\b"


def _limit_by_group(a: Attention) -> torch.Tensor:
    import torch

    group, rows = a.q.shape[1] // a.k.shape[1], a.q.shape[2]
    # the row of this call, and not its position: a decode step has row 0 alone
    last = torch.arange(rows, device=a.q.device) // group + a.keys - rows
    keys = torch.arange(a.keys, device=a.q.device)
    return a.seeing(a.allowed() & (keys <= last[:, None]))


def _windowed(a: Attention) -> torch.Tensor:
    import torch

    keys = torch.arange(a.keys, device=a.q.device)
    return a.seeing(a.allowed() & (keys > a.positions[:, None] - WINDOW))


def _ring(a: Attention) -> torch.Tensor:
    import torch

    keys = torch.arange(a.keys, device=a.k.device)
    # each slot holds the newest key that was written to it
    newest = keys + (a.keys - 1 - keys) // WINDOW * WINDOW
    return a.own(k=a.k[:, :, newest], v=a.v[:, :, newest])


def _leak(a: Attention) -> torch.Tensor:
    import torch

    # the pads' own keys are not at hand: the first token's stand for them
    k, v = (one[:, :, :1].expand(-1, -1, PADS, -1) for one in (a.k, a.v))
    return a.with_keys(k, v, torch.full((1, PADS), LEAK))


def _in_all_layers(form: Form) -> Form:
    @contextmanager
    def everywhere(model: Any, layer: int) -> Iterator[None]:
        with ExitStack() as stack:
            for number in range(len(model.model.layers)):
                stack.enter_context(form(model, number))
            yield

    return everywhere


FAULTS: tuple[ModelFault, ...] = (
    ModelFault(
        name="causal-limit-divided-by-group",
        component="mask",
        operator="attention",
        point="attn.context",
        form=at_attention(_limit_by_group, needs=shared_kv_heads),
        reports=("Dao-AILab/flash-attention#2528",),
        description="A row sees keys up to its number divided by the heads of one KV head.",
        changes=0.1,
    ),
    ModelFault(
        name="window-on-every-layer",
        component="mask",
        operator="attention",
        point="attn.context",
        form=_in_all_layers(at_attention(_windowed)),
        reports=("vllm-project/vllm#49795",),
        description="Every layer attends to the last 16 tokens alone, where all should be full.",
        layers="all",
        sides=("rollout",),
        where=FROM_WINDOW,
        changes=0.6,
    ),
    ModelFault(
        name="window-on-a-full-layer",
        component="mask",
        operator="attention",
        point="attn.context",
        form=at_attention(_windowed),
        reports=("vllm-project/vllm#49795",),
        description="One layer that should be full attends to the last 16 tokens alone.",
        where=FROM_WINDOW,
        changes=0.6,
    ),
    ModelFault(
        name="kv-ring-read-past-its-end",
        component="mask",
        operator="attention",
        point="attn.context",
        form=at_attention(_ring, when="decode"),
        reports=("vllm-project/vllm#2064",),
        description="A ring of 16 keys is overwritten, and read as if it still held all of them.",
        passes="decode",
        sides=("rollout",),
        where=FROM_WINDOW,
        changes=0.6,
    ),
    ModelFault(
        name="decode-forgets-past-a-window",
        component="mask",
        operator="attention",
        point="attn.context",
        form=at_attention(_windowed, when="decode"),
        reports=("vllm-project/vllm#2064",),
        description="Decoding attends to the last 16 tokens alone.",
        passes="decode",
        sides=("rollout",),
        where=FROM_WINDOW,
        changes=0.6,
    ),
    ModelFault(
        name="padding-leaks-into-attention",
        component="mask",
        operator="attention",
        point="attn.context",
        form=at_attention(_leak),
        reports=("NVIDIA-NeMo/NeMo-Aligner#68",),
        description="Eight pad tokens are hidden by -7 in place of minus infinity.",
        sides=("trainer",),
        # a thousandth of the weight and less: bfloat16 rounds more away
        dtypes=("float32",),
        changes=0.9,
    ),
)

CONTROLS: tuple[Control, ...] = (
    Control(
        name="batch-padded",
        description="Sequences are padded and run together, with a right mask.",
        reports=("NVIDIA-NeMo/NeMo-Aligner#68",),
        layout="padded",
    ),
)

NOT_PLANTED: dict[str, str] = {}
