"""Faults that people met, planted in one side's weights: each is classed from weights alone.

The names are those of the fault catalogue. ``previous`` is the checkpoint before the update, which
a user may have or not; each case is judged with and without it where that makes a difference, and
its clean twin, the same pair with nothing planted, must raise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.weight_diff.report import Kind
from tests.bisect.weight_diff.making import (
    CONFIG,
    EXPERTS,
    LAYERS,
    QUANTISED,
    Tensors,
    compared,
    each,
    low_rank_delta,
    make_weights,
    quantised,
    updated,
)

TIED = {**CONFIG, "tie_word_embeddings": True}
W = make_weights()
U = updated(W)


@dataclass(frozen=True)
class Sides:
    """Both sides' tensors, what they held before, and their configurations."""

    rollout: Tensors
    trainer: Tensors
    previous: Tensors | None = None
    configs: tuple[Mapping[str, Any], Mapping[str, Any]] = (CONFIG, CONFIG)


@dataclass(frozen=True)
class Case:
    """A pair, clean or faulty, and what the fault is."""

    clean: Callable[[], Sides]
    faulty: Callable[[], Sides]
    kind: Kind
    side: str
    how: str
    names: Callable[[str], bool]


def pair(rollout: Tensors = W, trainer: Tensors = W, **more: Any) -> Sides:
    return Sides(dict(rollout), dict(trainer), **more)


def changed(sides: Sides, side: str, ending: str, change: Any) -> Sides:
    each(getattr(sides, side), ending, change)
    return sides


def lost_rows(x: torch.Tensor) -> torch.Tensor:
    fresh = torch.randn(8, x.shape[1], generator=torch.Generator().manual_seed(3)) * 0.02
    return torch.cat([x[:-8], fresh.to(x.dtype)])


def gate_up_swapped(sides: Sides, scales: bool = False) -> Sides:
    for name in [n for n in W if n.endswith("gate_proj.weight")]:
        for suffix in ("", "_scale_inv")[: 1 + scales]:
            mine, other = name + suffix, name.replace("gate_proj", "up_proj") + suffix
            held = sides.trainer
            held[mine], held[other] = held[other], held[mine]
    return sides


def lora(targets: tuple[str, ...], size: float = 0.05) -> Tensors:
    """Merge an adapter of rank 2."""
    made = dict(W)
    for name in (n for n in W if n.endswith(tuple(f"{t}.weight" for t in targets))):
        made[name] = (W[name].float() + low_rank_delta(W[name], 2, size)).bfloat16()
    return made


def fc1_adapter(rollout_order: bool) -> Sides:
    """Merge an adapter into packed gate and up; the rollout's order may be [g0 u0 g1 u1]."""
    sides = pair()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            stem = f"model.layers.{layer}.mlp.experts.{expert}."
            names = f"{stem}gate_proj.weight", f"{stem}up_proj.weight"
            delta = low_rank_delta(torch.cat([W[n] for n in names]), 2, 0.1, seed=layer)
            (g0, g1), (u0, u1) = (half.chunk(2) for half in delta.chunk(2))
            orders = ((g0, u0), (g1, u1)) if rollout_order else ((g0, g1), (u0, u1))
            for name, mine, theirs in zip(names, orders, ((g0, g1), (u0, u1)), strict=True):
                for tensors, part in ((sides.rollout, mine), (sides.trainer, theirs)):
                    tensors[name] = (W[name].float() + torch.cat(part)).bfloat16()
    return sides


def raw_export(sides: Sides) -> Sides:
    """Split q, k and v packed by shard as if they were packed whole."""
    for layer in range(LAYERS):
        names = [f"model.layers.{layer}.self_attn.{n}_proj.weight" for n in "qkv"]
        cut = [sides.rollout[n].chunk(2) for n in names]
        packed = torch.cat([part[rank] for rank in range(2) for part in cut])
        heights = [len(sides.rollout[n]) for n in names]
        sides.rollout.update(zip(names, packed.split(heights), strict=True))
    return sides


def tied(own_head: str | None) -> Sides:
    held = make_weights(tied=True)
    sides = pair(held, held, configs=(TIED, TIED))
    if own_head:
        getattr(sides, own_head)["lm_head.weight"] = W["lm_head.weight"]
    return sides


def fp8(trainer: Tensors = W, **options: Any) -> Sides:
    return pair(quantised(W, **options), trainer, configs=(QUANTISED, CONFIG))


def fp8_twice(rollout: Tensors, trainer: Tensors) -> Sides:
    return pair(rollout, trainer, configs=(QUANTISED, QUANTISED))


def powers(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def crossed(scale: torch.Tensor) -> torch.Tensor:
    return scale.T.contiguous() if scale.shape[0] == scale.shape[1] else scale


SMALL_BLOCKS = dict(W)
each(SMALL_BLOCKS, "o_proj.weight", lambda x: torch.cat([x[:32], x[32:] * 1e-4]))
PLUS_ONE = dict(W)
each(PLUS_ONE, "norm.weight", lambda x: (x.float() + 1).bfloat16())

CASES: dict[str, Case] = {
    "B004 embedding rows lost": Case(
        lambda: pair(), lambda: changed(pair(), "trainer", "embed_tokens.weight", lost_rows),
        "rows", "unknown", "some rows", lambda n: "embed_tokens" in n,
    ),
    "B004 with the checkpoint": Case(
        lambda: pair(previous=W),
        lambda: changed(pair(previous=W), "trainer", "embed_tokens.weight", lost_rows),
        "rows", "trainer", "some rows", lambda n: "embed_tokens" in n,
    ),
    "B012 norms hold 1 + w": Case(
        lambda: pair(PLUS_ONE, PLUS_ONE), lambda: pair(W, PLUS_ONE),
        "offset", "unknown", "plus 1 on trainer", lambda n: n.endswith("norm.weight"),
    ),
    "B015 gate and up swapped": Case(
        lambda: pair(), lambda: gate_up_swapped(pair()),
        "swapped", "unknown", "gate_proj and up_proj exchanged",
        lambda n: "gate_proj" in n or "up_proj" in n,
    ),
    "B015 after an update": Case(
        lambda: pair(U, U, previous=W), lambda: gate_up_swapped(pair(U, U, previous=W)),
        "swapped", "trainer", "gate_proj and up_proj exchanged",
        lambda n: "gate_proj" in n or "up_proj" in n,
    ),
    "B015 in FP8 against bf16": Case(
        fp8, lambda: gate_up_swapped(fp8()),
        "swapped", "unknown", "gate_proj and up_proj exchanged",
        lambda n: "gate_proj" in n or "up_proj" in n,
    ),
    "B016 adapter of fc1 split without regard to shards": Case(
        lambda: fc1_adapter(False), lambda: fc1_adapter(True),
        "permuted", "unknown", "the update's rows of gate_proj+up_proj packed by shard, [g0 u0",
        lambda n: "gate_proj" in n or "up_proj" in n,
    ),
    "B019 parameter left at 1e4": Case(
        lambda: pair(),
        lambda: changed(pair(), "rollout", "layers.1.self_attn.k_norm.weight",
                        lambda x: torch.full_like(x, 1e4)),
        "not loaded", "rollout", "all 9984",
        lambda n: n.endswith("layers.1.self_attn.k_norm.weight"),
    ),
    "B019 parameter left NaN": Case(
        lambda: pair(),
        lambda: changed(pair(), "rollout", "layers.1.self_attn.k_norm.weight",
                        lambda x: torch.full_like(x, torch.nan)),
        "not loaded", "rollout", "not finite",
        lambda n: n.endswith("layers.1.self_attn.k_norm.weight"),
    ),
    "B021 adapter not delivered": Case(
        lambda: pair(lora(("q_proj", "v_proj")), lora(("q_proj", "v_proj"))),
        lambda: pair(W, lora(("q_proj", "v_proj"))),
        "low rank", "unknown", "adapter", lambda n: n.endswith(("q_proj.weight", "v_proj.weight")),
    ),
    "B022 base model served, with the base at hand": Case(
        lambda: pair(lora(("q_proj",)), lora(("q_proj",)), previous=W),
        lambda: pair(W, lora(("q_proj",)), previous=W),
        "low rank", "rollout", "adapter", lambda n: n.endswith("q_proj.weight"),
    ),
    "B023 small adapter under bf16 rounding": Case(
        lambda: pair(lora(("down_proj",), 0.01), lora(("down_proj",), 0.01)),
        lambda: pair(W, lora(("down_proj",), 0.01)),
        "low rank", "unknown", "adapter", lambda n: n.endswith("down_proj.weight"),
    ),
    "B110 stale head": Case(
        lambda: pair(U, U, previous=W),
        lambda: changed(pair(U, U, previous=W), "rollout", "lm_head.weight",
                        lambda _: W["lm_head.weight"]),
        "stale", "rollout", "equal to the previous weights", lambda n: n == "lm_head.weight",
    ),
    "B110 stale head, nothing else known": Case(
        lambda: pair(U, U),
        lambda: changed(pair(U, U), "rollout", "lm_head.weight", lambda _: W["lm_head.weight"]),
        "drift", "unknown", "small", lambda n: n == "lm_head.weight",
    ),
    "B135 tied head missing in the rollout": Case(
        lambda: tied(None), lambda: tied("rollout"),
        "tied head", "rollout", "the head is not tied", lambda n: n == "lm_head.weight",
    ),
    "B136 tied head missing in the trainer": Case(
        lambda: tied(None), lambda: tied("trainer"),
        "tied head", "trainer", "the head is not tied", lambda n: n == "lm_head.weight",
    ),
    "B141 scales rounded after quantising": Case(
        lambda: fp8(powers=True), lambda: changed(fp8(), "rollout", "_scale_inv", powers),
        "block scales", "rollout", "rounded up to powers of two",
        lambda n: n.endswith("_proj.weight"),
    ),
    "B143 floor of the scales": Case(
        lambda: pair(quantised(SMALL_BLOCKS), SMALL_BLOCKS, configs=(QUANTISED, CONFIG)),
        lambda: pair(quantised(SMALL_BLOCKS, floor=1e-4), SMALL_BLOCKS,
                     configs=(QUANTISED, CONFIG)),
        "block scales", "rollout", "kept from falling below 0.0001",
        lambda n: n.endswith("o_proj.weight"),
    ),
    "B143 floor of one side's scales": Case(
        lambda: fp8_twice(quantised(SMALL_BLOCKS), quantised(SMALL_BLOCKS)),
        lambda: fp8_twice(quantised(SMALL_BLOCKS), quantised(SMALL_BLOCKS, floor=1e-4)),
        "block scales", "trainer", "kept from falling below 0.0001",
        lambda n: n.endswith("o_proj.weight"),
    ),
    "B144 scales transposed": Case(
        fp8, lambda: changed(fp8(), "rollout", "_scale_inv", crossed),
        "block scales", "rollout", "the scales of blocks are transposed",
        lambda n: n.endswith(("q_proj.weight", "o_proj.weight")),
    ),
    "B162 raw export of q, k and v": Case(
        lambda: pair(), lambda: raw_export(pair()),
        "permuted", "unknown", "rows of q_proj+k_proj+v_proj packed by shard, [q0 k0 v0 q1 k1 v1]",
        lambda n: n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")),
    ),
    "B162 after an update": Case(
        lambda: pair(U, U, previous=W), lambda: raw_export(pair(U, U, previous=W)),
        "permuted", "rollout", "[q0 k0 v0 q1 k1 v1]",
        lambda n: n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")),
    ),
    "B172 one update skipped": Case(
        lambda: pair(U, U, previous=W), lambda: pair(W, U, previous=W),
        "stale", "rollout", "equal to the previous weights",
        lambda n: not torch.equal(W[n], U[n]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_planted_fault_is_classed(case: str, tmp_path: Path) -> None:
    one = CASES[case]
    sides = one.faulty()
    report = compared(tmp_path, sides.rollout, sides.trainer, sides.previous, configs=sides.configs)
    (group,) = report.groups
    assert (report.status, group.kind, group.side) == ("divergent", one.kind, one.side), group
    assert one.how in group.how
    everything = sorted({*sides.rollout, *sides.trainer})
    wanted = [n for n in everything if one.names(n) and not n.endswith("_scale_inv")]
    assert sorted(group.names) == wanted


@pytest.mark.parametrize(
    "case", [c for c, one in CASES.items() if one.faulty().configs[0] is CONFIG]
)
def test_a_planted_fault_is_classed_whatever_the_dtype_of_the_trainer(
    case: str, tmp_path: Path
) -> None:
    one = CASES[case]
    sides = one.faulty()
    # master weights, of which the rollout's are the rounded ones
    noise = {n: 1 + 2.0**-12 * torch.rand(x.shape) for n, x in sides.trainer.items()}
    wide = {n: x.float() * noise[n] for n, x in sides.trainer.items()}
    assert all(torch.equal(wide[n].bfloat16(), x) for n, x in sides.trainer.items())
    report = compared(tmp_path, sides.rollout, wide, sides.previous)
    (group,) = report.groups
    assert (group.kind, group.side) == (one.kind, one.side), group


@pytest.mark.parametrize("case", CASES)
def test_its_clean_twin_raises_nothing(case: str, tmp_path: Path) -> None:
    sides = CASES[case].clean()
    report = compared(tmp_path, sides.rollout, sides.trainer, sides.previous, configs=sides.configs)
    assert report.status == "agree", report.groups
    assert report.coverage.tensors == len(set(W) & set(sides.rollout))
