"""Run one side of a scene as a control has it: its form, layout, settings and dtype."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerbisect.captures.capture import capture
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.store import Capture
from layerbisect.captures.transformers_calls import cache_name
from scripts.planted.fault import Control, Side
from scripts.planted.scene import PROMPT, Run, Scene, load_engine

ENGINE_SETTINGS = ("attention", "experts")
PADDING = 5
"""Columns of padding beside each sequence of a padded batch, which are all equally long."""
RAGGED = (8, 3, 6, 1, 7, 4)
"""Tokens of each sequence that are prefilled before it is decoded, in turn."""

Batch = list[list[int]]
Layout = Callable[[Any, Batch, "dict[str, str]"], None]


def run_control(
    scene: Scene,
    control: Control,
    side: Side,
    directory: Path,
    *,
    layer: int | None = None,
    points: str = "all",
) -> Run:
    """Run a side of a scene as a control has it, and capture it.

    The form is planted once, in the middle layer or the given one; one of every layer ignores it.
    Settings beside the engine's own are the layout's: ``batch`` (sequences at once; 1, or all where
    they lie in one row), ``order`` (``reversed``), ``pad`` (``left``, ``right`` or ``both``),
    ``chunk`` (tokens at once), ``prompts`` (``ragged``), ``cache`` (``static``), ``mask``
    (``ones``) and ``copies`` (of each sequence).

    Raises:
        LayerBisectError: a model that cannot have it, or no such layout.
    """
    if control.moe_only and not any(scene.sparse(number) for number in range(scene.layers)):
        raise LayerBisectError(f"{control.name} needs a model with experts")
    settings = dict(control.settings or {})
    engine = engine_of(scene, control, side)
    order = list(range(len(scene.tokens)))
    if settings.get("order") == "reversed":
        order.reverse()
    batches = list(_batches(scene, order, control.layout, settings))
    names = [f"s{number}" for batch in batches for number in batch]
    shutil.rmtree(directory, ignore_errors=True)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if control.form is not None:
            middle = scene.layers // 2 if layer is None else layer
            stack.enter_context(control.form(engine, middle))
        stack.enter_context(
            capture(engine, directory, points=points, label=side, names=_told_apart(names))
        )
        for batch in batches:
            run_layout(engine, [scene.tokens[n] for n in batch], control.layout, settings)
    return Run(directory, _scores(Capture.open(directory), len(scene.tokens)))


def engine_of(scene: Scene, control: Control, side: Side) -> Any:
    """The side's own engine, or one loaded with other settings or in another dtype."""
    own = {k: v for k, v in (control.settings or {}).items() if k in ENGINE_SETTINGS}
    if not own and control.dtype in (None, scene.dtype):
        return scene.engines[side]
    return _loaded(scene.model, side, control.dtype or scene.dtype, tuple(sorted(own.items())))


@lru_cache(maxsize=2)
def _loaded(model: Path, side: Side, dtype: str, settings: tuple[tuple[str, str], ...]) -> Any:
    return load_engine(model, side, dtype, dict(settings))


def _batches(
    scene: Scene, order: Sequence[int], layout: str, settings: dict[str, str]
) -> Iterator[list[int]]:
    together = layout in ("padded", "packed", "batched decode")
    size = int(settings.get("batch", len(order) if together else 1))
    listed = [number for number in order for _ in range(int(settings.get("copies", 1)))]
    for start in range(0, len(listed), size):
        yield listed[start : start + size]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names of sequences in which a copy has a name of its own."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}-copy{seen[name] - 1}")
    return found


def run_layout(model: Any, batch: Batch, layout: str, settings: dict[str, str]) -> None:
    """Feed a batch of sequences to a model in one of the layouts."""
    if layout not in _LAYOUTS:
        raise LayerBisectError(f"there is no layout {layout!r}: {', '.join(_LAYOUTS)}")
    _LAYOUTS[layout](model, batch, settings)


def _single(model: Any, batch: Batch, settings: dict[str, str]) -> None:
    ids = torch.tensor(batch)
    mask = torch.ones_like(ids) if settings.get("mask") == "ones" else None
    model(input_ids=ids, attention_mask=mask, use_cache=False)


def _padded(model: Any, batch: Batch, settings: dict[str, str]) -> None:
    width = max(map(len, batch)) + PADDING
    ids, mask = torch.zeros(2, len(batch), width, dtype=torch.long)
    side = settings.get("pad", "both")
    for row, one in enumerate(batch):
        right = side == "right" or side == "both" and row % 2
        at = slice(0, len(one)) if right else slice(width - len(one), width)
        ids[row, at], mask[row, at] = torch.tensor(one), 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)


def _packed(model: Any, batch: Batch, settings: dict[str, str]) -> None:
    ids = torch.tensor([token for one in batch for token in one])
    places = torch.tensor([place for one in batch for place in range(len(one))])
    model(input_ids=ids[None], position_ids=places[None], use_cache=False)


def _chunked(model: Any, batch: Batch, settings: dict[str, str]) -> None:
    # all but the last token, which nothing is scored by
    lengths = [len(one) - 1 for one in batch]
    chunk = int(settings.get("chunk", 7))
    decode_like_rollout(model, batch, lengths, chunk, batch_size=len(batch))


def _decoded(model: Any, batch: Batch, settings: dict[str, str]) -> None:
    if settings.get("cache") == "static":
        _decoded_static(model, batch)
        return
    ragged = settings.get("prompts") == "ragged"
    lengths = [RAGGED[n % len(RAGGED)] if ragged else PROMPT for n in range(len(batch))]
    decode_like_rollout(model, batch, lengths, batch_size=len(batch))


def _decoded_static(model: Any, batch: Batch) -> None:
    from transformers import StaticCache

    ids = torch.tensor(batch)
    width = ids.shape[1]
    held = {cache_name(model): StaticCache(config=model.config, max_cache_len=width + PADDING)}
    for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, width))]:
        positions = torch.arange(start, stop)[None]
        model(input_ids=ids[:, start:stop], position_ids=positions, use_cache=True, **held)


_LAYOUTS: dict[str, Layout] = {
    "single": _single,
    "padded": _padded,
    "packed": _packed,
    "chunked prefill": _chunked,
    "decode": _decoded,
    "batched decode": _decoded,
}


def _scores(found: Capture, sequences: int) -> list[Any]:
    """Each sequence's captured log-probs (float64 [response], nat), in the scene's order."""
    table = found.scores
    numbers = {info.name: number for number, info in enumerate(found.sequences)}
    scores = []
    for sequence in range(sequences):
        at = table.rows.sequence == numbers[f"s{sequence}"]
        mine = at & (table.rows.position >= PROMPT)
        scores.append(table.logprob[mine][np.argsort(table.rows.position[mine])])
    return scores
