"""Faults of the engines themselves: KV cache, packing, masks and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from layerbisect.captures.record.file import ScoreRecord
from layerbisect.fault_attention import angles, rotated
from tests.bisect.scores.faults_weights import Named, older
from tests.bisect.scores.lab import Decode, Lab, causal, prompts
from tests.bisect.scores.runs import Bench, Case, Three, record, three

# prompts that end before the place where a fault begins
SHORT = prompts(30, longest=24)


def _plain(run: Three, **more: Any) -> list[ScoreRecord]:
    return [record(run.samples, run.scores(), **more)]


# the KV cache, in decode


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
    return _plain(run.retrained(bench.lab().train_padded(run.samples, 3, shift=True, leak=0.0)))


def compressed_positions(bench: Bench) -> list[ScoreRecord]:
    """From layer 2 on, keys at index 16 and later are rotated for a quarter of their position."""
    run, lab = bench.sound(longest=12), bench.lab()
    frequencies = lab.model.model.rotary_emb.inv_freq.float()

    def rotate(own: Any, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> Any:
        squeezed = torch.where(positions >= 16, positions // 4, positions)
        wrong = angles(lab.model, frequencies, squeezed, cos.dtype)
        return own(q, k, cos, sin)[0], own(q, k, *wrong)[1]

    with rotated(lab.model, 2, rotate), rotated(lab.model, 3, rotate):
        return _plain(run.retrained(lab.train(run.samples)))


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
        "B068", no_boundaries, "C", ("some responses",), "call1, call3, call5, call7"
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
}
