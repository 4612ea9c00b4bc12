"""The tests for shapes of values accuse nobody where engines are sound, or where others failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from layerbisect.bisect.shapes.sample import PairSample
from layerbisect.captures.record.call import Call
from tests.bisect.scores.lab import Lab, Scores, before, entropy, score
from tests.bisect.scores.runs import Three, three
from tests.bisect.shapes.value_pairs import convicted, found, half_sure, pair


@dataclass(frozen=True, slots=True, eq=False)
class Responses:
    """Responses of real engines: their tokens, two columns' scores, and entropies."""

    tokens: tuple[tuple[int, ...], ...]
    first: list[Scores]
    second: list[Scores]
    entropy: list[Scores]


@pytest.fixture(scope="module")
def sound(small_qwen3_dir: Path, small_moe_dir: Path) -> list[Responses]:
    made = []
    for lab in (
        Lab(small_qwen3_dir, "mixed"),
        Lab(small_qwen3_dir, "bfloat16"),
        Lab(small_moe_dir, "bfloat16"),
        Lab(small_moe_dir, "float16"),
    ):
        run = three(lab)
        scores, tokens = run.scores(), tuple(s.response for s in run.samples)
        made += [
            Responses(tokens, scores[one], scores[other], scores["C0.entropy"])
            for one, other in (("A", "B0"), ("A", "C0"))
        ]
    return made


Noise = Callable[[np.random.Generator, int], Scores]


def correlated(random: np.random.Generator, count: int) -> Scores:
    """Heavy tails, of a scale and a bias of the response's own, and alike among neighbours."""
    own = random.standard_t(3, count + 1) * np.exp(0.7 * random.normal()) + 0.3 * random.normal()
    mixed: Scores = 0.7 * (own[1:] + own[:-1])
    return mixed


def flipping(random: np.random.Generator, count: int) -> Scores:
    """Small noise, and 2 % of the tokens far off, as where experts flip."""
    flips: Scores = 40 * random.normal(size=count) * (random.random(count) < 0.02)
    return flips + random.normal(size=count)


NOISES: dict[str, Noise | None] = {
    # the engines' own differences
    "real": None,
    "even": lambda random, count: random.normal(size=count),
    "heavy tails": lambda random, count: random.standard_t(3, count),
    "correlated": correlated,
    "flipping": flipping,
    "biased": lambda random, count: random.standard_t(3, count) + 0.2,
}


@pytest.mark.parametrize("noise", NOISES)
def test_no_false_alarm(sound: list[Responses], noise: str) -> None:
    """Seven controls each; of 4,200 made alike none raised anything."""
    for seed in range(7):
        sample = control(sound, noise, np.random.default_rng([seed, *noise.encode()]))
        assert found(sample) == {}, f"seed {seed}"


def control(sound: list[Responses], noise: str, random: np.random.Generator) -> PairSample:
    """Responses drawn with replacement and cut, whose second column is real, and noise on it.

    Noise is in proportion to 1 - p and of 0.002 to 0.05 nat.
    """
    base = sound[random.integers(len(sound))]
    level = float(random.choice([0.002, 0.005, 0.01, 0.02, 0.05]))
    own, known = NOISES[noise], bool(random.integers(2))
    calls = []
    for number in range(int(random.choice([4, 8, 16, 32]))):
        i = int(random.integers(len(base.tokens)))
        length = min(128, int(random.integers(16, 257)))
        second = base.second[i][:length]
        first = base.first[i][:length]
        if own is not None:
            first = -np.abs(second + level * (1 - np.exp(second)) * own(random, length))
        scores = {"A": first, "C0": second}
        if known:
            scores["C0.entropy"] = base.entropy[i][:length]
        calls.append(Call.of(f"{number}", [1], base.tokens[i][:length], scores))
    return PairSample.of(calls, "A", "C0")


@pytest.fixture(scope="module")
def run(small_qwen3_dir: Path) -> Three:
    return three(Lab(small_qwen3_dir))


MISPLACED: dict[str, Callable[[list[Scores]], list[Scores]]] = {
    "shifted": lambda scores: [np.roll(values, 1) for values in scores],
    "swapped": lambda scores: scores[::-1],
    "first token": lambda scores: [v - 0.8 * (np.arange(len(v)) < 1) for v in scores],
    "halved from a place on": lambda scores: [
        np.where(np.arange(len(v)) % 64 < 32, v, np.roll(v, 3)) for v in scores
    ],
}


@pytest.mark.parametrize("fault", MISPLACED)
@pytest.mark.parametrize("known", [True, False])
def test_scores_in_the_wrong_place_are_no_shape_of_values(
    run: Three, fault: str, known: bool
) -> None:
    wrong = iter(MISPLACED[fault](run.scores()["A"]))
    assert convicted(pair(run, change=lambda _: next(wrong), entropy=known)) == set()


@pytest.mark.parametrize("strength", [0.01, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("known", [True, False])
def test_other_weights_are_no_shape_of_values(
    small_qwen3_dir: Path, strength: float, known: bool
) -> None:
    def shake(named: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(5)
        for weight in named.values():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += (strength * weight.float().std() * noise).to(weight.dtype)

    lab = Lab(small_qwen3_dir)
    assert convicted(pair(three(lab, trainer=lab.changed(shake)), entropy=known)) == set()


@pytest.mark.parametrize("rate", [1e-4, 3e-4])
def test_an_update_that_sharpens_is_no_temperature(small_moe_dir: Path, rate: float) -> None:
    """Five steps that lower the entropy; the rollout has not got them."""
    lab = Lab(small_moe_dir)
    run = three(lab)
    trained = lab.changed(lambda named: None)
    weights: list[torch.Tensor] = list(trained.model.parameters())
    optimizer = torch.optim.Adam(weights, lr=rate)
    for weight in weights:
        weight.requires_grad_(True)
    for _ in range(5):
        lost = torch.zeros(())
        for sample in run.samples:
            rows = trained.model(torch.tensor([sample.ids])).logits[0].float().log_softmax(-1)
            lost = lost - (rows.exp() * rows).sum(-1).mean()
        optimizer.zero_grad()
        torch.autograd.backward(lost)
        optimizer.step()
    with torch.no_grad():
        rows = [before(r, s) for r, s in zip(trained.train(run.samples), run.samples, strict=True)]
    a = run.scores()["A"]
    for known in (True, False):
        calls = []
        for i, (sample, row) in enumerate(zip(run.samples, rows, strict=True)):
            scores = {"A": a[i], "C0": score(row, sample.response)}
            if known:
                scores["C0.entropy"] = entropy(row)
            calls.append(Call.of(f"{i}", sample.prompt, sample.response, scores))
        assert convicted(PairSample.of(calls, "A", "C0")) == set()


@pytest.mark.parametrize(("gain", "own"), [(1.03, 0.03), (1.06, 0.03), (1.1, 0.1), (1.25, 0.2)])
@pytest.mark.parametrize("known", [True, False])
def test_a_gain_beside_noise_that_no_engine_has_is_no_temperature(
    gain: float, own: float, known: bool
) -> None:
    """A and B are equal, so that C's noise is more than what engines differ by."""
    assert convicted(pair(half_sure(2, 0.0, gain, own), entropy=known)) == set()


@pytest.mark.parametrize("gain", [1.03, 1.07])
def test_a_gain_near_1_that_is_no_round_temperature(gain: float) -> None:
    assert convicted(pair(half_sure(2, 0.005, gain))) == set()


def test_few_tokens_and_equal_columns_give_nothing(run: Three) -> None:
    scores = run.scores()
    tokens = run.samples[0].response
    few = Call.of("few", [1], tokens[:9], {"A": scores["A"][0][:9] - 1, "C0": scores["C0"][0][:9]})
    assert found(PairSample.of([few], "A", "C0")) == {}
    equal = Call.of("equal", [1], tokens, {"A": scores["A"][0], "C0": scores["A"][0]})
    assert found(PairSample.of([equal], "A", "C0")) == {}


def test_one_response_is_enough_for_an_offset_and_finds_nothing_else(run: Three) -> None:
    tokens, scores = run.samples[0].response, run.scores()
    call = Call.of("one", [1], tokens, {"A": scores["A"][0] - 0.1, "C0": scores["C0"][0]})
    assert "constant offset" in convicted(PairSample.of([call], "A", "C0"))
