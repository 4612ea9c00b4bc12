"""A headless Chromium that opens pages from disk and remembers what goes wrong in them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# those about the network keep the browser itself from asking for updates
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Opened:
    """A page, its console's errors and warnings, and every request for what is not on disk."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def said(self, message: ConsoleMessage) -> None:
        """Keep what the console complains about."""
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def asked(self, dialog: Dialog) -> None:
        """Keep what a script in a name or a token asked."""
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def requested(self, url: str) -> None:
        """Keep what was asked of a host."""
        if not url.startswith(("file:", "data:", "blob:")):
            self.requests.append(url)

    def serious_faults(self) -> list[str]:
        """What axe-core calls serious or critical, each with the element that it is about."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{fault['id']}: {node['target']}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser that LAYERBISECT_CHROMIUM names, else one on the path."""
    path = os.environ.get("LAYERBISECT_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield browser
        browser.close()


def opened(browser: Browser, file: Path, **how: Any) -> AbstractContextManager[Opened]:
    """Open a file as a user does, and wait until it is loaded; ``how`` is `visited`'s."""
    return visited(browser, file.absolute().as_uri(), **how)


@contextmanager
def visited(
    browser: Browser,
    url: str,
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1366,
    height: int = 768,
) -> Iterator[Opened]:
    """Open an address and wait until it is loaded."""
    viewport: Any = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    found = Opened(page)
    page.on("console", found.said)
    page.on("dialog", found.asked)
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("request", lambda request: found.requested(request.url))
    page.goto(url)
    page.wait_for_load_state("load")
    yield found
    context.close()
