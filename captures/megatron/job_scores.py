"""Log-probs from a job's own forward, put together over its ranks at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.call import Call, read_call
from layerbisect.captures.megatron.chunk import held_vocabulary
from layerbisect.captures.megatron.model import Chunk
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.problems import Problems
from layerbisect.captures.rows import Rows, find
from layerbisect.captures.vocab_scores import ShardScores, combine, shard_scores


class JobScores:
    """Scores the calls of a job's last stage; ranks without it have nothing to do.

    ``vocab`` is as :class:`layerbisect.captures.megatron.capture.MegatronCapture` has it, and
    ``problems`` gets what went wrong.
    """

    def __init__(
        self, chunks: Sequence[Chunk], place: Place, vocab: int | None, problems: Problems
    ) -> None:
        self._last = next((chunk for chunk in chunks if chunk.model.post_process), None)
        self._place, self._vocab = place, vocab
        self._sequences = 0
        self._call: Call | None = None
        self._parts: list[ShardScores] = []
        self._problems = problems

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Score the calls inside the context; errors of ours are kept from the model."""
        with ExitStack() as stack:
            if self._last is not None:
                model = self._last.model
                begin = model.register_forward_pre_hook(self._begin, with_kwargs=True)
                score = model.output_layer.register_forward_hook(self._score)
                stack.callback(begin.remove)
                stack.callback(score.remove)
            yield

    def of(self, rows: Rows) -> NDArray[np.float64]:
        """Look up the log-prob (float64 [row], nat) of the token after each row.

        All ranks of the last stage call this together; ``rows.sequence`` counts sequences over the
        calls, from 0. Where a row is its sequence's last, and on other stages, it is nan.
        """
        found = np.full(len(rows), np.nan)
        if self._last is None:
            return found
        mine: list[ShardScores] = []
        with self._problems.noted():
            mine = [part.resolved(rows) for part in self._parts]
        everyone = self._gathered(mine)
        with self._problems.noted():
            scored, logprob, *_ = combine(everyone)
            after = find(rows, rows.sequence, rows.position + np.int32(1))
            wanted = np.flatnonzero(after >= 0)
            token = rows.take(after[wanted])
            at = find(scored, token.sequence, token.position)
            same = at >= 0
            same[same] = scored.token[at[same]] == token.token[same]
            found[wanted[same]] = logprob[at[same]]
            if not same.all():
                lacking = int((~same).sum())
                raise LayerBisectError(f"{lacking} of {len(wanted)} tokens were not scored")
        return found

    def _gathered(self, mine: list[ShardScores]) -> list[ShardScores]:
        if self._place.tensor[1] * self._place.context[1] == 1:
            return mine
        import torch
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_and_context_parallel_group()
        everyone: list[Any] = [None] * (self._place.tensor[1] * self._place.context[1])
        torch.distributed.all_gather_object(everyone, mine, group)
        return [part for parts in everyone for part in parts]

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = None
        with self._problems.noted():
            call = read_call(model, args, kwargs, self._place.context)
            if isinstance(call, str):
                raise LayerBisectError(call)
            rows = replace(call.rows, sequence=call.rows.sequence + np.int32(self._sequences))
            self._sequences += call.sequences
            self._call = replace(call, rows=rows)

    def _score(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        with self._problems.noted():
            import torch

            logits = output[0] if isinstance(output, tuple) else output
            width, tensor = logits.shape[-1], self._place.tensor
            held = held_vocabulary(module, width, tensor, self._vocab)
            if held[0] == held[1]:
                # nothing but padding of the vocabulary is here
                return
            flat = logits.detach().reshape(call.grid, -1)
            index = torch.from_numpy(call.index).to(flat.device)
            open_end = ~call.last & (call.after < 0)
            self._parts.append(
                shard_scores(flat.index_select(0, index), held, call.rows, call.after, open_end)
            )
