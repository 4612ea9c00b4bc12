"""A small model, and the three engines that score its tokens: decode, prefill and a trainer.

All three compute in earnest, each in its own way, so their scores differ by rounding as those of
real engines do: decode over a KV cache in a left padded batch with sdpa attention (A), chunked
prefill in a right padded batch (B), and packed rows with eager attention (C). Faults are planted
where an engine has them: in the KV cache, the mask, the positions, the tokens fed, or the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.captures.transformers_calls import cache_name

Precision = Literal["mixed", "bfloat16", "float16"]
"""bfloat16 operators on a float32 residual stream, or everything in one dtype. The natural gap of a
small dense model is about 0.006, 0.017 and 0.0015 nat."""

Scores = NDArray[np.float64]
Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From query and key positions, int64 [row, query, 1] and [row, 1, key], to what is visible."""

# half of the tokens have a usual successor: what it gains there in logit, at most, and the gain of
# all logits; with these the entropy of a token is 0 to 3.5 nats
SUCCESSOR = 21.0
GAIN = 1.15
PAD = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and one response to it, token IDs."""

    group: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Samples, and the logits float32 [response, vocab] that each token was drawn from: as the
    model gave them, and after what the sampler did to them."""

    samples: tuple[Sample, ...]
    raw: tuple[torch.Tensor, ...]
    drawn: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """What is wrong in a decode engine.

    ``cache(cache, positions)`` may change the KV cache after a forward; ``positions`` int64
    [row, slot] are those of the cached tokens, negative for padding. ``feed(step, ids)`` says which
    tokens are fed, of those so far, ``place(step, positions)`` at which positions, and ``sees``
    what decode steps look at. ``by_token`` feeds the prompt token by token, as ``cache`` may need.
    """

    cache: Callable[[Any, torch.Tensor], None] | None = None
    feed: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    place: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    sees: Sees | None = None
    by_token: bool = False


SOUND = Decode()


def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Tokens see themselves and what came before; padding has negative positions."""
    return (key <= query) & (key >= 0)


def prompts(seed: int, count: int = 4, shortest: int = 10, longest: int = 40) -> list[list[int]]:
    """Some prompts of random tokens; the first one is the shortest."""
    random = np.random.default_rng(seed)
    lengths = [shortest, *random.integers(shortest, longest + 1, count - 1).tolist()]
    return [random.integers(1, 512, length).tolist() for length in lengths]


class Lab:
    """A model, sharpened so that its log-probs look like a trained model's."""

    def __init__(self, directory: Path, precision: Precision = "mixed", seed: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        self.precision = precision
        dtype = torch.float32 if precision == "mixed" else getattr(torch, precision)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._sharpen(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _sharpen(self, generator: torch.Generator) -> None:
        head, embedded = self.model.lm_head.weight, self.model.model.embed_tokens.weight.float()
        half = len(head) // 2
        usual = torch.randperm(len(head), generator=generator)[:half]
        successor = torch.randperm(len(head), generator=generator)[:half]
        strength = SUCCESSOR * torch.rand(half, 1, generator=generator)
        direction = embedded[usual] / embedded[usual].norm(dim=1, keepdim=True) ** 2
        sharp = GAIN * head.float()
        sharp[successor] += strength * direction
        head.copy_(sharp.bfloat16())

    @torch.no_grad()
    def changed(self, edit: Callable[[dict[str, torch.Tensor]], None]) -> Lab:
        """A copy of this lab whose named parameters ``edit`` has changed in place."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        edit(dict(other.model.named_parameters()))
        return other

    @torch.no_grad()
    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        *,
        attention: Literal["sdpa", "eager"],
        cache: Any = None,
    ) -> torch.Tensor:
        """Logits float32 [row, token, vocab]; ``mask`` is bool or additive [row, query, key]."""
        self.model.set_attn_implementation(attention)
        mixed = self.precision == "mixed"
        stream = torch.float32 if mixed else self.model.dtype
        if mask.dtype == torch.bool:
            # a padded query sees nothing: finite, so that its softmax is no nan
            lowest = torch.finfo(torch.bfloat16 if mixed else stream).min
            mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
        with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
            hidden = self.model.model(
                ids,
                position_ids=positions.clamp(min=0),
                attention_mask=mask[:, None].to(stream),
                use_cache=cache is not None,
                **{cache_name(self.model): cache},
            ).last_hidden_state
        found: torch.Tensor = hidden.float() @ self.model.lm_head.weight.float().T
        return found

    def new_cache(self) -> Any:
        """An empty KV cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def generate(
        self,
        asked: Sequence[Sequence[int]],
        length: int = 128,
        *,
        samples: int = 2,
        seed: int = 0,
        draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        fault: Decode = SOUND,
    ) -> Rollout:
        """Generate ``samples`` responses to each prompt, in one left padded batch.

        ``draw(logits, ids)`` is what the sampler does to logits [row, vocab] before drawing, given
        the IDs [row, slot] so far, padding included.
        """
        rows = [prompt for prompt in asked for _ in range(samples)]
        wide = max(map(len, rows))
        pads = torch.tensor([wide - len(prompt) for prompt in rows])[:, None]
        ids = torch.tensor([[PAD] * (wide - len(row)) + list(row) for row in rows])
        generator = torch.Generator().manual_seed(seed)
        cache, raw, drawn = self.new_cache(), [], []
        for fed in range(1, wide) if fault.by_token else ():
            self._step(cache, ids[:, :fed], 1, pads, -1, fault)
        for step in range(length):
            width = 1 if step or fault.by_token else wide
            raw.append(self._step(cache, ids, width, pads, step, fault))
            drawn.append(raw[-1] if draw is None else draw(raw[-1], ids))
            new = torch.multinomial(drawn[-1].softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, new], 1)
        return Rollout(
            tuple(
                Sample(f"p{i // samples}", tuple(rows[i]), tuple(ids[i, wide:].tolist()))
                for i in range(len(rows))
            ),
            tuple(torch.stack(raw, 1)),
            tuple(torch.stack(drawn, 1)),
        )

    def _step(
        self,
        cache: Any,
        ids: torch.Tensor,
        width: int,
        pads: torch.Tensor,
        step: int,
        fault: Decode,
    ) -> torch.Tensor:
        """One forward of the newest ``width`` of ``ids``; logits [row, vocab] after the last one.

        ``step`` counts responses' tokens: 0 where the last prompt token is fed, negative before.
        """
        positions = torch.arange(ids.shape[1]) - pads
        own, fed = positions[:, -width:], ids[:, -width:]
        sees = causal if step <= 0 or fault.sees is None else fault.sees
        visible = sees(own[:, :, None], positions[:, None, :])
        if step > 0 and fault.place is not None:
            own = fault.place(step, own)
        if step > 0 and fault.feed is not None:
            fed = fault.feed(step, ids)
        result = self.logits(fed, own, visible, attention="sdpa", cache=cache)[:, -1]
        if fault.cache is not None:
            fault.cache(cache, positions)
        return result

    def prefill(self, samples: Sequence[Sample], chunk: int = 64) -> list[torch.Tensor]:
        """Logits [prompt + response, vocab] of each sample, in a right padded batch, by chunks."""
        wide = max(len(sample.ids) for sample in samples)
        ids = torch.tensor([[*s.ids, *[PAD] * (wide - len(s.ids))] for s in samples])
        positions = torch.arange(wide).expand(ids.shape)
        cache, found = self.new_cache(), []
        for start in range(0, wide, chunk):
            part = slice(start, start + chunk)
            own = positions[:, part]
            visible = causal(own[:, :, None], positions[:, None, : start + chunk])
            found.append(self.logits(ids[:, part], own, visible, attention="sdpa", cache=cache))
        whole = torch.cat(found, 1)
        return [whole[i, : len(sample.ids)] for i, sample in enumerate(samples)]

    def train(
        self,
        samples: Sequence[Sample],
        *,
        row: int = 2,
        boundaries: bool = True,
        mask: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Logits [prompt + response, vocab] of each sample, as packed rows of ``row`` samples.

        ``boundaries`` False lets a sample see those before it in its row. ``mask`` may change the
        mask bool [1, query, key].
        """
        found: list[torch.Tensor] = []
        for first in range(0, len(samples), row):
            packed = samples[first : first + row]
            lengths = [len(sample.ids) for sample in packed]
            ids = torch.tensor([[token for sample in packed for token in sample.ids]])
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            order = torch.arange(ids.shape[1])
            visible = order[:, None] >= order
            if boundaries:
                document = torch.repeat_interleave(torch.arange(len(packed)), torch.tensor(lengths))
                visible &= document[:, None] == document
            seen = visible[None] if mask is None else mask(visible[None])
            rows = self.logits(ids, positions, seen, attention="eager")[0]
            found += rows.split(lengths)
        return found

    def train_padded(
        self, samples: Sequence[Sample], pad: int, *, shift: bool, leak: float
    ) -> list[torch.Tensor]:
        """Logits of each sample in a batch padded by ``pad`` tokens more than it needs.

        Padding is on the left where ``leak`` is 0 or more, and there it is visible; elsewhere it is
        on the right and gets attention with ``leak`` added to its scores. ``shift`` lets positions
        count padding as well.
        """
        found = []
        for sample in samples:
            length, left = len(sample.ids), leak >= 0
            padding = [PAD] * pad
            ids = torch.tensor([[*padding, *sample.ids] if left else [*sample.ids, *padding]])
            order = torch.arange(ids.shape[1])
            positions = order - (pad if left and not shift else 0)
            bias = torch.where(order[:, None] >= order, 0.0, torch.finfo(torch.bfloat16).min)
            if not left:
                bias[:length, length:] = leak
            rows = self.logits(ids, positions[None], bias[None], attention="eager")[0]
            found.append(rows[pad:] if left else rows[:length])
        return found


def before(rows: torch.Tensor, sample: Sample) -> torch.Tensor:
    """The rows of whole-sequence logits that predict the response, [response, vocab]."""
    return rows[len(sample.prompt) - 1 : len(sample.ids) - 1]


def score(rows: torch.Tensor, tokens: Sequence[int], temperature: float = 1.0) -> Scores:
    """Log-prob of each token under its own row of logits, float64 [token] (nat)."""
    normal = (rows.double() / temperature).log_softmax(-1)
    chosen: Scores = normal.gather(1, torch.tensor(tokens)[:, None])[:, 0].float().double().numpy()
    return chosen


def entropy(rows: torch.Tensor, temperature: float = 1.0) -> Scores:
    """Entropy of each row's distribution, float64 [token] (nat)."""
    normal = (rows.double() / temperature).log_softmax(-1)
    found: Scores = -(normal.exp() * normal).sum(-1).float().double().numpy()
    return found
