"""Read what SGLang's ``/generate`` answers, and refuse a reply that answers for something else.

The scores stand in ``meta_info``: a list of ``[score, token ID, text]``, of the generated tokens in
``output_token_logprobs`` and of the tokens that were sent in ``input_token_logprobs``, whose first
has no score. JSON has no nan, and SGLang sends null instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerbisect.captures.errors import WorkerError


class ReplyError(WorkerError):
    """A reply that cannot be used; ``reply`` is its text as it came."""

    def __init__(self, message: str, reply: str) -> None:
        super().__init__(message)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """One response with its scores (nat).

    ``cached`` counts the tokens that were read from the prefix cache, ``finish`` says why
    generation ended (``length`` or ``stop``), ``versions`` are the weight versions that the worker
    named, and ``rank`` is the data-parallel rank that answered, None where nothing was said.
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    cached: int
    finish: str
    versions: tuple[str, ...]
    rank: int | None


class Unusable(Exception):
    """What is wrong with a reply, as the rest of a sentence that begins with who answered."""


def generated(
    reply: Any, prompts: Sequence[Sequence[int]], longest: int
) -> tuple[ScoredResponse, ...]:
    """Read what was generated after ``prompts``, at most ``longest`` tokens each.

    Raises Unusable: another number of answers, an aborted one, scores that are not one finite
    number for each token.
    """
    found = []
    for here, prompt, one in _each(reply, prompts):
        meta = _meta(here, one, len(prompt))
        finish = meta.get("finish_reason")
        kind = finish.get("type") if isinstance(finish, dict) else finish
        if kind not in ("length", "stop"):
            raise Unusable(f"ended {here} by {finish!r:.200} and not by length or stop")
        pairs = _finite(here, _entries(here, meta, "output_token_logprobs"))
        tokens = tuple(token for _, token in pairs)
        count = meta.get("completion_tokens")
        if count != len(tokens):
            raise Unusable(f"gave {len(tokens)} scores for the {count!r} tokens of {here}")
        if not tokens or len(tokens) > longest or kind == "length" and len(tokens) != longest:
            raise Unusable(
                f"gave {len(tokens)} tokens to {here}, ended by {kind}, where 1 to {longest} "
                "were asked for"
            )
        given = one.get("output_ids")
        if given is not None and given != list(tokens):
            raise Unusable(f"scored other tokens than it gave in {here}: {_unlike(tokens, given)}")
        found.append(_scored(here, meta, pairs, kind))
    return tuple(found)


def replayed(
    reply: Any,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    vocabulary: int | None = None,
) -> tuple[ScoredResponse, ...]:
    """Read the scores of responses that were sent whole, scored from the first token on.

    SGLang scores the last token of a vocabulary as what it is and calls it 0 (0.5.23,
    logprob_result_processor.py clips one too many), which is understood where the model's number
    of tokens is known.

    Raises Unusable: another number of answers, of tokens or of scores, other tokens, a score that
    is not finite.
    """
    found = []
    for (here, sent, one), prompt in zip(_each(reply, sequences), prompt_lengths, strict=True):
        meta = _meta(here, one, len(sent))
        entries = _entries(here, meta, "input_token_logprobs")
        if len(entries) != len(sent):
            raise Unusable(f"gave {len(entries)} scores for the {len(sent)} tokens of {here}")
        named = [0 if token + 1 == vocabulary else token for token in sent]
        for place, ((score, token), name) in enumerate(zip(entries, named, strict=True)):
            if token not in (name, sent[place]):
                raise Unusable(
                    f"scored another token than was sent in {here}: {token} and not {sent[place]} "
                    f"at position {place}"
                )
            entries[place] = (score, sent[place])
        pairs = _finite(here, entries[prompt:])
        found.append(_scored(here, meta, pairs, ""))
    return tuple(found)


def _unlike(scored: Sequence[int], given: Any) -> str:
    """Say where two lists of token IDs part."""
    if not isinstance(given, list) or len(given) != len(scored):
        what = f"{len(given)} IDs" if isinstance(given, list) else f"{given!r:.80}"
        return f"{len(scored)} scores, and {what}"
    place = next(n for n, pair in enumerate(zip(scored, given, strict=True)) if pair[0] != pair[1])
    return f"{scored[place]} and not {given[place]!r:.40} at response position {place}"


def _each(
    reply: Any, sent: Sequence[Sequence[int]]
) -> list[tuple[str, Sequence[int], Mapping[str, Any]]]:
    answers = reply if isinstance(reply, list) else [reply]
    if len(answers) != len(sent):
        raise Unusable(f"gave {len(answers)} answers to {len(sent)} requests")
    for number, one in enumerate(answers):
        if not isinstance(one, dict) or not isinstance(one.get("meta_info"), dict):
            raise Unusable(f"answered {one!r:.200} to request {number}, which has no meta_info")
    pairs = zip(sent, answers, strict=True)
    return [(f"request {n}", ids, one) for n, (ids, one) in enumerate(pairs)]


def _meta(here: str, one: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    meta: Mapping[str, Any] = one["meta_info"]
    if meta.get("prompt_tokens") != length:
        raise Unusable(
            f"saw {meta.get('prompt_tokens')!r} tokens in {here}, where {length} were sent"
        )
    cached = meta.get("cached_tokens")
    if type(cached) is not int or not 0 <= cached <= length:
        raise Unusable(f"counts {cached!r} cached tokens among the {length} of {here}")
    return meta


def _entries(here: str, meta: Mapping[str, Any], key: str) -> list[tuple[Any, int]]:
    entries = meta.get(key)
    if not isinstance(entries, list):
        raise Unusable(f"gave {here} no {key}, but {entries!r:.80}")
    for place, entry in enumerate(entries):
        whole = isinstance(entry, list) and len(entry) > 1 and type(entry[1]) is int
        if not whole or entry[1] < 0:
            raise Unusable(
                f"gave {entry!r:.80} at place {place} of {key} in {here}, and not a score and a "
                "token ID"
            )
    return [(score, token) for score, token, *_ in entries]


def _finite(here: str, entries: list[tuple[Any, int]]) -> list[tuple[float, int]]:
    for place, (score, token) in enumerate(entries):
        number = isinstance(score, int | float) and not isinstance(score, bool)
        if not number or not math.isfinite(score):
            said = "null, which stands for nan," if score is None else f"{score!r:.40}"
            raise Unusable(
                f"gave {said} as the score at response position {place} (token {token}) of {here}"
            )
    return [(float(score), token) for score, token in entries]


def _scored(
    here: str, meta: Mapping[str, Any], pairs: list[tuple[float, int]], finish: str
) -> ScoredResponse:
    spans = meta.get("weight_versions") or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise Unusable(f"gave {spans!r:.80} as the weight versions of {here}")
    versions = [span.get("version") for span in spans] + [meta.get("weight_version")]
    return ScoredResponse(
        tokens=tuple(token for _, token in pairs),
        scores=tuple(score for score, _ in pairs),
        cached=meta["cached_tokens"],
        finish=finish,
        versions=tuple(dict.fromkeys(str(v) for v in versions if v is not None)),
        rank=meta["dp_rank"] if type(meta.get("dp_rank")) is int else None,
    )
