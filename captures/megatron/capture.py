"""Capture a Megatron-core job from inside: every rank writes what it holds, and asks nobody."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.forcing import Forcing
from layerbisect.captures.format import CaptureInfo
from layerbisect.captures.megatron.chunk import ChunkCapture, Names
from layerbisect.captures.megatron.experts import orders
from layerbisect.captures.megatron.model import Chunk, check_vocab, unwrap
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.run import run_name
from layerbisect.captures.megatron.weights import fingerprints
from layerbisect.captures.numerics_environment import numerics_environment
from layerbisect.captures.routes import wanted
from layerbisect.captures.telling import TellingWriter, warn_of
from layerbisect.captures.wanted_rows import WantedSequences
from layerbisect.captures.weight_states import WEIGHTS_CHANGED

if TYPE_CHECKING:
    from layerbisect.captures.megatron.model import Model
    from layerbisect.captures.store import Capture


class MegatronCapture:
    """Records what this rank's chunks of a GPTModel compute while the context is open.

    Args:
        model: the job's GPTModel, wrapped or not, or its list of virtual pipeline chunks.
        directory: where all ranks write; a new directory, or an empty one.
        points, label, names, salts, vocab, routes, route_weights, only: as
            :func:`layerbisect.captures.capture.capture` has them.
        whole_after_each_pass: mark the capture as whole whenever no pass is open, where nobody says
            which pass is the last; what the job trains on passes by.
        replayed: the job itself makes the model use the rollout's routes.
    """

    def __init__(
        self,
        model: Model,
        directory: str | PathLike[str],
        *,
        points: str | Sequence[str] = "coarse",
        label: str = "trainer",
        names: Sequence[str] | None = None,
        salts: Sequence[str] | None = None,
        vocab: int | None = None,
        routes: str | PathLike[str] | Capture | None = None,
        route_weights: bool = False,
        only: str | PathLike[str] | Capture | None = None,
        whole_after_each_pass: bool = False,
        replayed: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._model = model
        self.chunks = unwrap(model)
        check_vocab(self.chunks, vocab)
        self.points = self.chunks[0].points(points)
        self._label = label
        self._names, self._salts = tuple(names or ()), tuple(salts or ())
        self._vocab = vocab
        self._routes = wanted(routes, route_weights, self.chunks[0].moe_layers)
        self._only = WantedSequences(only) if only is not None else None
        self._live, self._replayed = whole_after_each_pass, replayed
        self._exit = ExitStack()
        self._open: list[ChunkCapture] = []

    def __enter__(self) -> MegatronCapture:
        place = Place.here(self.chunks[0].config)
        info = _describe(self.chunks[0], place, self._label, self.points, self._vocab)
        if self._only is not None and place.context[1] > 1:
            raise LayerBisectError(
                f"only: with {place.context[1]} context-parallel ranks none sees whole sequences, "
                "so nothing can be chosen by them; capture the whole batch"
            )
        if self._routes is not None:
            info = replace(info, routes=self._routes.kind)
        elif self._replayed:
            info = replace(info, routes="forced")
        self._before = fingerprints(self._model, vocab=self._vocab)
        run = run_name(self.directory)
        with ExitStack() as stack:
            for chunk in self.chunks:
                writer = TellingWriter(
                    self.directory,
                    info,
                    rank=place.world[0] * chunk.count + chunk.number,
                    world_size=place.world[1] * chunk.count,
                    replica=place.data[0],
                    name=place.name(chunk.number, chunk.count),
                    # one chunk speaks for the process
                    fingerprints=self._before if chunk.number == 0 else None,
                    run=run,
                )
                prefix = f"dp{place.data[0]}." if place.data[1] > 1 else ""
                names = Names(prefix, self._names, self._salts)
                here = [layer for layer in chunk.moe_layers if layer in chunk.layers]
                forcing = Forcing(self._routes, here) if self._routes is not None else None
                one = ChunkCapture(
                    chunk,
                    place,
                    writer,
                    self.points,
                    names,
                    self._vocab,
                    forcing=forcing,
                    only=self._only,
                )
                one.attach(stack, self._live)
                self._open.append(one)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()
        # what broke off is not whole: such a capture stays marked as unfinished
        if kind is None:
            after = fingerprints(self._model, vocab=self._vocab)
            changed = [name for name, digest in after.items() if self._before.get(name) != digest]
            for one in self._open:
                if changed:
                    one.writer.error(
                        f"{WEIGHTS_CHANGED} ({len(changed)} tensors, "
                        f"{changed[0]} first); capture one state of them"
                    )
                one.close()
            warn_of(self.directory, [e for one in self._open for e in one.writer.errors])


def _describe(
    chunk: Chunk, place: Place, label: str, points: tuple[str, ...], vocab: int | None
) -> CaptureInfo:
    import megatron.core
    import torch

    config, parameter = chunk.config, next(chunk.model.parameters())
    device = torch.cuda.get_device_name() if parameter.is_cuda else str(parameter.device)
    sizes = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups or config.num_attention_heads,
        "num_experts": config.num_moe_experts,
        "vocab_size": vocab,
    }
    return CaptureInfo(
        engine="megatron-core",
        engine_version=megatron.core.__version__,
        label=label,
        device=device,
        dtype=str(config.params_dtype).removeprefix("torch."),
        num_layers=config.num_layers,
        moe_layers=chunk.moe_layers,
        points=points,
        model_config={name: size for name, size in sizes.items() if size is not None},
        parallel=dict(place.sizes),
        environment={
            **chunk.settings(),
            **orders(chunk, place),
            "sequence_parallel": str(place.sequence_parallel),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **numerics_environment(os.environ),
        },
    )
