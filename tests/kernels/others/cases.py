"""Small arguments of every operator, and how far an implementation is from exact on them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from layerbisect.kernels.bounds.router import router_bound, wrong_choices
from layerbisect.kernels.replay.program import REFERENCES
from layerbisect.kernels.router import weigh

CHOOSES = ("scoring", "bias", "softmax_after_top_k", "groups", "top_groups")
WEIGHS = ("renormalise", "scoring", "softmax_after_top_k", "scaling")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def arguments(operator: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield sets of arguments that engines give the operator, in ``dtype``."""
    g = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    if operator == "rms_norm":
        common = {"x": normal(9, 60), "weight": normal(60), "eps": 1e-5}
        yield {**common, "rounds_before_weight": True}
        yield {**common, "rounds_before_weight": False}
        yield {**common, "residual": normal(9, 60), "rounds_before_weight": False}
        yield {**common, "x": normal(9, 3, 60), "rounds_before_weight": False}
    elif operator == "linear":
        yield {"x": normal(9, 60), "weight": normal(40, 60)}
        yield {"x": normal(9, 60), "weight": normal(40, 60), "bias": normal(40)}
    elif operator == "rope":
        inv_freq = 10000.0 ** (-torch.arange(16) / 16)
        common = {"x": normal(9, 3, 32), "position": torch.arange(9) + 40, "inv_freq": inv_freq}
        yield {**common, "attention_scaling": 1.0, "interleaved": False}
        yield {**common, "attention_scaling": 1.25, "interleaved": True}
    elif operator == "attention":
        yield from attention(dtype)
    elif operator == "router":
        logits, bias = normal(9, 16), torch.randn(16, generator=g) / 10
        plain = {"logits": logits, "top_k": 3, "softmax_after_top_k": False, "scaling": 1.0}
        one = {**plain, "groups": None, "top_groups": None}
        yield {**one, "renormalise": True, "scoring": "softmax"}
        yield {**one, "renormalise": False, "scoring": "softmax"}
        yield {**one, "renormalise": True, "scoring": "softmax", "softmax_after_top_k": True}
        yield {**one, "renormalise": True, "scoring": "sigmoid", "bias": bias}
        grouped = {**plain, "groups": 4, "top_groups": 2}
        yield {**grouped, "renormalise": False, "scoring": "softmax"}
        yield {
            **grouped,
            "renormalise": True,
            "scoring": "sigmoid",
            "bias": bias,
            "scaling": 2.5,
        }
    elif operator == "swiglu":
        yield {"gate": 3 * normal(9, 40), "up": normal(9, 40)}
    elif operator == "experts":
        ids = torch.stack([torch.randperm(5, generator=g)[:2] for _ in range(9)])
        common = {
            "x": normal(9, 64),
            "weights": torch.rand(9, 2, generator=g),
            "gate_up": normal(5, 96, 64) / 8,
            "down": normal(5, 64, 48) / 7,
        }
        yield {**common, "ids": ids}
        yield {**common, "ids": ids.masked_fill(torch.arange(9)[:, None] == 4, -1)}
    elif operator == "combine":
        ids = torch.tensor([[0, 3], [1, -1], [-1, -1]])
        yield {"outputs": normal(3, 2, 64), "ids": ids}
    elif operator == "logprob":
        targets = torch.tensor([0, 1, 299, -1, 5])
        yield {"logits": 3 * normal(5, 300), "targets": targets, "shards": 1}
    else:
        yield {"stream": normal(9, 60), "delta": normal(9, 60)}


def attention(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield grouped attention over ragged sequences: whole, windowed, chunked and decoding.

    Keys share a direction and one key draws most of the attention, as first tokens do in models.
    """
    g = torch.Generator().manual_seed(11)
    # enough keys for two splits of decode
    lengths = (3, 70, 1)
    q, k, v = (torch.randn(sum(lengths), heads, 32, generator=g) for heads in (4, 2, 2))
    k += torch.randn(32, generator=g)
    k[0] += 3 * q.mean((0, 1))
    q, k, v = (t.to(dtype) for t in (q, k, v))
    whole = {"q": q, "k": k, "v": v, "lengths": lengths, "scale": 32**-0.5}
    chunk = torch.tensor([1, 2, *range(69, 73), 73])
    yield {**whole, "q": q[chunk], "queries": (2, 4, 1), "sliding_window": None}
    last = torch.tensor([2, 72, 73])
    yield {**whole, "q": q[last], "queries": (1, 1, 1), "sliding_window": None}
    short = {**whole, "q": q[:8], "k": k[:8], "v": v[:8], "lengths": (3, 5), "queries": None}
    yield {**short, "sliding_window": None}
    yield {**short, "sliding_window": 3}


def bound_used(operator: str, given: Mapping[str, Any], results: Any) -> float:
    """Return the largest error as a share of the bound; NaN and a wrong choice are infinite."""
    first = next(iter(given.values()))
    dtype = first.dtype
    wide = {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "inv_freq"
        else value
        for name, value in given.items()
    }
    if operator == "router":
        found, ids = results
        logits = wide["logits"]
        if wrong_choices(logits, ids, dtype=dtype, **_some(wide, CHOOSES)).any():
            return torch.inf
        exact = weigh(logits, ids, **_some(wide, WEIGHS))
        bound = router_bound(logits, ids, dtype=dtype, **_some(wide, WEIGHS))
    else:
        found = results
        exact = REFERENCES[operator](**wide)
        place = "experts" if operator == "combine" else operator
        module = importlib.import_module(f"layerbisect.kernels.bounds.{place}")
        bound = getattr(module, f"{operator}_bound")(**wide, dtype=dtype)
    error = (found.double() - exact).abs()
    unasked = exact.isnan() & found.isnan()
    share = torch.where(error == 0, 0.0, error / bound).masked_fill(unasked, 0.0)
    return float(share.nan_to_num(nan=torch.inf).max())


def _some(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}
