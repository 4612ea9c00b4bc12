"""Build the real megatron-core, unchanged, on a CPU over gloo, and run it forward in any layout.

What a GPU job has and this has not: TransformerEngine, hence no packed sequences, no context
parallelism and no sequence parallelism, as the local attention and the local norm refuse them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.megatron.weights import load_checkpoint

if TYPE_CHECKING:
    import torch

VOCAB_MULTIPLE = 128
"""A job pads the vocabulary to a multiple of this times the tensor-parallel size."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model is spread over ranks.

    Attributes:
        tensor: ranks that share a layer's matrices and heads
        pipeline: stages
        expert: ranks that share a layer's experts
        expert_tensor: ranks that share one expert's matrices; ``tensor`` where None
        virtual: chunks that each stage holds
        data: replicas; where None, the fewest that ``expert`` wants
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual: int = 1
    data: int | None = None

    @property
    def replicas(self) -> int:
        """Ranks that run other sequences."""
        of_expert = (self.expert_tensor or self.tensor) * self.expert
        return self.data or math.lcm(self.tensor, of_expert) // self.tensor

    @property
    def ranks(self) -> int:
        """Processes of a job."""
        return self.tensor * self.pipeline * self.replicas


def stand_ins() -> None:
    """Replace in this process what megatron-core takes from CUDA and TransformerEngine.

    Nothing that computes: the current device is the CPU, and a tensor sent to CUDA stays.
    """
    import torch

    # optional, and not used on a CPU: SGLang's own flash_mla wants libcuda, and says so by an
    # error that megatron does not expect; flashinfer takes a second to import
    for name in ("flash_mla", "flashinfer"):
        sys.modules[name] = None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    from megatron.core.transformer.moe import moe_utils

    # 0.16 asks whether this is None, but defines it only where TransformerEngine is there
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def start(layout: Layout) -> None:
    """Join the job of this process's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Call `stand_ins` before.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    # the training tracker keeps CUDA generators; this one draws nothing
    random.initialize_rng_tracker(inference_rng_tracker=True)


def transformer_config(
    hf: dict[str, Any], layout: Layout, *, bf16: bool = True, **overrides: Any
) -> Any:
    """The TransformerConfig of a checkpoint's config.json (qwen3_moe, qwen3 or llama).

    Raises:
        ValueError: the model computes something else than these families do here.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    family = hf["model_type"]
    rope = hf["rope_parameters"]
    if family not in ("qwen3_moe", "qwen3", "llama") or rope["rope_type"] != "default":
        raise ValueError(f"cannot build model_type {family!r} with rope {rope['rope_type']!r}")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    fields: dict[str, Any] = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_dim,
        ffn_hidden_size=hf["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=family != "llama",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        # the fused kernels are CUDA's
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    if family == "qwen3_moe":
        fields |= dict(
            # transformers has written both names
            num_moe_experts=hf.get("num_local_experts") or hf["num_experts"],
            moe_router_topk=hf["num_experts_per_tok"],
            moe_ffn_hidden_size=hf["moe_intermediate_size"],
            # softmax of the top k alone equals softmax of all, then renormalised
            moe_router_pre_softmax=not hf["norm_topk_prob"],
            moe_router_load_balancing_type="none",
            # all-to-all makes a CUDA stream
            moe_token_dispatcher_type="allgather",
            moe_grouped_gemm=False,
        )
    return TransformerConfig(**(fields | overrides))


def build(directory: Path, layout: Layout, **overrides: Any) -> list[Any]:
    """This rank's model: one wrapped GPTModel a virtual stage, as a job's ``model`` list is.

    Args:
        directory: an HF checkpoint, whose config.json is read; its weights are loaded.
        overrides: fields of TransformerConfig; with ``bf16`` false all is computed in float32.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    hf = json.loads((directory / "config.json").read_text())
    config = transformer_config(hf, layout, **overrides)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    multiple = VOCAB_MULTIPLE * layout.tensor
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(layout.virtual):
        model = GPTModel(
            config,
            spec,
            vocab_size=math.ceil(hf["vocab_size"] / multiple) * multiple,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=stage == chunk == 0,
            post_process=(stage, chunk) == (layout.pipeline - 1, layout.virtual - 1),
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_parameters"]["rope_theta"],
            vp_stage=chunk if layout.virtual > 1 else None,
        )
        # the wrapper of every job in bf16: it casts the model, and returns float32 logits
        chunks.append((Float16Module(config, model) if config.bf16 else model).eval())
    load_checkpoint(chunks, directory)
    return chunks


def forward(
    chunks: Sequence[Any], batches: Sequence[Sequence[Sequence[int]]], longest: int = 0
) -> list[torch.Tensor]:
    """Run micro-batches of token sequences through the pipeline, without gradients.

    The stages run one after the other, and hand the boundary on themselves: megatron's schedules
    allocate on CUDA. Sequences are padded on the right, which a causal model does not see.

    Args:
        longest: tokens to pad to at least. Ranks that share experts must all give one shape, or
            the dispatcher's gathering fails: pad to what the longest of them has.

    Returns:
        logits of each micro-batch where the last stage is here, else an empty list:
        [sequences, longest, vocabulary shard] in float32, padded rows and vocabulary included.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    results = []
    with torch.no_grad():
        for batch in batches:
            ids = pad_sequence([torch.tensor(tokens) for tokens in batch], batch_first=True)
            ids = torch.nn.functional.pad(ids, (0, max(0, longest - ids.shape[1])))
            logits = _through(chunks, ids)
            if logits is not None:
                results.append(logits)
    return results


def _through(chunks: Sequence[Any], ids: torch.Tensor) -> torch.Tensor | None:
    """One micro-batch, ids [sequences, s], through all stages."""
    import torch
    from megatron.core import parallel_state

    sequences, longest = ids.shape
    positions = torch.arange(longest).expand_as(ids)
    # true where attention is forbidden
    mask = torch.ones(longest, longest, dtype=torch.bool).triu(1)[None, None]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    here = parallel_state.get_pipeline_model_parallel_rank()
    last = stages * len(chunks) - 1
    config = chunks[0].config
    for stage in range(here, last + 1, stages):
        chunk = chunks[stage // stages]
        if stage:
            boundary = torch.empty(
                longest, sequences, config.hidden_size, dtype=config.pipeline_dtype
            )
            torch.distributed.recv(boundary, parallel_state.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(boundary)
        out: torch.Tensor = chunk(ids, positions, mask)
        if stage == last:
            return out
        torch.distributed.send(out, parallel_state.get_pipeline_model_parallel_next_rank())
    return None
