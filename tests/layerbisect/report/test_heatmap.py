import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from layerbisect.bisect.heatmap import HeatRows, reduce_rows
from layerbisect.bisect.scores.report import TokenGap
from layerbisect.bisect.token_report import Column, Heatmap, SequenceTokens, TokenReport
from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import HeatmapBlock
from layerbisect.report.heatmap import heatmap_data, heatmap_figure, heatmap_section
from layerbisect.report.page import write_page
from layerbisect.report.results import VerdictResult
from layerbisect.report.token_text import TokenText
from tests.browser import chromium, opened
from tests.layerbisect.report.making import verdict

EVIL = "</script><img src=x onerror=alert(1)>"
NAME = "<img src=x onerror=alert(2)>"
TEXT = TokenText(
    {11: "The", 12: " \u202ecat", 13: EVIL, 14: "<!--", 15: " sat"}.get, added={}, byte_level=False
)

CARRIED = Heatmap(
    measure="carried gap",
    unit="nat",
    boundaries=(0, 1, 2),
    columns=(Column(NAME, 0, 1), Column(NAME, 1, 2), Column(NAME, 2, 3), Column("b:1", 0, 2)),
    values=((0.0, 0.0, None, 0.0), (0.01, 0.02, None, 0.03), (0.1, 0.2, 0.4, 0.3)),
    worst=((0, 1, 2, 0), (0, 1, 2, 1), (0, 1, 2, 1)),
)
STREAM = dataclasses.replace(
    CARRIED,
    measure="stream",
    unit="relative",
    values=((1e-4, 1e-4, 1e-4, 1e-4), (1e-3, 1e-3, 1e-3, 1e-3), (0.01, 0.02, 0.01, 0.01)),
)


def of(*heatmaps: Heatmap) -> Verdict:
    tokens = TokenReport(
        distribution=None,
        by_position=(),
        worst=(TokenGap(NAME, 3, 14, -2.5, -2.0, -0.5),),
        sequences=(
            SequenceTokens(
                NAME, 0, (11, 12, 13, 14), (None, -1.0, -3.0, -2.5), (None, -1.0, -3.25, -2.0)
            ),
            SequenceTokens("b:1", 0, (15, 11, 12), (None, -1.5, None), (None, None, None)),
        ),
        heatmaps=heatmaps,
    )
    return dataclasses.replace(verdict((0.0, 0.01, 0.2)), tokens=tokens)


def block(found: Verdict) -> HeatmapBlock:
    section = heatmap_section(found)
    assert section is not None
    (one,) = section.blocks
    assert isinstance(one, HeatmapBlock)
    return one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@contextmanager
def faultless(browser: Browser, file: Path) -> Iterator[Page]:
    """The page of a file, which must complain of nothing and ask for nothing."""
    with opened(browser, file) as found:
        yield found.page
        assert found.complaints == [] and found.requests == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    return write_page([VerdictResult("case", of(STREAM, CARRIED))], out, text=TEXT)


def test_reading_names_the_largest_cell_and_what_is_not_there() -> None:
    reading = block(of(CARRIED)).reading
    assert f"Its largest is 0.4 nat, into layer 2, where position 2 of {NAME} was read." in reading
    assert "Light blue is 0" in reading
    assert "What was not measured is left blank." in reading
    assert "A column stands for up to 2 rows and shows their largest." in reading


def test_rows_without_a_column_are_counted() -> None:
    reading = block(of(dataclasses.replace(CARRIED, left_out=90))).reading
    assert "90 rows of further sequences have no column" in reading


def test_zero_has_a_colour_of_its_own_below_the_scale() -> None:
    (trace,) = heatmap_figure(block(of(CARRIED))).data
    assert trace.zmin < trace.meta["zero"] < trace.meta["least"] < trace.zmax
    assert trace.colorbar.ticktext[0] == "0"
    assert trace.colorbar.title.text == "carried gap,<br>nat"


def test_names_of_sequences_are_no_markup_in_the_figure() -> None:
    written = heatmap_figure(block(of(CARRIED))).to_json()
    assert "<img" not in written and "<img" not in json.loads(json.dumps(written))


def test_verdict_without_heatmaps_has_no_section() -> None:
    assert heatmap_section(verdict()) is None
    assert heatmap_section(of()) is None


def test_data_holds_the_text_of_the_tokens_that_are_there() -> None:
    data = heatmap_data(block(of(CARRIED)), TEXT)
    assert data["text"]["12"] == "\u2423\\u202ecat"
    assert heatmap_data(block(of(CARRIED)), None)["text"] is None


def test_click_opens_the_token_whose_text_stays_inert(browser: Browser, page: Path) -> None:
    with faultless(browser, page) as shown:
        panel = shown.locator(".token-panel")
        assert panel.inner_text() == ""
        shown.locator("figure.heatmap .chart").first.scroll_into_view_if_needed()
        box = shown.locator("figure.heatmap .nsewdrag").first.bounding_box()
        # the third of four columns, at the topmost of three boundaries
        assert box is not None
        shown.mouse.click(box["x"] + box["width"] * 0.625, box["y"] + box["height"] / 6)
        panel.locator("h4").wait_for()
        assert panel.locator("h4").inner_text() == f"{NAME}: position 2 read, 3 predicted"
        facts = dict(
            zip(
                panel.locator("dt").all_inner_texts(),
                panel.locator("dd").all_inner_texts(),
                strict=True,
            )
        )
        assert facts == {
            "token read, position 2": f"{EVIL} ID 13",
            "token predicted, position 3": "<!-- ID 14",
            "log-prob, rollout": "-2.5000 nat",
            "log-prob, trainer": "-2.0000 nat",
            "rollout minus trainer": "-0.5000 nat",
            "carried gap": "largest into layer 2, 0.4 nat",
        }
        assert panel.locator(".tokens mark.read").inner_text() == EVIL
        around = panel.locator(".tokens bdi").all_inner_texts()
        assert around == ["The", "\u2423\\u202ecat", EVIL, "<!--"]
        assert panel.locator(".chart .main-svg").count() > 0
        assert shown.locator("img").count() == 0


def test_keyboard_moves_a_cursor_and_opens_what_it_is_on(browser: Browser, page: Path) -> None:
    with faultless(browser, page) as shown:
        chart, said = shown.locator("figure.heatmap .chart").first, shown.locator(".cursor")
        chart.focus()
        assert said.inner_text() == f"{NAME}, position 2, into layer 2: 0.4 nat"
        shown.keyboard.press("ArrowRight")
        assert said.inner_text() == (
            "b:1, positions 0 to 1, into layer 2: 0.3 nat, the largest at position 1"
        )
        shown.keyboard.press("ArrowDown")
        shown.keyboard.press("ArrowDown")
        shown.keyboard.press("ArrowDown")
        assert said.inner_text() == "b:1, positions 0 to 1, into layer 0: 0 nat"
        shown.keyboard.press("ArrowUp")
        shown.keyboard.press("Enter")
        panel = shown.locator(".token-panel")
        assert panel.locator("h4").inner_text() == "b:1: position 1 read, 2 predicted"
        text = panel.inner_text()
        assert "stands for positions 0 to 1; at each layer it shows the largest of them" in text
        assert "rises most over layer 1, from 0.03 to 0.3" in text
        assert "not captured" in text


def test_form_and_buttons_open_tokens_by_keyboard_alone(browser: Browser, page: Path) -> None:
    with faultless(browser, page) as shown:
        panel = shown.locator(".token-panel")
        shown.get_by_role("combobox", name="Sequence").select_option("b:1")
        shown.get_by_role("spinbutton", name="Position").fill("0")
        shown.keyboard.press("Enter")
        assert panel.locator("h4").inner_text() == "b:1: position 0 read, 1 predicted"
        assert panel.get_by_role("button", name="Previous token").is_disabled()
        panel.get_by_role("button", name="Next token").focus()
        shown.keyboard.press("Enter")
        assert panel.locator("h4").inner_text() == "b:1: position 1 read, 2 predicted"
        focused = "document.activeElement.textContent"
        assert shown.evaluate(focused) == "Next token"


def test_worst_token_of_a_table_opens_the_row_that_predicted_it(
    browser: Browser, page: Path
) -> None:
    with faultless(browser, page) as shown:
        shown.locator("button.open").first.click()
        heading = shown.locator(".token-panel h4")
        assert heading.inner_text() == f"{NAME}: position 2 read, 3 predicted"


def test_other_measure_is_shown_with_its_own_scale(browser: Browser, page: Path) -> None:
    with faultless(browser, page) as shown:
        assert "carried gap" in (shown.locator("figure.heatmap .chart").first.text_content() or "")
        shown.locator(".measures input").nth(1).check()
        shown.locator("figure.heatmap .chart", has_text="relative to its size").first.wait_for()
        shown.locator("figure.heatmap .chart").first.focus()
        assert shown.locator(".cursor").inner_text() == (
            f"{NAME}, position 2, into layer 2: 0.01 of its size"
        )


def test_token_that_no_heatmap_has_is_said_to_have_no_column(
    browser: Browser, tmp_path: Path
) -> None:
    one = dataclasses.replace(
        CARRIED,
        columns=CARRIED.columns[:3],
        values=tuple(row[:3] for row in CARRIED.values),
        worst=(),
    )
    out = write_page([VerdictResult("case", of(one))], tmp_path / "report.html")
    with faultless(browser, out) as shown:
        shown.evaluate("layerbisectOpenToken('b:1', 1)")
        text = shown.locator(".token-panel").inner_text()
        assert "no column of the heatmap has this position" in text
        assert "layerbisect report --tokenizer DIR shows text" in text
        shown.evaluate("layerbisectOpenToken('b:1', 99)")
        assert "This sequence has positions 0 to 2." in shown.locator(".token-panel").inner_text()
        assert shown.evaluate("layerbisectOpenToken('unknown', 0)") is False


@pytest.mark.slow
def test_ninety_four_layers_of_32768_tokens_open(browser: Browser, tmp_path: Path) -> None:
    layers, sequences, length = 94, 8, 4096
    random = np.random.default_rng(0)
    count = sequences * length
    rows = HeatRows(
        tuple(f"request-{n}" for n in range(sequences)),
        np.repeat(np.arange(sequences), length),
        np.tile(np.arange(length), sequences),
    )
    values = {
        n: (np.abs(random.normal(size=count)) * 1e-3 * (n + 1)).astype(np.float32)
        for n in range(layers + 1)
    }
    values[60][20_000] = 5.0
    shown_maps = [
        reduce_rows("carried gap", "nat", values, rows),
        reduce_rows("stream", "relative", values, rows),
    ]
    tokens = random.integers(0, 150_000, (sequences, length))
    scores = random.normal(size=(2, sequences, length)).round(4)
    report = TokenReport(
        None,
        (),
        (),
        tuple(
            SequenceTokens(name, 0, *(tuple(one.tolist()) for one in (tokens[n], *scores[:, n])))
            for n, name in enumerate(rows.names)
        ),
        tuple(one for one in shown_maps if one is not None),
    )
    carried = np.linspace(0, 0.1, layers + 1).tolist()
    large = dataclasses.replace(verdict(carried), tokens=report)
    data = heatmap_data(
        block(large), TokenText(lambda token: f"▁word{token % 1000}", added={}, byte_level=False)
    )
    assert len(json.dumps(data, separators=(",", ":"))) < 2_500_000
    out = write_page([VerdictResult("large", large)], tmp_path / "report.html")
    assert out.stat().st_size < 8_000_000
    with faultless(browser, out) as shown:
        shown.locator("figure.heatmap .chart").first.focus()
        # the worst row is still found in a column of many
        assert "into layer 60: 5 nat, the largest at position 3616" in (
            shown.locator(".cursor").inner_text()
        )
        shown.keyboard.press("Enter")
        heading = shown.locator(".token-panel h4").inner_text()
        assert heading == "request-4: position 3616 read, 3617 predicted"
