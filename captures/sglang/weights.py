"""What one SGLang process holds, as parts of a checkpoint's tensors.

SGLang packs q, k and v, gate and up, and the experts of a layer; pads the vocabulary; and cuts
across processes. Each module says itself how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerbisect.captures.sglang.info import experts_renumbered
from layerbisect.captures.weights.format import SCALE, Extent, Part
from layerbisect.captures.weights.names import plain_name

if TYPE_CHECKING:
    import torch

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
# kernels that want the experts in an order of their own
_REORDERING = ("use_triton_kernels", "use_flashinfer_trtllm_moe", "use_flashinfer_mxfp4_moe")


class NotLogical(Exception):
    """A tensor that is packed for a kernel; the message says how."""


@dataclass(frozen=True, slots=True)
class _Share:
    """One of the matrices packed into a tensor: ``held`` rows from ``start`` of ``total``."""

    name: str
    held: int
    start: int
    total: int


def weights_of(runner: Any) -> tuple[list[Part], dict[str, str]]:
    """Return the parts that this process holds, and why others that it holds are not among them.

    The parts are views: nothing is copied, and no process is asked.
    """
    parts: list[Part] = []
    left_out: dict[str, str] = {}
    block = getattr(getattr(runner.model, "quant_config", None), "weight_block_size", None)
    for path, module in runner.model.named_modules():
        own = list(module.named_parameters(recurse=False))
        left_out |= _riding_along(module, plain_name(path))
        for name, tensor in own:
            if getattr(tensor, "_skip_weight_check", False):
                # of the engine's own, such as the scales of its KV cache
                continue
            full = plain_name(f"{path}.{name}" if path else name)
            try:
                _check_packing(module, tensor, {n for n, _ in own})
                parts += _parts(runner, module, full, tensor, block)
            except NotLogical as why:
                left_out[full] = str(why)
    return parts, left_out


def _riding_along(module: Any, path: str) -> dict[str, str]:
    """Name the shared experts that an engine holds behind the routed ones."""
    routed = getattr(module, "_num_local_routed", None)
    if routed is None or routed == module.num_local_experts:
        return {}
    stem = f"{path.rpartition('.')[0]}.shared_experts"
    why = "held behind the routed experts"
    return {f"{stem}.{name}.weight": why for name in (*_GATE_UP, "down_proj")}


def _check_packing(module: Any, tensor: torch.Tensor, names: set[str]) -> None:
    if getattr(module, "use_intel_amx_backend", False):
        raise NotLogical("packed for AMX")
    if getattr(tensor, "is_shuffled", False):
        raise NotLogical("shuffled for a kernel")
    if getattr(tensor, "format_ue8m0", False):
        raise NotLogical("its scales are packed for a kernel")
    if tensor.itemsize == 1 and not any(n.endswith(SCALE) for n in names):
        raise NotLogical("quantised without scales by block")


def _parts(
    runner: Any, module: Any, full: str, tensor: torch.Tensor, block: Sequence[int] | None
) -> Iterator[Part]:
    stem, _, last = full.rpartition(".")
    kind = stem.rpartition(".")[2]
    # scales are counted in blocks
    unit = (int(block[0]), int(block[1])) if block and last.endswith(SCALE) else (1, 1)
    if last.startswith(("w13_weight", "w2_weight")):
        yield from _experts(runner, module, stem, last, tensor, unit)
    elif hasattr(module, "shard_indices"):
        yield _vocabulary(module, full, tensor)
    elif kind == "qkv_proj":
        yield from _rows(stem.removesuffix(kind), last, tensor, _qkv(module), unit[0])
    elif kind == "gate_up_proj":
        rank, size = _place(module.tp_group)
        held = [n // size for n in module.output_sizes]
        shares = [
            _Share(name, n, rank * n, n * size) for name, n in zip(_GATE_UP, held, strict=True)
        ]
        yield from _rows(stem.removesuffix(kind), last, tensor, shares, unit[0])
    else:
        yield Part.of(full, tensor, _cut(module, tensor))


def _cut(module: Any, tensor: torch.Tensor) -> dict[int, Extent]:
    """Say how an unpacked linear layer's weight, bias or scale is cut."""
    if not hasattr(module, "tp_group"):
        return {}
    rank, size = _place(module.tp_group)
    if size == 1:
        return {}
    if hasattr(module, "input_size_per_partition"):
        # its bias is whole, and added by one process
        dim = 1
    elif hasattr(module, "output_size_per_partition"):
        dim = 0
    else:
        return {}
    if tensor.ndim <= dim:
        return {}
    held = int(tensor.shape[dim])
    return {dim: (rank * held, (rank + 1) * held, held * size)}


def _place(group: Any) -> tuple[int, int]:
    """Rank and size in a group of SGLang's; None is no group."""
    return (0, 1) if group is None else (int(group.rank_in_group), int(group.world_size))


def _qkv(module: Any) -> list[_Share]:
    rank, size = _place(module.tp_group)
    kv_rank, _ = _place(module.kv_tp_group)
    queries = module.num_heads * module.head_size
    shares = [_Share("q_proj", queries, rank * queries, queries * size)]
    # with more processes than KV heads, neighbours hold copies of one head
    first = kv_rank // module.num_kv_head_replicas * module.num_kv_heads
    for name, width in (("k_proj", module.head_size), ("v_proj", module.v_head_size)):
        held = module.num_kv_heads * width
        shares.append(_Share(name, held, first * width, module.total_num_kv_heads * width))
    return shares


def _rows(
    stem: str, last: str, tensor: torch.Tensor, shares: Sequence[_Share], unit: int
) -> Iterator[Part]:
    """Split a packed tensor by rows; ``unit`` rows are one of a scale's."""
    if any(n % unit for s in shares for n in (s.held, s.start)):
        raise NotLogical(f"blocks of {unit} rows straddle the matrices that are packed in it")
    sizes = [s.held // unit for s in shares]
    if sum(sizes) != tensor.shape[0]:
        raise NotLogical(f"packed as {list(tensor.shape)}, of which {sizes} rows were expected")
    for share, view in zip(shares, tensor.split(sizes), strict=True):
        start, total = share.start // unit, -(-share.total // unit)
        cut = {0: (start, start + len(view), total)} if len(view) != total else {}
        yield Part.of(f"{stem}{share.name}.{last}", view, cut)


def _vocabulary(module: Any, full: str, tensor: torch.Tensor) -> Part:
    """Leave out the padding, and rows that were added for adapters."""
    at = module.shard_indices
    start, stop = int(at.org_vocab_start_index), int(at.org_vocab_end_index)
    total = int(module.org_vocab_size)
    cut = {} if stop - start == total else {0: (start, stop, total)}
    return Part.of(full, tensor[: stop - start], cut)


def _experts(
    runner: Any, module: Any, stem: str, last: str, tensor: torch.Tensor, unit: tuple[int, int]
) -> Iterator[Part]:
    import torch

    if experts_renumbered(runner):
        raise NotLogical("the engine numbers places of experts, not experts")
    wanted = next((name for name in _REORDERING if getattr(module, name, False)), None)
    if wanted or torch.version.hip:
        raise NotLogical(f"packed for a kernel ({wanted or 'aiter'})")
    up_first = bool(getattr(module.quant_method, "load_up_proj_weight_first", False))
    packed = last.startswith("w13")
    dim = 0 if packed else 1
    inner = module.intermediate_size_per_partition // unit[dim]
    hidden = -(-module.hidden_size // unit[1 - dim])
    expected = (2 * inner, hidden) if packed else (hidden, inner)
    if tuple(tensor.shape[1:]) != expected:
        raise NotLogical(f"experts of {list(tensor.shape[1:])}, where {list(expected)} is expected")
    size, rank = int(module.moe_tp_size), int(module.moe_tp_rank)
    cut = {dim: (rank * inner, (rank + 1) * inner, inner * size)} if size > 1 else {}
    names = (_GATE_UP[::-1] if up_first else _GATE_UP) if packed else ("down_proj",)
    suffix = last.removeprefix("w13_" if packed else "w2_")
    # shared experts that ride along come last
    routed = int(getattr(module, "_num_local_routed", module.num_local_experts))
    first = int(module.moe_ep_rank) * routed
    for place, matrix in enumerate(tensor[:routed]):
        for name, view in zip(names, matrix.chunk(len(names)), strict=True):
            yield Part.of(f"{stem}.{first + place}.{name}.{suffix}", view, cut)
