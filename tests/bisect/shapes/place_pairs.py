"""Scores of one small model by two engines, in which tests plant faults of place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.shapes.sample import PairSample

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """Responses that a model sampled: float64 [response, token], nat, by three forwards.

    ``exact`` is float32; ``first`` bfloat16 with eager attention, ``second`` bfloat16 with sdpa.
    ``elsewhere`` is ``second`` of the same responses under the next one's prompt.
    """

    prompts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    exact: Array
    first: Array
    second: Array
    elsewhere: Array


def score(model_dir: Path, responses: int = 64, prompt: int = 24, length: int = 128) -> Scored:
    """Sample responses with a small model, sharpened, and score them."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from layerbisect.captures.transformers_calls import cache_name

    def load(dtype: torch.dtype, attention: str) -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=attention
        ).eval()
        with torch.no_grad():
            # random weights know little: a larger head is as sure, and as unsure, as a trained one
            model.get_parameter("lm_head.weight").mul_(1.5)
        return model

    generator = torch.Generator().manual_seed(0)
    engine = load(torch.bfloat16, "eager")
    ids = torch.randint(0, 512, (responses, prompt), generator=generator)
    with torch.no_grad():
        held, step = {cache_name(engine): DynamicCache(config=engine.config)}, ids
        for _ in range(length):
            out = engine(input_ids=step, use_cache=True, **held)
            chances = out.logits[:, -1].float().softmax(-1)
            step = torch.multinomial(chances, 1, generator=generator)
            ids = torch.cat([ids, step], 1)

        def scores(model: torch.nn.Module, rows: torch.Tensor) -> Array:
            logits = model(input_ids=rows, use_cache=False).logits[:, prompt - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(-1, rows[:, prompt:, None])[..., 0]
            return np.asarray(chosen.double().numpy(), np.float64)

        other = load(torch.bfloat16, "sdpa")
        moved = torch.cat([ids.roll(-1, 0)[:, :prompt], ids[:, prompt:]], 1)
        return Scored(
            prompts=ids[:, :prompt].numpy(),
            tokens=ids[:, prompt:].numpy(),
            exact=scores(load(torch.float32, "eager"), ids),
            first=scores(engine, ids),
            second=scores(other, ids),
            elsewhere=scores(other, moved),
        )


def pair(
    first: Sequence[Array] | Array,
    second: Sequence[Array] | Array,
    *,
    prompts: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
    cached: Sequence[int] | None = None,
    tokens: NDArray[Any] | None = None,
    prompt: Sequence[int] | None = None,
) -> PairSample:
    """Lay responses end to end: ``A`` and ``B0`` of as many tokens each.

    Every response has a ``prompt`` of its own where nothing is said.
    """
    lengths = np.array([len(row) for row in first])
    one, other = np.concatenate(list(first)), np.concatenate(list(second))
    calls = len(lengths)
    return PairSample(
        first_name="A",
        second_name="B0",
        first=one,
        second=other,
        token=(np.zeros(len(one)) if tokens is None else tokens.ravel()).astype(np.int64),
        call=np.repeat(np.arange(calls), lengths),
        index=np.concatenate([np.arange(n) for n in lengths]),
        active=np.isfinite(one) & np.isfinite(other),
        lengths=lengths,
        prompt=np.array(prompt if prompt is not None else range(calls)),
        prompt_lengths=np.array(prompts if prompts is not None else [24] * calls),
        cached_first=np.array(cached if cached is not None else [-1] * calls),
        cached_second=np.full(calls, -1),
        entropy=None,
        entropy_of="",
        names=tuple(f"s{i}" for i in range(calls)),
        groups=tuple(groups if groups is not None else [""] * calls),
        noise=float("nan"),
    )


def clean(scored: Scored, generator: np.random.Generator) -> PairSample:
    """Draw a pair without a fault: responses of a real pair, with noise of another kind and size.

    Lengths, prompts, tails, correlation between neighbours, bias, growth with position and the
    first token's noise vary.
    """
    calls = int(generator.integers(8, 25))
    rows = generator.integers(0, len(scored.exact), calls)
    lengths = (
        generator.integers(40, 129, calls) if generator.random() < 0.5 else np.full(calls, 128)
    )
    exact = scored.exact[rows]
    kind = generator.integers(0, 4)
    if kind == 0:
        noise = (scored.first - scored.second)[rows]
    elif kind == 1:
        noise = (scored.first - scored.exact)[rows]
    else:
        noise = (
            generator.standard_t(3, exact.shape)
            if kind == 2
            else generator.normal(size=exact.shape)
        )
        # a running mean over neighbours
        if generator.random() < 0.5:
            noise = noise + np.roll(noise, 1, 1) + np.roll(noise, 2, 1)
        # less likely tokens are noisier, and some responses are
        noise = noise * (1.05 - np.exp(exact)) * generator.lognormal(0, 0.4, (calls, 1))
        noise *= np.exp(generator.uniform(np.log(0.004), np.log(0.05))) / np.abs(noise).mean()
    growth, place = generator.integers(0, 4), np.arange(128.0)
    if growth == 1:
        noise = noise * (1 + generator.uniform(0, 2) * place / 128)
    elif growth == 2:
        noise = noise * (0.3 + 0.7 * (1 - np.exp(-place / generator.uniform(1, 40))))
    elif growth == 3:
        noise = noise * (1 + place) ** generator.uniform(0, 0.5)
    if generator.random() < 0.5:
        noise[:, 0] *= generator.choice([0.0, 0.5, 2.0])
    if generator.random() < 0.3:
        noise = noise + generator.uniform(-0.002, 0.002)
    cached = generator.choice([0, 8, 16], calls) if generator.random() < 0.5 else None
    return pair(
        [r[:n] for r, n in zip(exact + noise, lengths, strict=True)],
        [r[:n] for r, n in zip(exact, lengths, strict=True)],
        prompts=[int(n) for n in generator.integers(8, 40, calls)],
        groups=[f"g{i // 2}" for i in range(calls)],
        cached=None if cached is None else [int(c) for c in cached],
    )


def awkward(kind: str, scored: Scored, generator: np.random.Generator) -> PairSample:
    """Draw a pair without a fault whose noise looks like one of a place, of some `AWKWARD` kind."""
    calls = int(generator.integers(8, 33))
    exact = scored.exact[generator.integers(0, len(scored.exact), calls)]
    place = np.arange(128)
    certain = -generator.exponential(1e-3, exact.shape)
    cut = int(generator.integers(30, 100))
    if kind == "a template":
        period = int(generator.integers(3, 20))
        exact = np.where(place % period == cut % period, exact - 0.5, certain)
    elif kind in ("certain early", "certain late"):
        exact = np.where((place < cut) == (kind == "certain early"), certain, exact)
    elif kind == "repeating":
        exact = np.tile(exact[:, :7], 19)[:, :128]
    noise = generator.standard_t(3, exact.shape) * (1.0001 - np.exp(exact))
    if kind == "sparse":
        noise *= generator.random(exact.shape) < 0.03
    elif kind == "bursts":
        noise *= np.exp(np.cumsum(generator.normal(0, 0.35, exact.shape), axis=1))
        noise /= np.abs(noise).mean(1, keepdims=True)
    elif kind == "responses":
        noise *= generator.lognormal(0, 0.8, (calls, 1))
    elif kind == "equal until anywhere":
        noise *= place >= generator.integers(0, 128, calls)[:, None]
    elif kind == "outliers":
        noise = noise * 0.3 + (generator.random(exact.shape) < 0.02) * generator.normal(
            0, 10, exact.shape
        )
    elif kind == "first and last":
        noise[:, 0] *= generator.choice([0.0, 3.0])
        noise[:, -1] *= 3.0
    elif kind == "growing":
        noise *= (place / 128.0) ** generator.choice([0.5, 1.0, 2.0])
    tokens = np.arange(exact.size).reshape(exact.shape)
    prompt = np.arange(calls)
    if kind == "samples of few prompts":
        # what two samples share from their start on, and the noise with it, up to some token
        prompt //= 8
        shared = place < generator.integers(1, 9, calls)[:, None]
        exact, noise, tokens = (
            np.where(shared, values[prompt * 8], values) for values in (exact, noise, tokens)
        )
    noise *= np.exp(generator.uniform(np.log(0.004), np.log(0.05))) / np.abs(noise).mean()
    return pair(
        list(exact + noise),
        list(exact),
        prompts=[int(n) for n in generator.integers(8, 40, calls)[prompt]],
        groups=[f"g{i // 8}" for i in range(calls)],
        tokens=tokens,
        prompt=[int(n) for n in prompt],
        cached=[int(n) for n in generator.choice([0, 8, 16, 32], calls)],
    )


AWKWARD = (
    "a template",
    "certain early",
    "certain late",
    "repeating",
    "sparse",
    "bursts",
    "responses",
    "equal until anywhere",
    "outliers",
    "first and last",
    "growing",
    "samples of few prompts",
)
