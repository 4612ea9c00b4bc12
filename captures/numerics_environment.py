"""What of a process's environment changes its numbers: variables that libraries read, and switches.

Only variables that are named here are recorded, so that nothing else of an environment is passed on
with a capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumericsVariable:
    """A variable that changes numbers: who reads it, and what it changes."""

    name: str
    who: str
    effect: str


_TE = "Transformer Engine"
_SGLANG = "SGLang"
_ROCM = "SGLang on ROCm"

VARIABLES: tuple[NumericsVariable, ...] = (
    NumericsVariable(
        "NVIDIA_TF32_OVERRIDE",
        "NVIDIA's libraries (cuBLAS, cuDNN)",
        "0 forbids TF32 in every float32 matmul, whatever torch allows",
    ),
    NumericsVariable(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "torch",
        "1 forces TF32 in float32 matmuls, against set_float32_matmul_precision",
    ),
    NumericsVariable(
        "CUBLAS_WORKSPACE_CONFIG",
        "cuBLAS",
        ":4096:8 or :16:8 make its matmuls repeat bit for bit; otherwise streams may change them",
    ),
    NumericsVariable(
        "TORCH_BLAS_PREFER_CUBLASLT",
        "torch",
        "chooses cuBLASLt over cuBLAS for matmuls: other kernels, another order of sums",
    ),
    NumericsVariable(
        "TORCH_BLAS_PREFER_HIPBLASLT",
        "torch on ROCm",
        "chooses between hipBLASLt and rocBLAS for matmuls: other kernels, another order of sums",
    ),
    NumericsVariable(
        "PYTORCH_TUNABLEOP_ENABLED",
        "torch",
        "1 takes the matmul kernel that tuning found fastest: another order of sums, by machine",
    ),
    NumericsVariable(
        "PYTORCH_TUNABLEOP_TUNING",
        "torch, where TunableOp is enabled",
        "1 tunes while it runs, so that two runs may take different matmul kernels",
    ),
    NumericsVariable(
        "PYTORCH_TUNABLEOP_FILENAME",
        "torch, where TunableOp is enabled",
        "names the file of tuned matmul kernels that are taken",
    ),
    NumericsVariable(
        "HIPBLASLT_ALLOW_TF32",
        "torch on ROCm, in some versions",
        "1 lets float32 matmuls compute in TF32, where torch allows it",
    ),
    NumericsVariable(
        "HIPBLASLT_TUNING_OVERRIDE_FILE",
        "hipBLASLt",
        "names a file of tuned matmul kernels that are taken instead of its own choice",
    ),
    NumericsVariable(
        "ROCBLAS_USE_HIPBLASLT",
        "rocBLAS",
        "0 takes Tensile's matmul kernels and 1 prefers hipBLASLt's: another order of sums",
    ),
    NumericsVariable(
        "ROCBLAS_DEFAULT_ATOMICS_MODE",
        "rocBLAS",
        "says whether atomics are allowed, with which results differ from run to run",
    ),
    NumericsVariable(
        "ROCBLAS_INTERNAL_FP16_ALT_IMPL",
        "rocBLAS on MI200",
        "1 computes float16 matmuls by way of bfloat16: larger range, fewer bits",
    ),
    NumericsVariable(
        "TORCH_ROCM_FA_PREFER_CK",
        "torch on ROCm",
        "1 takes Composable Kernel's flash attention instead of AOTriton's",
    ),
    NumericsVariable(
        "NCCL_ALGO",
        "NCCL, RCCL",
        "forces the algorithm of collectives, and with it the order in which ranks are summed",
    ),
    NumericsVariable(
        "NCCL_PROTO",
        "NCCL, RCCL",
        "forces the protocol of collectives, by which they are cut into pieces",
    ),
    NumericsVariable(
        "NCCL_NVLS_ENABLE",
        "NCCL",
        "says whether NVLink's switches may sum over ranks, in an order of their own",
    ),
    NumericsVariable(
        "NCCL_MIN_NCHANNELS",
        "NCCL, RCCL",
        "sets the least number of channels, among which what is summed over ranks is divided",
    ),
    NumericsVariable(
        "NCCL_MAX_NCHANNELS",
        "NCCL, RCCL",
        "sets the largest number of channels, among which what is summed over ranks is divided",
    ),
    NumericsVariable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        _TE,
        "0 keeps to algorithms that repeat bit for bit; otherwise attention's backward may not",
    ),
    NumericsVariable("NVTE_FLASH_ATTN", _TE, "0 forbids flash attention: another kernel is taken"),
    NumericsVariable(
        "NVTE_FUSED_ATTN", _TE, "0 forbids cuDNN's attention: another kernel is taken"
    ),
    NumericsVariable(
        "NVTE_UNFUSED_ATTN", _TE, "0 forbids attention by separate matmuls and softmax"
    ),
    NumericsVariable(
        "NVTE_APPLY_QK_LAYER_SCALING",
        _TE,
        "1 divides attention scores by the layer's number before the softmax, and undoes it there",
    ),
    NumericsVariable(
        "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
        _SGLANG,
        "1 sums over ranks in an order that the batch does not change; --enable-deterministic-"
        "inference sets it, with kernels to match",
    ),
    NumericsVariable(
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        _SGLANG,
        "1 returns log-probs from before temperature and top-k, top-p",
    ),
    NumericsVariable(
        "SGLANG_ROPE_CACHE_FP32",
        _SGLANG,
        "1 keeps the rotary cosines and sines in float32 where they are otherwise cast",
    ),
    NumericsVariable(
        "SGLANG_ENABLE_FAST_INPUT_LOGPROBS",
        _SGLANG,
        "says by which of two equal formulas prompt log-probs are computed",
    ),
    NumericsVariable(
        "SGLANG_FORCE_FUSED_OP_BACKEND",
        _SGLANG,
        "takes one backend, such as torch or triton, for all fused operators that have it",
    ),
    NumericsVariable(
        "SGLANG_ENABLE_BF16_SPLITK_GEMM",
        _SGLANG,
        "0 forbids split-K kernels in small bfloat16 matmuls (SM10x): another order of sums",
    ),
    NumericsVariable(
        "SGLANG_ENABLE_JIT_DEEPGEMM",
        _SGLANG,
        "0 forbids DeepGEMM's matmul kernels",
    ),
    NumericsVariable(
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2",
        _SGLANG,
        "0 takes the older all-reduce kernel: another order of sums over ranks",
    ),
    NumericsVariable(
        "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE",
        _SGLANG,
        "sets how Triton's decode attention divides the context, in deterministic mode",
    ),
    NumericsVariable(
        "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE",
        _SGLANG,
        "sets how FlashInfer's prefill attention divides the context, in deterministic mode",
    ),
    NumericsVariable(
        "SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE",
        _SGLANG,
        "sets how FlashInfer's decode attention divides the context, in deterministic mode",
    ),
    NumericsVariable(
        "SGLANG_USE_AITER",
        _ROCM,
        "1 takes aiter's kernels for norms, experts, attention and matmuls",
    ),
    NumericsVariable(
        "SGLANG_USE_AITER_AR",
        _ROCM,
        "0 takes SGLang's own all-reduce kernel instead of aiter's",
    ),
    NumericsVariable(
        "SGLANG_USE_1STAGE_ALLREDUCE",
        _ROCM,
        "1 sums over ranks in one stage, in a fixed order",
    ),
    NumericsVariable(
        "SGLANG_USE_AITER_UNIFIED_ATTN",
        _ROCM,
        "1 takes aiter's unified attention kernel",
    ),
    NumericsVariable(
        "SGLANG_AITER_KV_CACHE_LAYOUT",
        _ROCM,
        "sets the layout of the KV cache, and with it which attention kernels are taken",
    ),
    NumericsVariable("MKL_CBWR", "MKL", "fixes the instruction set, so that sums keep their order"),
    NumericsVariable(
        "ATEN_CPU_CAPABILITY",
        "torch on CPU",
        "sets the instruction set of torch's own kernels: vectors of another length sum otherwise",
    ),
    NumericsVariable(
        "ONEDNN_MAX_CPU_ISA",
        "oneDNN (CPU)",
        "limits its instruction set: without AMX, bfloat16 matmuls take other kernels",
    ),
    NumericsVariable(
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "oneDNN (CPU)",
        "BF16, TF32 or ANY let float32 matmuls compute in fewer bits",
    ),
    NumericsVariable(
        "TRITON_INTERPRET",
        "Triton",
        "1 interprets kernels with NumPy instead of compiling them",
    ),
)


def numerics_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Collect the variables of ``VARIABLES`` that are set, and torch's switches where it is loaded.

    Returns plain strings by name, in that order.
    """
    found = {one.name: environ[one.name] for one in VARIABLES if one.name in environ}
    return found | _torch_switches()


def _torch_switches() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    switches: dict[str, Callable[[], object]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: (
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "num_threads": torch.get_num_threads,
    }
    return {f"torch.{name}": _told(read) for name, read in switches.items()}


def _told(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except RuntimeError:
        # torch refuses to tell by its older names what a process set by fp32_precision
        return "set by fp32_precision"
