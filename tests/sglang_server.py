"""Start a real SGLang server on this machine's CPU, ask it things, and stop it again.

::

    with sglang_server(model, capture=directory, points="all", fault="softmax-scale:7") as server:
        answer = server.generate([1, 2, 3], 24)
        replay = server.replay(answer.tokens)
        server.plant("o-proj-permuted:2:decode")
        other = server.generate([1, 2, 3], 24)
        rollout = server.captured(requests=answer.rid)

Needs an environment with SGLang and with layerbisect installed (its entry points make the server
capture, and serve on a CPU).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.sglang.worker_info import vocabulary_of
from layerbisect.captures.store import Capture
from layerbisect.planted_sglang import FILE, Fault, lay_out

BROKEN = Path(__file__).with_name("broken_taps.py")
# about 25 s where nothing else runs
START_SECONDS = 600.0
STOP_SECONDS = 30.0


def sglang_installed() -> bool:
    """Say whether this environment can start a server."""
    return importlib.util.find_spec("sglang") is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered to one request.

    ``prompt`` and ``output`` are token IDs as the server returned them; ``prompt_logprobs`` has a
    None first and, where the logprobs of the prompt were not asked for from its start, before;
    ``output_logprobs`` are those recorded at generation. In nats. ``cached`` counts prompt tokens
    that came from the prefix cache.
    """

    rid: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    prompt_logprobs: tuple[float | None, ...]
    output_logprobs: tuple[float, ...]
    cached: int

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]


class ServerError(RuntimeError):
    """The server did not start, died, or answered an error."""


class Server:
    """A running server; made by :func:`sglang_server`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        log: Path,
        capture: Path | None,
        fault_file: Path | None,
        vocabulary: int | None,
    ) -> None:
        self.process = process
        self.port = port
        self.log = log
        self._capture = capture
        self._fault_file = fault_file
        self._vocabulary = vocabulary
        self._asked = 0

    def generate(
        self,
        tokens: Sequence[int],
        count: int,
        *,
        rid: str | None = None,
        temperature: float = 1.0,
        logprob_start: int = 0,
        logprobs: bool = True,
    ) -> Answer:
        """Generate ``count`` tokens after ``tokens``; an end-of-sequence token stops nothing.

        ``logprob_start`` is the first prompt position to be scored; the prefix cache is used only
        before it, so pass a late one (or ``logprobs=False``) to see cached tokens.
        """
        return self.generate_many(
            [tokens],
            count,
            rids=[rid] if rid else None,
            temperature=temperature,
            logprob_start=logprob_start,
            logprobs=logprobs,
        )[0]

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        rids: Sequence[str] | None = None,
        temperature: float = 1.0,
        logprob_start: int = 0,
        logprobs: bool = True,
    ) -> list[Answer]:
        """Generate for several prompts in one request, so that the server may batch them."""
        if rids is None:
            rids = [f"request-{self._asked + index}" for index in range(len(prompts))]
        self._asked += len(prompts)
        replies = self.post(
            "/generate",
            {
                "rid": list(rids),
                "input_ids": [list(prompt) for prompt in prompts],
                "return_logprob": logprobs,
                "logprob_start_len": logprob_start if logprobs else -1,
                "sampling_params": {
                    "max_new_tokens": count,
                    "temperature": temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "ignore_eos": True,
                },
            },
        )
        return [
            _answer(prompt, count, logprob_start, reply, self._vocabulary)
            for prompt, reply in zip(prompts, replies, strict=True)
        ]

    def replay(self, tokens: Sequence[int], *, rid: str | None = None) -> Answer:
        """Score ``tokens`` by a prefill from an empty cache: a clean B.

        Raises ServerError when a token was read from the prefix cache after all.
        """
        self.flush()
        answer = self.generate(tokens, 0, rid=rid)
        if answer.cached:
            raise ServerError(f"replay read {answer.cached} tokens from the prefix cache")
        return answer

    def flush(self) -> None:
        """Empty the prefix cache; raises ServerError where requests still run."""
        # a finished request is released a moment after its answer was sent
        for _ in range(50):
            try:
                self.post("/flush_cache", {})
                return
            except ServerError:
                time.sleep(0.1)
        self.post("/flush_cache", {})

    def plant(self, fault: str | None) -> None:
        """Plant another fault from the next request on, or none; empties the prefix cache."""
        if self._fault_file is None:
            raise ServerError("start the server with a fault, '' for none at first")
        if fault:
            Fault.parse(fault)
        self.flush()
        self._fault_file.write_text(fault or "")

    def captured(self, requests: str = "*", label: str | None = None) -> Capture:
        """Open what was captured so far, once all processes have written it.

        ``requests`` is a pattern over request IDs. The server must be idle.
        """
        if self._capture is None:
            raise ServerError("this server captures nothing")
        for _ in range(200):
            capture = Capture.open(self._capture, label=label, requests=requests)
            if capture.finished:
                return capture
            time.sleep(0.05)
        raise ServerError(f"the capture is not finished: {capture.problems}")

    def get(self, path: str) -> Any:
        """GET a path and decode its JSON."""
        return self._ask(path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON to a path, and decode the JSON of the answer."""
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, data: bytes | None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: {error.code} {error.read()[:500]!r}") from None
        except OSError as error:
            raise ServerError(f"{path}: {error}; the log ends:\n{self.tail()}") from None
        try:
            return json.loads(text)
        except ValueError:
            return text.decode()

    def tail(self, lines: int = 40) -> str:
        """Return the end of the server's log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])

    def kill(self) -> None:
        """End the server's processes at once, as kill -9 does; only those that it started."""
        # the server leads a process group of its own
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def stop(self) -> None:
        """Ask the server to end, and kill what is left of it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        self.kill()


@contextmanager
def sglang_server(
    model: str | os.PathLike[str],
    *,
    capture: str | os.PathLike[str] | None = None,
    points: str | None = None,
    requests: str | None = None,
    label: str | None = None,
    tp: int = 1,
    fault: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    max_tokens: int = 4096,
) -> Iterator[Server]:
    """Serve ``model`` from a CPU until the block ends.

    Args:
        model: checkpoint directory.
        capture: directory for our plugin to capture into; None leaves the plugin inert.
        points: LAYERBISECT_POINTS. requests: LAYERBISECT_REQUESTS. label: LAYERBISECT_LABEL.
        tp: tensor-parallel processes.
        fault: what is planted (layerbisect.planted_sglang), ``name:layer[=value][:decode]``; ''
            for nothing at first, and None to do without that plugin.
        arguments: more arguments for the server. environment: more variables.
        max_tokens: KV slots.

    Raises:
        ServerError: the server did not come up; the message holds the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="layerbisect-server-") as scratch:
        folder = Path(scratch)
        port = free_port()
        log = folder / "server.log"
        fault_file = None if fault is None else folder / "fault"
        if fault_file is not None:
            fault_file.write_text(fault or "")
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(Path(model), port, tp, max_tokens, arguments),
                cwd=folder,
                env=_environment(folder, tp, fault_file, environment)
                | _settings(capture, points, requests, label),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        folder_of_capture = Path(capture) if capture else None
        tokens = vocabulary_of(str(model))
        server = Server(process, port, log, folder_of_capture, fault_file, tokens)
        try:
            _wait(server)
            yield server
            server.stop()
        finally:
            server.kill()


def free_port() -> int:
    """Find a port on the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(
    model: Path, port: int, tp: int, max_tokens: int, arguments: Sequence[str]
) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model.resolve()), "--device", "cpu", "--skip-tokenizer-init"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        # an idle server would poll with a whole core
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
        *("--mem-fraction-static", "0.1", "--max-total-tokens", str(max_tokens)),
        *("--random-seed", "0", "--tp-size", str(tp), "--host", "127.0.0.1", "--port", str(port)),
        *arguments,
    ]


def _settings(
    capture: str | os.PathLike[str] | None,
    points: str | None,
    requests: str | None,
    label: str | None,
) -> dict[str, str]:
    chosen = {
        "LAYERBISECT_CAPTURE": None if capture is None else str(Path(capture).resolve()),
        "LAYERBISECT_POINTS": points,
        "LAYERBISECT_REQUESTS": requests,
        "LAYERBISECT_LABEL": label,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _environment(
    folder: Path, tp: int, fault_file: Path | None, more: Mapping[str, str] | None
) -> dict[str, str]:
    # tests of our own kernels interpret them, which would be no real server
    ours = ("LAYERBISECT_", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {
        "SGLANG_PLATFORM": "layerbisect_cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
    if fault_file is not None:
        environment[FILE] = str(fault_file)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_install_planted(folder)), *filter(None, [environment.get("PYTHONPATH")])]
        )
    return environment | dict(more or {})


def _install_planted(folder: Path) -> Path:
    """Lay out the planting plugin, and the tests' own beside it, as one installed distribution."""
    site = lay_out(folder / "site")
    with next(site.glob("*.dist-info")).joinpath("entry_points.txt").open("a") as entry_points:
        entry_points.write(f"layerbisect_broken_taps = {BROKEN.stem}:register\n")
    shutil.copy(BROKEN, site)
    return site


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"the server died while starting; its log ends:\n{server.tail()}")
        # readiness by the log: /health itself runs a request, and takes a second to answer
        if "ready to roll" in server.tail():
            return
        time.sleep(0.25)
    raise ServerError(f"the server did not start in {START_SECONDS} s:\n{server.tail()}")


def _answer(
    prompt: Sequence[int],
    count: int,
    logprob_start: int,
    reply: Mapping[str, Any],
    vocabulary: int | None,
) -> Answer:
    meta = reply["meta_info"]
    scored = meta.get("input_token_logprobs", [])
    given = meta.get("output_token_logprobs", [])
    output = tuple(reply["output_ids"])[:count]
    # a server that answers for other tokens than were asked about makes every number meaningless;
    # the vocabulary's last is scored as what it is, and called 0 (SGLang 0.5.23)
    returned = [token for _, token, *_ in scored]
    asked = list(prompt[logprob_start:])
    named = [0 if token + 1 == vocabulary else token for token in asked]
    if scored and returned not in (asked, named):
        raise ServerError(f"asked about {asked}, answered for {returned}")
    if given and [token for _, token, *_ in given][: len(output)] != list(output):
        raise ServerError(f"output {list(output)} has log-probs of {given}")
    if len(output) != count or meta["prompt_tokens"] != len(prompt):
        raise ServerError(f"asked for {count} tokens after {len(prompt)}: {meta}")
    before: tuple[float | None, ...] = (None,) * (len(prompt) - len(scored))
    return Answer(
        rid=meta["id"],
        prompt=tuple(prompt),
        output=output,
        prompt_logprobs=before + tuple(value for value, *_ in scored),
        output_logprobs=tuple(value for value, *_ in given)[:count],
        cached=meta["cached_tokens"],
    )
