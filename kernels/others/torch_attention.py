"""Attention in torch: written out, and by each backend of F.scaled_dot_product_attention."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerbisect.kernels.others.common import (
    Found,
    device_refuses,
    refuse_tensor,
    sequences,
)
from layerbisect.kernels.replay.implementation import Implementation, Unavailable, Unsupported

_BACKENDS = (
    ("torch-sdpa-math", SDPBackend.MATH, ("cpu", "cuda", "hip")),
    ("torch-sdpa-flash", SDPBackend.FLASH_ATTENTION, ("cpu", "cuda", "hip")),
    ("torch-sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, ("cuda", "hip")),
    ("torch-sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, ("cuda",)),
)


def attention_implementations(device: str) -> list[Found]:
    """Return the written-out form and SDPA's backends, those that ``device`` lacks with why."""
    package = f"torch {torch.__version__}"
    found: list[Found] = [Implementation("torch", "attention", package, eager)]
    for name, backend, kinds in _BACKENDS:
        refusals = [None if k == "cpu" == device else device_refuses(device, k) for k in kinds]
        if None in refusals:
            run = partial(sdpa, name, backend)
            found.append(Implementation(name, "attention", package, run))
        else:
            found.append(Unavailable(name, "attention", str(refusals[0])))
    return found


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend as transformers' eager form does: scores rounded, softmax in float32, then rounded."""
    context = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for rows, keys, before in sequences(lengths, queries):
        hidden = _hidden(before, keys.stop - keys.start, sliding_window, q.device)
        # [head, row, channel]
        one_q = q[rows].transpose(0, 1)
        one_k = k[keys].transpose(0, 1).repeat_interleave(group, dim=0)
        one_v = v[keys].transpose(0, 1).repeat_interleave(group, dim=0)
        scores = torch.matmul(one_q, one_k.transpose(1, 2)) * scale
        scores = scores.masked_fill(hidden, -torch.inf).float()
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : one_k.shape[1]].to(q.dtype)
        context[rows] = torch.matmul(weights, one_v).transpose(0, 1)
    return context


def sdpa(
    name: str,
    backend: SDPBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    lengths: Sequence[int],
    scale: float,
    queries: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend by one backend alone, a sequence at a time, key heads repeated.

    A whole prefill is asked for as ``is_causal`` and a decode step without a mask, since not every
    backend takes one; anything else with a mask. Raises Unsupported with torch's own reason where
    the backend does not take it.
    """
    refuse_tensor(name, "sinks", sinks)
    context = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for rows, keys, before in sequences(lengths, queries):
        count, length = rows.stop - rows.start, keys.stop - keys.start
        windowed = sliding_window is not None and sliding_window < length
        masked = windowed or (before > 0 and count > 1)
        mask = ~_hidden(before, length, sliding_window, q.device) if masked else None
        # [batch, head, row, channel]
        one_q = q[rows].transpose(0, 1)[None]
        one_k = k[keys].transpose(0, 1).repeat_interleave(group, dim=0)[None]
        one_v = v[keys].transpose(0, 1).repeat_interleave(group, dim=0)[None]
        causal = mask is None and count > 1
        with warnings.catch_warnings(record=True) as said, sdpa_kernel([backend]):
            warnings.simplefilter("always")
            try:
                out = functional.scaled_dot_product_attention(
                    one_q, one_k, one_v, mask, is_causal=causal, scale=scale
                )
            except RuntimeError as error:
                if not str(error).startswith(("No available kernel", "No viable backend")):
                    raise
                asked = f"queries={queries!r}, sliding_window={sliding_window!r}"
                why = "; ".join(str(w.message).split(" (Triggered")[0] for w in said)
                raise Unsupported(f"{name} does not support {asked} in {q.dtype}: {why}") from None
        context[rows] = out[0].transpose(0, 1)
    return context


def _hidden(
    before: int, length: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Which of ``length`` keys the queries from position ``before`` on must not see."""
    query = torch.arange(before, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    hidden = key > query
    if sliding_window is not None:
        hidden |= key <= query - sliding_window
    return hidden
