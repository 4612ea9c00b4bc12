"""Record what a backward computes again apart from what the forward computed.

With activation recomputation (torch.utils.checkpoint, Megatron's recompute_granularity) modules run
a second time while gradients are computed. Which forward call they repeat is told by the call's own
output: autograd runs its node before any node behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from layerbisect.captures.batch import Batch
from layerbisect.captures.recorder import Recorder


def in_backward() -> bool:
    """Say whether this thread is inside a backward."""
    import torch

    return torch._C._current_graph_task_id() != -1


class Recomputation:
    """Follows forward calls into their backward.

    ``call`` is what :meth:`follow` was given with the call whose backward is running.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.call: Any = None
        self._recorder = recorder
        self._open: int | None = None
        self._written: set[int] = set()
        self._closed = False

    def follow(self, number: int | None, batch: Batch, output: Any, call: Any = None) -> None:
        """Watch for the backward of a forward that has returned ``output``.

        ``number`` is that of the forward's pass, None where it was not written. What is given must
        hold no tensor of the graph, which would keep itself alive then.
        """
        if number is None:
            return
        again = replace(batch, phase="recompute", recomputes=number)

        def begins(_: Any) -> None:
            self._begin(again, call)

        for node in {id(n): n for n in _nodes(output)}.values():
            node.register_prehook(begins)

    def end(self) -> None:
        """Write what the backward has computed again, if it has."""
        number, self._open, self.call = self._open, None, None
        if number is None:
            return
        if self._recorder.seen:
            self._recorder.end()
            self._written.add(number)
        else:
            self._recorder.cancel()

    def close(self) -> None:
        """Follow no call any more."""
        self.end()
        self._closed = True

    def _begin(self, batch: Batch, call: Any) -> None:
        number = batch.recomputes
        # a graph that was retained is run through once more
        if self._closed or self._open == number or number in self._written:
            return
        with self._recorder.guarded("following a backward"):
            import torch

            self.end()
            self._recorder.begin(batch)
            self._open, self.call = number, call
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end)


def _nodes(output: Any) -> Iterator[Any]:
    """Yield the nodes of the graph that made the tensors of a module's output."""
    import torch

    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _nodes(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _nodes(value)
