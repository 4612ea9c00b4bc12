"""Record one chunk of a Megatron-core GPTModel on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import numpy as np

from layerbisect.captures.batch import Batch, RowPart
from layerbisect.captures.forcing import Forcing
from layerbisect.captures.format import SequenceInfo, TensorHeader
from layerbisect.captures.forward_mode import ModeWatch
from layerbisect.captures.megatron import adapter, experts
from layerbisect.captures.megatron.call import Call, kept_alone, read_call, scattered, unscored
from layerbisect.captures.megatron.mode import mode_of
from layerbisect.captures.megatron.model import Chunk, beyond_vocabulary
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.routes import forced_router
from layerbisect.captures.points import Point
from layerbisect.captures.recompute import Recomputation, in_backward
from layerbisect.captures.recorder import Recorder
from layerbisect.captures.rows import Rows, prefix_keys
from layerbisect.captures.telling import TellingWriter
from layerbisect.captures.vocab_scores import Vocab, shard_scores
from layerbisect.captures.wanted_rows import WantedSequences
from layerbisect.captures.wrapping import method_wrapped


class Names:
    """Names sequences in the order in which they come, the same on all ranks of a replica."""

    def __init__(self, prefix: str, names: Sequence[str], salts: Sequence[str]) -> None:
        self._prefix, self._names, self._salts = prefix, names, salts
        self._count = 0

    def next(self) -> SequenceInfo:
        number, self._count = self._count, self._count + 1
        given = self._names[number] if number < len(self._names) else f"s{number}"
        # each replica counts its own sequences
        salt = self._salts[number] if number < len(self._salts) else ""
        return SequenceInfo(self._prefix + given, salt)


class ChunkCapture:
    """Records what one chunk computes, as one writer of the capture."""

    def __init__(
        self,
        chunk: Chunk,
        place: Place,
        writer: TellingWriter,
        points: Sequence[str],
        names: Names,
        vocab: int | None,
        forcing: Forcing | None = None,
        only: WantedSequences | None = None,
    ) -> None:
        self.writer = writer
        self.passes = 0
        self._chunk, self._place, self._names, self._vocab = chunk, place, names, vocab
        self._call: Call | None = None
        self._held: Vocab | None = None
        self._forcing, self._only = forcing, only
        self._live = False
        # without a wanted sequence: how many there were, and the tokens of the first
        self._unwanted, self._first = 0, Rows.empty()
        self.recorder = Recorder(
            writer,
            [name for name in points if chunk.holds(name)],
            tuple(adapter.taps(chunk)),
            head_dim=int(chunk.config.kv_channels),
            header_of=self._header,
            scattered=adapter.SCATTERED if place.sequence_parallel else (),
        )
        self._again = Recomputation(self.recorder)
        self._modes = ModeWatch(partial(mode_of, chunk), writer.called_in)

    def attach(self, stack: ExitStack, live: bool) -> None:
        """Register the hooks until ``stack`` closes.

        ``live``: whenever no pass is open the capture is whole, and what a job trains on (in
        training mode, or with gradients) passes by.
        """
        model, recorder = self._chunk.model, self.recorder
        self._live = live
        handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, with_kwargs=True),
        ]
        if live:
            handles.append(model.register_forward_pre_hook(lambda *_: self._reopen(), prepend=True))
            handles.append(model.register_forward_hook(lambda *_: self._finish()))
        if self._chunk.model.post_process:
            handles.append(model.output_layer.register_forward_hook(self._score))
            recorder.expect("logits")
        for handle in handles:
            stack.callback(handle.remove)
        for layer, path in self._chunk.layers.items():
            router = getattr(model.get_submodule(path).mlp, "router", None)
            point = f"layers.{layer}.mlp.router_logits"
            if router is not None and point in recorder.points:
                recorder.expect(point)
                seen = self._router_logits(point)
                stack.enter_context(method_wrapped(router, "gating", seen))
            if router is not None and self._forcing is not None:
                stack.enter_context(self._forced(router, layer, self._forcing))
        stack.enter_context(experts.recorded(self._chunk, self._place, recorder))
        stack.callback(recorder.detach)
        stack.callback(self._again.close)
        recorder.attach(model)
        hidden = adapter.unseen(self._chunk) | experts.unseen(self._chunk, self._place)
        self.writer.points_seen({n: s for n, s in hidden.items() if n in recorder.points})

    def _forced(self, router: Any, layer: int, forcing: Forcing) -> AbstractContextManager[None]:
        return forced_router(
            router,
            partial(forcing.choice, layer),
            forcing.routes.weights,
            guarded=self.recorder.guarded,
            forced=forcing.count,
        )

    def close(self) -> None:
        """Finish after the last pass."""
        for problem in self._forcing.problems() if self._forcing else ():
            self.writer.error(problem)
        if self._only is not None and self._unwanted and not self.passes:
            self.writer.error(self._only.none_of(self._unwanted, self._first))
            self.writer.finish()
        else:
            self.writer.close(self.passes)

    def _passes_by(self) -> bool:
        import torch

        return self._live and (self._chunk.model.training or torch.is_grad_enabled())

    def _reopen(self) -> None:
        if self._passes_by():
            return
        with self.recorder.guarded("reopening the capture"):
            self.writer.reopen()

    def _finish(self) -> None:
        with self.recorder.guarded("finishing the capture"):
            self.writer.finish()

    def _router_logits(self, point: str) -> Callable[..., Any]:
        def gating(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            logits = own(*args, **kwargs)
            if self.recorder.wants(point):
                self.recorder.record(point, lambda: logits)
            return logits

        return gating

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = None
        if in_backward():
            # a layer's hooks record what is computed again, where it is known of which call
            return
        self._again.end()
        if self._forcing is not None:
            self._forcing.forget()
        if self._passes_by():
            return
        with self.recorder.guarded("reading a call"):
            self._modes.see(model.training)
            call = read_call(model, args, kwargs, self._place.context)
            if isinstance(call, str):
                # the other ranks count this pass, too
                self.writer.skip_pass()
                self.writer.error(call)
                return
            for problem in call.problems:
                self.writer.error(problem)
            sequences = tuple(self._names.next() for _ in range(call.sequences))
            if self._only is not None:
                kept = self._only.chosen(call.rows, [s.salt for s in sequences])
                if not kept.any():
                    if not self._unwanted:
                        self._first = call.rows.take(call.rows.sequence == 0)
                    self._unwanted += call.sequences
                    # all ranks of a replica see that, and none counts this pass
                    return
                call = kept_alone(call, kept)
                sequences = tuple(s for s, k in zip(sequences, kept, strict=True) if k)
            if beyond := beyond_vocabulary(call.rows, self._vocab):
                self.writer.error(beyond)
                call = unscored(call, self._vocab)
            part = scattered(call, self._place.tensor) if self._place.sequence_parallel else None
            self.recorder.begin(
                Batch("forward", sequences, call.rows, call.grid, call.index, part=part)
            )
            if self.recorder.batch is None:
                self.writer.write_pass("forward", sequences, call.rows, {}, {})
            self._call = call
            if self._forcing is not None:
                where = part or RowPart(call.grid, call.index, 0, len(call.rows))
                here = call.rows.take(np.arange(where.start, where.stop))
                names, salts = [s.name for s in sequences], [s.salt for s in sequences]
                keys = prefix_keys(here, call.rows, salts, names)
                self._forcing.begin(keys, where.index, where.grid)

    def _end(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._call is not None:
            self._call = None
            if self._forcing is not None:
                self._forcing.end()
            batch = self.recorder.batch
            number = self.recorder.end()
            self.passes += 1
            if batch is not None:
                with self.recorder.guarded("following a call"):
                    self._again.follow(number, batch, output)

    def _score(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        call = self._call
        if call is None or self.recorder.batch is None:
            return
        with self.recorder.guarded("logprob"):
            import torch

            logits = output[0] if isinstance(output, tuple) else output
            self._held = start, stop, _ = held_vocabulary(
                module, logits.shape[-1], self._place.tensor, self._vocab
            )
            if self.recorder.wants("logits") and start < stop:
                self.recorder.record("logits", lambda: logits[..., : stop - start])
            if "logprob" in self.recorder.points:
                flat = logits.detach().reshape(call.grid, -1)
                index = torch.from_numpy(call.index).to(flat.device)
                open_end = ~call.last & (call.after < 0)
                scores = shard_scores(
                    flat.index_select(0, index), self._held, call.rows, call.after, open_end
                )
                self.recorder.score_shard(scores)

    def _header(self, point: Point) -> TensorHeader:
        if point.suffix == "logits":
            assert self._held is not None
            start, stop, total = self._held
            cut = {"vocab": self._held} if (start, stop) != (0, total) else {}
            return TensorHeader(point.dims, shards=cut)
        return adapter.header(point, self._chunk.config, self._place)


def held_vocabulary(
    output_layer: Any, width: int, tensor: tuple[int, int], vocab: int | None
) -> Vocab:
    """Which token IDs the logits of a rank are of, which are ``width`` wide.

    Args:
        tensor: this rank among the tensor-parallel ranks, and their number.
        vocab: tokens in the vocabulary; all of its rows, without.

    Raises:
        ValueError: the logits are of another part, or the vocabulary is smaller than told.
    """
    rank, size = tensor
    padded = int(output_layer.output_size)
    total = padded if vocab is None else vocab
    if not 0 < total <= padded:
        raise ValueError(f"the vocabulary has {padded} rows, and {total} were said to be tokens")
    if width == padded:
        rank, size = 0, 1
    each = padded // size
    if width != each:
        raise ValueError(f"the logits are of {width} tokens, where {each} were expected")
    return min(rank * each, total), min((rank + 1) * each, total), total
