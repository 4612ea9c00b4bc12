"""What faults of weights are made with: where weights are, other values for them, 8-bit rounding.

Tensors are weights of linear maps, [out, in], or of all experts at once, [expert, out, in].
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from layerbisect.fault_tools import parameter_replaced

Place = tuple[Any, str]
"""A module and the name of a parameter of its own."""

BLOCK = 16
"""Rows and columns that share a scale: 128 in real checkpoints, less here for there to be many."""
_LARGEST = 448.0
"""Largest value of float8 e4m3."""


@contextmanager
def weights_replaced(values: Iterable[tuple[Place, torch.Tensor]]) -> Iterator[None]:
    """Put other values in the place of parameters, in the dtype that each has."""
    with ExitStack() as stack:
        for (owner, name), value in values:
            dtype = getattr(owner, name).dtype
            stack.enter_context(parameter_replaced(owner, name, value.to(dtype).contiguous()))
        yield


def held(place: Place) -> torch.Tensor:
    """Return a parameter's values in float32."""
    owner, name = place
    values: torch.Tensor = getattr(owner, name).detach().float()
    return values


def attention_places(model: Any, layer: int, parts: str = "qkvo") -> list[Place]:
    """Weights of a layer's projections, such as those of q and v for ``qv``."""
    attention = model.model.layers[layer].self_attn
    return [(getattr(attention, f"{part}_proj"), "weight") for part in parts]


def mlp_places(model: Any, layer: int) -> list[Place]:
    """Weights of a layer's MLP: gate, up and down; of experts, gate and up are one."""
    mlp = model.model.layers[layer].mlp
    if hasattr(mlp, "experts"):
        return [(mlp.experts, "gate_up_proj"), (mlp.experts, "down_proj")]
    return [(getattr(mlp, f"{part}_proj"), "weight") for part in ("gate", "up", "down")]


def all_places(model: Any) -> list[Place]:
    """All parameters; a head that shares the embedding's is there as well."""
    found = [
        (model.get_submodule(path), name)
        for path, _, name in (full.rpartition(".") for full, _ in model.named_parameters())
    ]
    if model.lm_head.weight is model.model.embed_tokens.weight:
        found.append((model.lm_head, "weight"))
    return found


def drawn(like: torch.Tensor, seed: str, *size: int) -> torch.Tensor:
    """Draw normal numbers of ``size``, by default as ``like``, always the same for a seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(size or tuple(like.shape), generator=generator).to(like.device)


def low_rank(weight: torch.Tensor, seed: str, share: float, rank: int = 2) -> torch.Tensor:
    """Draw a LoRA update of a weight, whose norm is ``share`` of the weight's."""
    *experts, out, into = weight.shape
    b = drawn(weight, f"{seed}/b", *experts, out, rank)
    a = drawn(weight, f"{seed}/a", *experts, rank, into)
    update = b @ a
    norms = [torch.linalg.matrix_norm(one, keepdim=True) for one in (weight, update)]
    scaled: torch.Tensor = update * (share * norms[0] / norms[1])
    return scaled


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scale of each block, with which its largest value becomes that of e4m3.

    Returns [..., blocks of rows, blocks of columns].
    """
    matrices = weight.abs().reshape(-1, *weight.shape[-2:])
    largest = torch.nn.functional.max_pool2d(matrices, BLOCK, ceil_mode=True)
    scales = largest.clamp(min=1e-10) / _LARGEST
    return scales.reshape(*weight.shape[:-2], *scales.shape[-2:])


def quantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the 8-bit values of a weight, in float32 and still to be multiplied by a scale."""
    coarse = (weight / spread(scales, weight)).clamp(-_LARGEST, _LARGEST)
    return coarse.to(torch.float8_e4m3fn).float()


def spread(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Give each element of a weight its block's scale."""
    rows, columns = weight.shape[-2:]
    whole = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return whole[..., :rows, :columns]
