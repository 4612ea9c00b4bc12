"""What full logits say about scores: which fault makes the scores that were returned, if any.

Each hypothesis gives the scores that it would have made of these logits; the one that is nearest
to the returned ones is taken, if it is nearer than the raw score by more than chance and than the
next one by more than chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.scores import hypotheses
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.extraction import scores_at

if TYPE_CHECKING:
    import torch

# a fitted hypothesis is always a little nearer: it must be so by this share, and this many
# standard errors of the paired distances, to count
_BETTER_BY = 0.05
_STANDARD_ERRORS = 5.0
_APART = 3.0
# what it leaves must be no more than the noise of two engines (nat), or than half
_NOISE = 0.1
# and raw scores must be so far off (nat): less is how one summed in float32
_MATTERS = 1e-3
_FEWEST = 16


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Scores as one fault would make them.

    ``value`` is what was fitted or found: a temperature, an offset (nat), a count of shards, k, p;
    nan for none. ``mae`` (nat) is what is left between them and the returned scores.
    """

    name: str
    value: float
    mae: float
    summary: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which hypothesis makes the returned scores of the logits.

    ``tried`` holds all of them, the nearest first, the raw score among them. ``best`` holds the one
    that explains the scores, more than one where chance cannot tell them apart, and none where the
    raw score is not beaten. ``raw_mae`` (nat) is the mean absolute distance from the raw score.
    """

    rows: int
    raw_mae: float
    best: tuple[Hypothesis, ...]
    tried: tuple[Hypothesis, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class TemperatureFit:
    """A temperature of the logits beside a wrong division of log-probs, both fitted to scores.

    ``mae_before`` (nat) is from the raw score, ``mae_after`` from log-probs of logits over
    ``temperature``, ``divided_mae`` from raw log-probs over ``divided_by``. ``better`` says which
    is nearer by more than chance.
    """

    temperature: float
    divided_by: float
    mae_before: float
    mae_after: float
    divided_mae: float
    better: Literal["temperature", "divided log-probs", "either", "neither"]
    summary: str


def explain(
    logits: torch.Tensor,
    tokens: NDArray[np.int64],
    scores: NDArray[np.float64],
    *,
    vocab: int | None = None,
) -> Explanation:
    """Say which fault makes ``scores`` of ``logits`` [row, vocab], in micro-batches.

    Args:
        logits: any float dtype, with padding rows of the vocabulary where there are some.
        tokens: int64 [row], what each row was scored for.
        scores: float64 [row], what was returned (nat).
        vocab: tokens in the vocabulary, where padding rows follow; default all.

    Raises:
        LayerBisectError: shapes that don't fit, fewer than 16 rows, or scores that aren't finite.
    """
    size = checked_vocab(logits, tokens, scores, vocab)
    raw = raw_scores(logits, tokens, size)
    found = _scored_as(logits, tokens, scores, size, raw)
    distances = {name: np.abs(made - scores) for name, _, made, _ in found}
    plain = Hypothesis("raw", float("nan"), float(np.abs(raw - scores).mean()), "raw scores")
    tried = [Hypothesis(n, v, float(distances[n].mean()), said) for n, v, _, said in found]
    tried.sort(key=lambda hypothesis: hypothesis.mae)
    best: list[Hypothesis] = []
    if _nearer(distances[tried[0].name], np.abs(raw - scores)):
        leading = distances[tried[0].name]
        best = [h for h in tried if _standard_errors(distances[h.name] - leading) < _APART]
    everything = tuple(sorted([*tried, plain], key=lambda hypothesis: hypothesis.mae))
    if best:
        summary = (
            f"{' or '.join(h.summary for h in best)}: {best[0].mae:.6f} nat are left of "
            f"{plain.mae:.6f}"
        )
    else:
        summary = f"no hypothesis is nearer than the raw score, which is {plain.mae:.6f} nat away"
    return Explanation(len(tokens), plain.mae, tuple(best), everything, summary)


def fit_temperature(
    logits: torch.Tensor,
    tokens: NDArray[np.int64],
    scores: NDArray[np.float64],
    *,
    vocab: int | None = None,
) -> TemperatureFit:
    """Fit the temperature that ``scores`` have, and the number that raw log-probs were divided by.

    Arguments and errors as of :func:`explain`.
    """
    size = checked_vocab(logits, tokens, scores, vocab)
    raw = raw_scores(logits, tokens, size)
    temperature = hypotheses.fit(logits[:, :size], tokens, scores)
    tempered = hypotheses.by_temperature(logits[:, :size], tokens, [temperature])[0]
    factor = hypotheses.factor(raw, scores)
    before, after = np.abs(raw - scores), np.abs(tempered - scores)
    divided = np.abs(factor * raw - scores)
    better: Literal["temperature", "divided log-probs", "either", "neither"]
    ahead = _standard_errors(divided - after)
    if not _nearer(after if ahead > 0 else divided, before):
        better = "neither"
    elif abs(ahead) < _APART:
        better = "either"
    else:
        better = "temperature" if ahead > 0 else "divided log-probs"
    divided_by = 1 / factor if factor else float("inf")
    said = {
        "temperature": f"logits were divided by {temperature:.4f}",
        "divided log-probs": f"log-probs were divided by {divided_by:.4f}, which leaves the "
        "normalizer wrong",
        "either": f"logits were divided by {temperature:.4f} or log-probs by {divided_by:.4f}",
        "neither": "neither a temperature nor a division of log-probs is nearer than raw scores",
    }[better]
    sizes = (
        f"raw scores are {before.mean():.6f} nat away, a temperature leaves {after.mean():.6f}, a "
        f"division {divided.mean():.6f}"
    )
    return TemperatureFit(
        temperature=temperature,
        divided_by=divided_by,
        mae_before=float(before.mean()),
        mae_after=float(after.mean()),
        divided_mae=float(divided.mean()),
        better=better,
        summary=f"{said}: {sizes}",
    )


def _scored_as(
    logits: torch.Tensor,
    tokens: NDArray[np.int64],
    scores: NDArray[np.float64],
    vocab: int,
    raw: NDArray[np.float64],
) -> list[tuple[str, float, NDArray[np.float64], str]]:
    """Name, value, scores and words of each hypothesis."""
    real = logits[:, :vocab]
    offset = float(np.median(scores - raw))
    temperature = hypotheses.fit(real, tokens, scores)
    factor = hypotheses.factor(raw, scores)
    divided_by = 1 / factor if factor else float("inf")
    found = [
        ("offset", offset, raw + offset, f"raw scores changed by {offset:+.6f} afterwards"),
        (
            "temperature",
            temperature,
            hypotheses.by_temperature(real, tokens, [temperature])[0],
            f"scores of logits over a temperature of {temperature:.4f}",
        ),
        (
            "divided log-probs",
            divided_by,
            factor * raw,
            f"raw scores divided by {divided_by:.4f} after the softmax",
        ),
    ]
    if logits.shape[1] > vocab:
        rows = logits.shape[1] - vocab
        padded = raw_scores(logits, tokens, logits.shape[1])
        said = f"a normalizer over {rows} padding rows of the vocabulary as well"
        found.append(("padded vocabulary", float(rows), padded, said))
    for count, made in hypotheses.by_shard(logits, tokens, vocab).items():
        said = f"a normalizer over one of {count} shards of the vocabulary"
        found.append((f"one of {count} shards", float(count), made, said))
    k, top, nuclei = hypotheses.by_filter(logits, tokens, scores, vocab)
    found.append(("top-k", float(k), top, f"scores renormalised over the {k} likeliest tokens"))
    mass, made = min(nuclei.items(), key=lambda item: float(np.abs(item[1] - scores).mean()))
    found.append(("top-p", mass, made, f"scores renormalised over a top-p of {mass:g}"))
    return found


def checked_vocab(
    logits: torch.Tensor,
    tokens: NDArray[np.int64],
    scores: NDArray[np.float64],
    vocab: int | None,
) -> int:
    """The vocabulary's size; raises LayerBisectError as :func:`explain` says."""
    if logits.ndim != 2 or tokens.shape != scores.shape or tokens.shape != logits.shape[:1]:
        raise LayerBisectError(
            f"logits, tokens and scores are {list(logits.shape)}, {list(tokens.shape)} and "
            f"{list(scores.shape)}; give [row, vocab], [row] and [row]"
        )
    if len(tokens) < _FEWEST:
        raise LayerBisectError(f"{len(tokens)} rows tell no fault from chance; give {_FEWEST}")
    if not np.isfinite(scores).all():
        raise LayerBisectError("a score is not finite; leave such tokens out")
    return logits.shape[1] if vocab is None else vocab


def raw_scores(logits: torch.Tensor, tokens: NDArray[np.int64], vocab: int) -> NDArray[np.float64]:
    """Raw log-probs of ``tokens`` by the first ``vocab`` columns of logits, [row] (nat)."""
    import torch

    at = (torch.arange(len(tokens), device=logits.device),)
    return scores_at(logits[:, :vocab], at, torch.from_numpy(tokens)).logprob


def _nearer(distance: NDArray[np.float64], raw: NDArray[np.float64]) -> bool:
    """Whether a hypothesis is nearer to the scores than the raw one, by more than chance."""
    before, after = float(raw.mean()), float(distance.mean())
    if before < _MATTERS or after > (1 - _BETTER_BY) * before or after > max(_NOISE, before / 2):
        return False
    return _standard_errors(raw - distance) >= _STANDARD_ERRORS


def _standard_errors(values: NDArray[np.float64]) -> float:
    """The mean of paired differences over its standard error."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    mean = float(values.mean())
    if error == 0.0:
        return 0.0 if mean == 0.0 else math.copysign(math.inf, mean)
    return mean / error
