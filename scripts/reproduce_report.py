"""What the reproduced experiments print, and whether a verdict names what was planted."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layerbisect.bisect.verdict import Verdict
from layerbisect.terminal.scores import headline

_TRANSFORMERS = """# The published experiments, reproduced

Written by `python -m scripts.reproduce_cases --work DIR --page docs/cases.md`: 4 prompts x
2 samples x {tokens} response tokens on a tiny Qwen3-MoE of 4 layers in bfloat16, a real SGLang
server on a CPU against transformers. What is planted is simulated: nothing else is. The published
figures are of Qwen3-30B-A3B on eight MI355X GPUs, SGLang against Megatron-core; other models have
other gaps, so it is the pattern that should agree, and the 0.10 nat that was planted. The judge
sees records alone.

```
{text}
```
"""
_MEGATRON_TITLE = "\n## The same with Megatron-core as the trainer\n"
_MEGATRON = (
    "Written by `python -m scripts.reproduce_cases --work DIR --page docs/cases.md --trainer "
    "megatron --layout {layout}`: the same server, model and prompts, {tokens} response tokens. "
    "The trainer is a job on the real megatron-core {version} on the CPU, {ranks}; the published "
    "job had PP 2, CP 2 and EP 4. C is taken from the job's own capture (`layerbisect scores "
    "trainer --capture`), and in Case 2 from what its scoring function returns, which is where the "
    "fault is. Megatron's data-parallel wrapper reduces the gradients of Case 3; AdamW is torch's, "
    "and the stages hand boundaries and gradients on themselves, since megatron's optimizer and "
    "schedules want CUDA. The server loads checkpoints made of the ranks' weight snapshots."
)


@dataclass(slots=True)
class Report:
    """Prints as it goes, and keeps what was expected of each verdict and did not come."""

    wrong: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def say(self, text: str = "") -> None:
        """Print some lines."""
        print(text, flush=True)
        self.lines += [line.rstrip() for line in text.split("\n")]

    def write_page(self, path: Path, tokens: int, megatron: Mapping[str, str] | None) -> None:
        """Write what was printed as one part of a page, whose other part is kept.

        ``megatron`` has ``layout``, ``ranks`` and ``version`` of a Megatron job; None is
        transformers.
        """
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        first, title, second = before.partition(_MEGATRON_TITLE)
        text = "\n".join(self.lines).replace("\n\n\n", "\n\n").strip()
        if megatron is None:
            first = _TRANSFORMERS.format(tokens=tokens, text=text)
        else:
            title = _MEGATRON_TITLE
            said = textwrap.fill(
                _MEGATRON.format(tokens=tokens, **megatron), 100, break_on_hyphens=False
            )
            second = f"\n{said}\n\n```\n{text}\n```\n"
        path.write_text(first + title + second, encoding="utf-8")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
        for row in (headers, ["-" * width for width in widths], *rows):
            self.say("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)))
        self.say()

    def expect(self, what: str, verdict: Verdict, right: Callable[[Verdict], bool]) -> None:
        """Print a verdict, and whether it is what was planted."""
        self.check(what, headline(verdict), right(verdict))

    def check(self, what: str, said: str, held: bool) -> None:
        """Print what was said, and whether it is what was planted."""
        self.say(f"  {what}: {said}")
        self.say(f"    -> {'right' if held else 'WRONG'}")
        if not held:
            self.wrong.append(f"{what}: {said}")


def agrees(verdict: Verdict) -> bool:
    """Whether nothing was found."""
    return verdict.status == "agree" and not verdict.culprits


def convicts(side: str, operator: str, text: str) -> Callable[[Verdict], bool]:
    """Whether exactly one culprit is convicted: this operator of this side, by this evidence."""

    def right(verdict: Verdict) -> bool:
        found = [(c.side, c.operator) for c in verdict.culprits]
        return found == [(side, operator)] and text in " ".join(verdict.culprits[0].evidence)

    return right


def maes(verdict: Verdict) -> dict[str, float]:
    """A verdict's mean absolute differences by pair."""
    assert verdict.scores is not None
    return {pair.name: pair.gap.mae for pair in verdict.scores.pairs}
