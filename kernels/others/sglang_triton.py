"""SGLang's Triton kernels besides attention: its batch-invariant operators, router and experts.

Checked against SGLang 0.5.23 on a CPU under Triton's interpreter; never run by this project on a
GPU. There ``matmul_persistent`` may take DeepGEMM, as SGLang itself does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from layerbisect.kernels.others.common import asked, refuse, refuse_tensor


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    rounds_before_weight: bool | None = None,
) -> torch.Tensor:
    """Normalise by rms_norm_batch_invariant, which rounds once."""
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import rms_norm_batch_invariant

    refuse("sglang-batch-invariant", "rounds_before_weight", rounds_before_weight, None, False)
    refuse_tensor("sglang-batch-invariant", "residual", residual)
    normed: torch.Tensor = rms_norm_batch_invariant(x, weight, eps)
    return normed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project by matmul_persistent, which adds the bias before it rounds."""
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import matmul_persistent

    with _one_core(x.device):
        made: torch.Tensor = matmul_persistent(x, weight.t(), bias)
    return made


def plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Project as a layer without quantisation does while nothing is deterministic."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    made: torch.Tensor = UnquantizedLinearMethod().apply(SimpleNamespace(weight=weight), x, bias)
    return made


def logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, shards: int | None = None
) -> torch.Tensor:
    """Gather from the batch-invariant log_softmax of float32 logits."""
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import log_softmax

    refuse("sglang-batch-invariant", "shards", shards, None, 1)
    return asked(log_softmax(logits.float()), targets)


def fast_logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, shards: int | None = None
) -> torch.Tensor:
    """Score as SGLang's fast path for a prompt does: a row's maximum and log-sum in one pass."""
    from sglang.srt.layers.logsumexp import row_logsumexp

    refuse("sglang", "shards", shards, None, 1)
    highest, log_sum = row_logsumexp(logits)
    made: torch.Tensor = asked(logits, targets).float() - highest - log_sum
    return made


def router(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    renormalise: bool,
    scoring: str = "softmax",
    softmax_after_top_k: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by moe_fused_gate, which SGLang runs on CUDA."""
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    name = "sglang-triton"
    refuse(name, "scoring", scoring, "softmax", "sigmoid")
    refuse(name, "softmax_after_top_k", softmax_after_top_k, False)
    if scoring == "softmax":
        # it would add the bias to the logits, and so to the weights
        refuse_tensor(name, "bias", bias)
    if bias is None:
        # its groups are scored by their two best, as is asked for with a bias alone
        refuse(name, "groups", groups, None)
        bias = None if scoring == "softmax" else logits.new_zeros(logits.shape[1]).float()
    weights, ids = moe_fused_gate(
        logits,
        bias,
        top_k,
        scoring_func=scoring,
        renormalize=renormalise,
        routed_scaling_factor=scaling,
        apply_routed_scaling_factor_on_output=scaling != 1.0,
        num_expert_group=groups or 1,
        topk_group=top_groups or 1,
    )
    return weights, ids.long()


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    deterministic: bool,
) -> torch.Tensor:
    """Sum experts by SGLang's fused MoE: two grouped products and a sum over slots.

    Its tiles come from tuned tables by the number of rows, or are fixed for deterministic
    inference.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    # it stores its products in one of these two
    refuse("sglang-triton", "dtype", x.dtype, torch.bfloat16, torch.float16)
    with _without_server(deterministic):
        made: torch.Tensor = fused_moe.fused_experts_impl(
            x.contiguous(),
            gate_up.contiguous(),
            down.contiguous(),
            weights.float(),
            ids.int(),
            filter_expert=bool((ids < 0).any()),
        )
    return made


@contextmanager
def _without_server(deterministic: bool) -> Iterator[None]:
    """Answer what the fused MoE asks of a server's settings: one rank, and this mode."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    settings = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
    )
    with ExitStack() as patched:
        for module, name, answer in (
            (fused_moe, "get_exec", settings),
            (fused_moe, "get_parallel", SimpleNamespace(tp_group=None)),
            (fused_moe, "is_allocation_symmetric", False),
            (fused_moe_triton_config, "get_exec", settings),
        ):
            patched.enter_context(mock.patch.object(module, name, return_value=answer))
        yield


@contextmanager
def _one_core(device: torch.device) -> Iterator[None]:
    """Let a CPU count as one core while SGLang's persistent kernels are launched.

    They start as many programs as the device has cores, and SGLang counts 0 on a CPU: no program
    then runs and the output stays unwritten. How many share the tiles changes no number.
    """
    from sglang.srt.batch_invariant_ops import batch_invariant_ops

    if device.type != "cpu":
        yield
        return
    with mock.patch.object(batch_invariant_ops, "get_device_core_count", return_value=1):
        yield
