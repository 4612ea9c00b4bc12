"""`layerbisect report`: a case as one page, as text, or as JUnit XML."""

from __future__ import annotations

from pathlib import Path

import click

from layerbisect.cli.boundary import echo_json
from layerbisect.cli.options import json_option, page

_FILE = click.Path(path_type=Path)


@click.command(short_help="Show results as one page of HTML, as text, or as JUnit XML.")
@click.argument("results", type=_FILE, nargs=-1, required=True, metavar="RESULT...")
@click.option("-o", "--out", type=_FILE, metavar="FILE", help="Write the page here.")
@click.option("--junit", type=_FILE, metavar="FILE", help="Write JUnit XML for CI here.")
@click.option(
    "--tokenizer",
    type=_FILE,
    metavar="DIR",
    help="Checkpoint whose tokenizer shows tokens as text.",
)
@click.option("--title", metavar="TEXT", help="What the page is called; the files' names if not.")
@json_option
def report(
    results: tuple[Path, ...],
    out: Path | None,
    junit: Path | None,
    tokenizer: Path | None,
    title: str | None,
    as_json: bool,
) -> int:
    """Show one case: what other commands printed with --json, together.

    RESULT is a file that bisect, scores judge, replay, demo, selftest or the accuracy script wrote
    with --json, or - for stdin. The page is one file that opens without a network. Without --out
    and --junit the results are printed as text.

    \b
    Exit codes:
      0  no result is divergent, convicted or failed
      1  one is
      2  one could not be judged, and none is

    \b
    Example:
      layerbisect bisect captures/rollout captures/trainer --model policy --json > bisect.json
      layerbisect report bisect.json -o report.html --tokenizer policy
      layerbisect report scores.json bisect.json replay.json -o case.html --junit case.xml
      layerbisect demo --json | layerbisect report - -o demo.html
    """
    from layerbisect.report.results import exit_code, read_result, with_explained

    if title is not None and out is None:
        raise click.UsageError("--title is of the page; give --out, too")
    _refuse_targets(results, out, junit)
    read = with_explained([read_result(path) for path in results])
    written: list[Path] = []
    xml = b""
    if junit is not None:
        from layerbisect.report.junit import junit_xml

        # before the page is written: of two files none is left alone
        xml = junit_xml(read)
    if out is not None:
        from layerbisect.report.page import write_page
        from layerbisect.report.token_text import TokenText

        text = None if tokenizer is None else TokenText.open(tokenizer)
        written.append(write_page(read, out, title=title, text=text))
    elif tokenizer is not None:
        raise click.UsageError("--tokenizer is of the page; give --out, too")
    if junit is not None:
        from layerbisect.report.files import write_whole

        write_whole(junit, xml)
        written.append(junit)
    if as_json:
        from layerbisect.report.summary import sentence

        said = [{"name": r.name, "status": r.status, "sentence": sentence(r)} for r in read]
        echo_json({"schema": 1, "results": said, "written": [str(path) for path in written]})
    elif not written:
        from layerbisect.terminal.results import render_results

        with page() as console:
            render_results(read, console)
    for path in written:
        click.echo(f"wrote {path}", err=True)
    return exit_code(read)


def _refuse_targets(results: tuple[Path, ...], out: Path | None, junit: Path | None) -> None:
    """Refuse to write over an input, two files into one, or where no file can be."""
    from layerbisect.captures.errors import LayerBisectError
    from layerbisect.report.files import check_target

    targets = [path for path in (out, junit) if path is not None]
    for path in targets:
        check_target(path)
        if path.resolve() in [one.resolve() for one in results]:
            raise LayerBisectError(f"{path} is one of the results; write to another file")
    if len(targets) == 2 and targets[0].resolve() == targets[1].resolve():
        raise LayerBisectError(f"--out and --junit are both {out}; name two files")
