"""A simulated worker: it speaks HTTP as an SGLang server does, and computes nothing.

Its scores are made up from the tokens before, so that generation and replay agree; its replies can
be spoiled in any way, which a real server cannot be brought to do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 100


def score(ids: Sequence[int]) -> float:
    """Make up the score of the last of ``ids`` after the others (nat)."""
    return -0.25 * (1 + sum((n + 1) * token for n, token in enumerate(ids)) % 17)


@dataclass(frozen=True)
class Raw:
    """An answer in place of the ordinary one; ``seconds`` go by before each of its two halves."""

    text: str = ""
    status: int = 200
    seconds: float = 0.0
    cut: bool = False


Spoil = Callable[[Any], Any]


@dataclass
class SimulatedWorker:
    """Answers at ``url`` until its block ends; ``asked`` are the paths and bodies that came.

    ``spoil`` maps what is asked for (``generate``, ``score``, or a path) to what is done to the
    reply. ``busy`` counts flushes that are refused.
    """

    url: str = ""
    version: str | None = "1"
    weights: str = "first"
    busy: int = 0
    spoil: dict[str, Spoil] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def bodies(self, kind: str) -> list[Any]:
        """Bodies of what was asked of one kind."""
        return [body for asked, body in self.asked if asked == kind]

    def answer(self, path: str, body: Any) -> Any:
        """Answer a request by JSON or Raw."""
        kind = path
        if path == "/generate":
            kind = "generate" if body["sampling_params"]["max_new_tokens"] else "score"
        self.asked.append((kind, body))
        reply = getattr(self, f"_{kind.strip('/')}", lambda body: Raw("no such route", 404))(body)
        return self.spoil.get(kind, lambda reply: reply)(reply)

    def _model_info(self, _: Any) -> Any:
        return {"model_path": "simulated", "weight_version": self.version}

    def _server_info(self, _: Any) -> Any:
        return {"version": "0", "dtype": "bfloat16", "tp_size": 1, "revision": None}

    def _flush_cache(self, _: Any) -> Any:
        self.busy -= 1
        return Raw("requests are running", 400) if self.busy >= 0 else Raw("Cache flushed.")

    def _weights_checker(self, _: Any) -> Any:
        return {"success": True, "message": "", "ranks": [{"per_gpu_checksum": self.weights}]}

    def _generate(self, body: Any) -> Any:
        count = body["sampling_params"]["max_new_tokens"]
        replies = []
        for number, prompt in enumerate(body["input_ids"]):
            ids, pairs = list(prompt), []
            for _ in range(count):
                ids.append((ids[-1] * 7 + number) % VOCAB)
                pairs.append([score(ids), ids[-1], None])
            replies.append(self._reply(prompt, output_token_logprobs=pairs))
            replies[-1]["output_ids"] = ids[len(prompt) :]
            replies[-1]["meta_info"] |= {
                "completion_tokens": count,
                "finish_reason": {"type": "length", "length": count},
            }
        return replies

    def _score(self, body: Any) -> Any:
        start = body["logprob_start_len"]
        replies = []
        for ids in body["input_ids"]:
            pairs = [[score(ids[: n + 1]), ids[n], None] for n in range(start, len(ids))]
            pairs[0][0] = None
            replies.append(self._reply(ids, input_token_logprobs=pairs))
        return replies

    def _reply(self, prompt: Sequence[int], **lists: Any) -> dict[str, Any]:
        meta = {"prompt_tokens": len(prompt), "cached_tokens": 0, "weight_version": self.version}
        return {"meta_info": {**meta, **lists}}


@contextmanager
def simulated_worker() -> Iterator[SimulatedWorker]:
    """Serve from a thread of this process until the block ends."""
    worker = SimulatedWorker()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(json.loads(sent) if sent else None)

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, body: Any) -> None:
            reply = worker.answer(self.path, body)
            raw = reply if isinstance(reply, Raw) else Raw(json.dumps(reply))
            data = raw.text.encode()
            try:
                self.send_response(raw.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                half = len(data) // 2
                for part in (data[:half], data[half:]):
                    worker.stopped.wait(raw.seconds)
                    self.wfile.write(part)
                    self.wfile.flush()
                    if raw.cut:
                        return
            except OSError:
                # the client gave up
                pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        worker.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield worker
        finally:
            worker.stopped.set()
            server.shutdown()
            thread.join()
