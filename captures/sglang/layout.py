"""Which part of a model one process of an SGLang server holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerbisect.captures.format import TensorHeader
from layerbisect.captures.points import Point


@dataclass(frozen=True, slots=True)
class Layout:
    """This process's place among those that serve the model; sizes are counts of processes.

    ``attention_rank`` of ``attention_size`` processes share a row's heads; ``rank`` and ``world``
    number every process that writes the capture. ``tokens_travel`` says that tokens are sent to
    the processes that hold their experts, and not every token to all.
    """

    rank: int
    world: int
    tensor_rank: int
    tensor_size: int
    attention_rank: int
    attention_size: int
    pipeline_size: int
    data_size: int
    expert_size: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens_travel: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes as a capture names them."""
        return {
            "tp": self.tensor_size,
            "pp": self.pipeline_size,
            "dp": self.data_size,
            "ep": self.expert_size,
        }

    @property
    def mlp_rows_differ(self) -> bool:
        """Say whether the MLP works on other rows than attention does: other groups', or a part."""
        return self.attention_size != self.tensor_size or self.tokens_travel

    def partial(self, suffix: str) -> bool:
        """Say whether each rank holds only a part of the sum."""
        return suffix in ("attn.out", "mlp.out") and self.attention_size > 1

    def header(self, point: Point) -> TensorHeader:
        """Describe which part of ``point`` this process holds."""
        rank, size = self.attention_rank, self.attention_size
        if self.partial(point.suffix):
            return TensorHeader(point.dims, partial_sum=(rank, size), how="partial_sum")
        for dim, total in (("head", self.heads), ("kv_head", self.kv_heads)):
            if dim in point.dims and size > 1:
                # with more processes than KV heads, neighbours hold copies of one head
                held = max(1, total // size)
                start = rank * total // size // held * held
                return TensorHeader(point.dims, shards={dim: (start, start + held, total)})
        return TensorHeader(point.dims)


def layout_of(runner: Any) -> Layout:
    """Read this process's place from SGLang's runtime context."""
    from sglang.srt.runtime_context import get_parallel

    parallel, config = get_parallel(), runner.model_config
    data = max(1, parallel.dp_size // parallel.attn_dp_size)
    within = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    each = parallel.pp_size * parallel.tp_size
    return Layout(
        rank=(parallel.dp_rank or 0) * each + within if data > 1 else within,
        world=data * each,
        tensor_rank=parallel.tp_rank,
        tensor_size=parallel.tp_size,
        attention_rank=parallel.attn_tp_rank,
        attention_size=parallel.attn_tp_size,
        pipeline_size=parallel.pp_size,
        data_size=data * parallel.attn_dp_size,
        expert_size=parallel.moe_ep_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        tokens_travel=runner.server_args.moe_a2a_backend not in (None, "none"),
    )
