"""The reports of real runs: a person who has not seen the tool knows from the first screen."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from layerbisect.report.page import write_page
from layerbisect.report.results import exit_code, read_result, with_explained
from tests.browser import chromium, opened

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"

WRONG_AND_NEXT = {
    "demo": (
        1,
        "A fault in the rotary embedding (RoPE) of layer 8, on the rollout side",
        "layerbisect replay demo/rollout --model demo/model --layer 8 --operator rope",
    ),
    "clean": (0, "No bug: the gap is rounding", "nothing to do"),
    "inconclusive": (
        2,
        "It could not be judged: nobody is accused, and nobody is cleared",
        "layerbisect bisect clean/rollout clean/trainer --model CHECKPOINT",
    ),
    "case-1": (
        1,
        "A fault in how log-probs are scored or kept, on the rollout side",
        "watch the scoring function",
    ),
    "case-2": (
        1,
        "A fault in how log-probs are scored or kept, on the trainer side",
        "watch the scoring function",
    ),
    "case-3": (
        1,
        "Other weights, on the rollout side",
        "layerbisect weights ROLLOUT TRAINER --previous OLD",
    ),
    "smollm2": (0, "No bug: the gap is rounding", "nothing to do"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("name", WRONG_AND_NEXT)
def test_first_screen_says_what_is_wrong_and_what_to_do(
    browser: Browser, name: str, tmp_path: Path
) -> None:
    code, wrong, command = WRONG_AND_NEXT[name]
    files = sorted(RESULTS.glob(f"{name}*.json"))
    results = with_explained([read_result(file) for file in files])
    assert exit_code(results) == code
    page = write_page(results, tmp_path / "report.html")
    with opened(browser, page) as found:
        assert found.page.locator("h1").inner_text() == wrong
        steps = found.page.locator(".next")
        assert command in steps.inner_text()
        box = steps.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 768
        assert found.complaints == []
        assert found.requests == []
        assert found.serious_faults() == []


def test_every_result_is_shown_with_a_picture() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    names = {file.stem for file in RESULTS.iterdir()}
    assert names == {*WRONG_AND_NEXT, "smollm2-scores", "smollm2-decode"}
    for name in WRONG_AND_NEXT:
        assert f"(pictures/{name}.png)" in text
        assert (ROOT / "docs" / "pictures" / f"{name}.png").stat().st_size > 10_000


def test_results_name_no_folder_of_a_machine() -> None:
    for file in RESULTS.iterdir():
        text = file.read_text()
        json.loads(text)
        assert not any(f'"{folder}' in text for folder in ("/tmp", "/home", "/root", "/work"))
