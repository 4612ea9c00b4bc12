"""Tables at any width: every figure whole, whatever has to give way for it."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from layerbisect.terminal.table import Bar, Column, Table

FIGURES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(lambda v: f"{v:.6f}"),
    st.integers(min_value=0).map(lambda n: f"{n:,}"),
    st.floats(0, 1).map(lambda v: f"{v * 100:.1f}%"),
).filter(lambda figure: len(figure) <= 40)
ROWS = st.integers(1, 9).flatmap(
    lambda many: st.lists(st.lists(FIGURES, min_size=many, max_size=many), min_size=1, max_size=4)
)


def printed(table: Table, width: int, indent: int = 0) -> list[str]:
    out = io.StringIO()
    table.print(Console(file=out, width=width, highlight=False, color_system=None), indent)
    return [line.rstrip() for line in out.getvalue().removesuffix("\n").split("\n")]


def wide(words: str = "layers.9.mlp.expert_weights (rollout)") -> Table:
    columns = (
        Column("layer"),
        Column("carried", "bar"),
        *(Column(f"figure {n}") for n in range(4)),
        Column("worst point", "words"),
    )
    table = Table(columns)
    for layer in range(3):
        bar = Bar("0.1234  ", (layer + 1) / 3, 1.0, "#", 16)
        table.add(f"{layer}", bar, *(f"{layer}.{n}2345678" for n in range(4)), words)
    return table


@given(
    rows=ROWS,
    name=st.text("abc-._/", min_size=1, max_size=60),
    width=st.sampled_from([80, 100]),
    indent=st.integers(0, 2),
)
def test_no_figure_is_cut_and_no_line_too_long(
    rows: list[list[str]], name: str, width: int, indent: int
) -> None:
    heads = [Column(f"head of\n{n}") for n in range(len(rows[0]))]
    table = Table([Column("name", "words"), *heads])
    for row in rows:
        table.add(name, *row)
    lines = printed(table, width, indent)
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    assert all(words.count(figure) >= 1 for row in rows for figure in row)


def test_bars_give_way_before_words_and_words_before_the_table_is_parted() -> None:
    marks = [max(line.count("#") for line in printed(wide(), width)) for width in (120, 112, 106)]
    assert marks[0] == 16 and marks == sorted(marks, reverse=True) and len(set(marks)) == 3
    assert all(len(printed(wide(), width)) == 4 for width in (120, 112, 106))
    # the name goes on after one of its joints
    folded = printed(wide(), 88)
    assert folded[1].endswith("layers.9.mlp.") and folded[2].split() == ["expert_weights"]
    assert min(line.count("#") for line in (folded[1], folded[4])) >= 1


def test_what_does_not_fit_goes_below_with_what_its_row_is_of() -> None:
    lines = printed(wide(), 50)
    parts = "\n".join(lines).split("\n\n")
    assert len(parts) > 1
    for part in parts:
        head, *rows = part.split("\n")
        assert head.split()[0] == "layer"
        assert [row.split()[0] for row in rows if row[:5].strip()] == ["0", "1", "2"]
    assert max(map(len, lines)) <= 50


@pytest.mark.parametrize("width", [5, 12])
def test_where_there_is_no_room_figures_are_folded_and_not_cut(width: int) -> None:
    table = Table([Column("a"), Column("b")])
    table.add("1234567890", "0.0987654321")
    lines = printed(table, width)
    assert "…" not in "".join(lines)
    digits = "".join(sorted("".join(lines).replace(" ", "")))
    assert digits == "".join(sorted("ab" + "1234567890" + "0.0987654321"))


def test_a_marked_line_goes_on_under_its_words() -> None:
    table = Table([Column("how", "words")])
    table.add("- a sentence of words\n> implementation-of-a-name\nplain words that go on")
    assert printed(table, 18) == [
        "how",
        "- a sentence of",
        "  words",
        "> implementation-",
        "  of-a-name",
        "plain words that",
        "go on",
    ]


def test_text_is_no_markup_and_wide_characters_count() -> None:
    table = Table([Column("name", "words"), Column("n")])
    table.add("[red]層層層層層層層層層層層層層[/red]", "1")
    lines = printed(table, 24)
    shown = "".join("".join(line.split()) for line in lines)
    assert "[red]" in shown and "[/red]" in shown and shown.count("層") == 13


def test_heads_stand_on_the_rows() -> None:
    table = Table([Column("point", "words"), Column("own error\nrollout"), Column("share")])
    table.add("embed", "1.1x", "7 %")
    assert printed(table, 80) == [
        "       own error",
        "point    rollout  share",
        "embed       1.1x    7 %",
    ]
