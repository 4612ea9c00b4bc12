"""Print what replays say: a sentence a stretch, then the engine's own output beside all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console

from layerbisect.kernels.replay.deterministic import Pair
from layerbisect.kernels.replay.report import Errors, Replay, Result, Variation
from layerbisect.replay_words import columns, figures, headline
from layerbisect.terminal.deterministic import render_pairs
from layerbisect.terminal.table import Column, Table
from layerbisect.terminal.text import headline_line, line, title
from layerbisect.wording import count, percent, times

STYLES = {"convicted": "bold red", "acquitted": "bold green", "inconclusive": "bold yellow"}
_SHOWN = ("ran", "garbage", "unwritten")
"""States of an implementation that returned something."""
_LABEL = 9
_WORST = 5


def render_replays(
    replays: Sequence[Replay],
    left_out: Mapping[str, str],
    console: Console,
    *,
    pairs: Sequence[Pair] | None = None,
    verbose: bool = False,
) -> None:
    """Print replays in the order of computation, and the points that could not be replayed.

    With ``pairs`` the table of a deterministic mode stands for that of the implementations.
    ``verbose`` shows both, worst rows, distances in units in the last place, and all that is known
    of the engine.
    """
    _Page(replays, left_out, console, pairs, verbose).print()


class _Page:
    def __init__(
        self,
        replays: Sequence[Replay],
        left_out: Mapping[str, str],
        console: Console,
        pairs: Sequence[Pair] | None,
        verbose: bool,
    ) -> None:
        self.replays = replays
        self.left_out = left_out
        self.console = console
        self.pairs = pairs
        self.verbose = verbose

    def print(self) -> None:
        for replay in self.replays:
            headline_line(self.console, headline(replay), STYLES[replay.status])
            if self.pairs is not None and not self.verbose:
                self._conclusion(replay)
        if self.pairs is not None:
            render_pairs(self.pairs, self.console)
        if self.pairs is None or self.verbose:
            for replay in self.replays:
                self._stretch(replay)
        self._not_run()
        if self.left_out:
            title(self.console, "not replayed")
            for point, why in self.left_out.items():
                self._line(f"{point}: {why}")
        self._where()

    def _line(self, text: str, indent: int = 2) -> None:
        line(self.console, text, indent, hang=2)

    def _fact(self, label: str, text: str) -> None:
        line(self.console, f"{label:<{_LABEL}} {text}", 2, hang=_LABEL + 1)

    def _stretch(self, replay: Replay) -> None:
        over = count(replay.rows, "row")
        if replay.rows_left_out:
            over += f", {replay.rows_left_out:,} left out"
        title(self.console, f"{replay.point}  {', '.join(replay.covers)}, {replay.dtype}, {over}")
        self._conclusion(replay)
        self._engine(replay)
        returned = shown(replay)
        if returned:
            self.console.print()
            _table(returned).print(self.console, 2)
        for result in returned:
            self._notes(result)

    def _conclusion(self, replay: Replay) -> None:
        if replay.conclusion not in headline(replay):
            self._fact("because", replay.conclusion)

    def _engine(self, replay: Replay) -> None:
        self._fact(replay.label, engine_words(replay))
        known = ("engine", "version", "device")
        facts = [f"{name}={v}" for name, v in replay.engine_facts.items() if name not in known]
        if self.verbose and facts:
            self._fact("", ", ".join(facts))
        if replay.engine is None:
            self._fact("", "what it returned is not known")
            return
        for text in figures(replay.engine) + (_details(replay.engine) if self.verbose else []):
            self._fact("", text)

    def _notes(self, result: Result) -> None:
        said = notes(result)
        if not self.verbose:
            for note in said:
                self._line(f"{result.name}: {note}")
            return
        self._line(f"{result.name}  {result.package}")
        details = [] if result.errors is None else _details(result.errors)
        for note in said + _variations(result) + details:
            self._line(note, 4)

    def _not_run(self) -> None:
        told = not_run(self.replays)
        if told:
            title(self.console, "did not run")
        for names, state, why in told:
            self._line(f"{names}: {state}{f': {why}' if why else ''}")

    def _where(self) -> None:
        self.console.print()
        line(self.console, where_words(self.replays), 0)


def engine_words(replay: Replay) -> str:
    """Name the engine whose operators were replayed, and its device."""
    facts = replay.engine_facts
    named = " ".join(facts.get(name, "") for name in ("engine", "version")).strip()
    device = facts.get("device", "")
    return f"{named or 'engine unknown'}{device and f' on {device}'}"


def shown(replay: Replay) -> list[Result]:
    """The implementations that returned something."""
    return [one for one in replay.results if one.state in _SHOWN]


def notes(result: Result) -> list[str]:
    """Say what of an implementation is not in a table's figures."""
    said = []
    if result.state != "ran":
        said.append(f"{result.state}{f': {result.why}' if result.why else ''}")
    elif result.why:
        said.append(result.why)
    if result.errors is not None and result.errors.convicted:
        said.append(f"beyond rounding: {result.errors.why}")
    if result.filled:
        said.append(f"{', '.join(result.filled)} by the low-precision reference")
    return said


def not_run(replays: Sequence[Replay]) -> list[tuple[str, str, str]]:
    """Name what could not be run, its state and why, once for all stretches it is the same of."""
    why: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    listed: dict[str, int] = defaultdict(int)
    for replay in replays:
        for one in replay.results:
            listed[one.name] += 1
            if one.state not in _SHOWN:
                why[one.state, one.why][one.name].append(replay.point)
    told = []
    # a kernel that died is more to know of than one that is not installed
    for (state, reason), names in sorted(why.items(), key=lambda item: item[0][0] != "crashed"):
        said = [
            name if len(points) == listed[name] else f"{name} at {', '.join(points)}"
            for name, points in names.items()
        ]
        told.append((", ".join(said), state, reason))
    return told


def where_words(replays: Sequence[Replay]) -> str:
    """Say where implementations ran, and what that means for their figures."""
    devices = sorted({replay.device for replay in replays})
    text = f"replayed on {', '.join(devices)}"
    if "cpu" in devices:
        text += ", where no times are taken"
        ran = (one for replay in replays for one in shown(replay))
        if any("triton" in f"{one.name} {one.package}".lower() for one in ran):
            text += (
                "; Triton's kernels ran under its interpreter, so their bits may differ from a "
                "GPU's"
            )
    return text


def _variations(result: Result) -> list[str]:
    said = []
    for name in ("repeats", "batches", "chunks"):
        variation: Variation | None = getattr(result, name)
        if variation is not None and not variation.none and variation.of:
            said.append(
                f"{name}: {variation.rows:,} of {count(variation.of, 'row')} change, by up to "
                f"{variation.max_ulps:.3g} ulp ({variation.how})"
            )
    return said


def _details(errors: Errors) -> list[str]:
    relative = ", ".join(f"{name} {value:.3g}" for name, value in errors.relative.items())
    lines = [f"error over the row's size: {relative}"] if relative else []
    for fit in errors.fits:
        lines.append(f"systematic: {fit.name} {fit.coefficient:+.4g} (z {fit.z:+.1f})")
    shares = [f"{name}: {percent(share)}" for name, share in errors.ulps.items() if share]
    if shares:
        lines.append(f"ulp from the right value: {', '.join(shares)}")
    worst = [f"{w.position} (token {w.token}) {times(w.ratio)}" for w in errors.worst[:_WORST]]
    if worst:
        lines.append(f"worst positions: {', '.join(worst)}")
    return lines


def _two(head: str) -> str:
    return head.replace(" ", "\n")


def _table(results: Sequence[Result]) -> Table:
    heads, cells = columns(results)
    kinds = [Column(_two(head), "words" if head == "systematic" else "figure") for head in heads]
    table = Table([Column("implementation", "words"), *kinds])
    for one in results:
        guilty = one.state != "ran" or (one.errors is not None and one.errors.convicted)
        name = f"{'>' if guilty else ' '} {one.name}"
        table.add(name, *(cell(one) for cell in cells), style="bold" if guilty else "")
    return table
