"""Which request and token each row of an SGLang forward pass is, and the log-probs that it gives.

SGLang lays the rows of all requests end to end, padding excluded: for a prefill each request's new
tokens, for a decode step one token a request.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from layerbisect.captures.batch import Batch
from layerbisect.captures.format import Phase, SequenceInfo
from layerbisect.captures.rows import Rows
from layerbisect.captures.scores import logprobs_of
from layerbisect.captures.writer import Scores

if TYPE_CHECKING:
    import torch

WARM_UP = "LAYERBISECT_WARMUP"
"""What the plugin names SGLang's own warm-up requests, which have no name of their own."""
OWN_REQUESTS = ("HEALTH_CHECK", WARM_UP)
# a pass that verifies drafts holds tokens that are not in the sequence
_MODES: dict[str, Phase] = {"EXTEND": "prefill", "MIXED": "prefill", "DECODE": "decode"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """One chosen request in a pass.

    ``slot`` is its place among the pass's requests; ``start`` and ``stop`` are its rows in the
    engine's tensors; ``first`` is the position of row ``start``; ``prompt`` counts its prompt
    tokens; ``samples`` says whether the pass samples its next token.
    """

    slot: int
    start: int
    stop: int
    first: int
    prompt: int
    samples: bool

    @property
    def end(self) -> int:
        """The position of the token that the pass samples."""
        return self.first + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass's rows, and its chosen requests in the order of the batch's sequences."""

    batch: Batch
    chosen: tuple[Chosen, ...]


class Requests:
    """Chooses requests by a pattern over their IDs, and names them over the passes."""

    def __init__(self, pattern: str = "*") -> None:
        self.pattern = pattern
        self._names: dict[str, tuple[weakref.ref[Any] | None, str]] = {}
        self._generations: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def wants(self, rid: str) -> bool:
        """Say whether the request is to be captured."""
        return not rid.startswith(OWN_REQUESTS) and fnmatch.fnmatchcase(rid, self.pattern)

    def pass_of(self, forward_batch: Any, requests: Sequence[Any]) -> Pass | None:
        """Describe a pass, or return None where it holds no chosen request.

        Args:
            forward_batch: SGLang's, before it is run.
            requests: SGLang's request objects, one a slot; where there are none, what they alone
                know is left out (the tokens of a cached prefix, what a pass samples).

        Raises:
            ValueError: the pass holds a chosen request and its rows are not known.
        """
        rids = list(forward_batch.rids or [request.rid for request in requests])
        slots = [slot for slot, rid in enumerate(rids) if self.wants(rid)]
        if not slots:
            return None
        mode = forward_batch.forward_mode.name
        if mode not in _MODES:
            raise ValueError(f"a pass in mode {mode} was not captured")
        tokens = forward_batch.input_ids.tolist()
        positions = forward_batch.positions.tolist()
        lengths = [1] * len(rids) if mode == "DECODE" else list(forward_batch.extend_seq_lens_cpu)
        if sum(lengths) != len(tokens) or len(lengths) != len(rids):
            raise ValueError(f"{len(tokens)} rows for {len(rids)} requests of {sum(lengths)} rows")
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        chosen, sequences, context = [], [], []
        for number, slot in enumerate(slots):
            request = requests[slot] if slot < len(requests) else None
            start, stop = starts[slot], starts[slot + 1]
            one = _chosen(slot, start, stop, positions[start], request, mode == "DECODE")
            name = self._name(rids[slot], request)
            context.append(self._before(name, number, one, request))
            self._known[name] = max(self._known.get(name, 0), one.end)
            chosen.append(one)
            sequences.append(SequenceInfo(name, _salt(forward_batch, slot, request)))
        index = np.concatenate([np.arange(c.start, c.stop) for c in chosen])
        batch = Batch(
            phase=_MODES[mode],
            sequences=tuple(sequences),
            rows=Rows.of(
                np.repeat(np.arange(len(chosen)), [c.stop - c.start for c in chosen]),
                np.asarray(positions)[index],
                np.asarray(tokens)[index],
            ),
            grid=len(tokens),
            index=index,
            context=Rows.concatenate(context),
        )
        return Pass(batch, tuple(chosen))

    def _name(self, rid: str, request: Any) -> str:
        """Name a request after its ID, with a number where another request had the same ID."""
        known = self._names.get(rid)
        if known and (request is None or known[0] is None or known[0]() is request):
            return known[1]
        count = self._generations[rid] = self._generations.get(rid, 0) + 1
        name = rid if count == 1 else f"{rid}#{count}"
        self._names[rid] = (None if request is None else weakref.ref(request), name)
        return name

    def _before(self, name: str, number: int, one: Chosen, request: Any) -> Rows:
        """The tokens before a request's first row that no pass has shown: a cached prefix."""
        known = self._known.get(name, 0)
        if request is None or one.first <= known:
            return Rows.empty()
        tokens = [*request.origin_input_ids, *request.output_ids][known : one.first]
        return Rows.of(
            np.full(len(tokens), number), known + np.arange(len(tokens)), np.asarray(tokens)
        )


def _chosen(slot: int, start: int, stop: int, first: int, request: Any, decodes: bool) -> Chosen:
    prompt = len(request.origin_input_ids) if request is not None else 0
    end = first + stop - start
    # a chunk that is not the last samples a token that is thrown away, and a request for no
    # tokens does so too
    last = request is not None and end >= prompt + len(request.output_ids)
    wanted = request is not None and request.sampling_params.max_new_tokens != 0
    return Chosen(slot, start, stop, first, prompt, decodes or (last and wanted))


def _salt(forward_batch: Any, slot: int, request: Any) -> str:
    """What else is in a request's scoring context than its token IDs."""
    parts = []
    adapters = forward_batch.lora_ids or ()
    if slot < len(adapters) and adapters[slot] is not None:
        parts.append(f"lora:{adapters[slot]}")
    media = forward_batch.mm_inputs or ()
    embedded = request is not None and getattr(request, "input_embeds", None) is not None
    if embedded or (slot < len(media) and media[slot] is not None):
        # not the tokens' own embeddings: such rows equal no other request's
        parts.append(f"request:{request.rid if request is not None else slot}")
    return " ".join(parts)


def prompt_scores(one: Pass, forward_batch: Any, output: Any) -> Scores | None:
    """Log-probs of prompt tokens, where the requests asked the engine for them; else None."""
    given = getattr(output, "input_token_logprobs", None)
    starts = forward_batch.extend_logprob_start_lens_cpu
    if given is None or starts is None:
        return None
    copied = getattr(output, "input_logprobs_copy_done", None)
    if copied is not None:
        copied.synchronize()
    values = np.asarray(given.tolist() if hasattr(given, "tolist") else given, np.float64)
    scored = [n - s for n, s in zip(forward_batch.extend_seq_lens_cpu, starts, strict=True)]
    tokens = forward_batch.extend_input_logprob_token_ids_gpu.tolist()
    if len(values) != sum(scored) or len(tokens) != len(values):
        raise ValueError(f"{len(values)} prompt log-probs for {sum(scored)} rows")
    offsets = np.concatenate([[0], np.cumsum(scored)]).tolist()
    parts, logprobs = [], []
    for number, request in enumerate(one.chosen):
        begin, end = offsets[request.slot], offsets[request.slot + 1]
        # row j scores the token after it; past the prompt the engine fills in token 0
        first = request.first + starts[request.slot] + 1
        count = min(end - begin, max(0, request.prompt - first))
        parts.append(
            Rows.of(np.full(count, number), first + np.arange(count), tokens[begin : begin + count])
        )
        logprobs.append(values[begin : begin + count])
    return Scores(Rows.concatenate(parts), np.concatenate(logprobs))


def keep_logits(one: Pass, output: Any, vocabulary: int) -> torch.Tensor | None:
    """Copy the logits [chosen request, vocab] that the sampler is about to change in place."""
    logits = getattr(output, "next_token_logits", None)
    if logits is None or logits.ndim != 2 or logits.shape[-1] < vocabulary:
        return None
    slots = [request.slot for request in one.chosen if request.samples]
    return logits[slots, :vocabulary].clone() if slots else None


def sampled_scores(one: Pass, logits: torch.Tensor | None, result: Any, raw: bool) -> Scores | None:
    """Log-probs of the tokens that the pass sampled: A.

    Where the engine computed them and they are ``raw`` (at temperature 1) they are the engine's
    own, else they are computed from its logits.
    """
    ids = getattr(result, "next_token_ids", None)
    pairs = [(n, c) for n, c in enumerate(one.chosen) if c.samples]
    if ids is None or not pairs:
        return None
    sampled = np.asarray(ids.tolist(), np.int64)
    slots = [request.slot for _, request in pairs]
    tokens = sampled[slots]
    own = getattr(result.logits_output, "next_token_logprobs", None)
    if own is not None and raw:
        values = np.asarray(own.tolist(), np.float64)[slots]
    elif logits is not None:
        values = logprobs_of(logits, tokens)
    else:
        return None
    rows = Rows.of([n for n, _ in pairs], [request.end for _, request in pairs], tokens)
    return Scores(rows, values)


def samples_raw(forward_batch: Any) -> bool:
    """Say whether the log-probs that the sampler returns are those of the unscaled logits."""
    import os

    info = forward_batch.sampling_info
    if info is None or info.is_all_greedy:
        return True
    if os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true"):
        return True
    return bool((info.temperatures == 1).all())
