"""How far a log-probability may be from the exact one of the same logits."""

from __future__ import annotations

import torch

from layerbisect.kernels.bounds.common import probable_gamma, unit_roundoff


def logprob_bound(
    logits: torch.Tensor, targets: torch.Tensor, *, dtype: torch.dtype, shards: int = 1
) -> torch.Tensor:
    """Bound the error of log-softmax and gather on ``logits`` [row, vocab]: [row] float64, in nats.

    For a computation in float32 of logits that are exact, so that neither ``dtype``, in which they
    are stored, nor ``shards`` changes it. nan where the target is negative, infinite where its
    logit is.

    With d = x - max x, an exponential is off by (3 |d| + 4) u: d, log2(e) and their product are
    rounded, and exp2 is good to 2 ulp. A term's exponential may come in pieces, as the maximum
    grows and the sum is scaled anew: as much again, and up to six roundings a term. The logarithm
    passes on the sum's relative error as an absolute one (Higham 2002, Accuracy and Stability of
    Numerical Algorithms, 4.2; Higham and Mary 2019 for the number of roundings).
    """
    logits = logits.double()
    u = unit_roundoff(torch.float32)
    peak = logits.amax(-1)
    below = (peak[:, None] - logits).nan_to_num(posinf=0.0)
    shares = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    relative = u * (shares * (6 * below + 8)).sum(-1) + probable_gamma(6 * logits.shape[1], u)
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.long().clamp(min=0)[:, None])[:, 0]
    # what is rounded once or more on the way from sum and maximum to the result: the logarithm may
    # be off by 4 u in itself, and that of a share of the softmax by that share's own error
    sizes = 4 * (chosen - peak).abs() + total.abs() + peak.abs() + 4 * (total - peak) + 16
    error = -torch.log1p(-relative) + u * (sizes + (chosen - total).abs())
    return error.masked_fill(targets < 0, torch.nan)
