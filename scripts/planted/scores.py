"""Faults between logits and the record of log-probs: gathers, temperatures, penalties, buffers.

What a column becomes is computed from the raw logits that its tokens were scored with; what its own
pass rounded otherwise (A decodes) is kept. A fault of a run at a temperature brings every column to
that temperature first, and says so in their definition: the record is one of such a run, and the
columns named by the fault are those that are not what they are said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import LayerBisectError
from layerbisect.fault_tools import forward_replaced
from scripts.planted.fault import ModelFault, Scored, ScoreFault, Side

Values = NDArray[np.float64]
Rescore = Callable[[Values, NDArray[np.int64], NDArray[np.int64]], Values]
"""From raw logits [response, vocab], prompt and response IDs to log-probs [response] (nat)."""

TRAINER, ROLLOUT, GENERATION = ("C0", "C1"), ("A", "B0", "B1"), ("A",)
REPLAY = ("B0", "B1")
DUMMIES = 5
"""Rows that an image adds to the logits and not to the labels."""
CHUNKS = 4
"""Context-parallel chunks of a sequence, for two ranks."""
CACHED = 32
"""Tokens of a sequence, from its start, that the rollout's prefix cache holds."""
MISSING = 2
PENALTY = 1.1
GATE_LIMIT = 2.0
BROKEN_POSITION = 9


def log_softmax(logits: Values) -> Values:
    """Log-probs (nat) over the last axis, float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def picked(logits: Values, tokens: NDArray[np.int64]) -> Values:
    """Log-probs [row] that logits [row, vocab] give one token a row."""
    return np.asarray(log_softmax(logits)[np.arange(len(tokens)), tokens])


def rescored(scored: Scored, columns: tuple[str, ...], rescore: Rescore) -> None:
    """Score columns otherwise; nan where nobody scores a token."""
    side: Side = "trainer" if columns[0].startswith("C") else "rollout"
    for number, (prompt, response) in enumerate(zip(scored.prompts, scored.tokens, strict=True)):
        logits = scored.logits[side][number].double().numpy()
        # a column's own rounding stays in it
        change = rescore(logits, prompt, response) - picked(logits, response)
        for column in columns:
            scored.scores[column][number] = scored.scores[column][number] + change


def at_temperature(scored: Scored, temperature: float) -> None:
    """Make the columns those of a run at a temperature, in which nothing is wrong."""
    for columns in (ROLLOUT, TRAINER):
        rescored(scored, columns, lambda z, _, response: picked(z / temperature, response))
    scored.definition.update(dict.fromkeys((*ROLLOUT, *TRAINER), "temperature"))


def _gather_truncated(scored: Scored) -> None:
    def rescore(logits: Values, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> Values:
        # rows of the image, which stands at the prompt's end, predict what the row before it does
        rows = np.maximum(np.arange(len(response)) - DUMMIES, 0)
        return picked(logits[rows], response)

    rescored(scored, TRAINER, rescore)


def _same_position(scored: Scored) -> None:
    def rescore(logits: Values, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> Values:
        # the last token's own row predicts nothing that is recorded
        return np.append(picked(logits[1:], response[:-1]), np.nan)

    rescored(scored, TRAINER, rescore)


def _one_left(scored: Scored) -> None:
    for column in TRAINER:
        scored.scores[column] = [np.append(s[1:], np.nan) for s in scored.scores[column]]


def _shifted_twice(scored: Scored) -> None:
    def rescore(logits: Values, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> Values:
        return np.append(picked(logits[:-1], response[1:]), np.nan)

    rescored(scored, TRAINER, rescore)


def _labels_rolled_in_chunks(scored: Scored) -> None:
    def rescore(logits: Values, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> Values:
        tokens = np.concatenate([prompt, response])
        # the row before each token scores it, and the chunk's last row its first token
        rows = np.arange(len(response)) + len(prompt) - 1
        size = len(tokens) // CHUNKS
        last = rows % size == size - 1
        return picked(logits, np.where(last, tokens[rows - size + 1], response))

    rescored(scored, TRAINER, rescore)


def _chunks_misordered(scored: Scored) -> None:
    for column in TRAINER:
        for number, prompt in enumerate(scored.prompts):
            known = scored.scores[column][number]
            rows = np.full(len(prompt) + len(known), np.nan)
            rows[len(prompt) - 1 : -1] = known
            first, second, third, last = np.array_split(rows, CHUNKS)
            # a rank's two chunks taken for one from the start and one from the end
            mixed = np.concatenate([first, third, last, second])
            scored.scores[column][number] = mixed[len(prompt) - 1 : -1]


def _mask_from_chunk_start(scored: Scored) -> None:
    for column in TRAINER:
        for prompt, values in zip(scored.prompts, scored.scores[column], strict=True):
            rows = np.arange(len(values)) + len(prompt) - 1
            size = (len(prompt) + len(values)) // CHUNKS
            start = rows[0] // size * size
            mixed = rows < start + size
            # as many rows as there are of the response, counted from the chunk's start
            masked = mixed & (rows >= start + mixed.sum())
            values[masked] = 0.0


def _filled_with_zero(scored: Scored) -> None:
    for values in scored.scores["A"]:
        values[-MISSING:] = 0.0


def _first_alone(scored: Scored) -> None:
    for values in scored.scores["A"]:
        values[1:] = np.nan


def _trainer_raw(scored: Scored) -> None:
    raw = {column: [v.copy() for v in scored.scores[column]] for column in TRAINER}
    at_temperature(scored, 0.7)
    scored.scores.update(raw)


def _rollout_raw(scored: Scored) -> None:
    raw = {column: [v.copy() for v in scored.scores[column]] for column in ROLLOUT}
    at_temperature(scored, 0.6)
    scored.scores.update(raw)


def _divided(scored: Scored) -> None:
    raw = {column: list(scored.scores[column]) for column in ROLLOUT}
    at_temperature(scored, 0.5)
    scored.scores.update({column: [v / 0.5 for v in values] for column, values in raw.items()})


def _penalised(scored: Scored) -> None:
    def rescore(logits: Values, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> Values:
        seen = np.zeros_like(logits, bool)
        for row in range(len(response)):
            seen[row, prompt] = True
            seen[row, response[:row]] = True
        lower = np.where(logits > 0, logits / PENALTY, logits * PENALTY)
        return picked(np.where(seen, lower, logits), response)

    rescored(scored, GENERATION, rescore)


def _stale_where_cached(scored: Scored) -> None:
    count = len(scored.prompts)
    for column, before in zip(REPLAY, (-1, 1), strict=True):
        right = [values.copy() for values in scored.scores[column]]
        for number, prompt in enumerate(scored.prompts):
            # requests came in one order the first time, in the reverse the second
            other = right[(number + before) % count]
            scored.scores[column][number][: CACHED - len(prompt)] = other[: CACHED - len(prompt)]


@contextmanager
def infinite_channel(model: Any, layer: int) -> Iterator[None]:
    """One channel of one token's attention output is infinite, in a batch's first sequence."""
    attention = model.model.layers[layer].self_attn
    positions: list[Any] = []

    def remember(own: Any, *args: Any, **kwargs: Any) -> Any:
        positions[:] = [kwargs["position_ids"]]
        return own(*args, **kwargs)

    def project(own: Any, context: Any) -> Any:
        out = own(context).clone()
        out[0, positions[0][0] == BROKEN_POSITION, 0] = float("inf")
        return out

    with forward_replaced(attention, remember), forward_replaced(attention.o_proj, project):
        yield


def gate_clamped(model: Any, layer: int) -> AbstractContextManager[None]:
    """SwiGLU's gate is clamped from above in one layer."""
    mlp = model.model.layers[layer].mlp
    active = getattr(mlp, "experts", mlp).act_fn
    if not callable(getattr(active, "forward", None)):
        raise LayerBisectError(f"the MLP's activation is {active!r} and no module")
    return forward_replaced(active, lambda own, gate: own(gate.clamp(max=GATE_LIMIT)))


def _trainers(
    name: str, change: Callable[[Scored], None], *reports: str, description: str
) -> ScoreFault:
    component = "logprob_gather_shift"
    return ScoreFault(name, component, "logprob", TRAINER, change, reports, description)


FAULTS: tuple[ModelFault | ScoreFault, ...] = (
    _trainers(
        "gather-truncated", _gather_truncated, "opendilab/LightRFT#53",
        description="Logits longer than the labels by an image's rows: the gather is off by five.",
    ),
    _trainers(
        "gather-same-position", _same_position, "AI-Hypercomputer/maxtext#2103",
        description="Logits at a token score that token, not the next one.",
    ),
    _trainers(
        "logprobs-one-left", _one_left,
        "modelscope/ms-swift#8196", "PrimeIntellect-ai/prime-rl#1525",
        description="Log-probs stand one place to the left of their tokens.",
    ),
    _trainers(
        "labels-shifted-twice", _shifted_twice, "ByteDance-Seed/VeOmni#917",
        description="Labels are shifted, and shifted again: logits score the token after the next.",
    ),
    _trainers(
        "cp-labels-rolled", _labels_rolled_in_chunks, "verl-project/verl#4250",
        description="Labels rolled inside each context-parallel chunk: its last row scores its "
        "first token.",
    ),
    _trainers(
        "cp-chunks-misordered", _chunks_misordered, "modelscope/ms-swift#10071",
        description="Contiguous context-parallel shards put together as if they were zigzag.",
    ),
    _trainers(
        "cp-response-offset", _mask_from_chunk_start, "THUDM/slime#73",
        description="The response's mask begins at the start of the chunk that also holds prompt; "
        "what it misses is zero.",
    ),
    ScoreFault(
        "logprobs-zero-filled", "logprob_gather_shift", "logprob", GENERATION, _filled_with_zero,
        ("vllm-project/vime#70",), "The last two log-probs are missing, and filled with 0.",
    ),
    ScoreFault(
        "logprobs-first-alone", "logprob_gather_shift", "logprob", GENERATION, _first_alone,
        ("sgl-project/sglang#14046",), "Speculative decoding returns the first log-prob alone.",
    ),
    ScoreFault(
        "temperature-not-in-trainer", "sampling_temperature", "logprob", TRAINER, _trainer_raw,
        ("THUDM/slime#557", "huggingface/trl#3029"),
        "At temperature 0.7 the trainer does not divide its logits by it.",
    ),
    ScoreFault(
        "temperature-not-in-rollout", "sampling_temperature", "logprob", ROLLOUT, _rollout_raw,
        ("huggingface/trl#4159", "vllm-project/vime#64", "ollama/ollama#16196"),
        "At temperature 0.6 the rollout returns log-probs of the raw logits.",
    ),
    ScoreFault(
        "temperature-after-softmax", "sampling_temperature", "logprob", ROLLOUT, _divided,
        ("PrimeIntellect-ai/prime-rl#697",),
        "At temperature 0.5 log-probs are divided by it, and not logits.",
    ),
    ScoreFault(
        "repetition-penalty", "sampling_temperature", "logprob", GENERATION, _penalised,
        ("agentscope-ai/Trinity-RFT#431",),
        "A repetition penalty of 1.1 that nobody asked for is in the log-probs of generation.",
    ),
    ScoreFault(
        "cached-logprobs-stale", "logits_processing", "logprob", REPLAY, _stale_where_cached,
        ("vllm-project/vllm#42245",),
        "Log-probs of tokens in the prefix cache are those of the request before.",
    ),
    ModelFault(
        "infinite-channel", "logits_processing", "linear", "attn.out", infinite_channel,
        ("huggingface/trl#6693",),
        "An all-reduce leaves an infinity in one channel of one token, and NaN log-probs after it.",
        passes="decode", sides=("rollout",),
    ),
    ModelFault(
        "swiglu-clamped", "logprob_gather_shift", "experts", "mlp.out", gate_clamped,
        ("ByteDance-Seed/VeOmni#917",), "One side clamps SwiGLU's gate, at 2.", dense="linear",
    ),
)  # fmt: skip

NOT_PLANTED: dict[str, str] = {
    "areal-project/AReaL#1290": "nobody found what it was: a run that collapses in one engine",
}
