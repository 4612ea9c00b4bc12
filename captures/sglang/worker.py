"""Talk to one SGLang worker over its native HTTP API.

Nothing is tried twice: a failure is a WorkerError that says who was asked for what, and what came.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from layerbisect.captures.errors import WorkerError
from layerbisect.captures.sglang.reply import (
    ReplyError,
    ScoredResponse,
    Unusable,
    generated,
    replayed,
)
from layerbisect.captures.sglang.request import send
from layerbisect.captures.sglang.worker_info import WorkerInfo, info_of, version_of

RAW: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "skip_special_tokens": False,
}
"""Sampling settings with which the scores are the model's own: no filter and no penalty."""

FLUSH_SECONDS = 30.0
_POLL_SECONDS = 0.1
# a route, or an action of it, that this version of the server does not have
_ABSENT = (400, 404, 405, 422, 501)
# what the request itself is refused with, such as a prompt longer than the context
_REFUSED = (400, 413, 422)
# servers have either the newer name or the older one
_MODEL_INFO = ("/model_info", "/get_model_info")
# what a socket takes at most is some hundred times as long
_LONGEST = 1e7

_Result = TypeVar("_Result")


class Worker:
    """An SGLang worker, or a router in front of some, at ``url`` (``http://host:port``).

    ``timeout`` (seconds) is for each answer as a whole. Every method raises WorkerError.
    """

    def __init__(self, url: str, *, timeout: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise WorkerError(f"{url!r} is no worker's address; give one as http://host:port")
        if not 0 < timeout <= _LONGEST:
            raise WorkerError(
                f"a timeout of {timeout} s is none; give seconds above 0, at most {_LONGEST:.0f}"
            )

    def info(self) -> WorkerInfo:
        """Ask what the worker serves and how."""
        model = self._described("the model's description", _MODEL_INFO)
        server = self._described("the server's settings", ("/server_info", "/get_server_info"))
        return info_of(model, server)

    def weight_version(self) -> str | None:
        """Ask for the name of the weights that are loaded; None where the worker has none."""
        return version_of(self._described("the weight version", _MODEL_INFO))

    def model(self) -> str:
        """Ask which model is served; "" where it answers and does not say, as a router may."""
        for path in _MODEL_INFO:
            status, text = self._send("GET", path, "the model's description")
            if status == 200:
                break
        try:
            reply = json.loads(text) if status == 200 else None
        except (ValueError, RecursionError):
            reply = None
        return str(reply.get("model_path") or "") if isinstance(reply, dict) else ""

    def weights_digest(self) -> str | None:
        """Ask for one digest of the weights on all ranks; None where this is not offered."""
        what = "checksums of the weights"
        status, text = self._send("POST", "/weights_checker", what, {"action": "checksum"})
        if status in _ABSENT:
            return None
        here = self._here("/weights_checker", what)
        self._check_status(here, status, text)

        def read(reply: Any) -> str:
            ranks = reply.get("ranks") if isinstance(reply, dict) else None
            ranks = ranks if isinstance(ranks, list) else []
            sums = [r.get("per_gpu_checksum") for r in ranks if isinstance(r, dict)]
            if not sums or None in sums:
                raise Unusable(f"gave {text!r:.200}, without a checksum of each rank")
            return hashlib.sha256(" ".join(map(str, sums)).encode()).hexdigest()[:16]

        return _read(here, text, read)

    def load_weights(self, directory: str | os.PathLike[str], version: str | None = None) -> None:
        """Let the worker load the checkpoint ``directory`` of its own disk, and wait until it has.

        ``version`` is what the weights are called from then on.
        """
        what = f"the weights of {directory}"
        body: dict[str, Any] = {"model_path": os.fspath(directory)}
        if version is not None:
            body["weight_version"] = version
        status, text = self._send("POST", "/update_weights_from_disk", what, body)
        here = self._here("/update_weights_from_disk", what)
        self._check_status(here, status, text)

        def read(reply: Any) -> None:
            if not isinstance(reply, dict) or reply.get("success") is not True:
                raise Unusable(f"answered {text!r:.200}, and so did not load them")

        _read(here, text, read)

    def flush(self) -> None:
        """Empty the prefix cache, waiting until nothing runs any more."""
        what, deadline = "an empty prefix cache", time.monotonic() + FLUSH_SECONDS
        while True:
            status, text = self._send("POST", "/flush_cache", what)
            # a finished request is released a moment after its answer, and refuses the flush
            if status != 400:
                break
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{self.url} did not empty its prefix cache within {FLUSH_SECONDS:g} s "
                    f"({text.strip()!r:.200}); take the worker out of service while you collect"
                )
            time.sleep(_POLL_SECONDS)
        self._check_status(self._here("/flush_cache", what), status, text)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> tuple[ScoredResponse, ...]:
        """Generate once for each of ``prompts`` (token IDs), all in one request.

        ``sampling`` must have ``max_new_tokens``. A reply that cannot be used is a ReplyError,
        which keeps its text.
        """
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": dict(sampling),
            "return_logprob": True,
        }
        longest = int(sampling["max_new_tokens"])
        return self._generate(
            body,
            _responses(len(prompts)),
            lambda reply: generated(reply, prompts, longest),
        )

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        adapters: Sequence[str | None] = (),
        vocabulary: int | None = None,
    ) -> tuple[ScoredResponse, ...]:
        """Score the responses in ``sequences`` (prompt and response IDs) by prefill alone.

        All go in one request. Each is scored from its first token on, because SGLang reuses cached
        tokens only before the first that it scores: asked from the response on, it lets a sequence
        reuse the prompt of another in the same request, and its scores differ then. ``adapters``
        names the LoRA adapter of each, where there are any; ``vocabulary`` is how many tokens the
        model has, by which the last of them is recognised.
        """
        body = {
            "input_ids": [list(ids) for ids in sequences],
            "sampling_params": {**RAW, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if any(adapters):
            body["lora_path"] = list(adapters)
        return self._generate(
            body,
            f"scores of {_responses(len(sequences))}",
            lambda reply: replayed(reply, sequences, prompt_lengths, vocabulary),
        )

    def _generate(
        self, body: Mapping[str, Any], what: str, read: Callable[[Any], _Result]
    ) -> _Result:
        status, text = self._send("POST", "/generate", what, body)
        here = self._here("/generate", what)
        self._check_status(here, status, text)
        return _read(here, text, read)

    def _described(self, what: str, paths: tuple[str, str]) -> Mapping[str, Any]:
        for path in paths:
            status, text = self._send("GET", path, what)
            if status != 404:
                break
        here = self._here(path, what)
        self._check_status(here, status, text)

        def read(reply: Any) -> Mapping[str, Any]:
            if not isinstance(reply, dict):
                raise Unusable(f"answered {text!r:.200}, which is no description")
            return reply

        return _read(here, text, read)

    def _send(
        self, method: str, path: str, what: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, str]:
        return send(method, self.url + path, self._here(path, what), self.timeout, body)

    def _here(self, path: str, what: str) -> str:
        return f"{self.url}, asked for {what} ({path}),"

    def _check_status(self, here: str, status: int, text: str) -> None:
        if status == 200:
            return
        advice = "see its log, and whether it is an SGLang worker"
        if status in _REFUSED:
            advice = "correct what it names"
        elif status >= 500:
            advice = "see its log"
        raise WorkerError(f"{here} answered HTTP {status}: {text[:200]!r}; {advice}")


def _read(here: str, text: str, read: Callable[[Any], _Result]) -> _Result:
    try:
        return read(json.loads(text))
    except Unusable as error:
        raise ReplyError(
            f"{here} {error}; nothing can be concluded from such an answer: see the worker's log",
            text,
        ) from None
    except (ValueError, RecursionError):
        raise ReplyError(
            f"{here} answered what is not JSON: {text[:200]!r}; see whether it is an SGLang worker",
            text,
        ) from None


def _responses(count: int) -> str:
    return "1 response" if count == 1 else f"{count} responses"
