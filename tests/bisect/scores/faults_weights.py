"""Faults of weights: what one side holds is wrong, and both score rightly what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from layerbisect.bisect.weight_diff.report import Kind
from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.lab import Lab
from tests.bisect.scores.runs import Bench, Case, Family, Three, record, three

Named = dict[str, torch.Tensor]
Edit = Callable[[Named], None]


@dataclass(frozen=True, slots=True)
class Wrong:
    """Weights that differ: what was done to each side's, and how the tensors then differ."""

    catalogue: str
    kind: Kind
    rollout: Edit | None = None
    trainer: Edit | None = None
    family: Family = "dense"

    def labs(self, bench: Bench) -> tuple[Lab, Lab]:
        """What the rollout and the trainer hold."""
        lab = bench.lab(self.family)
        rollout, trainer = (
            lab if edit is None else lab.changed(edit) for edit in (self.rollout, self.trainer)
        )
        return rollout, trainer


def _of(named: Named, kind: str) -> list[torch.Tensor]:
    """A kind of weight of all layers."""
    return [weight for name, weight in named.items() if f".{kind}." in name]


def older(strength: float, seed: int = 1) -> Callable[[Named], None]:
    """Weights as they were some updates ago: each off by ``strength`` of its tensor's deviation."""

    def edit(named: Named) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in named.values():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += strength * weight.float().std() * noise

    return edit


def adapter(named: Named, strength: float = 0.25) -> None:
    """Merge an update of rank 2 into the projections of queries and values."""
    generator = torch.Generator().manual_seed(3)
    for kind in ("q_proj", "v_proj"):
        for weight in _of(named, kind):
            down = torch.randn(2, weight.shape[1], generator=generator)
            up = torch.randn(weight.shape[0], 2, generator=generator)
            weight += strength * weight.std() * (up @ down)


def gate_up_adapter(named: Named, order: Sequence[int]) -> None:
    """Merge an update of rank 2 of gate and up; ``order`` is that of its quarters, 0 to 3."""
    for layer, (gate, up) in enumerate(
        zip(_of(named, "gate_proj"), _of(named, "up_proj"), strict=True)
    ):
        generator = torch.Generator().manual_seed(layer)
        down = torch.randn(2, gate.shape[1], generator=generator)
        both = torch.randn(2 * gate.shape[0], 2, generator=generator) @ down
        quarters = (0.15 * gate.std() * both).chunk(4)
        mine, other = torch.cat([quarters[i] for i in order]).chunk(2)
        gate += mine
        up += other


def norm_never_written(named: Named) -> None:
    named["model.layers.1.self_attn.k_norm.weight"].fill_(1e4)


def qkv_interleaved(named: Named) -> None:
    """Fused [q0 q1 k0 k1 v0 v1] is split as [q0 k0 v0 q1 k1 v1], as for two ranks."""
    kinds = ("q_proj", "k_proj", "v_proj")
    for parts in zip(*(_of(named, kind) for kind in kinds), strict=True):
        fused = torch.cat([*parts])
        shares = [len(part) // 2 for part in parts] * 2
        pieces = fused.split(shares)
        for i, part in enumerate(parts):
            part.copy_(torch.cat([pieces[i], pieces[i + 3]]))


def scales_transposed(named: Named) -> None:
    """Block-scaled float8, blocks of 32, whose square table of scales is read transposed."""
    for kind in ("q_proj", "o_proj"):
        for weight in _of(named, kind):
            blocks = weight.reshape(4, 32, 4, 32).transpose(1, 2)
            limit = torch.finfo(torch.float8_e4m3fn).max
            scale = blocks.abs().amax((-1, -2), keepdim=True) / limit
            narrow = (blocks / scale).to(torch.float8_e4m3fn).float()
            wrong = narrow * scale.transpose(0, 1)
            weight.copy_(wrong.transpose(1, 2).reshape(weight.shape))


def stale_head(named: Named) -> None:
    weight = named["lm_head.weight"]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    weight += 0.08 * weight.std() * noise


WRONG = {
    "adapter not delivered": Wrong("B021", "low rank", trainer=adapter),
    "adapter not used, mixture of experts": Wrong(
        "B022", "low rank", trainer=adapter, family="moe"
    ),
    # exported as [g0 u0 g1 u1], and read as [g0 g1 u0 u1]
    "adapter split wrongly": Wrong(
        "B016",
        "permuted",
        rollout=partial(gate_up_adapter, order=(0, 2, 1, 3)),
        trainer=partial(gate_up_adapter, order=(0, 1, 2, 3)),
    ),
    "norm never written": Wrong("B019", "not loaded", rollout=norm_never_written),
    "qkv split for ranks": Wrong("B162", "permuted", trainer=qkv_interleaved),
    "scales transposed": Wrong("B144", "drift", rollout=scales_transposed),
    "weights of the step before": Wrong("B172", "drift", trainer=older(0.05), family="moe"),
    "stale head": Wrong("B110", "drift", rollout=stale_head),
}


def _scored(bench: Bench, wrong: Wrong) -> list[ScoreRecord]:
    if wrong.rollout is None:
        assert wrong.trainer is not None
        run = _other_trainer(bench, wrong.trainer, wrong.family)
    else:
        rollout, trainer = wrong.labs(bench)
        run = three(rollout, trainer=trainer, seed=21)
    return [record(run.samples, run.scores())]


def _other_trainer(bench: Bench, edit: Edit, family: Family = "dense", seed: int = 0) -> Three:
    """A sound run, but for the trainer's weights."""
    run = bench.sound(family, seed=seed)
    return run.retrained(bench.lab(family).changed(edit).train(run.samples))


def adapter_grows(bench: Bench) -> list[ScoreRecord]:
    """An adapter that is never delivered: nothing at first, and more with every step."""
    records = []
    for step in range(3):
        run = _other_trainer(bench, partial(adapter, strength=0.12 * step), seed=step)
        records.append(record(run.samples, run.scores(), step=step))
    return records


def update_skipped(bench: Bench, *, labelled: bool = False) -> list[ScoreRecord]:
    """Step 0 in agreement; at step 1 the trainer has moved on, and the rollout has not.

    Versions say so where they are ``labelled`` by what each side holds, not by what it should.
    """
    held = {"A": "step-0", "B": "step-0"} if labelled else None
    first = bench.sound("moe")
    second = _other_trainer(bench, older(0.05), "moe", seed=1)
    return [
        record(first.samples, first.scores(), step=0),
        record(second.samples, second.scores(), step=1, versions=held),
    ]


def updated_before_replay(bench: Bench) -> list[ScoreRecord]:
    """A is of the old weights; the update came before B and C."""
    new = bench.lab().changed(older(0.05))
    run = three(new, generator=bench.lab(), trainer=new, seed=27)
    return [record(run.samples, run.scores())]


WEIGHTS = {
    **{
        name: Case(wrong.catalogue, partial(_scored, wrong=wrong), "C", weights=True)
        for name, wrong in WRONG.items()
    },
    "adapter grows": Case("B023", adapter_grows, "C", weights=True),
    "update skipped": Case("B172", update_skipped, "C", weights=True),
    "update skipped, and said": Case(
        "B172", partial(update_skipped, labelled=True), "B", ("weights",), weights=True
    ),
    "updated before the replay": Case("B172", updated_before_replay, "A"),
}
