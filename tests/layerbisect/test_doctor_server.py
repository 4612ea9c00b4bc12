"""What `layerbisect doctor --server URL` says of a running server, and of what is none.

``recordings/server_info.json`` is what a real SGLang 0.5.23 server on a CPU answered to
``/server_info``, without the fields that nothing here reads, and with another model path.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from layerbisect.captures.errors import WorkerError
from layerbisect.doctor.check import Check
from layerbisect.doctor.server import judge_reply, judge_server
from tests.layerbisect.doctor_run import doctor

RECORDING = Path(__file__).with_name("recordings") / "server_info.json"


def recorded() -> dict[str, Any]:
    said: dict[str, Any] = json.loads(RECORDING.read_text())
    return said


@contextmanager
def answering(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Answer GET requests by path, and all others with 404; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.get(self.path, (404, "not found"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def found(name: str, **changed: Any) -> Check:
    (one,) = [c for c in judge_reply(recorded() | changed).checks if c.name == name]
    return one


def test_the_recorded_server_has_no_problem() -> None:
    judged = judge_reply(recorded())
    assert judged.engine == "SGLang server" and judged.next == ""
    assert {c.name: c.state for c in judged.checks if c.state != "ok"} == {
        "capture": "note",
        "deterministic mode": "note",
        "model": "note",
    }
    # tried on a CPU, as it runs
    assert found("CUDA graphs").tried and found("attention kernels").tried


@pytest.mark.parametrize(
    "changed, name, state",
    [
        (
            {"device": "cuda", "disable_cuda_graph": False, "cuda_graph_config": None},
            "CUDA graphs",
            "problem",
        ),
        (
            {
                "device": "cuda",
                "disable_cuda_graph": False,
                "cuda_graph_config": {
                    "decode": {"backend": "full"},
                    "prefill": {"backend": "disabled"},
                },
            },
            "CUDA graphs",
            "problem",
        ),
        ({"enable_torch_compile": True}, "torch.compile", "problem"),
        ({"speculative_algorithm": "EAGLE3"}, "speculative decoding", "problem"),
        ({"quantization": "fp8"}, "quantization", "problem"),
        ({"moe_a2a_backend": "deepep"}, "experts' tokens travel", "problem"),
        ({"enable_dp_attention": True, "attn_dp_size": 8}, "attention DP", "problem"),
        ({"tp_size": 8}, "tensor parallel", "note"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache", "note"),
        ({"flashinfer_allreduce_fusion_backend": "auto"}, "fused all-reduce", "note"),
        ({"disable_overlap_schedule": False}, "overlap schedule", "note"),
        ({"version": "0.5.30"}, "sglang", "note"),
    ],
)
def test_a_server_is_judged_as_its_command_would_be(
    changed: dict[str, Any], name: str, state: str
) -> None:
    check = found(name, **changed)
    assert check.state == state
    if name == "CUDA graphs":
        phases = [phase for phase in ("decode", "prefill") if phase in check.effect]
        assert phases == (["decode"] if changed["cuda_graph_config"] else ["decode", "prefill"])


def test_sums_that_a_server_does_not_fuse_are_not_told() -> None:
    names = {c.name for c in judge_reply(recorded() | {"tp_size": 8, "device": "cuda"}).checks}
    assert "fused all-reduce" not in names


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_either_name_of_the_route_is_asked(path: str) -> None:
    with answering({path: (200, RECORDING.read_text())}) as url:
        assert judge_server(url + "/", 5.0) == judge_reply(recorded())


@pytest.mark.parametrize(
    "answers, message",
    [
        ({}, "answered 404 'not found'; see whether it is an SGLang worker"),
        ({"/server_info": (500, "boom")}, "answered 500 'boom'"),
        ({"/server_info": (200, "hello")}, "'hello', which is no SGLang worker's settings"),
        ({"/server_info": (200, '{"workers": []}')}, "give the address of a worker itself"),
        ({"/server_info": (200, "[1]")}, "which is no SGLang worker's settings"),
    ],
)
def test_what_is_no_worker_is_an_error(answers: dict[str, tuple[int, str]], message: str) -> None:
    with answering(answers) as url, pytest.raises(WorkerError) as caught:
        judge_server(url, 5.0)
    assert message in str(caught.value) and url in str(caught.value)


def test_the_command_asks_the_server_and_prints_what_it_runs_with() -> None:
    with answering({"/server_info": (200, RECORDING.read_text())}) as url:
        page = doctor("--server", url, COLUMNS="80")
        data = doctor("--server", url, "--json")
    assert page.returncode == data.returncode == 0, page.stderr
    assert f"the server at {url} (SGLang server): 3 notes" in page.stdout
    assert max(map(len, page.stdout.splitlines())) <= 80
    said = json.loads(data.stdout)
    assert said["command"] is None and said["server"]["engine"] == "SGLang server"


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://127.0.0.1:9", "is down"),
        ("here", "'here' is no worker's address; give one as http://host:port"),
    ],
)
def test_a_server_that_does_not_answer_could_not_be_judged(url: str, message: str) -> None:
    done = doctor("--server", url)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
