"""Pages in a real browser: they open from disk, ask nothing of anybody, and can be used."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.token_report import Column, Heatmap, SequenceTokens
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.demo import Outcome, run_demo
from layerbisect.report.page import write_page
from layerbisect.report.results import Result, VerdictResult, read_result
from tests.browser import Opened, chromium, opened

EVIL = "</script><img src=x onerror=alert(1)>\"'\u202e\u0007"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def outcome(small_moe_dir: Path) -> Outcome:
    """A real fault in a real model, found."""
    return run_demo(model=small_moe_dir)


@pytest.fixture(scope="module")
def results(outcome: Outcome, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What a page may have to show, as the commands' JSON gives it."""
    folder = tmp_path_factory.mktemp("results")
    verdict = outcome.verdict
    inconclusive = dataclasses.replace(
        verdict,
        status="inconclusive",
        culprits=(),
        gap=None,
        rounding_budget=None,
        reasons=("3 rows are joined, and 16 are needed",),
        layers=(),
        own_errors=(),
        routing=None,
        tokens=None,
        probe=None,
    )
    data = {
        "demo": outcome.to_json(),
        "scores": judge([_record()]).to_json(),
        "inconclusive": inconclusive.to_json(),
    }
    for name, value in data.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return {name: read_result(folder / f"{name}.json") for name in data}


def _record() -> ScoreRecord:
    """Case 1 as published: A is lower by 0.1 nat from response position 1 on."""
    random = np.random.default_rng(0)
    calls = []
    for number in range(8):
        b = -random.exponential(1.0, 64)
        noise = random.normal(0, 0.002, (2, 64))
        a = b + noise[0] - 0.1 * (np.arange(64) > 0)
        scores = {"A": a, "B0": b, "B1": b, "C0": b + noise[1], "C1": b + noise[1]}
        calls.append(Call.of(f"call-{number}", [1, 2, 3], range(100, 164), scores))
    return ScoreRecord(
        RecordInfo(columns={c: Scoring() for c in ("A", "B0", "B1", "C0", "C1")}), calls
    )


def page_of(result: Result, folder: Path, title: str | None = None) -> Path:
    return write_page([result], folder / "report.html", title=title)


def drawn(page: Page) -> int:
    """How many charts show a plot."""
    return len(page.locator(".js-plotly-plot:has(.main-svg)").all())


def charts(page: Page) -> int:
    return page.locator("main .chart").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["demo", "scores", "inconclusive"])
def test_page_opens_from_disk_and_nothing_is_wrong_with_it(
    browser: Browser, results: dict[str, Result], tmp_path: Path, name: str, scheme: Any
) -> None:
    file = page_of(results[name], tmp_path)
    with opened(browser, file, scheme=scheme) as found:
        assert found.complaints == []
        assert found.requests == []
        assert drawn(found.page) == charts(found.page)
        assert (charts(found.page) >= 3) == (name != "inconclusive")
        assert found.serious_faults() == []


def test_first_screen_says_what_is_wrong_and_what_to_do(
    browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    with opened(browser, page_of(results["demo"], tmp_path)) as found:
        said = visible_text(found)
    assert "A fault in the rotary embedding (RoPE) of layer 2, on the rollout side" in said
    assert "What to do next" in said and "How sure" in said and "What was not seen" in said


def visible_text(found: Opened) -> str:
    """The text that is on the screen without scrolling."""
    text = found.page.evaluate(
        """() => [...document.querySelectorAll("header :is(h1, h2, p, li, pre)")]
            .filter(one => one.getBoundingClientRect().bottom <= innerHeight)
            .map(one => one.innerText).join("\\n")"""
    )
    assert isinstance(text, str)
    return text


def test_command_is_copied(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    with opened(browser, page_of(results["demo"], tmp_path)) as found:
        found.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        button = found.page.locator("button.copy").first
        button.click()
        wanted = button.get_attribute("data-copy")
        assert found.page.evaluate("navigator.clipboard.readText()") == wanted


def test_click_on_the_heatmap_opens_a_token(
    browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    with opened(browser, page_of(results["demo"], tmp_path)) as found:
        panel = found.page.locator(".token-panel")
        assert panel.inner_text() == ""
        cells = found.page.locator("figure.heatmap .chart .nsewdrag").first
        cells.scroll_into_view_if_needed()
        cells.click()
        panel.locator("h3, h4").first.wait_for()
        assert "position" in panel.inner_text()
        assert found.complaints == []
        assert found.serious_faults() == []


def test_token_is_opened_by_keyboard_alone(
    browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    with opened(browser, page_of(results["demo"], tmp_path)) as found:
        found.page.locator("figure.heatmap .chart").focus()
        for key in ("ArrowRight", "ArrowUp", "Enter"):
            found.page.keyboard.press(key)
        panel = found.page.locator(".token-panel")
        panel.locator("h3, h4").first.wait_for()
        assert "position" in panel.inner_text()


def test_worst_token_opens_in_the_heatmap(
    browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    with opened(browser, page_of(results["demo"], tmp_path)) as found:
        found.page.locator("button.open").first.click()
        found.page.locator(".token-panel h3, .token-panel h4").first.wait_for()


def test_text_of_names_and_files_is_inert(
    browser: Browser, outcome: Outcome, tmp_path: Path
) -> None:
    verdict = _renamed(outcome.verdict)
    with opened(browser, page_of(VerdictResult(EVIL, verdict), tmp_path, EVIL)) as found:
        assert found.complaints == []
        assert found.page.locator("img").count() == 0
        assert "<img src=x" in found.page.locator("header").inner_text()
        found.page.locator("button.open").first.click()
        found.page.locator(".token-panel h3, .token-panel h4").first.wait_for()
        assert found.page.locator("img").count() == 0


def _renamed(verdict: Verdict) -> Verdict:
    """Put text that would like to be markup wherever a user's or a model's text may stand."""
    text = json.dumps(verdict.to_json())
    tokens = verdict.tokens
    assert tokens is not None
    for name in [one.name for one in tokens.sequences]:
        text = text.replace(json.dumps(name), json.dumps(EVIL + name))
    for label in verdict.labels:
        text = text.replace(json.dumps(label), json.dumps(EVIL + label))
    found = verdict_from_json(json.loads(text))
    return dataclasses.replace(found, reasons=(EVIL,), next=f"`layerbisect show {EVIL} x`")


def test_large_case_opens(browser: Browser, outcome: Outcome, tmp_path: Path) -> None:
    """94 layers and 32,768 tokens, of which 512 columns are left."""
    result = VerdictResult("large", _large(outcome.verdict))
    file = page_of(result, tmp_path)
    assert file.stat().st_size < 10e6
    with opened(browser, file) as found:
        assert drawn(found.page) == charts(found.page)
        found.page.locator("figure.heatmap .chart .nsewdrag").first.click()
        panel = found.page.locator(".token-panel")
        panel.locator("h3, h4").first.wait_for()
        assert "to" in panel.inner_text()
        assert found.complaints == []


def _large(verdict: Verdict, layers: int = 94, length: int = 32_768, columns: int = 512) -> Verdict:
    tokens = verdict.tokens
    assert tokens is not None
    width = length // columns
    heatmap = Heatmap(
        "carried gap",
        "nat",
        tuple(range(layers + 1)),
        tuple(Column("long", at * width, (at + 1) * width) for at in range(columns)),
        tuple(
            tuple(float(f"{(layer + 1) * (at % 97 + 1) * 1e-5:.4g}") for at in range(columns))
            for layer in range(layers + 1)
        ),
        tuple(
            tuple(at * width + layer % width for at in range(columns))
            for layer in range(layers + 1)
        ),
    )
    scores = tuple(-(at % 1000) / 100 for at in range(length))
    long = SequenceTokens("long", 0, tuple(at % 50_000 for at in range(length)), scores, scores)
    report = dataclasses.replace(tokens, sequences=(long,), heatmaps=(heatmap,))
    return dataclasses.replace(verdict, tokens=report)


def test_page_prints_in_ink_on_white(
    browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    with opened(browser, page_of(results["demo"], tmp_path), scheme="dark") as found:
        found.page.emulate_media(media="print", color_scheme="dark")
        body = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert body == "rgb(255, 255, 255)"
        assert found.page.locator("nav").is_hidden()


@pytest.mark.parametrize("width", [400, 1366])
def test_page_is_as_wide_as_the_screen(
    browser: Browser, results: dict[str, Result], tmp_path: Path, width: int
) -> None:
    with opened(browser, page_of(results["demo"], tmp_path), width=width) as found:
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width
