"""What fingerprints prove: other weights are ruled out, known to differ, or not all known."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.store import Capture
from layerbisect.terminal.verdict import headline, render_verdict
from tests.bisect.conftest import Clean
from tests.bisect.making import Engine, random_tokens, rewrite
from tests.bisect.test_several_faults import stale

NORM = "model.layers.2.input_layernorm.weight"


def ruled_out(verdict: Verdict) -> dict[str, str]:
    return {one.hypothesis: one.evidence for one in verdict.ruled_out}


def notes(verdict: Verdict) -> str:
    return "\n".join(verdict.coverage.notes)


def test_all_tensors_are_compared_or_nothing_is_ruled_out(clean: Clean, tmp_path: Path) -> None:
    held = Capture.open(clean.trainer).info.fingerprints
    total = len(load_file(clean.model / "model.safetensors"))
    assert len(held) == total
    # as under tensor parallelism
    few = {name: digest for name, digest in held.items() if "norm" in name or ".gate." in name}
    sharded = rewrite(clean.trainer, tmp_path / "few", info={"fingerprints": few})
    verdict = bisect(clean.rollout, sharded, model=clean.model)
    assert verdict.status == "agree"
    said = ruled_out(verdict)
    assert said["rollout runs other weights"].startswith(f"all {total} tensors match")
    assert "trainer runs other weights" not in said
    assert f"trainer: {len(few)} of {total} tensors compared, and they match" in notes(verdict)
    assert "layerbisect weights" in notes(verdict)


@pytest.mark.parametrize("stored", [False, True], ids=["embedding alone", "head stored too"])
def test_a_tied_head_is_no_tensor_of_its_own(clean: Clean, stored: bool, tmp_path: Path) -> None:
    model = shutil.copytree(clean.model, tmp_path / "tied")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    total = len(tensors)
    if stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    tokens = random_tokens(512, [24])
    first, second = (
        Engine.load(model, label).capture(tmp_path / label, tokens)
        for label in ("rollout", "trainer")
    )
    said = ruled_out(bisect(first, second, model=model))
    assert said["rollout runs other weights"].startswith(f"all {total} tensors match")
    assert said["trainer runs other weights"].startswith(f"all {total} tensors match")


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def replicas(target: Path, captures: list[Path]) -> Path:
    """Join captures as those of data-parallel replicas of one job."""
    prints = [dict(Capture.open(one).info.fingerprints) for one in captures]
    shutil.copytree(captures[0], target)
    for rank, one in enumerate(captures):
        own = target / f"rank-{rank}"
        if rank:
            shutil.copytree(one / "rank-0", own)
        place = {
            "rank": rank,
            "replica": rank,
            "world_size": len(captures),
            "name": f"dp {rank}",
            "fingerprints": prints[rank],
            "run": "",
        }
        edit(own / "manifest.json", lambda old, place=place: old | place)  # type: ignore[misc]
    edit(target / "capture.json", lambda old: old | {"fingerprints": {}})
    return target


@pytest.mark.parametrize("wrong", [0, 1])
def test_replicas_that_hold_different_weights_are_a_culprit(
    clean: Clean, wrong: int, tmp_path: Path
) -> None:
    engine = clean.engines["trainer"]
    with stale(engine.model, ["layers.2.input_layernorm"], 0.05):
        other = engine.capture(tmp_path / "other", clean.tokens)
    order = [clean.trainer, other] if wrong else [other, clean.trainer]
    joined = replicas(tmp_path / "joined", order)
    verdict = bisect(clean.rollout, joined, model=clean.model)
    assert verdict.status == "divergent"
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [(2, "weights", "trainer")]
    assert verdict.culprits[0].evidence[0] == (
        f"rank 0 (dp 0) and rank 1 (dp 1) hold different values of {NORM}; "
        f"rank {1 - wrong} (dp {1 - wrong}) has those of the model directory"
    )
    assert "trainer runs other weights" not in ruled_out(verdict)
    assert verdict.next == "find out which weights each rank of the trainer side loaded, and when"


def test_replicas_that_differ_are_no_instability(clean: Clean, tmp_path: Path) -> None:
    # nothing errs on the rows compared, and the replicas' scores are further apart than the sides
    moved = rewrite(
        clean.trainer, tmp_path / "moved", logprobs=lambda values: values - 0.5 * (values < -6)
    )
    prints = Capture.open(moved).info.fingerprints
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 3)]
    edit(
        moved / "capture.json",
        lambda old: old | {"fingerprints": {**prints, **dict.fromkeys(names, "0" * 16)}},
    )
    joined = replicas(tmp_path / "joined", [clean.trainer, moved])
    verdict = bisect(clean.rollout, joined, model=clean.model)
    (culprit,) = verdict.culprits
    assert (verdict.status, culprit.layer, culprit.operator) == ("divergent", None, "weights")
    assert f"hold different values of 2 tensors, {names[0]} first" in culprit.evidence[0]


def test_what_was_updated_meanwhile_is_not_ruled_out(clean: Clean, tmp_path: Path) -> None:
    moved = shutil.copytree(clean.trainer, tmp_path / "moved")
    error = "the weights changed during the capture (1 tensors, a first); capture one state"
    edit(moved / "rank-0" / "manifest.json", lambda old: old | {"errors": [error]})
    verdict = bisect(clean.rollout, moved, model=clean.model)
    assert ruled_out(verdict).keys() & {"trainer runs other weights"} == set()
    assert "the weights changed during the capture" in notes(verdict)


@pytest.mark.parametrize("part", ["layers.2.self_attn.o_proj", "layers.2.mlp.gate."])
def test_weights_known_to_differ_are_said_first(clean: Clean, part: str, tmp_path: Path) -> None:
    engine = clean.engines["trainer"]
    with stale(engine.model, [part], 0.05):
        made = engine.capture(tmp_path / "wrong", clean.tokens)
    verdict = bisect(clean.rollout, made, model=clean.model)
    first = verdict.culprits[0].evidence[0]
    assert first.startswith(f"its weights differ from the model directory: model.{part}")
    assert verdict.next == "find out which weights the trainer side loaded, and when"
    console = Console(width=100, file=io.StringIO())
    render_verdict(verdict, console)
    # in the first sentence, too
    assert f"; {first}" in headline(verdict)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("its weights differ from the model") < shown.index("on its own captured in")


def test_of_many_replicas_the_first_few_are_named(clean: Clean, tmp_path: Path) -> None:
    held = Capture.open(clean.trainer).info.fingerprints
    captures = [clean.trainer]
    for number in range(1, 6):
        prints = {**held, NORM: f"{number:016}"}
        captures.append(
            rewrite(clean.trainer, tmp_path / f"{number}", info={"fingerprints": prints})
        )
    joined = replicas(tmp_path / "joined", captures)
    (culprit,) = bisect(clean.rollout, joined, model=clean.model).culprits
    assert sum("hold different values of" in line for line in culprit.evidence) == 3
    assert "and 2 more pairs of ranks that differ" in culprit.evidence


def test_a_stale_tied_head_is_part_of_stale_weights(clean: Clean, tmp_path: Path) -> None:
    model = shutil.copytree(clean.model, tmp_path / "tied")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    old = shutil.copytree(model, tmp_path / "old")
    moved = {name: (1.05 * value.float()).to(value.dtype) for name, value in tensors.items()}
    save_file(moved, old / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(512, [48, 48])
    rollout = Engine.load(old, "rollout").capture(tmp_path / "rollout", tokens)
    trainer = Engine.load(model, "trainer", attention="sdpa").capture(tmp_path / "trainer", tokens)
    verdict = bisect(rollout, trainer, model=model)
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [
        (None, "weights", "rollout")
    ]
