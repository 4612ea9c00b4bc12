"""Capture the log-prob forward of a live miles or slime job, by one flag and no edit.

::

    --custom-megatron-before-log-prob-hook-path layerbisect.captures.megatron.hook.before_log_prob
    --train-env-vars '{"LAYERBISECT_CAPTURE": "/shared/captures/trainer"}'

One round of the actor is captured: its log-probs of one rollout, each data-parallel rank's
sequences in every micro-batch. These variables say what, and are the trainer's alone, so that the
rollout's server does not capture into the same directory:

``LAYERBISECT_CAPTURE``
    where all ranks write, a new directory that every node sees. Without it nothing is done.
``LAYERBISECT_POINTS``
    patterns of points, ``coarse`` by default.
``LAYERBISECT_LABEL``
    what a verdict calls this side, ``trainer`` by default.
``LAYERBISECT_ROUND``
    which of the actor's rounds, counted from 0; the first by default.
``LAYERBISECT_ONLY``
    the rollout's capture: of the round's batches only the sequences that it holds are recorded.
``LAYERBISECT_TAIL``
    the rollout's capture: before the round its states are carried through the trainer's layers (see
    :mod:`layerbisect.captures.megatron.tail`), and ``<LAYERBISECT_CAPTURE>.carried.json`` is
    written for ``layerbisect bisect --carried``, where there is none. All ranks must be given it:
    where one alone is, it waits for the others, and the job hangs.

The job calls the hook on every rank with the model in evaluation mode, and names the weights that
are in it by a prefix of what it stores: none for the actor, ``ref_`` and ``teacher_`` for others.
Nobody says when the round is over: the capture is whole after each pass, and closed when the job
begins to train, calls the hook again, or ends. slime leaves the actor's round out where its loss
can do without; ``--get-mismatch-metrics`` brings it back.

No rank waits for another but in the live tail, whose forwards are the job's own. What goes wrong is
logged once, and the job goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.carried import check_unwritten
from layerbisect.captures.claiming import check_new
from layerbisect.captures.errors import CaptureError, LayerBisectError

if TYPE_CHECKING:
    from layerbisect.captures.megatron.capture import MegatronCapture
    from layerbisect.captures.megatron.model import Model

log = logging.getLogger("layerbisect")

DIRECTORY = "LAYERBISECT_CAPTURE"
ROUND = "LAYERBISECT_ROUND"
TAIL = "LAYERBISECT_TAIL"

_logged: set[str] = set()
_rounds: dict[str, LiveRound] = {}


def before_log_prob(args: Any, model: Model, store_prefix: str) -> None:
    """Capture the coming log-prob round, if it is the one that was asked for.

    Args:
        args: the job's arguments.
        model: its list of model chunks on this rank.
        store_prefix: which weights are in them; empty for the actor's.
    """
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return
    with _guarded("the hook"):
        if directory not in _rounds:
            _rounds[directory] = LiveRound(Path(directory))
        _rounds[directory].begins(args, model, store_prefix)


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Log an error, each one once: whatever our hook does, the job goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        message = f"{what}: {type(error).__name__}: {error}"
        if message not in _logged:
            _logged.add(message)
            log.error("layerbisect: %s; the job goes on", message)


class LiveRound:
    """The round of a job that is captured into ``directory``, on one rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen = 0
        self._taken = False
        self._handles: list[Any] = []
        self._running: MegatronCapture | None = None

    def begins(self, args: Any, model: Model, prefix: str) -> None:
        """A log-prob round begins: end a capture that is running, and start one if it is time."""
        self.close()
        # miles and slime name a critic's model so; its rounds have the actor's prefix
        first = model[0] if isinstance(model, (list, tuple)) and model else model
        if prefix or getattr(first, "role", "actor") != "actor":
            return
        number, self._seen = self._seen, self._seen + 1
        if number != _wanted_round():
            return
        _refuse(args)
        if os.environ.get(TAIL):
            with _guarded("the live tail"):
                self._carry(args, model, os.environ[TAIL])
        if not self._taken:
            self._open(args, model)

    def _check(self) -> None:
        """Raise CaptureError, before any forward, where what was written is not to be kept."""
        try:
            check_new(self.directory)
        except CaptureError:
            # said once: the capture is not begun, either
            self._taken = True
            raise
        check_unwritten(self._carried)

    @property
    def _carried(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.carried.json")

    def _open(self, args: Any, model: Model) -> None:
        from layerbisect.captures.megatron.capture import MegatronCapture

        capture = MegatronCapture(
            model,
            self.directory,
            points=os.environ.get("LAYERBISECT_POINTS") or "coarse",
            label=_label(),
            vocab=getattr(args, "vocab_size", None),
            only=os.environ.get("LAYERBISECT_ONLY") or None,
            whole_after_each_pass=True,
            replayed=bool(getattr(args, "use_rollout_routing_replay", False)),
        )
        capture.__enter__()
        self._running = capture
        # behind the capture's own: hooks that are removed within a call are called all the same
        self._handles = [
            chunk.model.register_forward_pre_hook(self._close_in_training)
            for chunk in capture.chunks
        ]
        atexit.register(self._close_at_exit)
        log.info("layerbisect: capturing %d points into %s", len(capture.points), self.directory)

    def _close_in_training(self, module: Any, args: tuple[Any, ...]) -> None:
        import torch

        if module.training or torch.is_grad_enabled():
            with _guarded("closing the capture"):
                self.close()

    def _close_at_exit(self) -> None:
        with _guarded("closing the capture"):
            self.close()

    def close(self) -> None:
        """End the capture if one is running: hooks are removed, and the weights looked at again."""
        running, self._running = self._running, None
        if running is None:
            return
        for handle in self._handles:
            handle.remove()
        atexit.unregister(self._close_at_exit)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            running.__exit__(None, None, None)
        for warning in told:
            log.warning("layerbisect: %s", warning.message)

    def _carry(self, args: Any, model: Model, rollout: str) -> None:
        import torch

        from layerbisect.captures.megatron.pipeline import pipeline_forward
        from layerbisect.captures.megatron.tail import live_carried_gap

        _refuse_replay(args)
        packed = getattr(args, "qkv_format", "thd") == "thd"
        found = live_carried_gap(
            model,
            rollout,
            pipeline_forward(model, packed=packed),
            label=_label(),
            vocab=getattr(args, "vocab_size", None),
            check=self._check,
        )
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            found.write(self._carried)
            log.info(
                "layerbisect: %d forwards of the trainer carried %d tokens through %d boundaries: "
                "%s",
                found.forwards,
                found.tokens,
                len(found.gaps),
                self._carried,
            )


def _label() -> str:
    return os.environ.get("LAYERBISECT_LABEL") or "trainer"


def _wanted_round() -> int:
    text = os.environ.get(ROUND) or "0"
    if not text.isdecimal():
        raise LayerBisectError(f"{ROUND} is {text!r}; give a number counted from 0")
    return int(text)


def _refuse(args: Any) -> None:
    """Raise LayerBisectError for a round whose rows or weights are not what they seem."""
    if getattr(args, "keep_old_actor", False):
        raise LayerBisectError(
            "nothing is captured with --keep-old-actor, whose log-probs are of an older snapshot "
            "of the actor; run without it"
        )
    if getattr(args, "allgather_cp", False) and getattr(args, "context_parallel_size", 1) > 1:
        raise LayerBisectError(
            "nothing is captured with --allgather-cp, which cuts whole packs over "
            f"{args.context_parallel_size} context-parallel ranks; run without it"
        )


def _refuse_replay(args: Any) -> None:
    if getattr(args, "use_routing_replay", False):
        raise LayerBisectError(
            "not run with --use-routing-replay, whose records forwards of ours would disturb; "
            "run without it, or capture without LAYERBISECT_TAIL"
        )
