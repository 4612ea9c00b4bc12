"""Where a process stands in a Megatron job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Coordinate = tuple[int, int]
"""Rank and size in one kind of parallelism."""


@dataclass(frozen=True, slots=True)
class Place:
    """One process's coordinates; ``world`` is its rank and the size of the whole job.

    ``data`` counts replicas of the model that are given other tokens, context parallelism left
    out; experts may be spread over them.
    """

    world: Coordinate = (0, 1)
    tensor: Coordinate = (0, 1)
    pipeline: Coordinate = (0, 1)
    context: Coordinate = (0, 1)
    data: Coordinate = (0, 1)
    expert: Coordinate = (0, 1)
    expert_tensor: Coordinate = (0, 1)
    sequence_parallel: bool = False

    @classmethod
    def here(cls, config: Any) -> Place:
        """Read this process's place from Megatron's parallel state; ``config`` is the model's."""
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return cls()
        import torch

        return cls(
            world=(torch.distributed.get_rank(), torch.distributed.get_world_size()),
            tensor=(
                state.get_tensor_model_parallel_rank(),
                state.get_tensor_model_parallel_world_size(),
            ),
            pipeline=(
                state.get_pipeline_model_parallel_rank(),
                state.get_pipeline_model_parallel_world_size(),
            ),
            context=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
            data=(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
            expert=(
                state.get_expert_model_parallel_rank(),
                state.get_expert_model_parallel_world_size(),
            ),
            expert_tensor=(
                state.get_expert_tensor_parallel_rank(),
                state.get_expert_tensor_parallel_world_size(),
            ),
            sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        """Parallel sizes as a capture names them."""
        named = {
            "tp": self.tensor,
            "pp": self.pipeline,
            "cp": self.context,
            "dp": self.data,
            "ep": self.expert,
            "etp": self.expert_tensor,
        }
        return {name: size for name, (_, size) in named.items()}

    def name(self, chunk: int = 0, chunks: int = 1) -> str:
        """Name the place by the coordinates that tell processes apart, as ``pp 1, tp 0``."""
        named = {
            "dp": self.data,
            "pp": self.pipeline,
            "cp": self.context,
            "tp": self.tensor,
            "chunk": (chunk, chunks),
        }
        return ", ".join(f"{name} {rank}" for name, (rank, size) in named.items() if size > 1)
