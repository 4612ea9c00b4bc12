"""Write a case as one page of HTML that opens from disk and asks nothing of any host."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.report.blocks import Chart, HeatmapBlock, Section
from layerbisect.report.files import write_whole
from layerbisect.report.heatmap import heatmap_data, heatmap_figure
from layerbisect.report.results import Result
from layerbisect.report.sections import sections
from layerbisect.report.summary import summarize
from layerbisect.report.token_text import TokenText

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_FOLDER = resources.files("layerbisect.report")


def write_page(
    results: Sequence[Result],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    text: TokenText | None = None,
) -> Path:
    """Write the page of a case, whole or not at all.

    Args:
        results: what the case is made of.
        path: the page's file; one that is there is replaced.
        title: heads the page and names its tab; the results' names where not given.
        text: shows tokens as text.

    Raises:
        LayerBisectError: jinja2 or plotly is not installed, or the file cannot be written.
    """
    target = Path(path)
    page = html(results, title=title or ", ".join(r.name for r in results), text=text)
    write_whole(target, page.encode("utf-8"))
    return target


def html(results: Sequence[Result], *, title: str, text: TokenText | None = None) -> str:
    """Return the page of a case."""
    import layerbisect

    environment = _environment()
    from plotly.offline import get_plotlyjs

    return environment.get_template("page.html").render(
        title=title,
        summary=summarize(results),
        parts=[_numbered(number, sections(one, text)) for number, one in enumerate(results)],
        results=results,
        text=text,
        styles=_read("page.css") + _read("heatmap.css"),
        scripts=[get_plotlyjs(), _read("token_panel.js"), _read("heatmap.js"), _read("page.js")],
        version=layerbisect.__version__,
    )


def script_json(value: Any) -> Markup:
    """Write data into a script element, from which nothing in it can break out."""
    from markupsafe import Markup

    text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def words(text: str) -> Markup:
    """Set what stands in backticks as code; all else is escaped."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    if len(parts) % 2 == 0:
        # an odd number of them is no pair
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part)
        for at, part in enumerate(parts)
    )


def _environment() -> Environment:
    try:
        import plotly  # noqa: F401
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise LayerBisectError(
            f"a page needs {error.name}, which is not installed: pip install 'layerbisect[report]'"
        ) from None
    environment = Environment(
        # what is read into the page is plain text, wherever it comes from
        autoescape=True,
        loader=FileSystemLoader(str(_FOLDER)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    environment.filters["words"] = words
    environment.filters["figure_json"] = lambda figure: script_json(figure.to_json())
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.globals["heatmap_data"] = heatmap_data
    environment.globals["heatmap_figure"] = heatmap_figure
    return environment


def _numbered(number: int, found: Sequence[Section]) -> list[Section]:
    """Make names unique on the page: two results may have the same sections."""
    return [
        replace(
            section,
            id=f"{section.id}-{number}",
            blocks=tuple(
                replace(block, id=f"{block.id}-{number}")
                if isinstance(block, Chart | HeatmapBlock)
                else block
                for block in section.blocks
            ),
        )
        for section in found
    ]


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
