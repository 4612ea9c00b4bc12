"""Print a self-test for people, a line for each run as it is judged."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from layerbisect.bisect.verdict import Verdict
from layerbisect.demo import Planted
from layerbisect.selftest import SelfTest, Setting, Tried
from layerbisect.terminal.text import line, next_command, next_line
from layerbisect.wording import count

_PLANTED, _VERDICT = 48, 31
_WHOLE = 98
"""Columns of a row in one line; in fewer it is in two."""


def place(layer: int | None, operator: str | None, side: str) -> str:
    """Say who it is: ``norm, layer 3, rollout``; what is no layer's is without one."""
    parts = [operator or "operator unknown", "" if layer is None else f"layer {layer}", side]
    return ", ".join(part for part in parts if part)


class SelfTestPage:
    """Prints what a self-test tells, in this order: begin, tell each run, end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._told = 0

    def begin(self, setting: Setting) -> None:
        """Say what is tested, and print the table's head."""
        on = f"{count(setting.layers, 'layer')}, {setting.dtype}, {setting.device}"
        line(self.console, setting.engines, 0, hang=2)
        line(self.console, f"{setting.model}, {on}", 0, hang=2)
        self.console.print()
        self._row("", "planted", "the verdict says", "", "seconds", style="bold")

    def tell(self, tried: Tried) -> None:
        """Print a run's line, and below it in what the verdict is wrong."""
        outcome = tried.outcome
        right = "right" if outcome.right else "WRONG"
        style = "" if outcome.right else "bold red"
        # the first is the clean pair
        number, seconds = str(self._told or ""), f"{tried.seconds:.1f}"
        self._told += 1
        said = _said(outcome.verdict)
        self._row(number, _planted(outcome.planted), said, right, seconds, style=style)
        if not outcome.right:
            self._wrong(tried)

    def end(self, done: SelfTest, keep: Path | None, model: Path | None) -> None:
        """Print the sum in one sentence, what was left out, and what to do."""
        self.console.print()
        accused = "was accused" if done.clean_accused else "was not accused"
        text = f"{done.found} of {len(done.faults)} found, the clean pair {accused}"
        self.console.print(Text(text, style="bold green" if done.passed else "bold red"))
        if len(done.faults) < done.wanted:
            fewer = f"not {done.wanted}: nothing was left to plant instead of what is named below"
            line(self.console, fewer, 0, hang=2)
        for one in done.left_out:
            said = left_out_words(one.fault, one.why, one.instead)
            line(self.console, f"note: {said}", 0, hang=2)
        if not done.passed:
            self._advise(done, keep, model)

    def _row(
        self, number: str, planted: str, said: str, right: str, seconds: str, *, style: str
    ) -> None:
        # rows come one by one, so that no width can be learnt from those to come
        second = f"{said:<{_VERDICT}} {right:<5} {seconds:>7}"
        whole = f"{number:>2}  {planted:<{_PLANTED}} {second}"
        rows = [whole]
        if max(len(whole), _WHOLE) > self.console.width:
            rows = [f"{number:>2}  {planted}".rstrip(), f"    {second}"]
        for row in rows:
            self.console.print(Text(row, style=style), soft_wrap=True)

    def _wrong(self, tried: Tried) -> None:
        for mistake in tried.outcome.mistakes():
            line(self.console, mistake, 4, hang=2)
        for reason in tried.outcome.verdict.reasons[:1]:
            line(self.console, f"the verdict: {reason}", 4, hang=2)

    def _advise(self, done: SelfTest, keep: Path | None, model: Path | None) -> None:
        wrong = next(one for one in done.tried if not one.outcome.right)
        self.console.print()
        if done.clean_accused:
            line(
                self.console,
                "The two engines differ with nothing planted: either one of them is really wrong "
                "here, or layerbisect is. Look at the clean pair first.",
                0,
            )
        else:
            line(
                self.console,
                "layerbisect does not see on this machine, model or engine what it should, and "
                "its verdicts on faults like these are not to be relied on here. Please report it, "
                "with what the command below prints.",
                0,
            )
        if keep is None:
            next_line(self.console, "`layerbisect selftest --keep DIR` keeps the captures")
            return
        policy = keep / "model" if model is None else model
        next_command(self.console, f"layerbisect bisect {wrong.captures} --model {policy}")


def _planted(planted: Planted | None) -> str:
    if planted is None:
        return "nothing"
    return f"{planted.fault}: {place(planted.layer, planted.operator, planted.side)}"


def _said(verdict: Verdict) -> str:
    if not verdict.culprits:
        return verdict.status
    first, *others = verdict.culprits
    text = place(first.layer, first.operator, first.side)
    return f"{text} (+{len(others)})" if others else text


def left_out_words(fault: str, why: str, instead: str | None) -> str:
    """Say that a fault could not be planted, why, and what was instead, if anything."""
    other = f"`{instead}` was planted instead" if instead else "nothing was left instead"
    return f"`{fault}` could not be planted, {other}: {why}"
