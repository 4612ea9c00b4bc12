"""Check that a planted fault does what it says: where it begins, how far it reaches, its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.captures.capture import capture
from layerbisect.captures.points import all_points
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.store import Capture
from layerbisect.loading import load_model
from scripts.planted.fault import ModelFault

Layout = Literal["single", "batched decode"]
SEQUENCES, PROMPT, RESPONSE = 4, 8, 40
"""Longer than 32 tokens, for faults that begin there."""


def tokens_of(vocab: int) -> list[list[int]]:
    """Random tokens, int [sequence][position]; as in the scene some prompts hold a rare one."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab - 8, (SEQUENCES, PROMPT + RESPONSE), generator=draw)
    for row in range(0, SEQUENCES, 2):
        ids[row, PROMPT // 2] = vocab - 1 - row
    rows: list[list[int]] = ids.tolist()
    return rows


@dataclass(slots=True)
class Checked:
    """A model that faults are planted into, and what it computes when it is right."""

    model: Any
    folder: Path
    tokens: list[list[int]] = field(init=False)
    _clean: dict[str, Capture] = field(init=False, default_factory=dict)
    _weights: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    _outputs: dict[str, list[torch.Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = tokens_of(self.model.config.vocab_size)

    @classmethod
    def load(
        cls,
        directory: Path,
        folder: Path,
        *,
        attention: str = "eager",
        experts: str = "eager",
        dtype: str = "float32",
    ) -> Checked:
        """Load a checkpoint, in which any change shows if it is float32."""
        model: Any = load_model(directory, dtype=dtype, attention=attention)
        if hasattr(model.config, "num_experts"):
            model.set_experts_implementation(experts)
        return cls(model, folder)

    def clean(self, layout: Layout) -> Capture:
        """The run without a fault; computed once."""
        if layout not in self._clean:
            self._clean[layout] = self.run(self.folder / f"clean {layout}", layout)
        return self._clean[layout]

    def run(
        self,
        directory: Path,
        layout: Layout,
        planted: AbstractContextManager[Any] | None = None,
    ) -> Capture:
        """Run all sequences in a layout, with a fault or without, and capture every point."""
        with (
            planted or nullcontext(),
            capture(self.model, directory, points="all,logits", label="engine"),
        ):
            self._compute(layout)
        return Capture.open(directory)

    def keep_right(self, layout: Layout) -> None:
        """Keep what :meth:`changed` compares with, while nothing is planted; once."""
        if not self._weights:
            self._weights = {name: held.detach().clone() for name, held in self._tensors()}
        if layout not in self._outputs:
            self._outputs[layout] = self._logits(layout)

    def changed(self, layout: Layout) -> list[str]:
        """Weights and buffers of other bits than when it was right, and whether its logits are.

        Each point reaches the logits, and in float32 what changes one changes them.
        """
        weights = dict(self._tensors())
        names = [n for n, right in self._weights.items() if not torch.equal(weights[n], right)]
        pairs = zip(self._outputs[layout], self._logits(layout), strict=True)
        return names + ["logits"] * any(not torch.equal(right, now) for right, now in pairs)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def _logits(self, layout: Layout) -> list[torch.Tensor]:
        taken: list[torch.Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda _, args, out: taken.append(out))
        try:
            self._compute(layout)
        finally:
            hook.remove()
        return taken

    @torch.no_grad()
    def _compute(self, layout: Layout) -> None:
        if layout == "single":
            for ids in self.tokens:
                self.model(input_ids=torch.tensor([ids]), use_cache=False)
        else:
            prompts = [PROMPT] * SEQUENCES
            decode_like_rollout(self.model, self.tokens, prompts, batch_size=SEQUENCES)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a planted fault was seen to change in one layout.

    ``clean`` and ``taken`` are the fault's first point, [row, ...] each; ``changed`` bool [row];
    ``positions`` int32 [row].
    """

    clean: NDArray[Any]
    taken: NDArray[Any]
    changed: NDArray[np.bool_]
    positions: NDArray[np.int32]
    capture: Capture

    @property
    def size(self) -> float:
        """Largest finite change over the largest clean value."""
        apart = np.abs(self.taken.astype(np.float64) - self.clean)
        finite = np.isfinite(apart)
        return float(apart[finite].max(initial=0.0) / np.abs(self.clean).max())


def changed_rows(right: Capture, taken: Capture, point: str) -> NDArray[np.bool_]:
    """In which rows (bool [row]) a point's bits differ; NaN is equal to the same NaN."""
    a, b = (np.ascontiguousarray(one.read(point)) for one in (right, taken))
    assert a.dtype == b.dtype and a.shape == b.shape, f"{point}: {a.shape} and {b.shape}"
    bits = [one.view(np.uint8).reshape(len(one), -1) for one in (a, b)]
    changed: NDArray[np.bool_] = (bits[0] != bits[1]).any(1)
    return changed


def wrong_points(right: Capture, taken: Capture) -> Iterator[str]:
    """Points of which any bit differs, in the order of computation."""
    for name in all_points(right.info.num_layers, right.info.moe_layers):
        held = name in right.points and right.has(name).any()
        if held and changed_rows(right, taken, name).any():
            yield name


def check_truth(
    engine: Checked,
    fault: ModelFault,
    layer: int,
    tmp_path: Path,
    layouts: Sequence[Layout] | None = None,
) -> dict[Layout, Seen]:
    """Plant a fault and check that its truth is true of a capture.

    No point before ``fault.point_in(layer)`` may differ in a bit, in any earlier layer either;
    that point must, in at least ``fault.changes`` of the rows of each layout; and afterwards the
    model must have the right weights and compute the right bits again.

    Args:
        engine: in float32, so that any change shows.
        fault: planted as the benchmark does, by its form.
        layer: where.
        tmp_path: an empty folder.
        layouts: to run; by default those of the fault's passes; a trainer decodes nothing.

    Returns:
        What was seen in each layout, for checks of its own.
    """
    chosen: dict[str, tuple[Layout, ...]] = {
        "both": ("single", "batched decode") if "rollout" in fault.sides else ("single",),
        "decode": ("batched decode",),
        "prefill": ("single",),
    }
    point = fault.point_in(layer)
    found: dict[Layout, Seen] = {}
    for layout in layouts or chosen[fault.passes]:
        right = engine.clean(layout)
        engine.keep_right(layout)
        taken = engine.run(tmp_path / f"planted {layout}", layout, fault.form(engine.model, layer))
        # reading what comes after it would take longer than all else
        first = next(wrong_points(right, taken), None)
        assert first, f"{fault.name} changes nothing in {layout}"
        assert first == point, f"{fault.name} first shows at {first} in {layout}"
        changed = changed_rows(right, taken, point)
        share = changed.mean()
        assert share >= fault.changes, f"{fault.name} changes {share:.3f} of {point} in {layout}"
        found[layout] = Seen(
            right.read(point), taken.read(point), changed, right.rows.position, taken
        )
    left = engine.changed(layout)
    assert not left, f"{fault.name} leaves {left[:3]} changed"
    return found
