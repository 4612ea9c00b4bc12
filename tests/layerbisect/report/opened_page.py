"""Open pages from disk in a headless browser, as a user does."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def opened(file: Path, **context: Any) -> Iterator[Any]:
    """Open a page from disk, and see to it that it asks no host and says nothing went wrong.

    ``context`` goes to the browser's page, such as ``color_scheme="dark"``.
    """
    api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("LAYERBISECT_CHROMIUM") or shutil.which("chromium")
    said: list[str] = []
    asked: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        page = browser.new_page(**context)
        page.on("console", lambda one: said.append(one.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda one: (said.append(f"dialog: {one.message}"), one.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        yield page
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
