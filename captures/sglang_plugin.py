"""Capture inside an SGLang server, through SGLang's own plugin entry point.

Installed with layerbisect and inert until a variable names a directory::

    LAYERBISECT_CAPTURE=/data/rollout python -m sglang.launch_server ...

``LAYERBISECT_POINTS``
    points or patterns, separated by commas; ``coarse`` where it is not set.
``LAYERBISECT_REQUESTS``
    pattern over request IDs (``rid``); every request but SGLang's own where it is not set.
``LAYERBISECT_LABEL``
    what to call this side; ``rollout`` where it is not set.

Nothing here raises into the engine or changes what it computes. Each process of a tensor-parallel
server writes its own part, without talking to the others.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import PointSeen
from layerbisect.captures.points import select
from layerbisect.captures.recorder import Recorder
from layerbisect.captures.sglang_adapter import (
    experts_renumbered,
    info_of,
    layout_of,
    moe_layers,
    taps,
    weight_version,
)
from layerbisect.captures.sglang_batch import (
    WARM_UP,
    Pass,
    Requests,
    keep_logits,
    prompt_scores,
    sampled_scores,
    samples_raw,
)
from layerbisect.captures.writer import CaptureWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger("layerbisect")

DIRECTORY = "LAYERBISECT_CAPTURE"
REFUSED = "LAYERBISECT_REFUSED"
_CHECKED = "LAYERBISECT_CHECKED"


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
        with _guarded("starting the capture"):
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
                taps(layout, layers, self._usable),
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
                f"the weights changed from {self._weights!r} to {version!r} during the capture; "
                "capture each into a directory of its own"
            )
            self._weights = version
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
        """After ``Scheduler.on_idle``: nothing is in flight, so what was written is whole."""
        if self._unsaved and self.recorder is not None:
            self._unsaved = False
            with self.recorder.guarded("finishing the capture"):
                self.recorder.writer.finish()


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Log an error that no capture can hold yet, so that the engine goes on."""
    try:
        yield
    except Exception as error:  # whatever our hook does, serving goes on
        log.error("layerbisect: %s: %s; serving goes on without capturing", what, error)


def name_warm_up(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``TokenizerManager.generate_request``: name what SGLang asks itself while starting."""
    with _guarded("naming a warm-up request"):
        starting = getattr(getattr(manager, "server_status", None), "name", "") == "Starting"
        if starting and getattr(request, "rid", "") is None:
            request.rid = f"{WARM_UP}_{uuid.uuid4().hex}"


def _refuse_old(directory: Path) -> None:
    """Refuse a directory that holds anything, once, in the process that starts the others.

    A rank of its own cannot tell an old capture from what the other ranks have just begun.
    """
    if _CHECKED in os.environ:
        return
    os.environ[_CHECKED] = "1"
    os.environ.pop(REFUSED, None)
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        os.environ[REFUSED] = "1"
        log.error(
            "layerbisect: %s is not an empty directory; name another one in %s. "
            "Serving goes on without capturing",
            directory,
            DIRECTORY,
        )


def register() -> None:
    """Entry point of ``sglang.srt.plugins``, called once in each process of the server."""
    named = os.environ.get(DIRECTORY)
    if not named:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    directory = Path(named)
    _refuse_old(directory)
    if REFUSED in os.environ:
        return
    session = Session(directory)
    srt = "sglang.srt"
    runner = f"{srt}.model_executor.model_runner.ModelRunner"
    for target, hook, kind in (
        (f"{runner}.load_model", session.loaded, HookType.AFTER),
        (f"{runner}.forward", session.forward, HookType.AROUND),
        (
            f"{srt}.managers.tp_worker.TpModelWorker.forward_batch_generation",
            session.batch,
            HookType.AROUND,
        ),
        (f"{srt}.managers.scheduler.Scheduler.on_idle", session.idle, HookType.AFTER),
        (
            f"{srt}.managers.tokenizer_manager.TokenizerManager.generate_request",
            name_warm_up,
            HookType.BEFORE,
        ),
    ):
        HookRegistry.register(target, hook, kind)
