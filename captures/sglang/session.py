"""What one process of an SGLang server captures; the plugin hooks these methods into SGLang."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import PointSeen
from layerbisect.captures.points import select
from layerbisect.captures.recorder import Recorder
from layerbisect.captures.sglang import adapter as sglang_adapter
from layerbisect.captures.sglang.batch import (
    Pass,
    Requests,
    keep_logits,
    prompt_scores,
    sampled_scores,
    samples_raw,
)
from layerbisect.captures.sglang.info import (
    experts_renumbered,
    info_of,
    moe_layers,
    weight_version,
)
from layerbisect.captures.sglang.layout import layout_of
from layerbisect.captures.weight_states import WEIGHTS_CHANGED
from layerbisect.captures.writer import CaptureWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger("layerbisect")


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Log an error that no capture can hold yet, so that the engine goes on."""
    try:
        yield
    except Exception as error:  # whatever our hook does, serving goes on
        log.error("layerbisect: %s: %s; serving goes on without capturing", what, error)


class Session:
    """What a process of the server captures: the hooks on SGLang call it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests = Requests(os.environ.get("LAYERBISECT_REQUESTS") or "*")
        self.recorder: Recorder | None = None
        self._attached = False
        self._weights: str | None = None
        self._request_objects: tuple[Any, ...] = ()
        self._within_batch = False
        self._pass: Pass | None = None
        self._logits: torch.Tensor | None = None
        self._raw = True
        self._unsaved = False

    def loaded(self, _: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After ``ModelRunner.load_model``: start the capture."""
        # a draft model is not the policy
        if self.recorder is not None or runner.is_draft_worker:
            return
        with guarded("starting the capture"):
            layout = layout_of(runner)
            label = os.environ.get("LAYERBISECT_LABEL") or "rollout"
            patterns = os.environ.get("LAYERBISECT_POINTS") or "coarse"
            layers = runner.model_config.num_hidden_layers
            wrong = None
            try:
                points = select(patterns, layers, moe_layers(runner))
            except LayerBisectError as error:
                points, wrong = (), str(error)
            self._weights = weight_version(runner)
            writer = CaptureWriter(
                self.directory,
                info_of(runner, layout, label, points),
                rank=layout.rank,
                world_size=layout.world,
            )
            if wrong:
                writer.error(wrong)
                log.error("layerbisect: %s", wrong)
                return
            self.recorder = Recorder(
                writer,
                points,
                sglang_adapter.taps(layout, layers, self._usable),
                head_dim=layout.head_dim,
                header_of=layout.header,
            )
            log.info("layerbisect: capturing %d points into %s", len(points), self.directory)

    def _attach(self, recorder: Recorder, runner: Any) -> None:
        # on the first chosen request and not before: hooks present while SGLang captures its CUDA
        # graphs would be called within the capture
        self._attached = True
        if experts_renumbered(runner):
            reason = "the engine numbers places of experts, not experts"
            numbered = {n for n in recorder.points if n.endswith("mlp.expert_ids")}
            recorder.writer.points_seen({n: PointSeen("not_observable", reason) for n in numbered})
            recorder.points = {n: p for n, p in recorder.points.items() if n not in numbered}
        recorder.attach(runner.model)

    def _usable(self, value: torch.Tensor) -> torch.Tensor | None:
        """Let pass what has the rows of the open pass, outside of graph capture and compilation."""
        import torch

        if torch.compiler.is_compiling():
            return None
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        assert self._pass is not None
        grid = self._pass.batch.grid
        if value.shape[0] != grid:
            raise ValueError(f"holds {value.shape[0]} rows in a pass of {grid}")
        return value

    def batch(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """Around ``TpModelWorker.forward_batch_generation``: forward and sampling."""
        self._request_objects = tuple(getattr(batch, "reqs", None) or ())
        self._within_batch = True
        try:
            result = original(worker, batch, *args, **kw)
        finally:
            self._within_batch = False
            self._request_objects = ()
        if self._pass is not None and self.recorder is not None:
            with self.recorder.guarded("log-probs of sampled tokens"):
                if self.recorder.wants("logprob"):
                    scores = sampled_scores(self._pass, self._logits, result, self._raw)
                    if scores is not None:
                        self.recorder.score(scores)
            self._end(self.recorder)
        return result

    def forward(self, original: Callable[..., Any], runner: Any, *args: Any, **kw: Any) -> Any:
        """Around ``ModelRunner.forward``."""
        forward_batch = kw.get("forward_batch", args[0] if args else None)
        recorder = self.recorder
        if recorder is None or runner.is_draft_worker or forward_batch is None:
            return original(runner, *args, **kw)
        with recorder.guarded("reading the rows of a pass"):
            self._begin(recorder, runner, forward_batch)
        output = original(runner, *args, **kw)
        if self._pass is not None:
            with recorder.guarded("log-probs of the prompt"):
                # older versions return (logits, graph used)
                logits = output[0] if isinstance(output, tuple) else output.logits_output
                if recorder.wants("logprob"):
                    self._score(recorder, runner, forward_batch, logits)
            if not self._within_batch:
                self._end(recorder)
        return output

    def _begin(self, recorder: Recorder, runner: Any, forward_batch: Any) -> None:
        self._pass = None
        one = self.requests.pass_of(forward_batch, self._request_objects)
        if one is None:
            return
        if not self._attached:
            self._attach(recorder, runner)
        version = weight_version(runner)
        if version != self._weights:
            recorder.writer.error(
                f"{WEIGHTS_CHANGED}, from {self._weights!r} to {version!r}; capture each into a "
                "directory of its own"
            )
            self._weights = version
        recorder.writer.reopen()
        recorder.begin(one.batch)
        self._pass, self._unsaved = one, True

    def _score(self, recorder: Recorder, runner: Any, forward_batch: Any, output: Any) -> None:
        assert self._pass is not None
        scores = prompt_scores(self._pass, forward_batch, output)
        if scores is not None:
            recorder.score(scores)
        self._raw = samples_raw(forward_batch)
        self._logits = keep_logits(self._pass, output, runner.model_config.vocab_size)

    def _end(self, recorder: Recorder) -> None:
        self._pass = self._logits = None
        recorder.end()

    def idle(self, *args: Any, **kwargs: Any) -> None:
        """Before ``Scheduler.on_idle``: nothing is in flight, so what was written is whole."""
        # before, because SGLang may sleep in there until the next request
        if self._unsaved and self.recorder is not None:
            self._unsaved = False
            with self.recorder.guarded("finishing the capture"):
                self.recorder.writer.finish()
