"""Faults of score handling: the engines computed rightly, and what was kept of it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.lab import Sample, Scores, before, entropy, prompts, score
from tests.bisect.scores.runs import Bench, Case, Columns, Family, Three, chosen, record, three

# a logit that leaves a token no chance
NEVER = -1e9


def _kept(run: Three, change: Callable[[Columns], None]) -> list[ScoreRecord]:
    scores = run.scores()
    change(scores)
    return [record(run.samples, scores)]


def _trainer(run: Three, kept: Callable[[Sample, torch.Tensor], Scores]) -> list[ScoreRecord]:
    """C kept as ``kept(sample, rows)``, of the logits [prompt + response, vocab]."""
    wrong = [kept(sample, rows) for sample, rows in zip(run.samples, run.c, strict=True)]
    return _kept(run, lambda scores: scores.update(C0=wrong, C1=[w.copy() for w in wrong]))


def _everywhere(sample: Sample, rows: torch.Tensor) -> Scores:
    """Log-probs of all tokens but the first one, at the index of their own prediction."""
    return score(rows[:-1], sample.ids[1:])


def _response(sample: Sample, values: Scores) -> Scores:
    """The part of :func:`_everywhere` that belongs to the response."""
    return values[len(sample.prompt) - 1 :]


# temperature


def trainer_forgets_temperature(
    bench: Bench, heat: float = 0.7, family: Family = "dense"
) -> list[ScoreRecord]:
    run = bench.heated(heat, family)
    return [record(run.samples, run.scores(a=heat, b=heat), temperature=heat)]


def rollout_keeps_raw(bench: Bench, heat: float = 0.7) -> list[ScoreRecord]:
    run = bench.heated(heat)
    return [record(run.samples, run.scores(c=heat), temperature=heat)]


def divides_logprobs(bench: Bench, *, scaled: bool, heat: float = 0.7) -> list[ScoreRecord]:
    """A is divided by the temperature; B and C are of ``scaled`` logits, or raw."""
    run = bench.heated(heat)
    others = heat if scaled else 1.0
    scores = run.scores(b=others, c=others)
    scores["A"] = [values / heat for values in scores["A"]]
    return [record(run.samples, scores, temperature=heat)]


def raw_against_scaled_with_drift(bench: Bench) -> list[ScoreRecord]:
    """The trainer divides by 0.9, and its weights drift away as well, step by step."""
    heat, records = 0.9, []
    generator = torch.Generator().manual_seed(0)
    for step in range(3):

        def drift(named: dict[str, torch.Tensor], step: int = step) -> None:
            for weight in named.values():
                weight += step * 1e-4 * torch.randn(weight.shape, generator=generator)

        run = bench.heated(heat)
        drifted = run.retrained(bench.lab().changed(drift).train(run.samples))
        records.append(record(run.samples, drifted.scores(c=heat), step=step, temperature=heat))
    return records


def penalised(logits: torch.Tensor, ids: torch.Tensor, strength: float = 1.1) -> torch.Tensor:
    """Repetition penalty: logits of seen tokens are divided where positive, else multiplied."""
    seen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, ids, True)
    return torch.where(seen, torch.where(logits > 0, logits / strength, logits * strength), logits)


def penalty_in_scores(bench: Bench) -> list[ScoreRecord]:
    run = three(bench.lab(), seed=3, draw=penalised)
    return [record(run.samples, run.scores(drawn=True))]


def nucleus(logits: torch.Tensor, ids: torch.Tensor, share: float = 0.9) -> torch.Tensor:
    """Top-p: only the likeliest tokens that together reach ``share`` can be drawn."""
    order = logits.argsort(-1, descending=True)
    ranked = logits.gather(1, order).softmax(-1)
    beyond = ranked.cumsum(-1) - ranked >= share
    return logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), NEVER)


def top_k(logits: torch.Tensor, ids: torch.Tensor, count: int = 8) -> torch.Tensor:
    """Top-k: only the ``count`` likeliest tokens can be drawn."""
    lowest = logits.topk(count, -1).values[:, -1:]
    return logits.masked_fill(logits < lowest, NEVER)


def renormalised_top_p(bench: Bench) -> list[ScoreRecord]:
    run = three(bench.lab(), seed=4, draw=nucleus)
    return [record(run.samples, run.scores(drawn=True))]


def renormalised_top_k(bench: Bench) -> list[ScoreRecord]:
    run = three(bench.lab("moe"), seed=4, draw=top_k)
    return [record(run.samples, run.scores(drawn=True))]


# gather and shift


def rolled_by_one(bench: Bench) -> list[ScoreRecord]:
    return _trainer(bench.sound(), lambda s, rows: _response(s, np.roll(_everywhere(s, rows), 1)))


def labels_shifted_left(bench: Bench) -> list[ScoreRecord]:
    run = bench.sound("moe")
    return _trainer(run, lambda s, rows: _response(s, np.roll(_everywhere(s, rows), -1)))


def same_position(bench: Bench) -> list[ScoreRecord]:
    return _trainer(bench.sound(), lambda s, rows: score(rows[len(s.prompt) :], s.response))


def shifted_twice(bench: Bench) -> list[ScoreRecord]:
    return _trainer(
        bench.sound(),
        lambda s, rows: score(before(rows, s), [*s.response[1:], s.ids[0]]),
    )


def dummy_positions(bench: Bench) -> list[ScoreRecord]:
    """The trainer sees five tokens more after the first one, and labels do not know of them."""

    run = bench.sound()
    longer = [replace(s, prompt=(s.prompt[0], *[0] * 5, *s.prompt[1:])) for s in run.samples]
    found = bench.lab().train(longer)
    rows = [rows[: len(s.ids)] for s, rows in zip(run.samples, found, strict=True)]
    return [record(run.samples, run.retrained(rows).scores())]


def last_two_zero(bench: Bench) -> list[ScoreRecord]:
    def fill(scores: Columns) -> None:
        for values in scores["A"]:
            values[-2:] = 0.0

    return _kept(bench.sound(), fill)


def one_score_then_nan(bench: Bench) -> list[ScoreRecord]:
    def lose(scores: Columns) -> None:
        for values in scores["A"]:
            values[1:] = np.nan

    return _kept(bench.sound(), lose)


def chunks(length: int, count: int) -> list[range]:
    """Cut ``length`` positions into ``count`` runs, the last one padded."""
    size = -(-length // count)
    return [range(i * size, min((i + 1) * size, length)) for i in range(count)]


def rolled_in_chunks(bench: Bench) -> list[ScoreRecord]:
    """Every sequence is padded to 192 and cut in 2 x 2 chunks, in which labels are rolled."""

    def kept(s: Sample, rows: torch.Tensor) -> Scores:
        labels = np.zeros(192, np.int64)
        labels[: len(s.ids)] = s.ids
        for chunk in chunks(192, 4):
            labels[chunk.start : chunk.stop] = np.roll(labels[chunk.start : chunk.stop], -1)
        return _response(s, score(rows[:-1], labels[: len(s.ids) - 1].tolist()))

    return _trainer(bench.sound(seed=1), kept)


def unsharded_in_zigzag(bench: Bench) -> list[ScoreRecord]:
    """Two ranks hold the halves, and they are put together as if they held zigzag chunks."""

    def kept(s: Sample, rows: torch.Tensor) -> Scores:
        whole = np.append(_everywhere(s, rows), 0.0)
        whole = np.append(whole, np.zeros(-len(whole) % 4))
        quarters = whole.reshape(4, -1)[[0, 2, 3, 1]].ravel()
        return _response(s, quarters[: len(s.ids) - 1])

    return _trainer(bench.sound(seed=1), kept)


def chunks_start_with_response(bench: Bench) -> list[ScoreRecord]:
    """In the chunk where the response begins, its scores are taken from the chunk's beginning."""

    def kept(s: Sample, rows: torch.Tensor) -> Scores:
        whole, first = _everywhere(s, rows), len(s.prompt) - 1
        for chunk in chunks(len(whole), 4):
            if first in chunk:
                count = chunk.stop - first
                whole[first : chunk.stop] = whole[chunk.start : chunk.start + count]
        return _response(s, whole)

    return _trainer(bench.sound(seed=1), kept)


# logits processing


def stale_prompt_scores(bench: Bench, again: bool = True) -> list[ScoreRecord]:
    """B of what the prefix cache held is what the request before left in the buffer."""
    run = bench.sound(seed=2)
    scores = run.scores()
    whole = [_everywhere(s, rows) for s, rows in zip(run.samples, run.b, strict=True)]
    cached = [(len(s.ids) - 1 - 7 * i) // 16 * 16 for i, s in enumerate(run.samples)]
    for i, sample in enumerate(run.samples):
        stale = whole[i].copy()
        left = min(cached[i], len(stale), len(whole[i - 1]))
        stale[:left] = whole[i - 1][:left]
        scores["B0"][i] = _response(sample, stale)
        if again:
            scores["B1"][i] = scores["B0"][i].copy()
    counts = {"B0": cached, "B1": cached if again else [0] * len(cached)}
    return [record(run.samples, scores, cached=counts)]


def scores_in_bfloat16(bench: Bench) -> list[ScoreRecord]:
    def narrow(scores: Columns) -> None:
        for values in scores["A"]:
            values[:] = torch.tensor(values).bfloat16().double().numpy()

    return _kept(bench.sound("moe", "float16"), narrow)


def lower_by_a_tenth(column: str) -> Callable[[Bench], list[ScoreRecord]]:
    def plant(bench: Bench) -> list[ScoreRecord]:
        def lower(scores: Columns) -> None:
            for name in ("A",) if column == "A" else ("C0", "C1"):
                for values in scores[name]:
                    values[1 if column == "A" else 0 :] -= 0.10

        return _kept(bench.sound(), lower)

    return plant


def first_token_raw(bench: Bench) -> list[ScoreRecord]:
    """The first token's score is of another distribution, as prefill and decode report apart."""
    run = bench.sound(count=16, samples=1)

    def cool(scores: Columns) -> None:
        for values, rows, sample in zip(scores["A"], run.rollout.raw, run.samples, strict=True):
            values[0] = score(rows[:1], sample.response[:1], 0.5)[0]

    return _kept(run, cool)


def nan_from_token_9(bench: Bench) -> list[ScoreRecord]:
    """One channel becomes infinite in layer 2 where the tenth token is computed."""
    model = bench.lab().model.model
    passes = iter(range(128))

    def overflow(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if next(passes) == 9:
            output[..., 0] = torch.inf

    hook = model.layers[2].register_forward_hook(overflow)
    try:
        asked = prompts(19)
        found = bench.lab().generate(asked, draw=lambda logits, ids: logits.nan_to_num())
    finally:
        hook.remove()
    run = Three(found, bench.lab().prefill(found.samples), bench.lab().train(found.samples))
    return [record(run.samples, run.scores())]


# packing


def mispaired(bench: Bench) -> list[ScoreRecord]:
    """One response in ten is scored under the next group's prompt."""
    run = bench.sound(samples=8)
    wrong = {5, 14, 27}

    def prompt_of(i: int, sample: Sample) -> Sample:
        other = run.samples[(i + 8) % len(run.samples)].prompt
        return replace(sample, prompt=other) if i in wrong else sample

    asked = [prompt_of(i, sample) for i, sample in enumerate(run.samples)]
    rows = [before(rows, s) for s, rows in zip(asked, bench.lab().train(asked), strict=True)]
    scores = run.scores()
    scores["C0"] = [score(row, s.response) for row, s in zip(rows, asked, strict=True)]
    scores["C1"] = [values.copy() for values in scores["C0"]]
    scores["C0.entropy"] = [entropy(row) for row in rows]
    scores["C0.logit"] = [chosen(row, s.response) for row, s in zip(rows, asked, strict=True)]
    return [record(run.samples, scores)]


def swapped(bench: Bench) -> list[ScoreRecord]:
    """The two samples of one group come back in the other order."""

    def swap(scores: Columns) -> None:
        for column in ("C0", "C1", "C0.entropy", "C0.logit"):
            values = scores[column]
            values[2], values[3] = values[3], values[2]

    return _kept(bench.sound(), swap)


BOOKKEEPING = {
    "temperature missing in the trainer": Case(
        "B113", trainer_forgets_temperature, "C", ("temperature",)
    ),
    "temperature missing in the trainer, mixture of experts": Case(
        "B115", lambda bench: trainer_forgets_temperature(bench, 1.3, "moe"), "C", ("temperature",)
    ),
    "rollout keeps raw scores": Case("B114", rollout_keeps_raw, "C", ("temperature",)),
    "raw scores at a temperature of 0.9": Case(
        "B180", lambda bench: rollout_keeps_raw(bench, 0.9), "C", ("temperature",)
    ),
    "log-probs divided by the temperature": Case(
        "B116",
        lambda bench: divides_logprobs(bench, scaled=False),
        "A",
        ("log-probs divided by T",),
    ),
    "log-probs divided by the temperature, others scaled": Case(
        "B116", lambda bench: divides_logprobs(bench, scaled=True), "A", ("log-probs divided by T",)
    ),
    "raw against scaled, with drift": Case(
        "B117", raw_against_scaled_with_drift, "C", ("temperature",)
    ),
    "repetition penalty in scores": Case(
        "B175", penalty_in_scores, "A", ("penalty on seen tokens",)
    ),
    "renormalised top-p": Case("", renormalised_top_p, "A", ("renormalised top-p/top-k",)),
    "renormalised top-k": Case("", renormalised_top_k, "A", ("renormalised top-p/top-k",)),
    "rolled by one": Case("B121", rolled_by_one, "C", ("shift",)),
    "labels shifted left": Case("B122", labels_shifted_left, "C", ("shift",)),
    "logits of the same position": Case("B120", same_position, "C", ("unrelated scores",)),
    "labels shifted twice": Case("B146", shifted_twice, "C", ("unrelated scores",)),
    "dummy positions": Case("B073", dummy_positions, "C", ("unrelated scores",)),
    "last two are zero": Case("B123", last_two_zero, "A", ("padding filled with zeros",)),
    "one score, then nan": Case("B124", one_score_then_nan, "A", refused="score nan in A"),
    "labels rolled in chunks": Case(
        "B128", rolled_in_chunks, "C", ("multiples of a chunk or page",), where="48"
    ),
    "unsharded in zigzag": Case("B129", unsharded_in_zigzag, "C", ("chunk order",)),
    "chunks start with the response": Case("B131", chunks_start_with_response, "C"),
    "stale prompt scores": Case("B031", stale_prompt_scores, "B", ("cached prefix",)),
    "nan from token 9": Case("B126", nan_from_token_9, "A", refused="score nan in A"),
    "scores in bfloat16": Case(
        "", scores_in_bfloat16, "A", ("bf16-rounded scores",), tolerance=0.0025
    ),
    "A lower by 0.10 from position 1": Case("", lower_by_a_tenth("A"), "A", ("constant offset",)),
    "C lower by 0.10": Case("", lower_by_a_tenth("C"), "C", ("constant offset",)),
    "first token at another temperature": Case("", first_token_raw, "A", ("first token only",)),
    "a tenth mispaired": Case("B163", mispaired, "C", ("mispaired samples",)),
    "two samples swapped": Case("B163", swapped, "C", ("swapped samples",)),
}
