"""What ``with layerbisect.capture(model, directory)`` does with a transformers model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from layerbisect.captures import kv_lanes
from layerbisect.captures.attention_seam import observed
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.forcing import Forcing
from layerbisect.captures.forward_mode import ModeWatch
from layerbisect.captures.lanes import Lane, Names
from layerbisect.captures.recompute import Recomputation, in_backward
from layerbisect.captures.recorder import Recorder
from layerbisect.captures.routes import wanted as wanted_routes
from layerbisect.captures.scores import Pending, score_pass
from layerbisect.captures.telling import TellingWriter, warn_of
from layerbisect.captures.transformers_adapter import ATTENTION_SUFFIXES, Anatomy
from layerbisect.captures.transformers_calls import Call, cache_name, read_call
from layerbisect.captures.transformers_mode import mode_of
from layerbisect.captures.transformers_routes import forced_gates, keys_of

if TYPE_CHECKING:
    import torch

    from layerbisect.captures.store import Capture


class ModelCapture:
    """Records what a transformers model computes while the context is open.

    Arguments are as :func:`layerbisect.captures.capture.capture` has them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        directory: str | os.PathLike[str],
        *,
        points: str | Sequence[str] = "coarse",
        label: str = "trainer",
        names: Sequence[str] | None = None,
        salts: Sequence[str] | None = None,
        routes: str | os.PathLike[str] | Capture | None = None,
        route_weights: bool = False,
    ) -> None:
        if isinstance(names, str) or isinstance(salts, str):
            raise LayerBisectError("names and salts are lists with one text a sequence, not texts")
        self.directory = Path(directory)
        self.points: tuple[str, ...] = ()
        self._anatomy = Anatomy.of(model)
        self.points = self._anatomy.points(points)
        self._label = label
        self._routes = wanted_routes(routes, route_weights, self._anatomy.moe_layers)
        self._forcing: Forcing | None = None
        if self._routes is not None:
            self._forcing = Forcing(self._routes, self._anatomy.moe_layers)
        self._names = Names(names or (), salts or ())
        self._exit = ExitStack()
        self._call: Call | None = None
        self._after: tuple[Lane, ...] = ()
        self._passes = 0

    def __enter__(self) -> ModelCapture:
        anatomy = self._anatomy
        info = anatomy.info(self._label, self.points)
        if self._routes is not None:
            info = replace(info, routes=self._routes.kind)
        self._writer = TellingWriter(self.directory, info)
        self._recorder = Recorder(
            self._writer, self.points, anatomy.taps, head_dim=anatomy.head_dim
        )
        self._again = Recomputation(self._recorder)
        self._modes = ModeWatch(partial(mode_of, anatomy), self._writer.called_in)
        with ExitStack() as stack:
            model = anatomy.model
            root = [
                model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                model.register_forward_hook(self._end, with_kwargs=True),
                model.lm_head.register_forward_hook(self._score),
            ]
            for handle in root:
                stack.callback(handle.remove)
            wanted = [name for name in self.points if name.endswith(ATTENTION_SUFFIXES)]
            if wanted:
                self._layer_of = {id(m): i for i, m in anatomy.attention_layers()}
                stack.enter_context(observed(self._attention))
            for point in (*wanted, "logits"):
                self._recorder.expect(point)
            if self._forcing is not None:
                stack.enter_context(forced_gates(anatomy, self._forcing, self._recorder.guarded))
            stack.callback(self._recorder.detach)
            stack.callback(self._again.close)
            self._recorder.attach(model)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()
        for problem in self._forcing.problems() if self._forcing is not None else ():
            self._writer.error(problem)
        # what broke off is not whole: such a capture stays marked as unfinished
        if kind is None:
            self._writer.close(self._passes)
            warn_of(self.directory, self._writer.errors)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = None
        if in_backward():
            if self._again.call is None:
                self._writer.error(
                    "a backward computed the whole model again, and of which call is not known: it "
                    "was not recorded; checkpoint the model's layers instead"
                )
            return
        self._again.end()
        if self._forcing is not None:
            self._forcing.forget()
        with self._recorder.guarded("reading a call"):
            self._modes.see(model.training)
            call = read_call(model, args, kwargs, self._names)
            if isinstance(call, str):
                self._writer.error(call)
                return
            for problem in call.problems:
                self._writer.error(problem)
            for wish, name in self._names.renamed:
                self._writer.error(
                    f"the name {wish!r} stands for two lists of tokens; one was called {name!r}"
                )
            self._names.renamed.clear()
            self._recorder.begin(call.batch)
            self._call, self._after = call, call.fed.lanes
            if self._forcing is not None:
                self._forcing.begin(keys_of(call), call.batch.index, call.batch.grid)

    def _end(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        with self._recorder.guarded("ending a call"):
            if self._forcing is not None:
                self._forcing.end()
            cache = call.cache if call.cache is not None else _cache_of(model, output)
            if cache is not None:
                kv_lanes.remember(cache, self._after)
        number = self._recorder.end()
        self._passes += 1
        with self._recorder.guarded("following a call"):
            # a cache belongs to the graph
            self._again.follow(number, call.batch, output, replace(call, cache=None))

    def _attention(self, module: Any, query: Any, key: Any, value: Any) -> None:
        layer, call = self._layer_of.get(id(module)), self._call or self._again.call
        if layer is None or call is None:
            return
        # a dynamic cache has what is new at its end, a static one where its past ends
        past = call.past if key.shape[2] > call.past + call.width else key.shape[2] - call.width
        new = slice(past, past + call.width)
        for point, heads in (("q", query), ("k", key[:, :, new]), ("v", value[:, :, new])):
            self._recorder.record(f"layers.{layer}.attn.{point}", partial(heads.transpose, 1, 2))

    def _score(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        call = self._call or self._again.call
        if call is None:
            return
        with self._recorder.guarded("logprob"):
            whole = len(call.kept) == call.width
            self._recorder.record("logits", lambda: output if whole else None)
            if "logprob" in self.points and self._call is not None:
                self._score_rows(call, output)

    def _score_rows(self, call: Call, logits: torch.Tensor) -> None:
        import torch

        batch = call.batch
        row_of = np.full(batch.grid, -1, np.intp)
        row_of[batch.index] = np.arange(len(batch.rows))
        place = (np.arange(batch.grid // call.width)[:, None] * call.width + call.kept).reshape(-1)
        rows = row_of[place]
        flat = logits.detach().reshape(len(place), -1)
        if (rows < 0).any():
            flat = flat[torch.from_numpy(np.flatnonzero(rows >= 0)).to(flat.device)]
        before: dict[int, Pending] = {}
        for sequence, lane in call.fed.continues.items():
            pending = call.before[lane].pending
            if pending is not None:
                before[sequence] = pending
        scores, after = score_pass(batch.rows, flat, before, kept=rows[rows >= 0])
        self._recorder.score(scores)
        lanes = list(call.fed.lanes)
        for sequence, lane in call.fed.leaves_open.items():
            lanes[lane] = replace(lanes[lane], pending=after.get(sequence))
        self._after = tuple(lanes)


def _cache_of(model: Any, output: Any) -> Any:
    if not isinstance(output, tuple):
        return getattr(output, cache_name(model), None)
    return next((item for item in output if hasattr(item, "get_seq_length")), None)
