"""Name the step that changed scores after they were calculated, within one forward.

::

    with ScoreSteps() as steps:
        steps.watch_attribute(framework.loss, "calculate_log_probs_and_entropy")
        steps.watch_attribute(framework.actor, "scores_of_batch")
        trainer.compute_log_prob(batch)
    for change in steps.changes():
        print(change)

What a watched function returns is copied, and every torch function that is applied to it is noted
with its line. A watched function that returns what it made of another's scores gives two copies
from one forward: what differs between them was done in between. Results are passed on untouched,
and an error of ours is kept in ``errors`` and stops nobody. What happens outside torch's Python
functions (numpy, a custom kernel, a compiled region, another thread) shows in the values, and has
no line.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.score_steps.tracing import Node, Trace

if TYPE_CHECKING:
    import torch

    from layerbisect.captures.score_steps.report import ScoreChange

Pick = Callable[[Any], Any] | str | int | None
"""How to find the scores in a result: a function, a key, an index, or None to search for them."""

_KEYS = ("log_probs", "logprobs", "log_prob", "logprob", "logps", "scores")


@dataclass(slots=True, eq=False)
class Capture:
    """What one call of a watched function returned.

    ``values`` are copies of its scores; ``nodes`` stand for those that are tensors, and ``tensors``
    are these themselves; ``inner`` are the captures of watched functions that it called; ``last``
    are the tensors' nodes when the context was left.
    """

    name: str
    number: int
    values: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    tensors: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    inner: list[Capture] = field(default_factory=list)
    last: list[Node] = field(default_factory=list)


class ScoreSteps:
    """Watches scoring functions while the context is open; see the module."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.trace = Trace()
        self.captures: list[Capture] = []
        self._calling: list[Capture] = []
        self._counts: dict[str, int] = {}
        self._active = False
        self._busy = False
        self._exit = ExitStack()

    def __enter__(self) -> ScoreSteps:
        self._exit.enter_context(_follower(self))
        self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._active = False
        with self._guarded():
            for capture in self.captures:
                for reference, node in zip(capture.tensors, capture.nodes, strict=True):
                    tensor = reference()
                    if tensor is not None:
                        before = self.trace.node(tensor) or node
                        capture.last.append(self.trace.follow(tensor, (before,), None))
        self._exit.close()

    def watch(
        self, function: Callable[..., Any], name: str | None = None, *, pick: Pick = None
    ) -> Callable[..., Any]:
        """Return ``function`` so wrapped that the scores it returns are copied.

        ``pick`` finds the scores in a result. By itself it takes a tensor or an array, what a
        mapping has under a usual key, the first that a tuple has, or all that a list has.
        """
        called = name or str(getattr(function, "__name__", type(function).__name__))

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return function(*args, **kwargs)
            self._counts[called] = self._counts.get(called, 0) + 1
            capture = Capture(called, self._counts[called])
            self._calling.append(capture)
            try:
                result = function(*args, **kwargs)
            finally:
                self._calling.remove(capture)
            with self._guarded():
                self._keep(capture, result, pick)
            return result

        return watched

    def watch_attribute(
        self, owner: Any, attribute: str, name: str | None = None, *, pick: Pick = None
    ) -> None:
        """Watch a function where its caller looks it up, until the context is left.

        Args:
            owner: the module, class or object that has it. A name that another module imported
                with ``from ... import`` is looked up there.
            attribute: its name there.
            name: what to call it; default ``attribute``.
            pick: as :meth:`watch` has it.

        Raises:
            LayerBisectError: it is not there, or no function.
        """
        import torch

        here = getattr(owner, "__name__", type(owner).__name__)
        if not hasattr(owner, attribute):
            raise LayerBisectError(f"{here} has no attribute {attribute}; watch one that it has")
        value = getattr(owner, attribute)
        if not callable(value) or isinstance(value, torch.nn.Module):
            advice = " its 'forward'" if isinstance(value, torch.nn.Module) else " a function"
            raise LayerBisectError(
                f"{here}.{attribute} is a {type(value).__name__}; watch{advice}"
            )
        own = vars(owner).get(attribute)
        raw = inspect.getattr_static(owner, attribute)
        # a class keeps functions as they will be bound
        kind = type(raw) if isinstance(owner, type) else None
        ours: Any
        if kind in (staticmethod, classmethod):
            ours = kind(self.watch(raw.__func__, name or attribute, pick=pick))
        else:
            found = raw if isinstance(owner, type) else value
            ours = self.watch(found, name or attribute, pick=pick)
        setattr(owner, attribute, ours)

        def restore() -> None:
            # whoever has wrapped it since would be cut off: ours passes everything on from now on
            if vars(owner).get(attribute) is not ours:
                return
            if own is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)

        self._exit.callback(restore)

    def changes(self) -> list[ScoreChange]:
        """Say for each watched function's scores what was done to them afterwards, in order.

        A function's scores that another watched function made its own of are compared with those;
        other scores with what torch functions made of them until the context was left. Scores that
        a watched function made of others are not followed further.
        """
        from layerbisect.captures.score_steps.report import changes_of

        return changes_of(self.captures, self.trace)

    def _keep(self, capture: Capture, result: Any, pick: Pick) -> None:
        import torch

        if callable(pick):
            result = pick(result)
        elif pick is not None:
            result = result[pick]
        found = list(_scores_in(result))
        if not found:
            raise LayerBisectError(
                f"`{capture.name}` returned a {type(result).__name__} in which no scores were "
                "found; say with pick= where they are"
            )
        for scores in found:
            if isinstance(scores, torch.Tensor):
                before = self.trace.node(scores)
                node = self.trace.follow(scores, (before,) if before else (), None, capture)
                capture.nodes.append(node)
                capture.tensors.append(weakref.ref(scores))
                capture.values.append(node.values)
            else:
                capture.values.append(scores.copy())
        self.captures.append(capture)
        if self._calling:
            self._calling[-1].inner.append(capture)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep an error of ours from the one who is being watched."""
        self._busy = True
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if message not in self.errors:
                self.errors.append(message)
        finally:
            self._busy = False


def _follower(steps: ScoreSteps) -> Any:
    """Make the mode that shows every torch function of this thread to ``steps``."""
    from torch.compiler import is_compiling
    from torch.overrides import TorchFunctionMode, resolve_name

    class Follow(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            # while torch.compile traces this mode, anything more would break its graph
            if not is_compiling() and steps.trace and not steps._busy:
                with steps._guarded():
                    name = resolve_name(func) or getattr(func, "__name__", repr(func))
                    steps.trace.apply(name.removeprefix("torch."), args, kwargs or {}, result)
            return result

    return Follow()


def _scores_in(result: Any) -> Iterator[Any]:
    """The tensors or arrays that hold scores in what a scoring function returned."""
    import torch

    if isinstance(result, torch.Tensor | np.ndarray):
        yield result
    elif isinstance(result, Mapping):
        for key in (*_KEYS, *result):
            found = list(_scores_in(result[key])) if key in result else []
            if found:
                yield from found
                return
    elif isinstance(result, tuple):
        for part in result:
            found = list(_scores_in(part))
            if found:
                yield from found
                return
    elif isinstance(result, list) and result:
        if isinstance(result[0], int | float):
            yield np.array(result, np.float64)
        else:
            for part in result:
                yield from _scores_in(part)
