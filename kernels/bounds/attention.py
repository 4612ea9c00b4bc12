"""How far attention may be from the exact one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerbisect.kernels.attention_rows import checked_queries
from layerbisect.kernels.bounds.common import gamma, smallest_subnormal, unit_roundoff

# one tensor of scores held at once, of about ten
SCORE_BYTES = 16 * 2**20
# an exponential or a quotient on a GPU is off by two units in the last place
STEPS = 4
# the narrowest tile or split of keys after which a running softmax is scaled anew
TILE = 16


def attention_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
    queries: Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the error of attention, whose arguments these are, in ``dtype``.

    Float64 [query row, head, channel]. For sums in float32 in any order, which may cut off as
    tensor cores do; a softmax in float32, at once or in tiles and splits; the product of query and
    key rounded to ``dtype`` or not, and so the scaled score and the probability, before or after it
    is divided by the denominator; a context rounded to ``dtype``. Not for queries or keys that are
    scaled and then rounded.

    A score that is off by at most e scales its weight by at most exp(e). Weights w_j scaled by
    1 + a_j with |a_j| <= A_j, and divided by their sum, move the context c by

        sum_j w_j a_j (v_j - c) / (1 + sum_j w_j a_j),

    and what rounds numerator and denominator apart adds a share of sum_j w_j |v_j| (Higham 2002,
    Accuracy and Stability of Numerical Algorithms, 3.1, 3.5 and 4.2). The context lies among the
    values whatever the weights, which bounds it where scores are so large that nothing else does.
    """
    counts = checked_queries(q, k, v, lengths, queries, sinks)
    q, k, v = q.double(), k.double(), v.double()
    sink = torch.full(q.shape[1:2], -torch.inf, device=q.device) if sinks is None else sinks
    bound = torch.empty_like(q)
    start = key_start = 0
    for count, length in zip(counts, lengths, strict=True):
        keys = slice(key_start, key_start + length)
        # 0 times a hidden value that is no number is none: then every query goes by itself
        most = SCORE_BYTES // max(1, 8 * q.shape[1] * length)
        step = max(1, most if bool(v[keys].isfinite().all()) else 1)
        for begin in range(length - count, length, step):
            end = min(begin + step, length)
            rows = slice(start + begin - (length - count), start + end - (length - count))
            key = torch.arange(end, device=q.device)
            position = torch.arange(begin, end, device=q.device)[:, None]
            seen = key <= position
            if sliding_window is not None:
                seen &= key > position - sliding_window
            one_k, one_v = k[keys][:end], v[keys][:end]
            bound[rows] = _of_rows(q[rows], one_k, one_v, seen, scale, sink.double(), dtype)
        start, key_start = start + count, key_start + length
    return bound


def _of_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound rows of one sequence: ``seen`` is bool [row, key]."""
    single, stored = unit_roundoff(torch.float32), unit_roundoff(dtype)
    tiny, underflow = torch.finfo(torch.float32).tiny, smallest_subnormal(dtype) / 2
    group, channels = q.shape[1] // k.shape[1], q.shape[2]
    # [head, row or key, channel]
    q = q.transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))

    scores = q @ k.transpose(1, 2) * scale
    error = gamma(channels, 2 * single) * (q.abs() @ k.abs().transpose(1, 2)) * abs(scale)
    error += (channels * tiny + underflow) * abs(scale) + underflow
    # of the product, and of the scaled score after four roundings that make it one of a power of 2
    for roundoff in (stored, 4 * single, stored):
        error += roundoff * (scores.abs() + error)
    sink = sinks[:, None, None].expand(-1, len(seen), 1)
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sink], dim=-1)
    error = torch.cat([error, stored * sink.abs().nan_to_num(posinf=0)], dim=-1)
    # where nothing is added the weight is 0, whatever its error
    error = error.masked_fill(scores.isinf(), 0)
    size = scores.abs().masked_fill(scores.isinf(), 0) + error
    error += 4 * single * (size + size.amax(-1, keepdim=True))

    weights = torch.softmax(scores, dim=-1)
    moved = weights * torch.expm1((error + 2 * STEPS * single).clamp(max=500))
    share = moved.sum(-1, keepdim=True)
    weights, moved = weights[..., :-1], moved[..., :-1]
    v = v.masked_fill(~seen.any(0)[:, None], 0)
    context, strayed = (weights @ v).abs(), moved @ v.abs()
    # up to the row's own key, the last it sees
    largest = v.abs().cummax(1).values[:, -len(seen) :]
    kept = (1 - share).clamp(min=1e-300)
    magnitude = ((weights @ v.abs() + strayed) / kept).minimum(largest)
    strayed = ((strayed + context * share) / kept).minimum(context + largest)
    keys = seen.sum(-1)[None, :, None]
    steps = (keys + (STEPS + 1) * (keys / TILE + 2) + 2 * STEPS) * 2 * single
    sums = steps / (1 - steps)
    apart = (1 + stored) * (1 + sums) ** 2 / (1 - sums) - 1
    lost = (underflow + tiny) * (seen.double() @ v.abs()) / (1 - sums)
    error = strayed + apart * magnitude + lost
    error += stored * (context + error) + underflow
    return error.transpose(0, 1)
