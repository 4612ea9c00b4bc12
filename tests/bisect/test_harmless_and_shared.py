"""What changes nothing acquits, and what both sides share hides no fault of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.capture import capture
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.telling import CaptureWarning

Plant = Callable[[Any], list[Callable[[], None]]]


class Engines:
    """One model, captured as either side with something planted."""

    def __init__(self, model: Path, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.directory, self.folder = model, folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        self.tokens = torch.randint(3, 500, (3, 64), generator=torch.Generator().manual_seed(0))
        self._count = 0

    def side(self, label: str, *plants: Plant, **inputs: Any) -> Path:
        self._count += 1
        directory = self.folder / f"{label}-{self._count}"
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(_planted(plant, self.model))
            stack.enter_context(capture(self.model, directory, points="all", label=label))
            stack.enter_context(torch.no_grad())
            for ids in self.tokens:
                self.model(input_ids=ids[None], **inputs)
        return directory

    def judge(self, rollout: Path, trainer: Path) -> Verdict:
        return bisect(rollout, trainer, model=self.directory)


@contextmanager
def _planted(plant: Plant, model: Any) -> Iterator[None]:
    undo = plant(model)
    try:
        yield
    finally:
        for one in undo:
            one()


@pytest.fixture(scope="module")
def engines(small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(small_moe_dir, tmp_path_factory.mktemp("engines"))


def temperature(model: Any) -> list[Callable[[], None]]:
    return [model.lm_head.register_forward_hook(lambda _, args, out: out / 0.7).remove]


def biased_output_projection(model: Any) -> list[Callable[[], None]]:
    def add(_: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[..., 5] += 0.5
        return out

    return [model.model.layers[2].self_attn.o_proj.register_forward_hook(add).remove]


def other_top_k(model: Any) -> list[Callable[[], None]]:
    gate = model.model.layers[2].mlp.gate
    gate.top_k, before = 1, gate.top_k
    return [lambda: setattr(gate, "top_k", before)]


def norm_eps(model: Any) -> list[Callable[[], None]]:
    norm = model.model.layers[1].input_layernorm
    norm.variance_epsilon, before = 1e-2, norm.variance_epsilon
    return [lambda: setattr(norm, "variance_epsilon", before)]


def scaled_embedding(model: Any) -> list[Callable[[], None]]:
    hook = model.model.embed_tokens.register_forward_hook(lambda _, args, out: out * 1.02)
    return [hook.remove]


def test_positions_that_start_elsewhere_are_no_fault(engines: Engines) -> None:
    shifted = torch.arange(7, 7 + engines.tokens.shape[1])[None]
    with pytest.warns(CaptureWarning):
        rollout = engines.side("rollout", position_ids=shifted)
    verdict = engines.judge(rollout, engines.side("trainer"))
    assert verdict.status == "agree", verdict.culprits
    (acquitted,) = [r for r in verdict.ruled_out if r.hypothesis.startswith("rope")]
    assert "4 layers" in acquitted.hypothesis


def test_what_both_sides_share_hides_no_fault_of_one(engines: Engines) -> None:
    rollout = engines.side("rollout", temperature, biased_output_projection)
    verdict = engines.judge(rollout, engines.side("trainer", temperature))
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [(2, "linear", "rollout")]
    assert any(r.hypothesis == "head at logprob" for r in verdict.ruled_out)


def test_what_both_sides_share_alone_is_named(engines: Engines) -> None:
    verdict = engines.judge(
        engines.side("rollout", temperature), engines.side("trainer", temperature)
    )
    assert verdict.status == "inconclusive"
    assert "head at logprob" in verdict.reasons[0] and "temperature" in verdict.reasons[0]


def test_points_of_another_width_convict_the_router(engines: Engines) -> None:
    verdict = engines.judge(engines.side("rollout", other_top_k), engines.side("trainer"))
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [(2, "router", "rollout")]


def test_a_fitted_eps_is_the_eps(engines: Engines) -> None:
    verdict = engines.judge(engines.side("rollout", norm_eps), engines.side("trainer"))
    (culprit,) = verdict.culprits
    (said,) = [line for line in culprit.evidence if "systematic, eps" in line]
    fitted = float(said.split("eps ")[1].split(" ")[0])
    assert fitted == pytest.approx(1e-2, rel=0.1)


def test_an_exact_operator_has_one_rounding_for_a_measure(engines: Engines) -> None:
    verdict = engines.judge(engines.side("rollout", scaled_embedding), engines.side("trainer"))
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (None, "embedding", "rollout")
    # two in a hundred are five unit roundoffs of bfloat16, and one rounding is 0.4 of one
    assert culprit.own_error == pytest.approx(0.02 / (0.4 * 2**-8), rel=0.2)
    assert culprit.share_of_gap is not None and culprit.share_of_gap > 0.3


def test_reserved_labels_are_refused(engines: Engines) -> None:
    with pytest.raises(LayerBisectError, match="'both' is what a verdict calls"):
        engines.judge(engines.side("both"), engines.side("trainer"))
