"""Log-probabilities of given tokens in Triton: online log-softmax in float32, and gather.

The vocabulary is cut into parts. Each gives its maximum and the sum of its exponentials, found in
one pass over the logits (Milakov and Gimelshein 2018, arXiv:1805.02867), and the parts are combined
in their order. The fast form makes more parts the fewer rows there are; in the deterministic form
they have one length, whatever the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerbisect.kernels.triton_forms.common import Build, aligned, require_dtype

# about as many programs as a GPU runs at once; part of what the fast form's bits depend on, so that
# it is one number and not asked of the device
_PROGRAMS = 128
_BLOCK = 1024
_FIXED_LENGTH = 16 * _BLOCK


def logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, deterministic: bool, shards: int = 1
) -> torch.Tensor:
    """Score ``targets`` int64 [row] given ``logits`` [row, vocab], in nats: [row] float32.

    ``logits`` is bfloat16, float16 or float32. A target that is no token gets nan: whether one is
    too high is not asked, since that would wait for the GPU. ``shards`` is how many parts of one
    size (the last of which may be smaller) the vocabulary is cut into first, as ranks of a
    vocabulary-parallel head hold them. Raises ValueError for shapes that don't fit and for
    ``shards`` below 1, and Unsupported for another dtype.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            "logits and targets must have shapes [row, vocab] and [row], got "
            f"{list(logits.shape)} and {list(targets.shape)}"
        )
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    require_dtype("logits", logits)
    rows, vocab = logits.shape
    result = logits.new_empty(rows, dtype=torch.float32)
    if not rows:
        return result
    shard = triton.cdiv(vocab, shards)
    length = min(shard, _FIXED_LENGTH if deterministic else _fast_length(rows, vocab))
    per_shard = triton.cdiv(shard, length)
    parts = per_shard * triton.cdiv(vocab, shard)
    peaks = logits.new_empty(rows, parts, dtype=torch.float32)
    sums = torch.empty_like(peaks)
    logits, targets = aligned(logits), aligned(targets)
    _part_kernel[(rows, parts)](
        logits,
        peaks,
        sums,
        vocab,
        shard,
        length,
        per_shard,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    _combine_kernel[(rows,)](
        logits, targets, peaks, sums, result, vocab, parts, enable_fp_fusion=False
    )
    return result


def builds() -> list[Build]:
    """Return what to compile without a GPU."""
    partial = {"peaks": "*fp32", "sums": "*fp32"}
    sizes = dict.fromkeys(("vocab", "shard", "length"), "i32:16") | {"per_shard": "i32"}
    return [
        Build(
            "logprob part", _part_kernel, {"logits": "*bf16"} | partial | sizes, {"BLOCK": _BLOCK}
        ),
        Build(
            "logprob combine",
            _combine_kernel,
            {"logits": "*bf16", "targets": "*i64"}
            | partial
            | {"result": "*fp32", "vocab": "i32", "parts": "i32"},
            {},
        ),
    ]


def _fast_length(rows: int, vocab: int) -> int:
    parts = max(1, _PROGRAMS // rows)
    return max(_BLOCK // 8, -(-vocab // parts))


@triton.jit  # type: ignore[untyped-decorator]
def _part_kernel(
    logits: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    vocab: tl.tensor,
    shard: tl.tensor,
    length: tl.tensor,
    per_shard: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find one part's maximum, and the sum of its exponentials over that of the maximum."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part // per_shard * shard
    first = begin + part % per_shard * length
    last = tl.minimum(tl.minimum(first + length, begin + shard), vocab)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + at, mask=at < last, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        # of nothing but minus infinity the differences would be no numbers
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - origin) + tl.sum(tl.exp(x - origin), 0)
        peak = higher
    parts = tl.num_programs(1)
    tl.store(peaks + row * parts + part, peak)
    tl.store(sums + row * parts + part, total)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    result: tl.tensor,
    vocab: tl.tensor,
    parts: tl.tensor,
) -> None:
    """Combine one row's parts, and take the logit of its target from the logarithm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full((), float("-inf"), tl.float32)
    for part in range(parts):
        peak = tl.maximum(peak, tl.load(peaks + row * parts + part))
    total = tl.zeros((), tl.float32)
    for part in range(parts):
        at = row * parts + part
        total += tl.load(sums + at) * tl.exp(tl.load(peaks + at) - peak)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab)
    chosen = tl.load(logits + row * vocab + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(result + row, chosen - peak - tl.log(total))
