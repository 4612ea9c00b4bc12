"""The journal of a replay: what was started and what came of it, a JSON object a line.

The first line says which bundle it is of. ``{"started": {...}}`` comes before an implementation is
run and ``{"result": {...}}`` after it, so that one that was started and has no result is one that
took its process down. ``{"engine": {...}}`` is the judgement of the engine's own output,
``{"known": [...]}`` the names in order, ``{"finished": true}`` says that a run went through, and
``{"failed": "..."}`` that it stopped by an error of the replayer's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.judging.residuals import Fit
from layerbisect.kernels.replay.report import (
    Errors,
    Reproduction,
    Result,
    Variation,
    WorstRow,
)

SCHEMA = 1


class Journal:
    """A journal on disk, read once when it is opened and appended to.

    ``results`` maps names to what became of them; ``started`` is the one that was started and has
    no result, as the crash that it is if its process is dead; ``engine`` is None before the engine
    was judged, and after that a list of the judgement, or of nothing where there was none to judge.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        self.started: Result | None = None
        self.engine: list[Errors] | None = None
        self.known: list[str] = []
        self.finished = False
        self.failed = ""
        self._read = 0
        self._header: dict[str, Any] = {}
        self.refresh()

    @classmethod
    def open(cls, path: Path, facts: Mapping[str, Any]) -> Journal:
        """Open a journal, or begin one, of a replay that these ``facts`` describe.

        Raises LayerBisectError for one of another replay, or a file that is no journal.
        """
        header = {"schema": SCHEMA, **facts}
        try:
            if not path.exists() or not path.stat().st_size:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(header) + "\n")
            journal = cls(path)
        except OSError as error:
            raise LayerBisectError(
                f"{path} cannot be a journal: {error.strerror}; give another path"
            ) from None
        found = journal._header
        for name, value in header.items():
            if found.get(name) != value:
                raise LayerBisectError(
                    f"{path} is the journal of another replay: its {name} is {found.get(name)}, "
                    f"and this one's {value}; give another journal, or remove it"
                )
        # what an earlier run went through may not be all that is wanted now
        journal.finished, journal.failed = False, ""
        return journal

    def has(self, names: Collection[str] | None) -> bool:
        """Whether all that is wanted is here: these names, or None for all that are known."""
        wanted = self.known if names is None else names
        return bool(self.known) and all(name in self.results for name in wanted)

    def refresh(self) -> None:
        """Read the lines that were added since; one that is not complete yet is left for later."""
        with open(self.path, "rb") as file:
            file.seek(self._read)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        try:
            for line in whole.splitlines():
                self._take(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LayerBisectError(
                f"{self.path} is no journal of a replay, or a damaged one ({error}); give another "
                "journal, or remove it"
            ) from None
        self._read += len(whole)

    def _take(self, line: dict[str, Any]) -> None:
        if not self._header:
            self._header = {"schema": line["schema"], **line}
        elif "started" in line:
            self.started = _result(line["started"])
        elif "result" in line:
            result = _result(line["result"])
            self.results[result.name] = result
            self.started = None
        elif "engine" in line:
            self.engine = [] if line["engine"] is None else [_errors(line["engine"])]
        elif "known" in line:
            self.known = line["known"]
        elif "finished" in line:
            self.finished = True
        elif "failed" in line:
            self.failed, self.started = line["failed"], None

    def add(self, kind: str, value: Any) -> None:
        """Append a line; dataclasses are written as objects."""
        plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        self._end_torn_line()
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({kind: plain}) + "\n")
        self.refresh()

    def _end_torn_line(self) -> None:
        """Cut off a last line that its writer did not live to end."""
        if self.path.stat().st_size > self._read:
            with open(self.path, "r+b") as file:
                file.truncate(self._read)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _result(raw: dict[str, Any]) -> Result:
    parts: dict[str, Any] = {
        name: kind(**raw[name])
        for name, kind in (
            ("repeats", Variation),
            ("batches", Variation),
            ("chunks", Variation),
            ("reproduces", Reproduction),
        )
        if raw[name] is not None
    }
    errors = None if raw["errors"] is None else _errors(raw["errors"])
    return Result(**{**raw, **parts, "filled": tuple(raw["filled"]), "errors": errors})


def _errors(raw: dict[str, Any]) -> Errors:
    lists = {
        "worst": tuple(WorstRow(**row) for row in raw["worst"]),
        "fits": tuple(Fit(**fit) for fit in raw["fits"]),
    }
    return Errors(**{**raw, **lists})
