"""Controls change what is rounded and nothing else, in every layout and on either side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.models import make_tiny
from scripts.planted.control_runs import run_control, run_layout
from scripts.planted.controls import CONTROLS, make_near_tied
from scripts.planted.fault import DTYPES, SIDES, Control, Side
from scripts.planted.scene import PROMPT, Pass, Scene

NAMED = {control.name: control for control in CONTROLS}
SEQUENCES, RESPONSE = 4, 20
CLEAN: dict[Side, Pass] = {"rollout": "prefill", "trainer": "trainer"}


@pytest.fixture(scope="module")
def scene(shared: Path) -> Scene:
    """A small scene of short sequences in float32: what is no rounding is far beyond it."""
    model = make_tiny(
        shared / "model", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8,
        top_k=2, vocab=128,
    )  # fmt: skip
    return Scene(model, "float32", shared, SEQUENCES, RESPONSE)


def off(scene: Scene, control: Control, side: Side, folder: Path) -> float:
    """Largest difference (nat) of a control's scores from those of the clean run."""
    run = run_control(scene, control, side, folder)
    assert [len(values) for values in run.scores] == [RESPONSE] * SEQUENCES
    apart = np.abs(np.concatenate(run.scores) - np.concatenate(scene.clean[CLEAN[side]].scores))
    assert np.isfinite(apart).all()
    return float(apart.max())


@pytest.mark.parametrize("name", NAMED)
def test_scores_stay_within_rounding(name: str, scene: Scene, tmp_path: Path) -> None:
    control = NAMED[name]
    allowed = 1e-4 if control.dtype is None else 0.5
    # a decode is long, and the sides differ little in it
    sides: tuple[Side, ...] = ("rollout",) if "decode" in control.layout else SIDES
    for side in sides:
        assert off(scene, control, side, tmp_path / side) < allowed, side
        found = Capture.open(tmp_path / side)
        assert found.label == side and found.finished and not found.problems
        for point in found.points:
            assert np.isfinite(found.read(point)).all(), point
        # and it is taken back
        assert off(scene, Control("none", ""), side, tmp_path / "after") == 0


def test_another_temperature_would_be_beyond_it(scene: Scene, tmp_path: Path) -> None:
    def form(model: torch.nn.Module, layer: int) -> object:
        from layerbisect.fault_tools import forward_replaced

        return forward_replaced(model.lm_head, lambda own, hidden: own(hidden) / 1.01)

    wrong = Control("wrong", "", form=form)  # type: ignore[arg-type]
    assert off(scene, wrong, "rollout", tmp_path) > 1e-3


@pytest.mark.parametrize(
    "name", ["padded-pairs", "packed-reversed", "order-reversed", "each-sequence-twice"]
)
def test_scores_are_of_the_sequence_that_they_are_told_of(
    name: str, scene: Scene, tmp_path: Path
) -> None:
    # another sequence's scores are far from these
    apart = np.abs(scene.clean["prefill"].scores[0] - scene.clean["prefill"].scores[-1])
    assert apart.max() > 0.1
    run = run_control(scene, NAMED[name], "rollout", tmp_path)
    found = Capture.open(tmp_path)
    for number, info in enumerate(found.sequences):
        if "copy" in info.name:
            continue
        rows = found.scores.rows.take(found.scores.rows.sequence == number)
        ids = scene.tokens[int(info.name[1:])]
        assert rows.token.tolist() == [ids[p] for p in rows.position.tolist()]
    assert len(run.scores) == SEQUENCES
    copies = sum("copy" in info.name for info in found.sequences)
    assert copies == (SEQUENCES if name == "each-sequence-twice" else 0)


def test_layouts_are_what_they_are_called(scene: Scene) -> None:
    seen: list[tuple[int, ...]] = []
    engine = scene.engines["trainer"]
    hook = engine.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: seen.append(tuple(args[0].shape))
    )
    batch = scene.tokens[:2]
    length = PROMPT + RESPONSE
    with torch.no_grad():
        for layout, settings in (
            ("single", {}),
            ("padded", {}),
            ("packed", {}),
            ("chunked prefill", {"chunk": "16"}),
        ):
            run_layout(engine, batch, layout, settings)
    assert seen == [
        (2, length), (2, length + 5), (1, 2 * length), (2, 16), (2, 11), (2, 1),
    ]  # fmt: skip
    seen.clear()
    with torch.no_grad():
        run_layout(engine, batch, "batched decode", {"prompts": "ragged"})
        run_layout(engine, batch, "decode", {"cache": "static"})
    hook.remove()
    # the second prompt has five tokens less, so its sequence ends five columns later
    assert seen[0] == (2, PROMPT) and seen[1 : RESPONSE + 6] == [(2, 1)] * (RESPONSE + 5)
    assert seen[RESPONSE + 6 :] == [(2, PROMPT), *[(2, 1)] * RESPONSE]


def test_what_a_model_cannot_have_is_refused(scene: Scene, tmp_path: Path) -> None:
    model = make_tiny(
        tmp_path / "dense", "llama", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, vocab=64
    )
    dense = Scene(model, "float32", tmp_path, 2, 4)
    with pytest.raises(LayerBisectError, match="needs a model with experts"):
        run_control(dense, NAMED["experts-backwards"], "rollout", tmp_path / "run")
    with pytest.raises(LayerBisectError, match="no layout 'diagonal'"):
        run_control(scene, Control("odd", "", layout="diagonal"), "rollout", tmp_path / "run")


def test_near_ties_choose_apart(tmp_path: Path) -> None:
    scene = Scene(make_near_tied(tmp_path / "model"), "bfloat16", tmp_path)
    chosen = [
        np.sort(Capture.open(scene.clean[name].directory).read("layers.1.mlp.expert_ids"), 1)
        for name in ("prefill", "trainer")
    ]
    assert 0 < (chosen[0] != chosen[1]).any(1).mean() < 0.5


def test_there_are_more_than_forty_of_each_dtype() -> None:
    assert len(NAMED) == len(CONTROLS)
    for dtype in DTYPES:
        assert sum(dtype in control.dtypes for control in CONTROLS) > 40
