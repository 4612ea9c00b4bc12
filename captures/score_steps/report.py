"""Say what was done to watched scores, from what was traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.score_steps.change import FLOAT32_EPS, ValueChange, describe_change
from layerbisect.captures.score_steps.tracing import Applied, Node, Trace, ancestors

if TYPE_CHECKING:
    import torch

    from layerbisect.captures.score_steps.watch import Capture


@dataclass(frozen=True, slots=True)
class Step:
    """What changed scores, and how; ``applied`` is None for what was no torch function."""

    applied: Applied | None
    change: ValueChange


@dataclass(frozen=True, slots=True)
class ScoreChange:
    """What happened to the scores of ``before`` until ``after`` returned them.

    ``calls`` are the numbers of the calls of ``before``, counted from 1. ``after`` is None for
    scores that no other watched function returned again. ``change`` is from the copy of the former
    to the copy of the latter, and ``steps`` are what changed values in between, in order.
    """

    before: str
    calls: tuple[int, ...]
    after: str | None
    change: ValueChange
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        first, last = self.calls[0], self.calls[-1]
        call = f"call {first}" if first == last else f"calls {first} to {last}"
        whose = f"the scores of `{self.before}` ({call})"
        end = f"what `{self.after}` returned" if self.after else "what became of them"
        if self.change.kind == "same" and not self.steps:
            return f"{whose} and {end} are the same"
        lines = [
            f"{step.applied or 'something that is no torch function'} changed {whose}: "
            f"{step.change.summary}"
            for step in self.steps
        ]
        if self.change.kind != "same" and not lines:
            what = "differ in shape" if self.change.kind == "shape" else "differ"
            lines = [
                f"{whose} and {end} {what}: {self.change.summary}; no torch function was seen to "
                "do it: look for numpy, a custom kernel or another thread"
            ]
        return "\n".join(lines)


def changes_of(captures: Sequence[Capture], trace: Trace) -> list[ScoreChange]:
    """What was done to each capture's scores, in the order in which it ended."""
    found = []
    taken: set[int] = set()
    for capture in captures:
        path = ancestors(parent for node in capture.nodes for parent in node.parents)
        sources = [node.label for node in path if node.label is not None]
        sources = list({id(s): s for s in sources}.values()) or capture.inner
        if sources:
            taken |= {id(source) for source in sources} | {id(capture)}
            steps = _steps([*path, *capture.nodes], trace)
            change = _compare(sources, [_numbers(v) for v in capture.values], capture.nodes)
            found.append(_change(sources, capture.name, change, steps))
    for capture in captures:
        if id(capture) not in taken:
            after = _descendants(capture, trace)
            steps = _steps(after, trace)
            shape = capture.values[0].shape
            kept = [n.values for n in after if n.values.shape == shape and _floating(n)]
            last = [kept[-1]] if kept and len(capture.values) == 1 else capture.values
            change = _compare([capture], [_numbers(v) for v in last], after)
            found.append(_change([capture], None, change, steps))
    return found


def _change(
    sources: list[Capture], after: str | None, change: ValueChange, steps: tuple[Step, ...]
) -> ScoreChange:
    names = ", ".join(dict.fromkeys(source.name for source in sources))
    return ScoreChange(names, tuple(s.number for s in sources), after, change, steps)


def _compare(
    sources: list[Capture], after: list[NDArray[np.float64]], nodes: Iterable[Node]
) -> ValueChange:
    before = [_numbers(values) for source in sources for values in source.values]
    eps = max([FLOAT32_EPS, *(_eps(node) for node in nodes)])
    if len(before) == len(after) == 1:
        return describe_change(before[0], after[0], eps=eps)
    # micro-batches that were laid end to end
    return describe_change(
        np.concatenate([b.ravel() for b in before]),
        np.concatenate([a.ravel() for a in after]),
        eps=eps,
    )


def _steps(nodes: Iterable[Node], trace: Trace) -> tuple[Step, ...]:
    """Those among ``nodes`` whose values differ from what they were made of, in order."""
    order = {id(node): number for number, node in enumerate(trace.nodes)}
    steps: dict[int, Step] = {}
    for node in sorted(nodes, key=lambda n: order[id(n)]):
        made_of = [p for p in node.parents if p.values.shape == node.values.shape and _floating(p)]
        if not made_of or not _floating(node):
            continue
        before, after = _numbers(made_of[0].values), _numbers(node.values)
        change = describe_change(before, after, eps=max(_eps(node), _eps(made_of[0])))
        if change.kind == "same":
            continue
        # a change of a view is one of what it views as well: tell it of the larger of the two
        key = id(node.applied or node)
        if key not in steps or steps[key].change.values < change.values:
            steps[key] = Step(node.applied, change)
    return tuple(steps.values())


def _descendants(capture: Capture, trace: Trace) -> list[Node]:
    """What was made of a capture's scores, in order."""
    inside = {id(node) for node in capture.nodes}
    found = []
    for node in trace.nodes:
        if any(id(parent) in inside for parent in node.parents) and node.label is None:
            inside.add(id(node))
            found.append(node)
    return found


def _floating(node: Node) -> bool:
    return node.values.is_floating_point()


def _eps(node: Node) -> float:
    import torch

    return float(torch.finfo(node.values.dtype).eps) if _floating(node) else 0.0


def _numbers(values: NDArray[Any] | torch.Tensor) -> NDArray[np.float64]:
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)
    array: NDArray[np.float64] = values.double().cpu().numpy()
    return array
