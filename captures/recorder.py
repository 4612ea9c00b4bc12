"""Record points from forward hooks; the same for every engine.

An adapter is a table of :class:`Tap`: which module shows which point. The recorder attaches the
hooks, turns what they see into rows, and writes a pass at a time. It never raises into the engine:
what goes wrong is written into the capture, and the engine goes on.
"""

from __future__ import annotations

import itertools
import logging
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from layerbisect.captures.batch import Batch, RowPart
from layerbisect.captures.format import How, PointSeen, TensorHeader
from layerbisect.captures.points import Point, parse
from layerbisect.captures.rows import Rows
from layerbisect.captures.vocab_scores import ShardScores
from layerbisect.captures.writer import CaptureWriter, Scores, check_tensor

if TYPE_CHECKING:
    import torch

log = logging.getLogger("layerbisect")

Pick = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""From a module call's (args, kwargs, output) to the point's tensor, or None if it is not there."""


@dataclass(frozen=True, slots=True)
class Tap:
    """Where an engine shows a point.

    Args:
        module: pattern over module paths, matched whole; its group ``layer`` is the layer number.
        point: the point's name, with ``{layer}`` where the layer number goes.
        pick: takes the tensor from the call. Leading dimensions are flattened to rows, and heads
            are split where the point has them.
        when: ``before`` the module runs (output is None then) or ``after``.
        how: whether the engine holds the very tensor, or it follows from others.
        again: look only at what a backward computes again, where another tap's module may not run.
    """

    module: str
    point: str
    pick: Pick
    when: Literal["before", "after"] = "after"
    how: How = "observed"
    again: bool = False


class Recorder:
    """Attaches taps to a model and writes what they see.

    Args:
        writer: where the passes go.
        points: the points wanted, as :func:`layerbisect.captures.points.select` gives them.
        taps: the engine's table.
        head_dim: channels a head, to split flattened heads.
        header_of: describes a point's shard on this rank; whole tensors where it is not given.
        scattered: suffixes of the points of which this rank holds the pass's ``part`` alone.
    """

    def __init__(
        self,
        writer: CaptureWriter,
        points: Sequence[str],
        taps: Sequence[Tap],
        *,
        head_dim: int,
        header_of: Callable[[Point], TensorHeader] | None = None,
        scattered: Collection[str] = (),
    ) -> None:
        self.writer = writer
        self.points = {name: parse(name) for name in points}
        self._taps = taps
        self._head_dim = head_dim
        self._header_of = header_of or (lambda point: TensorHeader(point.dims))
        self._scattered = frozenset(scattered)
        self._handles: list[Any] = []
        self._logged: set[str] = set()
        self._how: dict[str, How] = {}
        self._batch: Batch | None = None
        self._values: dict[str, torch.Tensor] = {}
        self._headers: dict[str, TensorHeader] = {}
        self._scores: list[Scores] = []
        self._shard_scores: ShardScores | None = None

    @property
    def batch(self) -> Batch | None:
        """The pass that is open, if one is."""
        return self._batch

    @property
    def seen(self) -> bool:
        """Whether the open pass holds a point yet."""
        return bool(self._values)

    def wants(self, point: str) -> bool:
        """Say whether ``point`` is to be recorded in the pass that is open."""
        return self._batch is not None and point in self.points

    def attach(self, root: torch.nn.Module) -> None:
        """Register the hooks; points that no module shows are recorded as not observable."""
        with self.guarded("attaching hooks"):
            for path, module in root.named_modules():
                for tap in self._taps:
                    match = re.fullmatch(tap.module, path)
                    if match:
                        self._attach(module, tap, tap.point.format(**match.groupdict()))
            missing = [n for n in self.points if n not in self._how and n != "logprob"]
            unseen = PointSeen("not_observable", "no module of this model shows it")
            self.writer.points_seen(dict.fromkeys(missing, unseen))

    def expect(self, point: str, how: How = "observed") -> None:
        """Declare that ``point`` will come through :meth:`record` and not through a tap."""
        self._how[point] = how

    def _attach(self, module: torch.nn.Module, tap: Tap, point: str) -> None:
        if point not in self.points:
            return
        self._how[point] = tap.how

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._batch is not None:
                self.record(point, lambda: tap.pick(args, kwargs, None))

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._batch is not None and (not tap.again or self._batch.recomputes is not None):
                self.record(point, lambda: tap.pick(args, kwargs, output))

        if tap.when == "before":
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks; a pass that is still open was broken off, and is dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._drop()

    def begin(self, batch: Batch) -> None:
        """Open a pass. One that is still open was broken off, and is dropped."""
        self._drop()
        self._batch = batch if len(batch.rows) else None

    def _drop(self) -> None:
        broken, self._batch = self._batch, None
        self._clear()
        if broken is not None:
            with self.guarded("dropping a pass"):
                self.writer.skip_pass()
                self.writer.error("a forward pass broke off before its end and was not recorded")

    def record(self, point: str, take: Callable[[], Any]) -> None:
        """Record a point of the open pass; ``take`` gives its tensor, [grid rows, ...] flattened.

        A value that is None, or an error in taking it, leaves the point unseen in this pass.
        """
        batch = self._batch
        if batch is None or point not in self.points:
            return
        import torch

        # what is taken must leave nothing in a graph that is kept for a backward
        with self.guarded(point), torch.no_grad():
            value = take()
            if value is None or self._has_no_rows(batch, self.points[point]):
                return
            if point in self._values and batch.recomputes is not None:
                # one checkpoint inside another
                return
            if point in self._values:
                self.writer.error(f"{point} was computed twice in one pass; the first was kept")
                return
            parsed = self.points[point]
            header, whole = self._header_of(parsed), len(batch.rows)
            part = RowPart(batch.grid, batch.index, 0, whole)
            if batch.part is not None and parsed.suffix in self._scattered:
                part = batch.part
                header = replace(
                    header, shards={**header.shards, "row": (part.start, part.stop, whole)}
                )
            rows = self._rows_of(value, part, parsed)
            # one point that does not fit must not cost the whole pass
            check_tensor(point, rows, header, whole)
            self._values[point], self._headers[point] = rows, header

    def _rows_of(self, value: torch.Tensor, part: RowPart, point: Point) -> torch.Tensor:
        import torch

        # a wrong grid may divide the values evenly all the same
        if part.grid not in itertools.accumulate(value.shape, operator.mul):
            raise ValueError(f"shape {list(value.shape)} does not have {part.grid} rows")
        flat = value.detach().reshape(part.grid, -1)
        index = torch.from_numpy(part.index).to(flat.device)
        # index_select copies, so a later in-place operation of the engine cannot change it
        rows = flat.index_select(0, index).to("cpu")
        if "channel" in point.dims:
            rows = rows.reshape(len(rows), -1, self._head_dim)
        elif len(point.dims) > 2:
            rows = rows.reshape(len(rows), *value.shape[1 - len(point.dims) :])
        return rows

    def score(self, scores: Scores) -> None:
        """Add log-probs to the open pass."""
        if self._batch is not None and len(scores.rows):
            self._scores.append(scores)

    def score_shard(self, scores: ShardScores) -> None:
        """Add this rank's part of the log-probs to the open pass."""
        if self._batch is not None:
            self._shard_scores = scores

    def cancel(self) -> None:
        """Close the open pass as if it had never been."""
        self._batch = None
        self._clear()

    def end(self) -> int | None:
        """Write the open pass; returns its number, or None where none was written."""
        batch, self._batch = self._batch, None
        if batch is None:
            return None
        number = None
        with self.guarded("writing a pass"):
            if batch.recomputes is None:
                self._report_unseen(batch)
            scores: Scores | ShardScores = self._shard_scores or Scores(
                Rows.concatenate([s.rows for s in self._scores]),
                np.concatenate([np.asarray(s.logprob) for s in self._scores] or [np.empty(0)]),
            )
            number = self.writer.write_pass(
                batch.phase,
                batch.sequences,
                batch.rows,
                self._values,
                self._headers,
                scores=scores,
                context=batch.context,
                recomputes=batch.recomputes,
            )
            self.writer.points_seen(
                {n: PointSeen(self._how.get(n, "observed")) for n in self._values}
            )
        self._clear()
        return number

    def _clear(self) -> None:
        self._values, self._headers, self._scores, self._shard_scores = {}, {}, [], None

    def _has_no_rows(self, batch: Batch, point: Point) -> bool:
        """Say whether all rows of a scattered point are on other ranks."""
        part = batch.part
        return part is not None and part.start == part.stop and point.suffix in self._scattered

    def _report_unseen(self, batch: Batch) -> None:
        expected = [
            name
            for name, point in self.points.items()
            if name in self._how and not self._has_no_rows(batch, point)
        ]
        unseen = [name for name in expected if name not in self._values]
        if unseen and not self._values:
            self.writer.error(
                f"no hook fired in a {batch.phase} pass; was it replayed from a CUDA graph or "
                "compiled? serve with graphs disabled to see inside it"
            )
        elif unseen:
            self.writer.error(
                f"{len(unseen)} points were not seen in a {batch.phase} pass, {unseen[0]} first"
            )

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turn an error into a line of the capture, so that the engine goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever our hook does, serving goes on
            message = f"{what}: {type(error).__name__}: {error}"
            if message not in self._logged:
                self._logged.add(message)
                log.warning("layerbisect: %s", message)
            try:
                self.writer.error(message)
            except Exception:  # noqa: BLE001
                log.warning("layerbisect: the capture cannot be written")
