"""Ask a running SGLang server for its settings, and judge them as those of a command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from layerbisect.captures.errors import WorkerError
from layerbisect.captures.sglang.request import send
from layerbisect.captures.sglang.worker import Worker
from layerbisect.doctor.arguments import Settings
from layerbisect.doctor.check import Check, worst_first
from layerbisect.doctor.command import Judged
from layerbisect.doctor.packages import judged
from layerbisect.doctor.rules import Finding
from layerbisect.doctor.sglang_rules import judge_sglang

# servers have either the newer name or the older one
_PATHS = ("/server_info", "/get_server_info")


def judge_server(url: str, timeout: float) -> Judged:
    """Judge what the server at ``url`` runs with; ``timeout`` in seconds.

    Raises WorkerError where no SGLang server answers.
    """
    worker = Worker(url, timeout=timeout)
    status, text = 0, ""
    for path in _PATHS:
        here = f"{worker.url}, asked for its settings ({path}),"
        status, text = send("GET", worker.url + path, here, timeout)
        if status != 404:
            break
    if status != 200:
        raise WorkerError(
            f"{here} answered {status} {text.strip()!r:.80}; see whether it is an SGLang worker"
        )
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        reply = None
    # a router describes its workers, and none of these is there
    if not isinstance(reply, dict) or "tp_size" not in reply:
        raise WorkerError(
            f"{here} answered {text.strip()!r:.80}, which is no SGLang worker's settings; give the "
            "address of a worker itself"
        )
    return judge_reply(reply)


def judge_reply(reply: Mapping[str, Any]) -> Judged:
    """Judge what a server answered to ``/server_info``."""
    settings = Settings(reply, _told(reply), whole=True)
    version = reply.get("version")
    unseen = Check(
        "capture",
        "note",
        "a server does not say whether it captures",
        "start it with LAYERBISECT_CAPTURE=DIR; its log then says how many points it captures",
    )
    findings = (*judge_sglang(settings), Finding(unseen))
    engine = judged("sglang", str(version)) if version else Check("sglang", "note", "no version")
    return Judged("SGLang server", worst_first((engine, *(one.check for one in findings))))


def _told(reply: Mapping[str, Any]) -> dict[str, str]:
    """How flags that are switched on are said; what has a value says it."""
    return {
        name: f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in reply.items()
        if isinstance(value, str | int | float) and value is not False
    }
