"""A real SGLang server on this machine that captures, and in which faults can be planted."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from layerbisect.captures.errors import LayerBisectError, WorkerError
from layerbisect.captures.sglang.request import send
from layerbisect.captures.sglang.worker import RAW, Worker
from layerbisect.captures.store import Capture
from layerbisect.planted_sglang import FILE, lay_out, said_of

START_SECONDS = 900.0
STOP_SECONDS = 30.0
ANSWER_SECONDS = 300.0
WRITE_SECONDS = 60.0
_READY = "ready to roll"
_ON_CPU = {"SGLANG_PLATFORM": "layerbisect_cpu"}
_CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # an idle server would poll with a whole core
    *("--disable-overlap-schedule", "--sleep-on-idle", "--mem-fraction-static", "0.1"),
)


class PlantedServer:
    """Serves ``model`` on the loopback interface; ``folder`` gets its capture and what it says.

    ``device`` is ``cpu`` or as torch names a GPU; ``dtype`` None leaves the checkpoint's own.
    """

    def __init__(self, model: Path, folder: Path, device: str, dtype: str | None) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise LayerBisectError(
                "sglang is not installed: run pip install 'layerbisect[sglang]', "
                "or leave --engine sglang out"
            )
        folder.mkdir(parents=True)
        self.capture = folder / "capture"
        self._folder = folder
        self._fault = folder / "fault"
        self._fault.write_text("")
        self._log = folder / "server.log"
        self._port = _free_port()
        self._command = _command(model, self._port, device, dtype)
        self._on_cpu = device == "cpu"
        self._process: subprocess.Popen[bytes] | None = None
        self._worker = Worker(f"http://127.0.0.1:{self._port}", timeout=ANSWER_SECONDS)

    def start(self) -> None:
        """Start the server and wait until it answers; raises WorkerError where it does not."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a process group of its own, that nothing else is ended with it
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            # by its log: asking for its health makes it run a request
            if _READY in self._log.read_text(errors="replace"):
                return
            if self._process.poll() is not None:
                raise WorkerError(self._failed("ended while it started"))
            time.sleep(0.25)
        raise WorkerError(self._failed(f"did not start in {START_SECONDS:.0f} s"))

    def stop(self) -> None:
        """End the server and all that it started."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def plant(self, text: str) -> None:
        """Plant ``name:layer`` from the next request on, or nothing; empties the prefix cache."""
        self._worker.flush()
        self._fault.write_text(text)

    def said(self) -> str:
        """What the server says that it planted before the last request."""
        said = said_of(self._fault)
        return said.read_text() if said.exists() else ""

    def score(self, ids: Sequence[int], name: str) -> None:
        """Score a sequence by prefill alone, with ``name`` in the capture."""
        here = f"the server that the self-test started, asked for {name},"
        body = {
            "rid": name,
            "input_ids": list(ids),
            "sampling_params": {**RAW, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        address = f"{self._worker.url}/generate"
        status, text = send("POST", address, here, ANSWER_SECONDS, body)
        if status != 200:
            raise WorkerError(f"{here} answered HTTP {status}: {text[:200]!r}; {self._see()}")

    def captured(self, requests: str, label: str) -> Capture:
        """Open what was captured of matching requests, once the server has written it."""
        deadline = time.monotonic() + WRITE_SECONDS
        while True:
            found = Capture.open(self.capture, label=label, requests=requests)
            if found.finished:
                return found
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"SGLang did not finish its capture in {WRITE_SECONDS:.0f} s "
                    f"({'; '.join(found.problems) or 'it says no reason'}); {self._see()}"
                )
            time.sleep(0.05)

    def _environment(self) -> dict[str, str]:
        # what another capture or the tests have set would be no plain server
        ours = ("LAYERBISECT_", "TRITON_INTERPRET")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        if self._on_cpu:
            environment |= _ON_CPU
        path = [str(lay_out(self._folder / "plugin")), environment.get("PYTHONPATH", "")]
        return environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            FILE: str(self._fault.resolve()),
            "LAYERBISECT_CAPTURE": str(self.capture.resolve()),
            "LAYERBISECT_POINTS": "all",
        }

    def _failed(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line] or lines
        last = f" (`{errors[-1].strip()[:300]}`)" if errors else ""
        return f"SGLang {what}{last}; {self._see()}"

    def _see(self) -> str:
        return f"see what `{shlex.join(['python', *self._command[1:]])}` prints"


def _command(model: Path, port: int, device: str, dtype: str | None) -> list[str]:
    kind, _, index = device.partition(":")
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model.resolve())),
        *("--device", kind, "--skip-tokenizer-init", "--host", "127.0.0.1", "--port", str(port)),
        # a replayed graph hides what is inside it
        *("--disable-cuda-graph", "--max-total-tokens", "4096", "--random-seed", "0"),
        *(("--base-gpu-id", index) if index else ()),
        *(() if dtype is None else ("--dtype", dtype)),
        *(_CPU_ARGUMENTS if kind == "cpu" else ()),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
