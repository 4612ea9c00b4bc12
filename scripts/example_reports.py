"""Make the results of docs/examples.md from real runs, and a picture of each report.

    python -m scripts.example_reports --work DIR --cases CASES --smollm2 SMOLLM2

CASES is the work directory of `python -m scripts.reproduce_cases`, SMOLLM2 that of `python -m
scripts.smollm2_case`. A fault planted in a demo, a clean demo, and a clean pair judged by the
wrong checkpoint, which nobody may be accused for, are run in ``--work``. Results go to
docs/results, pictures to docs/pictures; the pages themselves are made of the results by
`layerbisect report`. Takes about two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

import layerbisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.verdict_json import verdict_from_json
from layerbisect.captures.record.file import open_all
from layerbisect.cli.boundary import json_text
from layerbisect.demo import Outcome, run_demo
from layerbisect.models import make_tiny
from layerbisect.report.page import write_page
from layerbisect.report.results import read_result, with_explained
from layerbisect.report.token_text import TokenText
from scripts.smollm2_report import TITLE, score_record
from scripts.smollm2_work import Work
from tests.browser import chromium, opened

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PICTURES = ROOT / "docs" / "pictures"
CASES = {
    "case-1": ("case-1-fault.stored.safetensors",),
    "case-2": ("case-2-fault.safetensors",),
    "case-3": tuple(f"case-3-fault/{step}.safetensors" for step in range(3)),
}
OTHER_SEED = 7
SIZE = (1200, 740)


def results(work: Path, cases: Path, smollm2: Path) -> Iterator[tuple[str, Verdict | Outcome]]:
    """Run what is to be run; yields each result with its name."""
    yield "demo", run_demo(keep=work / "demo")
    yield "clean", run_demo(fault="none", keep=work / "clean")
    other = make_tiny(work / "another-checkpoint", seed=OTHER_SEED)
    sides = (work / "clean" / "rollout", work / "clean" / "trainer")
    yield "inconclusive", layerbisect.bisect(*sides, model=other)
    for name, files in CASES.items():
        yield name, layerbisect.judge(open_all([cases / file for file in files]))
    yield "smollm2-scores", layerbisect.judge([score_record(Work(smollm2))])
    for name, file in {"smollm2": "verdict", "smollm2-decode": "decode"}.items():
        yield name, verdict_from_json(json.loads((smollm2 / f"{file}.json").read_text()))


def write_results(work: Path, cases: Path, smollm2: Path) -> None:
    """Write every result; where the folders lie on this machine is left out."""
    RESULTS.mkdir(exist_ok=True)
    for name, result in results(work, cases, smollm2):
        text = json_text(result.to_json()) + "\n"
        for folder in (work, cases, smollm2):
            text = text.replace(f"{folder}/", "")
        (RESULTS / f"{name}.json").write_text(text)
        click.echo(name)


def take_pictures(work: Path, smollm2: Path) -> None:
    """Write each report into the work directory, and a picture of its first screen."""
    PICTURES.mkdir(exist_ok=True)
    text = TokenText.open(smollm2 / "model")
    names = ["demo", "clean", "inconclusive", *CASES, "smollm2"]
    with chromium() as browser:
        for name in names:
            of_smollm2 = name == "smollm2"
            files = [f"{name}-scores", name, f"{name}-decode"] if of_smollm2 else [name]
            results = with_explained([read_result(RESULTS / f"{one}.json") for one in files])
            title = TITLE if of_smollm2 else name
            page = write_page(
                results, work / f"{name}.html", title=title, text=text if of_smollm2 else None
            )
            with opened(browser, page, width=SIZE[0], height=SIZE[1]) as found:
                found.page.screenshot(path=PICTURES / f"{name}.png")
            click.echo(f"{page}")


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--cases", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--smollm2", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--pictures-only", is_flag=True, help="Take the results as they are.")
def main(work: Path, cases: Path, smollm2: Path, pictures_only: bool) -> None:
    """Command line."""
    work, cases, smollm2 = (path.resolve() for path in (work, cases, smollm2))
    if not pictures_only:
        write_results(work, cases, smollm2)
    take_pictures(work, smollm2)


if __name__ == "__main__":
    main()
