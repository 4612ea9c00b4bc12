"""Tensors that one side alone holds are no agreement, unless there is a reason for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.captures.weights.format import Part, SnapshotInfo
from layerbisect.captures.weights.snapshot import write_rank
from tests.bisect.weight_diff.making import (
    CONFIG,
    Tensors,
    compared,
    make_weights,
    updated,
    write_checkpoint,
)

W = make_weights()
TIED = make_weights(tied=True)
STEM = "model.layers.1."
Q = f"{STEM}self_attn.q_proj.weight"
QKV = [f"{STEM}self_attn.{kind}_proj.weight" for kind in "qkv"]
EXPERTS = [n for n in W if n.startswith(f"{STEM}mlp.experts.") and "down" not in n]


def without(tensors: Tensors, names: list[str]) -> Tensors:
    return {n: x for n, x in tensors.items() if n not in names}


def snapshot(
    folder: Path,
    tensors: Tensors,
    *,
    left_out: dict[str, str] | None = None,
    ranks: int = 1,
    values: bool = True,
    label: str = "rollout",
) -> Path:
    """Write what rank 0 of ``ranks`` holds."""
    info = SnapshotInfo("test", "1", label, "bfloat16", ranks, values)
    parts = [Part.of(n, x) for n, x in tensors.items()]
    return write_rank(folder, info, 0, parts, left_out=left_out)


@pytest.mark.parametrize("lacking", ["rollout", "trainer"])
@pytest.mark.parametrize(
    "lost, what",
    [
        ([Q], "layer 1 self_attn.q_proj"),
        ([n for n in W if n.startswith(STEM)], "layer 1 input_layernorm, mlp.experts.0-3.*"),
        (["model.embed_tokens.weight", "lm_head.weight"], "lm_head; model.embed_tokens"),
    ],
)
def test_what_one_side_lacks_is_missing_there(
    lost: list[str], what: str, lacking: str, tmp_path: Path
) -> None:
    sides = without(W, lost), W
    report = compared(tmp_path, *(sides if lacking == "rollout" else sides[::-1]))
    (group,) = report.groups
    assert (report.exit_code, group.kind, group.side) == (1, "missing", lacking)
    assert sorted(group.names) == sorted(lost) and group.what.startswith(what)
    assert report.coverage.tensors == report.coverage.same == len(W) - len(lost)


def test_a_tensor_too_many_is_no_agreement(tmp_path: Path) -> None:
    report = compared(tmp_path, W | {"model.extra.weight": torch.ones(3)}, W)
    (group,) = report.groups
    assert (group.kind, group.side, group.names) == ("missing", "trainer", ("model.extra.weight",))
    assert group.how == "on rollout alone"


@pytest.mark.parametrize("held", ["checkpoint", "snapshot", "digests"])
def test_a_tied_head_may_be_absent(held: str, tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    trainer = write_checkpoint(tmp_path / "t", TIED, config)

    def rollout(name: str, head: torch.Tensor) -> Path:
        tensors = TIED | {"lm_head.weight": head}
        if held == "checkpoint":
            return write_checkpoint(tmp_path / name, tensors, config)
        return snapshot(tmp_path / name, tensors, values=held == "snapshot")

    report = compare(rollout("a", TIED["model.embed_tokens.weight"]), trainer)
    assert report and report.coverage.same + report.coverage.cast == len(TIED)
    (finding,) = compare(rollout("b", W["lm_head.weight"].flip(0)), trainer).findings
    assert (finding.kind, finding.side) == ("tied head", "rollout")


def test_a_stale_side_with_a_copy_for_a_head_is_stale_and_no_more(tmp_path: Path) -> None:
    later = updated(TIED)
    old = TIED | {"lm_head.weight": TIED["model.embed_tokens.weight"]}
    report = compared(tmp_path, old, later, previous=TIED)
    assert {(f.kind, f.name == "lm_head.weight") for f in report.findings} == {("stale", False)}


def test_what_is_computed_or_only_predicts_further_may_be_absent(tmp_path: Path) -> None:
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "mtp.layers.0.eh_proj.weight": torch.ones(4, 4),
        "model.layers.3.eh_proj.weight": torch.ones(4, 4),
    }
    config = {**CONFIG, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    report = compared(tmp_path, W, W | more, configs=(CONFIG, config))
    assert report and len(report.coverage.notes) == 2
    assert "2 on trainer alone: of layers that only predict" in report.coverage.notes[1]
    # where the configuration knows of no such layer, it is one like the others
    report = compared(tmp_path / "b", W, W | more)
    assert [f.name for f in report.findings] == ["model.layers.3.eh_proj.weight"]


@pytest.mark.parametrize(
    "lost, packed",
    [
        ([Q], Q),
        (QKV, f"{STEM}self_attn.qkv_proj.weight"),
        (EXPERTS, f"{STEM}mlp.experts.w13_weight"),
        ([n.replace("gate", "down") for n in EXPERTS if "gate" in n],
         f"{STEM}mlp.experts.w2_weight"),
    ],
)  # fmt: skip
def test_what_a_snapshot_left_out_is_not_judged(
    lost: list[str], packed: str, tmp_path: Path
) -> None:
    rollout = snapshot(tmp_path / "s", without(W, lost), left_out={packed: "packed for AMX"})
    report = compare(rollout, write_checkpoint(tmp_path / "t", W))
    assert report.status == "inconclusive" and not report.findings
    assert set(report.coverage.not_compared) == set(lost)
    assert set(report.coverage.not_compared.values()) == {"left out by rollout: packed for AMX"}
    (reason,) = report.reasons
    number = "1 tensor" if len(lost) == 1 else f"{len(lost)} tensors"
    assert reason.startswith(f"{number} could not be compared: layer 1 ")
    # and what both left out no less
    both = [
        snapshot(tmp_path / n, without(W, lost), left_out={packed: "packed for AMX"}, label=n)
        for n in ("one", "two")
    ]
    assert compare(*both).status == "inconclusive"
    # but another that is not there has no such reason
    rollout = snapshot(
        tmp_path / "u",
        without(W, [*lost, "model.norm.weight"]),
        left_out={packed: "packed for AMX"},
    )
    report = compare(rollout, tmp_path / "t")
    assert [(f.kind, f.name) for f in report.findings] == [("missing", "model.norm.weight")]


def test_what_a_missing_rank_may_hold_is_not_judged(tmp_path: Path) -> None:
    rollout = snapshot(tmp_path / "s", without(W, EXPERTS), ranks=2)
    report = compare(rollout, write_checkpoint(tmp_path / "t", W))
    assert report.status == "inconclusive" and "rank 1 of 2 wrote nothing" in report.reasons[0]
    assert set(report.coverage.not_compared) == set(EXPERTS)


def test_what_is_packed_or_named_otherwise_is_not_judged(tmp_path: Path) -> None:
    packed = without(W, QKV) | {f"{STEM}self_attn.qkv_proj.weight": torch.cat([W[n] for n in QKV])}
    report = compared(tmp_path, W, packed)
    assert report.status == "inconclusive" and len(report.coverage.not_compared) == 4
    # however a stack is laid out
    blocks = without(W, EXPERTS) | {f"{STEM}mlp.experts.gate_up_proj_blocks": torch.ones(4, 2, 2)}
    report = compared(tmp_path / "c", W, blocks)
    assert report.status == "inconclusive"
    assert len(report.coverage.not_compared) == len(EXPERTS) + 1
    # other experts are none that may hold it
    sides = [without(W, [f"{STEM}mlp.experts.{n}.up_proj.weight"]) for n in (0, 3)]
    report = compared(tmp_path / "d", sides[0], sides[1])
    assert {(f.kind, f.side) for f in report.findings} == {
        ("missing", "rollout"),
        ("missing", "trainer"),
    }
    renamed = {n.replace("model.layers", "model.language_model.layers"): x for n, x in W.items()}
    report = compared(tmp_path / "b", renamed, W)
    assert report.status == "inconclusive" and report.coverage.same == 3
    assert report.coverage.not_compared[Q].startswith("of another name on rollout, such as model.l")


def test_scales_of_a_quantisation_of_one_side_are_not_judged(tmp_path: Path) -> None:
    rollout = snapshot(
        tmp_path / "s",
        without(W, [Q]) | {f"{Q}_scale": torch.ones(64)},
        left_out={Q: "quantised without scales by block"},
    )
    report = compare(rollout, write_checkpoint(tmp_path / "t", W))
    assert report.status == "inconclusive" and len(report.coverage.not_compared) == 2
