"""Replace the residual stream at a layer boundary by states that were captured elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.call import read_call, scattered
from layerbisect.captures.megatron.model import Chunk, unwrap
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.problems import Problems
from layerbisect.captures.rows import Rows, find

if TYPE_CHECKING:
    import torch

    from layerbisect.captures.megatron.model import Model


@dataclass(frozen=True, eq=False)
class States:
    """Captured states: ``values`` float [row, hidden], and which token each row is.

    ``rows.sequence`` counts sequences in the order in which the calls have them, from 0.
    """

    rows: Rows
    values: NDArray[Any]


@dataclass
class Injection:
    """What became of the rows that this rank holds at the boundary.

    ``replaced`` counts rows that got a captured state, ``unknown`` those that kept the model's own
    for want of one, padding that no mask tells from tokens included. ``problems`` are errors of
    ours, which the model never sees: its rows kept its own states then.
    """

    replaced: int = 0
    unknown: int = 0
    problems: Problems = field(default_factory=Problems)


@contextmanager
def injected(model: Model, layer: int, states: States) -> Iterator[Injection]:
    """Replace the stream that enters a layer in the forward calls inside the context.

    Only the rank and the chunk that hold the layer do anything; under sequence and context
    parallelism each replaces the rows that it holds.

    Args:
        model: the job's GPTModel, wrapped or not, or its list of virtual pipeline chunks.
        layer: which one, counted over the whole model; the number of layers is the boundary after
            the last one, before the final norm.
        states: what to put there. A row of which there is none keeps the model's own.

    Raises:
        LayerBisectError: the model has no such boundary.
    """
    chunks = unwrap(model)
    layers = int(chunks[0].config.num_layers)
    if not 0 <= layer <= layers:
        raise LayerBisectError(
            f"there is no boundary {layer} in a model of {layers} layers; give one from 0 to it"
        )
    place = Place.here(chunks[0].config)
    done = Injection()
    with ExitStack() as stack:
        for chunk in chunks:
            path = chunk.layers.get(min(layer, layers - 1))
            if path is not None:
                one = _ChunkInjection(chunk, place, states, done)
                for handle in one.hooks(chunk.model.get_submodule(path), after=layer == layers):
                    stack.callback(handle.remove)
        yield done


class _ChunkInjection:
    """Injects into one chunk, whose calls tell which rows its layer is given."""

    def __init__(self, chunk: Chunk, place: Place, states: States, done: Injection) -> None:
        self._chunk, self._place, self._states, self._done = chunk, place, states, done
        self._sequences = 0
        # rows of the layer's flattened stream, which of them to replace, and by which states
        self._plan: tuple[int, NDArray[np.int64], NDArray[np.intp]] | None = None

    def hooks(self, module: torch.nn.Module, *, after: bool) -> Iterator[Any]:
        yield self._chunk.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        if after:
            yield module.register_forward_hook(self._after)
        else:
            yield module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._plan = None
        with self._done.problems.noted():
            call = read_call(model, args, kwargs, self._place.context)
            if isinstance(call, str):
                raise LayerBisectError(call)
            rows, grid, index = call.rows, call.grid, call.index
            if self._place.sequence_parallel:
                part = scattered(call, self._place.tensor)
                rows, grid = rows.take(np.arange(part.start, part.stop)), part.grid
                index = part.index
            known = self._states.rows
            first, self._sequences = self._sequences, self._sequences + call.sequences
            at = find(known, rows.sequence + np.int32(first), rows.position)
            held = np.flatnonzero(at >= 0)
            wrong = held[known.token[at[held]] != rows.token[held]]
            if len(wrong):
                one = rows.take(wrong[:1])
                raise LayerBisectError(
                    f"position {one.position[0]} of sequence {first + one.sequence[0]} is token "
                    f"{one.token[0]} and not {known.token[at[wrong[0]]]}: run the sequences of the "
                    "states, in their order"
                )
            self._plan = grid, index[held], at[held]
            self._done.unknown += len(rows) - len(held)

    def _before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        with self._done.problems.noted():
            if args:
                return (self._replaced(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self._replaced(kwargs["hidden_states"])}
        return None

    def _after(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        with self._done.problems.noted():
            if isinstance(output, tuple):
                return (self._replaced(output[0]), *output[1:])
            return self._replaced(output)
        return None

    def _replaced(self, stream: torch.Tensor) -> torch.Tensor:
        import torch

        plan, self._plan = self._plan, None
        if plan is None:
            # another call of the layer within one of the model, or a call that could not be read
            raise LayerBisectError("the layer was called with rows that are not known")
        grid, index, at = plan
        if not len(index):
            return stream
        flat = stream.reshape(grid, -1).clone()
        values = torch.from_numpy(np.ascontiguousarray(self._states.values[at]))
        place = torch.from_numpy(index).to(flat.device)
        flat.index_copy_(0, place, values.to(flat.device, flat.dtype))
        self._done.replaced += len(index)
        return flat.reshape(stream.shape)
