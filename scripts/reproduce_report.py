"""What the reproduced experiments print, and whether a verdict names what was planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layerbisect.bisect.verdict import Verdict
from layerbisect.render_scores import headline

_PAGE = """# The published experiments, reproduced

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


@dataclass(slots=True)
class Report:
    """Prints as it goes, and keeps what was expected of each verdict and did not come."""

    wrong: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def say(self, text: str = "") -> None:
        """Print a line."""
        print(text, flush=True)
        self.lines.append(text.rstrip())

    def page(self, tokens: int) -> str:
        """Return what was printed as a page."""
        text = "\n".join(self.lines).replace("\n\n\n", "\n\n").strip()
        return _PAGE.format(tokens=tokens, text=text)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
        for row in (headers, ["-" * width for width in widths], *rows):
            self.say("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)))
        self.say()

    def expect(self, what: str, verdict: Verdict, right: Callable[[Verdict], bool]) -> None:
        """Print a verdict, and whether it is what was planted."""
        held = right(verdict)
        self.say(f"  {what}: {headline(verdict)}")
        self.say(f"    -> {'right' if held else 'WRONG'}")
        if not held:
            self.wrong.append(f"{what}: {headline(verdict)}")


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
