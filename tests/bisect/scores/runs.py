"""Runs of three engines over the same tokens, and the records that are kept of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from tests.bisect.scores.lab import (
    SOUND,
    Decode,
    Lab,
    Precision,
    Rollout,
    Sample,
    Scores,
    before,
    entropy,
    prompts,
    score,
)

Columns = dict[str, list[Scores]]
Rows = Sequence[torch.Tensor]
Family = Literal["dense", "moe"]


@dataclass(frozen=True, slots=True, eq=False)
class Three:
    """Samples and the logits of three engines: A's [response, vocab], and those of B and C for
    every token, [prompt + response, vocab]."""

    rollout: Rollout
    b: Rows
    c: Rows

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.rollout.samples

    def scores(
        self, *, a: float = 1.0, b: float = 1.0, c: float = 1.0, drawn: bool = False
    ) -> Columns:
        """Scores at the temperatures ``a``, ``b`` and ``c``; A of what was ``drawn`` from."""
        logits = self.rollout.drawn if drawn else self.rollout.raw
        pairs = list(zip(self.samples, logits, self.b, self.c, strict=True))
        first = [score(rows, s.response, a) for s, rows, _, _ in pairs]
        second = [score(before(rows, s), s.response, b) for s, _, rows, _ in pairs]
        third = [score(before(rows, s), s.response, c) for s, _, _, rows in pairs]
        return {
            "A": first,
            "B0": second,
            "B1": [values.copy() for values in second],
            "C0": third,
            "C1": [values.copy() for values in third],
            "C0.entropy": [entropy(before(rows, s), c) for s, _, _, rows in pairs],
            "C0.logit": [chosen(before(rows, s), s.response) for s, _, _, rows in pairs],
        }

    def retrained(self, c: Rows) -> Three:
        """The same tokens with other logits of C."""
        return Three(self.rollout, self.b, c)

    def cut(self, lengths: Sequence[int]) -> Three:
        """The same with responses that ended earlier."""
        rollout = Rollout(
            tuple(
                replace(s, response=s.response[:n])
                for s, n in zip(self.samples, lengths, strict=True)
            ),
            tuple(rows[:n] for rows, n in zip(self.rollout.raw, lengths, strict=True)),
            tuple(rows[:n] for rows, n in zip(self.rollout.drawn, lengths, strict=True)),
        )
        return Three(rollout, self.b, self.c)


def chosen(rows: torch.Tensor, tokens: Sequence[int]) -> Scores:
    """The logit of each token, float64 [token]."""
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].double().numpy()


def three(
    rollout: Lab,
    *,
    generator: Lab | None = None,
    trainer: Lab | None = None,
    seed: int = 0,
    asked: Sequence[Sequence[int]] | None = None,
    length: int = 128,
    samples: int = 2,
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    fault: Decode = SOUND,
) -> Three:
    """Generate, replay and train on the same tokens; ``generator`` generates for ``rollout``."""
    found = (generator or rollout).generate(
        prompts(seed) if asked is None else asked,
        length,
        samples=samples,
        seed=seed,
        draw=draw,
        fault=fault,
    )
    trained = (trainer or rollout).train(found.samples)
    return Three(found, rollout.prefill(found.samples), trained)


def record(
    samples: Sequence[Sample],
    scores: Mapping[str, Sequence[Scores]],
    *,
    cached: Mapping[str, Sequence[int]] | None = None,
    masks: Sequence[Any] | None = None,
    step: int = 0,
    versions: Mapping[str, str] | None = None,
    definition: Literal["raw", "temperature"] = "raw",
    temperature: float = 1.0,
) -> ScoreRecord:
    """A record as somebody keeps it who believes that all is well."""
    calls = [
        Call.of(
            f"call{i}",
            sample.prompt,
            sample.response,
            {column: values[i] for column, values in scores.items()},
            group=sample.group,
            mask=None if masks is None else masks[i],
            cached={column: counts[i] for column, counts in (cached or {}).items()},
        )
        for i, sample in enumerate(samples)
    ]
    names = tuple(call.name for call in calls)
    columns = {}
    for column in scores:
        trainer = column.startswith("C")
        columns[column] = Scoring(
            definition=definition,
            engine="transformers" if trainer else "sglang",
            worker="" if trainer else "http://127.0.0.1:30000",
            weight_version=(versions or {}).get(column[0], f"step-{step}"),
            cache="none" if trainer else "flushed",
            packed=trainer,
            batches=(names,),
        )
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": -1}
    return ScoreRecord(
        RecordInfo(model="small", step=step, sampling=sampling, columns=columns), calls
    )


@dataclass(slots=True, eq=False)
class Bench:
    """The models, and sound runs that several cases start from; each is made when first used."""

    dense_dir: Path
    moe_dir: Path
    _made: dict[Any, Any] = field(default_factory=dict)

    def lab(self, family: Family = "dense", precision: Precision = "mixed") -> Lab:
        """A model."""
        folder = self.dense_dir if family == "dense" else self.moe_dir
        made: Lab = self._once(("lab", family, precision), lambda: Lab(folder, precision))
        return made

    def sound(
        self,
        family: Family = "dense",
        precision: Precision = "mixed",
        seed: int = 0,
        count: int = 4,
        samples: int = 2,
        longest: int = 40,
    ) -> Three:
        """A run of three sound engines, with ``count`` prompts of 10 tokens to ``longest``."""

        def make() -> Three:
            asked = prompts(seed, count, longest=longest)
            return three(self.lab(family, precision), seed=seed, asked=asked, samples=samples)

        made: Three = self._once(("sound", family, precision, seed, count, samples, longest), make)
        return made

    def heated(self, heat: float, family: Family = "dense") -> Three:
        """A run of three sound engines that samples at the temperature ``heat``."""

        def make() -> Three:
            return three(self.lab(family), seed=9, draw=lambda logits, ids: logits / heat)

        made: Three = self._once(("heated", family, heat), make)
        return made

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclass(frozen=True, slots=True)
class Case:
    """A planted fault, and what must be said of it.

    Attributes:
        catalogue: IDs in the catalogue of real faults; empty for one that is not in it.
        plant: makes the records, one a step. It raises RecordError where they cannot be.
        letter: the column that is wrong.
        shapes: names of tests of which one must convict; empty where scores show no shape, and all
            that can be said is which computation it is.
        where: a pattern that the convicting finding's place must match, or "".
        refused: the sentence that refuses the record, as a pattern, or "".
        faint: the shape may drown in the rest of what the fault does; nothing else may be said.
        weights: the weights are wrong; the scoring is right, and must not be blamed.
        tolerance: what the records are judged with (nat).
    """

    catalogue: str
    plant: Callable[[Bench], list[ScoreRecord]]
    letter: Literal["A", "B", "C"]
    shapes: tuple[str, ...] = ()
    where: str = ""
    refused: str = ""
    faint: bool = False
    weights: bool = False
    tolerance: float = 0.01

    @property
    def side(self) -> str:
        return "trainer" if self.letter == "C" else "rollout"
