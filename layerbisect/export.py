"""Write an operator bundle, and beside it a program that replays it with torch alone."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import layerbisect
from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bundle import Bundle, save_bundle
from layerbisect.kernels.replay.implementation import OPERATORS, Implementation, Unavailable
from layerbisect.kernels.replay.known import implementations as known
from layerbisect.kernels.replay.report import Replay
from layerbisect.kernels.replay.variants import REFERENCE
from layerbisect.repro_template import page
from layerbisect.standalone.assemble import standalone

DEFAULT = "torch"
"""What an exported program runs beside the low-precision reference, where it is known."""

_TEMPLATE = "layerbisect.repro_template"
_PLACE = '''    """List what is run beside the low-precision reference."""
    return []
'''
# references before them keep their names
_LAST_IMPORT = "from layerbisect.replay_words import columns, figures, headline\n"
_INTERPRET = """import os

import torch

if not torch.cuda.is_available():
    # Triton reads it on import, and nothing else could run its kernels here
    os.environ.setdefault("TRITON_INTERPRET", "1")
"""


def check_export(
    directory: Path, bundles: Sequence[Bundle], names: Sequence[str], device: str
) -> None:
    """Raise LayerBisectError where `write_export` would, before anything is run for it."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise LayerBisectError(f"{directory} is there already; name a new directory for the export")
    for bundle in bundles:
        _chosen(bundle, names, device)


def write_export(
    directory: Path,
    bundles: Sequence[Bundle],
    replays: Sequence[Replay],
    names: Sequence[str],
    device: str,
) -> list[Path]:
    """Write ``bundle.safetensors`` and ``repro.py``, in a folder a point where there are several.

    The program runs the low-precision reference, torch's ordinary form, and the implementations
    called ``names``, in so far as they are of the bundle's operators and can run on ``device``.
    Returns the programs. Raises LayerBisectError for a directory that isn't empty, and for a named
    implementation that cannot run here.
    """
    check_export(directory, bundles, names, device)
    programs = [
        program(bundle, replay, names, device)
        for bundle, replay in zip(bundles, replays, strict=True)
    ]
    written = []
    for bundle, text in zip(bundles, programs, strict=True):
        folder = directory if len(bundles) == 1 else directory / bundle.point
        folder.mkdir(parents=True, exist_ok=True)
        save_bundle(bundle, folder / "bundle.safetensors")
        written.append(folder / "repro.py")
        written[-1].write_text(text)
    return written


def program(bundle: Bundle, replay: Replay, names: Sequence[str], device: str) -> str:
    """Write the program that replays ``bundle``, with the figures of ``replay`` at its top."""
    chosen = _chosen(bundle, names, device)
    listing = _Listing()
    listed = [f"        {listing.implementation(one)}," for one in chosen]
    template = _source(_TEMPLATE)
    imports = "\n".join(sorted(listing.imports))
    place = _PLACE.replace("    return []\n", "\n".join(["    return [", *listed, "    ]", ""]))
    for old, new in (
        ('"""WHAT"""\n', f'"""{_what(bundle, replay, chosen)}"""\n'),
        (_LAST_IMPORT, f"{_LAST_IMPORT}{imports}\n"),
        (_PLACE, place),
    ):
        if template.count(old) != 1:
            raise ValueError(f"the template has {old!r} {template.count(old)} times, not once")
        template = template.replace(old, new)
    return standalone(
        _TEMPLATE,
        {_TEMPLATE: template},
        entries=OPERATORS,
        # a verdict's words are keys of tables, too
        kept={*(call.operator for call in bundle.calls), bundle.operator, *bundle.covers},
        first=_INTERPRET if any("triton" in line for line in listing.imports) else "",
    )


def _chosen(bundle: Bundle, names: Sequence[str], device: str) -> list[Implementation]:
    found: list[Implementation] = []
    lacking: dict[str, str] = {}
    for operator in dict.fromkeys(call.operator for call in bundle.calls):
        for one in known(operator, device):
            if one.name in (DEFAULT, *names):
                if isinstance(one, Unavailable):
                    lacking[one.name] = one.why
                else:
                    found.append(one)
    for name in names:
        if name in lacking and all(one.name != name for one in found):
            raise LayerBisectError(
                f"{name} can't be exported, for it can't run here: {lacking[name]}"
            )
    return found


class _Listing:
    """Writes implementations as Python, and gathers what that has to import."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self._aliases: dict[tuple[str, str], str] = {}

    def implementation(self, one: Implementation) -> str:
        # as it is called where it is installed; the program looks for the version that it finds
        package = f"package({_distribution(one)!r})"
        run = self.expression(one.run, one.name)
        given = (repr(one.name), repr(one.operator), package, run, repr(one.mode), repr(one.family))
        return "\n".join(["Implementation(", *(f"            {g}," for g in given), "        )"])

    def expression(self, value: Any, name: str) -> str:
        if isinstance(value, partial):
            parts = [self.expression(v, name) for v in (value.func, *value.args)]
            parts += [f"{k}={self.expression(v, name)}" for k, v in value.keywords.items()]
            self.imports.add("from functools import partial")
            return f"partial({', '.join(parts)})"
        if value is None or isinstance(value, str | int | float):
            return repr(value)
        if isinstance(value, enum.Enum) or hasattr(value, "name"):
            return f"{self._imported(type(value), name)}.{value.name}"
        if callable(value):
            return self._imported(value, name)
        raise LayerBisectError(f"{name} can't be exported: it is made with {value!r}")

    def _imported(self, thing: Callable[..., Any], name: str) -> str:
        home, own = thing.__module__, getattr(thing, "__name__", "")
        if getattr(import_module(home), own, None) is not thing:
            raise LayerBisectError(f"{name} can't be exported: {own!r} is no function of {home}")
        if (alias := self._aliases.get((home, own))) is None:
            # what it is called in the end is decided where all of the program is known
            alias = self._aliases[home, own] = f"{own.lstrip('_')}__{len(self._aliases)}"
            self.imports.add(f"from {home} import {own} as {alias}")
        return alias


def _what(bundle: Bundle, replay: Replay, chosen: Sequence[Implementation]) -> str:
    """Say what the program is, and what was found when it was written."""
    names = [REFERENCE, *(one.name for one in chosen)]
    packages = sorted({_distribution(one) for one in chosen} - {"torch"})
    needs = f"torch and {', '.join(packages)}" if packages else "torch alone"
    shown = replace(replay, results=tuple(r for r in replay.results if r.name in names))
    made = f"layerbisect {layerbisect.__version__}, torch {torch.__version__}"
    paragraphs = [
        f"{bundle.point}, replayed on the input that an engine captured.",
        "bundle.safetensors, beside this file, holds what went into the operator "
        f"({', '.join(bundle.covers)}), the weights that it needs, and what the engine returned. "
        "This program judges that, and runs other implementations on the same input. It needs "
        f"{needs}:",
        "    python repro.py [bundle.safetensors] [--device cpu] [--json]",
        "Every output is measured against float64, row by row, as a multiple of what a "
        "low-precision reference loses on the same input (1.0x is rounding); as a share of the "
        "worst-case bound of any implementation that sums in float32; and for a systematic part: "
        "a gain or an offset that rounding would average away. Rows that change in a repeat, in "
        "other batches or in chunks are counted bit by bit.",
        f"Found when this was written ({made}):",
    ]
    lines = [p if p.startswith(" ") else textwrap.fill(p, 98) for p in paragraphs]
    found = [
        textwrap.fill(line, 98, initial_indent="    ", subsequent_indent="      ")
        if len(line) > 94
        else f"    {line}".rstrip()
        for line in page(shown).splitlines()
    ]
    # a docstring ends at three quotes, and reads a backslash
    return ("\n\n".join([*lines, "\n".join(found)]) + "\n").replace("\\", "/").replace('"', "'")


def _distribution(one: Implementation) -> str:
    """Name the package that an implementation comes from, without its version."""
    return one.package.split(",")[0].split()[0]


def _source(name: str) -> str:
    found = import_module(name).__file__
    assert found is not None
    return Path(found).read_text()
