"""Faults of the engines themselves: KV cache, packing, positions and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from layerbisect.captures.record_file import ScoreRecord
from layerbisect.fault_attention import _angles, _rotated
from tests.bisect.score_lab import Decode, Lab, causal, prompts
from tests.bisect.score_runs import Bench, Case, Family, Three, record, three

Named = dict[str, torch.Tensor]

# prompts that end before the place where a fault begins
SHORT = prompts(30, longest=24)


def _plain(run: Three, **more: Any) -> list[ScoreRecord]:
    return [record(run.samples, run.scores(), **more)]


# the KV cache, in decode


def older(strength: float, seed: int = 1) -> Callable[[Named], None]:
    """Weights as they were some updates ago: each off by ``strength`` of its tensor's deviation."""

    def edit(named: Named) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in named.values():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += strength * weight.float().std() * noise

    return edit


def _prefix_from(labs: Sequence[Lab], asked: list[list[int]], ends: list[list[int]]) -> Decode:
    """K and V of row i before ``ends[i][k]`` come from ``labs[k]``, the first one that has them.

    ``asked`` are the prompts of all rows.
    """
    wide = max(map(len, asked))
    ids = torch.tensor([[0] * (wide - len(row)) + row for row in asked])
    pads = torch.tensor([wide - len(row) for row in asked])[:, None]
    place = torch.arange(wide) - pads
    old = []
    for lab in labs:
        held = lab.new_cache()
        visible = causal(place[:, :, None], place[:, None, :])
        lab.logits(ids, place, visible, attention="sdpa", cache=held)
        old.append(held)
    limits = torch.tensor(ends)

    def cache(live: Any, positions: torch.Tensor) -> None:
        known = positions[:, :wide]
        for k, stale in reversed(list(enumerate(old))):
            cells = (known >= 0) & (known < limits[:, k : k + 1])
            for mine, theirs in zip(live.layers, stale.layers, strict=True):
                count = known.shape[1]
                here = cells[:, None, :, None]
                for own, was in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    own[:, :, :count] = torch.where(here, was[:, :, :count], own[:, :, :count])

    return Decode(cache=cache, by_token=True)


def stale_prefix(bench: Bench, *, ages: int = 1, repeated: bool = False) -> list[ScoreRecord]:
    """The prompt's KV is of weights before the update; generation goes on with the new ones.

    Where prompts are ``repeated``, every other one was seen before the update, and the rest is new.
    """
    asked = prompts(9, count=16 if repeated else 4, shortest=20)
    rows = [row for row in asked for _ in range(2)]
    held = [0 if repeated and i // 2 % 2 else len(row) // 8 * 8 for i, row in enumerate(rows)]
    # the older half of the blocks is one update older
    ends = [[n // 2, n] if ages > 1 else [n] for n in held]
    labs = [bench.lab().changed(older(0.06 * (ages - k))) for k in range(ages)]
    fault = _prefix_from(labs, rows, ends)
    length = 48 if repeated else 128
    run = three(bench.lab(), seed=9, asked=asked, length=length, fault=fault)
    none = [0] * len(rows)
    return _plain(run, cached={"A": held, "B0": none, "B1": none})


def _quantised(values: torch.Tensor, scale: float) -> torch.Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    narrow = (values / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return narrow.to(values.dtype) * scale


def _quantise(cells: Callable[[torch.Tensor], torch.Tensor], scale: float) -> Decode:
    """K and V of ``cells(positions)`` are kept in float8."""

    def cache(live: Any, positions: torch.Tensor) -> None:
        here = cells(positions)[:, None, :, None]
        for layer in live.layers:
            for held in (layer.keys, layer.values):
                held.copy_(torch.where(here, _quantised(held, scale), held))

    return Decode(cache=cache)


def kv_scale_forgotten(bench: Bench) -> list[ScoreRecord]:
    """A model with large keys, whose float8 cache has the scale 1 and saturates."""

    def large(named: Named) -> None:
        for name, weight in named.items():
            if "k_norm" in name:
                weight *= 200
            if "q_norm" in name:
                weight /= 200

    lab = bench.lab().changed(large)
    everywhere = _quantise(lambda positions: positions >= 0, 1.0)
    return _plain(three(lab, seed=10, fault=everywhere))


def kv_in_float8_beyond_a_tile(bench: Bench) -> list[ScoreRecord]:
    """In float16, as the report's engine is deterministic, and exact before the tile's end."""

    def full_tiles(positions: torch.Tensor) -> torch.Tensor:
        return (positions >= 0) & (positions < positions[:, -1:] // 32 * 32)

    lab = bench.lab(precision="float16")
    return _plain(three(lab, asked=SHORT, seed=11, fault=_quantise(full_tiles, 1.0)))


def decode_sees_32_keys(bench: Bench) -> list[ScoreRecord]:
    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(query, key) & (key < 32)

    return _plain(three(bench.lab(), asked=SHORT, seed=12, fault=Decode(sees=sees)))


def ring_of_16(bench: Bench) -> list[ScoreRecord]:
    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(query, key) & (key > query - 16)

    return _plain(three(bench.lab("moe"), seed=12, fault=Decode(sees=sees)))


def stale_draft_at_the_end(bench: Bench, length: int = 96) -> list[ScoreRecord]:
    def feed(step: int, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, -2:-1] if step >= length - 3 else ids[:, -1:]

    return _plain(three(bench.lab(), seed=13, length=length, fault=Decode(feed=feed)))


def stale_position_every_fourth(bench: Bench) -> list[ScoreRecord]:
    def place(step: int, positions: torch.Tensor) -> torch.Tensor:
        return positions - 1 if step % 4 == 0 else positions

    return _plain(three(bench.lab(), seed=13, fault=Decode(place=place)))


# packing, masks and positions in the trainer


def no_boundaries(bench: Bench) -> list[ScoreRecord]:
    run = bench.sound()
    return _plain(run.retrained(bench.lab().train(run.samples, boundaries=False)))


def keys_dropped_at_chunk_ends(bench: Bench) -> list[ScoreRecord]:
    """Each row is cut in 2 x 2 chunks and padded, and a chunk keeps the keys of an unpadded one."""

    def mask(visible: torch.Tensor) -> torch.Tensor:
        length = visible.shape[-1]
        size, kept = -(-length // 4), length // 4
        own = torch.eye(length, dtype=torch.bool)
        return visible & ((torch.arange(length) % size < kept) | own)

    run = bench.sound(longest=24)
    return _plain(run.retrained(bench.lab().train(run.samples, row=1, mask=mask)))


def left_padding_is_seen(bench: Bench) -> list[ScoreRecord]:
    run = bench.sound()
    return _plain(
        run.retrained(bench.lab().train_padded(run.samples, 3, shift=True, leak=0.0))
    )


def compressed_positions(bench: Bench) -> list[ScoreRecord]:
    """From layer 2 on, keys at index 16 and later are rotated for a quarter of their position."""

    run, lab = bench.sound(longest=12), bench.lab()
    frequencies = lab.model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        squeezed = torch.where(positions >= 16, positions // 4, positions)
        wrong = _angles(lab.model, frequencies, squeezed, cos.dtype)
        return own(q, k, cos, sin)[0], own(q, k, *wrong)[1]

    with _rotated(lab.model, 2, rotate), _rotated(lab.model, 3, rotate):
        return _plain(run.retrained(lab.train(run.samples)))


# weights


def _attention(named: Named, kind: str) -> list[torch.Tensor]:
    return [weight for name, weight in named.items() if f".{kind}." in name]


def adapter(named: Named, strength: float) -> None:
    """Merge an update of rank 2 into the projections of queries and values."""
    generator = torch.Generator().manual_seed(3)
    for kind in ("q_proj", "v_proj"):
        for weight in _attention(named, kind):
            down = torch.randn(2, weight.shape[1], generator=generator)
            up = torch.randn(weight.shape[0], 2, generator=generator)
            weight += strength * weight.std() * (up @ down)


def _other_trainer(
    bench: Bench, edit: Callable[[Named], None], family: Family = "dense", seed: int = 0
) -> Three:
    """A sound run, but for the trainer's weights."""
    run = bench.sound(family, seed=seed)
    return run.retrained(bench.lab(family).changed(edit).train(run.samples))


def adapter_not_delivered(bench: Bench, family: Family = "dense") -> list[ScoreRecord]:
    return _plain(_other_trainer(bench, lambda named: adapter(named, 0.25), family))


def adapter_grows(bench: Bench) -> list[ScoreRecord]:
    """An adapter that is never delivered: nothing at first, and more with every step."""
    records = []
    for step in range(3):
        def edit(named: Named, step: int = step) -> None:
            adapter(named, 0.12 * step)

        run = _other_trainer(bench, edit, seed=step)
        records.append(record(run.samples, run.scores(), step=step))
    return records


def adapter_split_wrongly(bench: Bench) -> list[ScoreRecord]:
    """The adapter of gate and up is exported as [g0 u0 g1 u1], and read as [g0 g1 u0 u1]."""

    def delta(weight: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        down = torch.randn(2, weight.shape[1], generator=generator)
        up = torch.randn(2 * weight.shape[0], 2, generator=generator)
        return 0.15 * weight.std() * (up @ down)

    def merge(named: Named, order: Sequence[int]) -> None:
        pairs = zip(_attention(named, "gate_proj"), _attention(named, "up_proj"), strict=True)
        for layer, (gate, up) in enumerate(pairs):
            quarters = delta(gate, layer).chunk(4)
            both = torch.cat([quarters[i] for i in order]).chunk(2)
            gate += both[0]
            up += both[1]

    trainer = bench.lab().changed(lambda named: merge(named, (0, 1, 2, 3)))
    rollout = bench.lab().changed(lambda named: merge(named, (0, 2, 1, 3)))
    return _plain(three(rollout, trainer=trainer, seed=21))


def norm_never_written(bench: Bench) -> list[ScoreRecord]:
    def garbage(named: Named) -> None:
        named["model.layers.1.self_attn.k_norm.weight"].fill_(1e4)

    rollout = bench.lab().changed(garbage)
    return _plain(three(rollout, trainer=bench.lab(), seed=22))


def qkv_interleaved(named: Named) -> None:
    """Fused [q0 q1 k0 k1 v0 v1] is split as [q0 k0 v0 q1 k1 v1], as for two ranks."""
    kinds = ("q_proj", "k_proj", "v_proj")
    for parts in zip(*(_attention(named, kind) for kind in kinds), strict=True):
        fused = torch.cat([*parts])
        shares = [len(part) // 2 for part in parts] * 2
        pieces = fused.split(shares)
        for i, part in enumerate(parts):
            part.copy_(torch.cat([pieces[i], pieces[i + 3]]))


def qkv_split_for_ranks(bench: Bench) -> list[ScoreRecord]:
    return _plain(_other_trainer(bench, qkv_interleaved))


def scales_transposed(named: Named) -> None:
    """Block-scaled float8, blocks of 32, whose square table of scales is read transposed."""
    for kind in ("q_proj", "o_proj"):
        for weight in _attention(named, kind):
            blocks = weight.reshape(4, 32, 4, 32).transpose(1, 2)
            limit = torch.finfo(torch.float8_e4m3fn).max
            scale = blocks.abs().amax((-1, -2), keepdim=True) / limit
            narrow = (blocks / scale).to(torch.float8_e4m3fn).float()
            wrong = narrow * scale.transpose(0, 1)
            weight.copy_(wrong.transpose(1, 2).reshape(weight.shape))


def scale_layout(bench: Bench) -> list[ScoreRecord]:
    return _plain(
        three(bench.lab().changed(scales_transposed), trainer=bench.lab(), seed=24)
    )


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
    return _plain(three(new, generator=bench.lab(), trainer=new, seed=27))


def stale_head(bench: Bench) -> list[ScoreRecord]:
    def edit(named: Named) -> None:
        weight = named["lm_head.weight"]
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
        weight += 0.08 * weight.std() * noise

    return _plain(three(bench.lab().changed(edit), trainer=bench.lab(), seed=28))


ENGINES = {
    "stale prefix": Case("B025", stale_prefix, "A"),
    "stale prefix of several ages": Case("B026", lambda bench: stale_prefix(bench, ages=2), "A"),
    "stale prefix of repeated prompts": Case(
        "B027", lambda bench: stale_prefix(bench, repeated=True), "A", ("cached prefix",)
    ),
    "scale of the KV cache forgotten": Case("B028", kv_scale_forgotten, "A"),
    "KV in float8 beyond a tile": Case(
        "B029", kv_in_float8_beyond_a_tile, "A", ("from a position on",), "positions >= 3[2-4]"
    ),
    "decode sees 32 keys": Case(
        "B061", decode_sees_32_keys, "A", ("from a position on",), "positions >= 3[2-4]"
    ),
    "ring buffer of 16": Case("B065", ring_of_16, "A"),
    "stale draft at the end": Case(
        "B125", stale_draft_at_the_end, "A", ("from a position on",), "last 3"
    ),
    "stale position every fourth step": Case("B158", stale_position_every_fourth, "A"),
    "attention across documents": Case(
        "B068", no_boundaries, "C", ("some responses",), "1, 3, 5, 7"
    ),
    "keys dropped at chunk ends": Case(
        "B066",
        keys_dropped_at_chunk_ends,
        "C",
        ("from a position on",),
        "positions >= [23][0-9]",
        faint=True,
    ),
    "left padding is seen": Case("B127", left_padding_is_seen, "C"),
    "compressed positions": Case(
        "B043",
        compressed_positions,
        "C",
        ("from a position on",),
        "positions >= (1[0-9]|[4-9])",
        faint=True,
    ),
    "adapter not delivered": Case("B021", adapter_not_delivered, "C", weights=True),
    "adapter not used, mixture of experts": Case(
        "B022", lambda bench: adapter_not_delivered(bench, "moe"), "C", weights=True
    ),
    "adapter grows": Case("B023", adapter_grows, "C", weights=True),
    "adapter split wrongly": Case("B016", adapter_split_wrongly, "C", weights=True),
    "norm never written": Case("B019", norm_never_written, "C", weights=True),
    "qkv split for ranks": Case("B162", qkv_split_for_ranks, "C", weights=True),
    "scales transposed": Case("B144", scale_layout, "C", weights=True),
    "update skipped": Case("B172", update_skipped, "C", weights=True),
    "update skipped, and said": Case(
        "B172", lambda bench: update_skipped(bench, labelled=True), "B", ("weights",), weights=True
    ),
    "updated before the replay": Case("B172", updated_before_replay, "A"),
    "stale head": Case("B110", stale_head, "C", weights=True),
}
