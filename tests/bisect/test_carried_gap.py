"""The carried gap goes from nothing to the whole gap, and a search finds what a scan does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from layerbisect.bisect import carried_gap as module
from layerbisect.bisect.carried_gap import CarriedGap, carried_gap, read_out, visible_boundaries
from layerbisect.bisect.join import join
from layerbisect.bisect.locate import bisect
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import squared_above
from layerbisect.captures.store import Capture
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine, random_tokens, rewrite

Sides = tuple[Side, Side]


def opened(rollout: Path, trainer: Path, model: Path) -> tuple[ReferenceModel, Sides]:
    first, second = Capture.open(rollout), Capture.open(trainer)
    joined = join(first, second)
    reference = ReferenceModel.from_directory(model)
    row = joined.chains.row
    return reference, (
        Side(first, joined.chains, joined.rollout[row], torch.float32),
        Side(second, joined.chains, joined.trainer[row], torch.float32),
    )


@pytest.fixture(scope="module")
def deep(tiny_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Captures of the boundaries of a model of 16 layers: clean, and with faults."""
    folder = tmp_path_factory.mktemp("deep")
    tokens = random_tokens(2048, [24, 24])
    rollout = Engine.load(tiny_moe_dir, "rollout")
    trainer = Engine.load(tiny_moe_dir, "trainer", attention="sdpa", experts="grouped_mm")
    made = {"model": tiny_moe_dir}
    made["trainer"] = trainer.capture(folder / "trainer", tokens, points="coarse")
    for layer in (0, 6, 15):
        made[f"fault {layer}"] = rollout.capture(
            folder / f"fault-{layer}",
            tokens,
            points="coarse",
            faults=[("gate-up-swapped", layer)],
        )
    made["two"] = rollout.capture(
        folder / "two",
        tokens,
        points="coarse",
        faults=[("gate-up-swapped", 3), ("kv-heads-regrouped", 11)],
    )
    return made


def steps(carried: CarriedGap, share: float = 0.2) -> list[tuple[int, int]]:
    """Intervals between probes that make a good share of the squared gap."""
    probed = sorted(carried.at)
    whole = carried.at[probed[-1]] ** 2
    return [
        (a, b)
        for a, b in zip(probed, probed[1:], strict=False)
        if carried.at[b] ** 2 - carried.at[a] ** 2 > share * whole
    ]


@pytest.mark.parametrize("layer", [0, 6, 15])
def test_a_search_finds_the_step_that_a_scan_finds(deep: dict[str, Path], layer: int) -> None:
    model, sides = opened(deep[f"fault {layer}"], deep["trainer"], deep["model"])
    scan = carried_gap(model, sides, mode="scan")
    search = carried_gap(model, sides, mode="search")
    assert (scan.mode, search.mode) == ("scan", "search")
    assert steps(scan) == steps(search) == [(layer, layer + 1)]
    assert set(search.at) <= set(scan.at) == set(range(17))
    assert all(search.at[at] == scan.at[at] for at in search.at)
    # both ends, and then one probe a halving
    assert scan.forwards == 34 and search.forwards <= 2 * (2 + 5)


def test_a_search_finds_two_steps(deep: dict[str, Path]) -> None:
    model, sides = opened(deep["two"], deep["trainer"], deep["model"])
    search = carried_gap(model, sides, mode="search")
    assert steps(search, 0.1) == [(3, 4), (11, 12)]
    assert search.forwards < 34


def test_it_goes_from_nothing_to_the_whole_gap(clean: Clean) -> None:
    model, sides = opened(clean.rollout, clean.trainer, clean.model)
    carried = carried_gap(model, sides, mode="scan")
    assert carried.at[0] == 0.0
    verdict = bisect(clean.rollout, clean.trainer, model=clean.model)
    assert verdict.gap is not None
    # what the head's own rounding adds is not carried into it
    assert 0.5 * verdict.gap.mae < carried.at[4] < 1.2 * verdict.gap.mae
    assert [e.carried_in for e in verdict.layers] == [carried.at[i] for i in range(4)]


def test_the_end_is_the_log_prob_that_the_reference_reads(clean: Clean) -> None:
    model, sides = opened(clean.rollout, clean.trainer, clean.model)
    first, second = read_out(model, sides, 0)
    assert torch.equal(first, second) and len(first) == 3 * 47
    chains = sides[0].chains
    stream = sides[1].stream(4, 4)
    assert stream is not None
    alone = model.tail(
        4,
        stream,
        torch.from_numpy(chains.position),
        chains.lengths,
        torch.from_numpy(chains.target),
    )
    _, both = read_out(model, sides, 4)
    torch.testing.assert_close(both, alone[torch.from_numpy(chains.scored)].double())


def test_only_boundaries_that_both_show_are_probed(clean: Clean, tmp_path: Path) -> None:
    without = rewrite(
        clean.rollout, tmp_path / "fewer", points=lambda n: n not in ("layers.1.input", "embed")
    )
    model, sides = opened(without, clean.trainer, clean.model)
    assert visible_boundaries(sides, 4) == [0, 2, 3, 4]
    carried = carried_gap(model, sides, mode="search")
    assert set(carried.at) <= {0, 2, 3, 4}
    with pytest.raises(ValueError, match="rollout does not show boundary 1"):
        read_out(model, sides, 1)
    verdict = bisect(without, clean.trainer, model=clean.model, probe="scan")
    assert verdict.layers[0].carried_out is None and verdict.status == "agree"


def test_progress_counts_probes(clean: Clean) -> None:
    model, sides = opened(clean.rollout, clean.trainer, clean.model)
    news: list[tuple[int, int]] = []
    carried_gap(model, sides, mode="scan", progress=lambda *told: news.append(told))
    assert news == [(n, 5) for n in range(1, 6)]


@pytest.mark.parametrize("probe", ["auto", "scan", "search"])
def test_the_verdict_says_what_was_done(clean: Clean, probe: str) -> None:
    verdict = bisect(clean.rollout, clean.trainer, model=clean.model, probe=probe)  # type: ignore[arg-type]
    assert verdict.probe is not None
    assert verdict.probe.mode == ("search" if probe == "search" else "scan")


def fake(profile: Callable[[int], float]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Stand in for a model: each boundary carries what the profile says."""

    def read(model: object, sides: object, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), profile(layer)), torch.zeros(4)

    return read


@pytest.mark.parametrize("layers", [4, 17, 61, 94])
def test_a_search_costs_the_logarithm_of_the_layers(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        num_layers = layers

    class Model:
        config = Config

    monkeypatch.setattr(module, "visible_boundaries", lambda sides, n: list(range(n + 1)))
    for culprit in range(layers):
        monkeypatch.setattr(
            module,
            "read_out",
            fake(lambda at, c=culprit: 1.0 if at > c else 0.01 * at / layers),  # type: ignore[misc]
        )
        found = carried_gap(Model, None, mode="search")  # type: ignore[arg-type]
        assert steps(found) == [(culprit, culprit + 1)]
        assert found.forwards <= 2 * (2 + layers.bit_length())


def test_a_trainer_s_rounding_is_measured_where_rounding_explains_it() -> None:
    def floor(gaps: list[float], predicted: float = 0.02, freedom: float = 1.0) -> float:
        return CarriedGap(dict(enumerate(gaps)), "scan", 6, "trainer").floor(predicted, freedom)

    assert floor([0.0, 0.021, 0.025, 0.024]) == 0.025
    # a step is a layer's
    assert floor([0.0, 0.021, 0.025, 3.8]) == 0.025
    # the first layer has a fault: nothing is so small that rounding makes it
    assert floor([0.0, 3.7, 3.8, 3.8]) == 0.02
    assert floor([0.0, 3.7, 3.8, 3.8], freedom=200.0) == 3.8
    assert floor([0.0, 0.1], predicted=float("nan")) == 0.0
    assert CarriedGap({1: 0.02}, "scan", 2).floor(0.02, 1.0) == 0.0
    assert squared_above(5.0, 3.0) == 16.0 and squared_above(0.02, 0.025) == 0.0
