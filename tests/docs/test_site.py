"""The site builds without a warning, its links lead somewhere, and it asks nobody for anything."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, visited

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def slugs(markdown: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    found: dict[str, int] = {}
    text = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    for title in re.findall(r"^#{1,6} +(.+?)\s*$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        name, _, anchor = target.partition("#")
        assert not name.startswith("/"), target
        file = page.parent / name if name else page
        assert file.is_file(), target
        if anchor:
            assert anchor in slugs(file.read_text(encoding="utf-8")), target


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Resources(HTMLParser):
    """What a browser loads for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.found += [given[name] for name in ("src", "srcset", "poster") if name in given]
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.found.append(given.get("href", ""))


def test_no_page_loads_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES) - 1
    for page in pages:
        resources = Resources()
        resources.feed(page.read_text(encoding="utf-8"))
        outside = [one for one in resources.found if re.match(r"(?:[a-z]+:)?//", one)]
        assert outside == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", sheet.read_text())


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_shows_and_searches_it_without_another_host(address: str, scheme: Any) -> None:
    with chromium() as browser, visited(browser, f"{address}/gap.html", scheme=scheme) as found:
        page = found.page
        assert page.locator("article img").first.evaluate("image => image.naturalWidth") > 0
        page.locator("input[name=query]").click()
        page.keyboard.type("deterministic")
        page.locator(".md-search-result__item").first.wait_for(state="attached", timeout=20_000)
        for name in ("index", "decides", "engines/verl"):
            page.goto(f"{address}/{name}.html")
            assert found.serious_faults() == [], name
        assert [url for url in found.requests if not url.startswith(address)] == []
        assert found.complaints == []
