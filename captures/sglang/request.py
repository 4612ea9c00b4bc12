"""One HTTP request to a worker, with a limit of time that holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from layerbisect.captures.errors import WorkerError

CONNECT_SECONDS = 10.0
"""A worker is near: what takes longer to reach is not there."""


def send(
    method: str, address: str, here: str, timeout: float, body: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    """Send a request, once, and return the status and the text of the answer.

    Args:
        address: the whole URL. here: who is asked for what, to begin an error's sentence.
        timeout: seconds for the answer as a whole.
        body: sent as JSON.

    Raises:
        WorkerError: nothing listens there, it took too long, or the connection broke.
    """
    import httpx

    deadline = time.monotonic() + timeout
    limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))
    parts: list[bytes] = []
    # certificates take longer to load than many an answer to come
    secure = address.startswith("https:")
    try:
        # a proxy of the environment leads elsewhere
        with httpx.stream(
            method, address, json=body, timeout=limits, trust_env=False, verify=secure
        ) as answer:
            for part in answer.iter_bytes():
                parts.append(part)
                # httpx's own limit is for each part
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("")
            return answer.status_code, b"".join(parts).decode(errors="replace")
    except httpx.ConnectTimeout:
        problem = f"could not be reached within {limits.connect:g} s; start it, or correct its URL"
    except httpx.TimeoutException:
        problem = f"timed out after {timeout:g} s; see what else it runs, or give it longer"
    except httpx.ConnectError as error:
        problem = f"is down ({error}); start it, or correct its URL"
    except httpx.HTTPError as error:
        problem = f"broke off ({type(error).__name__}: {error}); see its log"
    raise WorkerError(f"{here} {problem}")
