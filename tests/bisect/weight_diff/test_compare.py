"""Comparing weights: what counts as the same, how the rest differs, and what was not seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.bisect.weight_diff.report import Group, WeightReport, described
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.weights.format import Part, SnapshotInfo
from layerbisect.captures.weights.snapshot import save_weights, write_rank
from tests.bisect.weight_diff.making import (
    CONFIG,
    QUANTISED,
    Tensors,
    compared,
    each,
    low_rank_delta,
    make_weights,
    quantise,
    quantised,
    updated,
    write_checkpoint,
)

W = make_weights()
U = updated(W)
Q = "model.layers.1.self_attn.q_proj.weight"


def only_group(report: WeightReport) -> Group:
    (group,) = report.groups
    return group


def snapshot(
    folder: Path,
    tensors: Tensors,
    ranks: int = 1,
    *,
    values: bool = True,
    label: str = "rollout",
    skip: tuple[int, ...] = (),
) -> Path:
    """Write a snapshot whose matrices are cut by rows over ``ranks`` processes."""
    info = SnapshotInfo("test", "1", label, "bfloat16", ranks, values, block=(16, 16))
    for rank in range(ranks):
        parts = []
        for name, x in tensors.items():
            cut = x.ndim == 2 and len(x) % ranks == 0 and ranks > 1
            size = len(x) // ranks
            view = x[rank * size : (rank + 1) * size] if cut else x
            at = {0: (rank * size, (rank + 1) * size, len(x))} if cut else {}
            parts.append(Part.of(name, view, at))
        if rank not in skip:
            write_rank(folder, info, rank, parts)
    return folder


def test_a_cast_is_the_same(tmp_path: Path) -> None:
    wide = make_weights(dtype=torch.float32)
    narrow = {name: x.bfloat16() for name, x in wide.items()}
    # an engine may keep a router as it is
    for name in (n for n in wide if n.endswith("mlp.gate.weight")):
        narrow[name] = wide[name]
    report = compared(tmp_path, narrow, wide)
    assert report and (report.coverage.cast, report.coverage.same) == (len(W) - 3, 3)
    # rounded and widened again it is no cast of the other's
    rounded = {name: x.bfloat16().float() for name, x in wide.items()}
    assert {f.kind for f in compared(tmp_path / "b", rounded, wide).findings} == {"drift"}


def test_float8_without_scales_is_a_cast(tmp_path: Path) -> None:
    narrow = dict(W) | {Q: W[Q].to(torch.float8_e4m3fn)}
    assert compared(tmp_path, narrow, W).coverage.cast == 1
    group = only_group(compared(tmp_path / "b", narrow, dict(W) | {Q: W[Q] * 2}))
    assert (group.kind, group.how) == ("scaled", "times 2 on trainer")


def test_rounding_of_quantisation_is_the_same(tmp_path: Path) -> None:
    values, scale = quantise(W[Q])
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    relative = (values.float() * spread - W[Q].float()).norm() / W[Q].float().norm()
    assert 0.01 < float(relative) < 0.04
    report = compared(tmp_path, quantised(W), W, configs=(QUANTISED, CONFIG))
    assert report and report.coverage.quantised == 48 and report.coverage.same == 18
    # other scales, as right as those
    again = compared(
        tmp_path / "b", quantised(W), quantised(W, powers=True), configs=(QUANTISED, QUANTISED)
    )
    assert again and again.coverage.quantised == 48


def test_an_update_is_more_than_the_rounding_of_quantisation(tmp_path: Path) -> None:
    far = updated(W, size=0.3)
    report = compared(tmp_path, quantised(W), far, configs=(QUANTISED, CONFIG))
    assert {f.name for f in report.findings} >= {n for n in W if n.endswith("_proj.weight")}


def test_scales_of_another_block_shape_are_refused(tmp_path: Path) -> None:
    wrong = {**QUANTISED, "quantization_config": {"weight_block_size": [32, 32]}}
    report = compared(tmp_path, quantised(W), W, configs=(wrong, CONFIG))
    assert len(report.coverage.not_compared) == 48
    # the others agree, and that is not enough
    assert report.status == "inconclusive" and "48 tensors could not be" in report.reasons[0]
    assert "do not fit [64, 64] in blocks of [32, 32]" in report.coverage.not_compared[Q]


@pytest.mark.parametrize(
    "change, kind, how",
    [
        (lambda x: x.T, "transposed", "rows are the other's columns"),
        (lambda x: x * 1.0625, "scaled", "times 0.941 on trainer"),
        (lambda x: -x, "scaled", "times -1 on trainer"),
        (lambda x: torch.zeros_like(x), "not loaded", "zeros"),
        (lambda x: x[torch.randperm(64)], "permuted", "rows moved"),
        (lambda x: x[:, torch.randperm(64)], "permuted", "columns moved"),
        (lambda x: x.view(4, 16, 64)[[1, 0, 2, 3]].reshape(64, 64), "permuted", "2 of 4 blocks"),
        (
            lambda x: x.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64),
            "permuted",
            "halves of each 16 rows interleaved",
        ),
        (lambda x: x.view(2, 32, 64).transpose(0, 1).reshape(64, 64), "permuted", "halves of the"),
        (lambda x: torch.cat([x[32:], x[:32]]), "permuted", "2 shards of the rows in reverse"),
        (lambda x: torch.cat([x[:, :32], U[Q][:, 32:]], 1), "one shard", "shard 1 of 2"),
        (lambda x: torch.cat([x[:32], U[Q][32:48], x[48:]]), "one shard", "shard 2 of 4"),
        (lambda x: torch.cat([x[:5], x[5:6] * 2, x[6:]]), "rows", "some rows"),
        (lambda x: x + low_rank_delta(x, 3, 0.1), "low rank", "adapter"),
        (lambda x: x + 5 * torch.eye(64) * (torch.arange(64) < 3), "few values", "all others are"),
        (lambda x: x + 5 * torch.eye(64) * (torch.arange(64) < 40), "few values", "all others are"),
        (lambda x: U[Q], "drift", "a small difference"),
        (lambda x: torch.randn(64, 64), "not loaded", "uncorrelated"),
        (lambda x: torch.randn(64, 64) * 1e-20, "not loaded", "wildly different scale"),
        (lambda x: x + 0.7 * torch.randn(64, 64) * x.float().std(), "different", "no known"),
        (lambda x: x[:48], "shape", "shapes differ"),
    ],
)  # fmt: skip
def test_each_way_to_differ_has_its_name(change: Any, kind: str, how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    broken = dict(W)
    broken[Q] = change(W[Q]).bfloat16()
    report = compared(tmp_path, broken, W)
    group = only_group(report)
    assert (group.kind, group.names) == (kind, (Q,)) and how in group.how, group
    assert report.exit_code == 1


def test_an_update_of_a_few_rows_is_an_update(tmp_path: Path) -> None:
    seen = dict(W)
    # an optimizer moves the embeddings of the tokens that it saw
    each(seen, "embed_tokens.weight", lambda x: torch.cat([x[:20], x[20:50] * 1.01, x[50:]]))
    group = only_group(compared(tmp_path, W, seen, previous=W))
    assert (group.kind, group.side) == ("stale", "rollout")
    assert only_group(compared(tmp_path / "b", W, seen)).kind == "rows"


def test_a_few_values_are_counted_and_placed(tmp_path: Path) -> None:
    broken = dict(W) | {"model.norm.weight": W["model.norm.weight"].clone()}
    broken["model.norm.weight"][17] += 0.5
    report = compared(tmp_path, broken, W, previous=W)
    group = only_group(report)
    assert (group.kind, group.side) == ("few values", "rollout")
    assert "1 of 64 values differs, by 0.4" in group.evidence[0]
    assert group.evidence[0].endswith("at [17]") and report.findings[0].where == "values [17]"
    # beside an update it is still what it is: no step moves one value by half
    late = dict(U) | {"model.norm.weight": broken["model.norm.weight"]}
    late_too = dict(W) | {"model.norm.weight": W["model.norm.weight"]}
    assert {g.kind for g in compared(tmp_path / "b", late, late_too).groups} == {
        "few values",
        "drift",
    }


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4, 1e-3])
def test_a_small_step_in_bf16_is_one_update(rate: float, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)

    def uniform(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=draw) - 0.5

    # of the master weights most stay within what rounds to the same
    master = {n: x.float() * (1 + 2**-8 * uniform(x)) for n, x in W.items()}
    later = {n: (x + rate * uniform(x).sign()).bfloat16() for n, x in master.items()}
    before = {n: x.bfloat16() for n, x in master.items()}
    # tokens that were not seen
    each(later, "embed_tokens.weight", lambda x: x.clone())
    later["model.embed_tokens.weight"][40:] = before["model.embed_tokens.weight"][40:]
    group = only_group(compared(tmp_path, before, later))
    assert (group.kind, group.side, len(group.names) > 45) == ("drift", "unknown", True)
    group = only_group(compared(tmp_path / "b", before, later, previous=before))
    assert (group.kind, group.side) == ("stale", "rollout")


def test_digests_that_differ_where_no_sample_is(tmp_path: Path) -> None:
    wide = torch.randn(256, 64).bfloat16()
    other = wide.clone()
    # every fourth value is sampled
    other[100, 1] += 1
    rollout = snapshot(tmp_path / "s", dict(W) | {Q: other}, values=False)
    group = only_group(compare(rollout, write_checkpoint(tmp_path / "t", dict(W) | {Q: wide})))
    assert (group.kind, group.how) == ("different", "in values that were not sampled")


def test_norms_that_left_their_first_values_are_an_update(tmp_path: Path) -> None:
    first, later = dict(W), dict(W)
    each(first, "norm.weight", torch.ones_like)
    each(later, "norm.weight", lambda x: torch.ones_like(x) + 0.0078 * (torch.rand(len(x)) > 0.5))
    each(later, "norm.weight", lambda x: x.bfloat16())
    assert {f.kind for f in compared(tmp_path, first, later).findings} == {"drift"}
    report = compared(tmp_path / "b", first, later, previous=first)
    assert {(f.kind, f.side) for f in report.findings} == {("stale", "rollout")}
    # but a norm that is still as it was made is none that was trained
    report = compared(tmp_path / "c", first, W)
    assert {(f.kind, f.side) for f in report.findings} == {("not loaded", "rollout")}


def test_an_update_of_low_rank_is_an_update_where_all_is_stale(tmp_path: Path) -> None:
    later = dict(U)
    for name in (n for n in W if n.endswith("q_proj.weight")):
        later[name] = (W[name].float() + low_rank_delta(W[name], 1, 0.01)).bfloat16()
    group = only_group(compared(tmp_path, W, later, previous=W))
    assert (group.kind, group.side) == ("stale", "rollout")


def test_stale_experts_are_numbered(tmp_path: Path) -> None:
    late = dict(U)
    for name in (n for n in W if ".experts.2." in n or ".experts.3." in n):
        late[name] = W[name]
    group = only_group(compared(tmp_path, late, U, previous=W))
    assert (group.kind, group.what) == ("stale", "layers 0-2 mlp.experts.2-3.*")


def test_exchanged_tensors_are_named(tmp_path: Path) -> None:
    experts, layers, copied = dict(W), dict(W), dict(W)
    for kind in ("gate", "up", "down"):
        names = [f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight" for e in (0, 3)]
        experts[names[0]], experts[names[1]] = W[names[1]], W[names[0]]
    group = only_group(compared(tmp_path / "a", experts, W))
    assert (group.kind, group.how, len(group.names)) == ("swapped", "experts 0 and 3 exchanged", 6)
    for name in (n for n in W if n.startswith("model.layers.2.")):
        other = name.replace("layers.2", "layers.0")
        layers[name], layers[other] = W[other], W[name]
        copied[name] = W[other]
    group = only_group(compared(tmp_path / "b", layers, W))
    assert (group.kind, group.how) == ("swapped", "layers 0 and 2 exchanged")
    # a side that has one layer twice is the wrong one, whatever the other has
    group = only_group(compared(tmp_path / "c", W, copied))
    assert (group.how, group.side) == ("layers 0 and 2: one in place of the other", "trainer")


def test_the_embedding_in_place_of_the_head_is_seen(tmp_path: Path) -> None:
    broken = dict(W) | {"lm_head.weight": W["model.embed_tokens.weight"]}
    group = only_group(compared(tmp_path, broken, W))
    assert (group.kind, group.side) == ("tied head", "rollout")


def test_a_head_that_is_the_embedding_is_as_good_as_none(tmp_path: Path) -> None:
    tied = make_weights(tied=True)
    own = dict(tied) | {"lm_head.weight": tied["model.embed_tokens.weight"]}
    config = {**CONFIG, "tie_word_embeddings": True}
    report = compared(tmp_path, own, tied, configs=(config, config))
    assert report and "lm_head.weight of rollout is the embedding" in report.coverage.notes[0]
    # a model with a head of its own lacks it
    report = compared(tmp_path / "b", W, tied, configs=(CONFIG, CONFIG))
    found = [f for f in report.findings if f.name == "lm_head.weight"]
    assert [(f.kind, f.side, f.how) for f in found] == [
        ("tied head", "trainer", "the head is missing")
    ]


def test_padding_of_the_vocabulary_is_ignored_and_said(tmp_path: Path) -> None:
    padded = dict(W)
    each(padded, "embed_tokens.weight", lambda x: torch.cat([x, torch.zeros(16, 64).bfloat16()]))
    report = compared(tmp_path, padded, W)
    assert report and "rows from 128 on are on rollout alone" in report.coverage.notes[0]
    each(padded, "embed_tokens.weight", lambda x: x.flip(0))
    assert not compared(tmp_path / "b", padded, W)


@pytest.mark.parametrize("short", [0, 1])
def test_rows_of_tokens_that_one_side_lacks_are_no_padding(short: int, tmp_path: Path) -> None:
    cut = dict(W)
    each(cut, "embed_tokens.weight", lambda x: x[:100])
    each(cut, "lm_head.weight", lambda x: x[:100])
    sides = (cut, W) if short == 0 else (W, cut)
    report = compared(tmp_path, *sides)
    assert report.status == "inconclusive" and not report.findings
    label = ("trainer", "rollout")[short]
    assert f"rows 100 to 127 of {label} have no counterpart" in report.reasons[0]
    assert set(report.coverage.not_compared) == {"model.embed_tokens.weight", "lm_head.weight"}
    # what both have is compared in any case
    each(cut, "lm_head.weight", lambda x: x.flip(0))
    assert [f.name for f in compared(tmp_path / "b", *sides).findings] == ["lm_head.weight"]


def test_a_tied_head_of_fewer_tokens_is_not_compared(tmp_path: Path) -> None:
    tied = make_weights(tied=True)
    headed = tied | {"lm_head.weight": tied["model.embed_tokens.weight"][:100]}
    report = compared(tmp_path, headed, tied)
    assert report.status == "inconclusive"
    assert "rows 100 to 127 of rollout have no counterpart" in report.reasons[0]


def test_an_adapter_beside_the_weights_must_be_on_both_sides(tmp_path: Path) -> None:
    stem = Q.removesuffix("weight")
    adapter = {f"{stem}lora_A.weight": torch.ones(2, 64), f"{stem}lora_B.weight": torch.ones(64, 2)}
    report = compared(tmp_path, W, W | adapter)
    group = only_group(report)
    assert (group.kind, group.side, len(group.names)) == ("adapter", "rollout", 2)
    assert compared(tmp_path / "b", W | adapter, W | adapter)


def test_two_models_are_called_so(tmp_path: Path) -> None:
    report = compared(tmp_path, make_weights(7), W)
    assert report.status == "divergent"
    assert "these are two different models" in report.reasons[0]


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    stacked = {n: x for n, x in W.items() if ".experts." not in n}
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts."
        pick = {
            k: [W[f"{stem}{e}.{k}_proj.weight"] for e in range(4)] for k in ("gate", "up", "down")
        }
        packed = [torch.cat(both) for both in zip(pick["gate"], pick["up"], strict=True)]
        stacked[f"{stem}gate_up_proj"] = torch.stack(packed)
        stacked[f"{stem}down_proj"] = torch.stack(pick["down"])
    report = compared(tmp_path, stacked, W)
    assert report and report.coverage.same == len(W)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_snapshot_agrees_with_its_checkpoint(ranks: int, tmp_path: Path) -> None:
    saved = snapshot(tmp_path / "s", W, ranks)
    trainer = write_checkpoint(tmp_path / "t", W)
    report = compare(saved, trainer)
    assert report and report.coverage.same == len(W)
    # matrices in as many parts, and vectors as copies
    assert report.coverage.shards == len(W) * ranks
    assert report.coverage.bytes == sum(x.nbytes for x in W.values())
    assert report.labels == ("rollout", "trainer")


def test_a_stale_rank_is_named(tmp_path: Path) -> None:
    mixed = dict(U)
    mixed[Q] = torch.cat([U[Q][:16], W[Q][16:32], U[Q][32:]])
    saved = snapshot(tmp_path / "s", mixed, 4)
    sides = write_checkpoint(tmp_path / "t", U), write_checkpoint(tmp_path / "p", W)
    group = only_group(compare(saved, sides[0], previous=sides[1]))
    assert (group.kind, group.side) == ("one shard", "rollout")
    assert "which is what rank 1 of rollout holds" in group.evidence
    assert "there rollout has the previous weights" in group.evidence


def test_replicas_that_differ_are_a_finding(tmp_path: Path) -> None:
    info = SnapshotInfo("test", "1", "rollout", "bfloat16", 2, True)
    for rank, tensors in enumerate(
        (W, dict(W) | {"model.norm.weight": W["model.norm.weight"] * 2})
    ):
        write_rank(tmp_path / "s", info, rank, [Part.of(n, x) for n, x in tensors.items()])
    group = only_group(compare(tmp_path / "s", write_checkpoint(tmp_path / "t", W)))
    assert (group.kind, group.side) == ("replicas", "rollout")


def test_a_missing_rank_is_no_agreement(tmp_path: Path) -> None:
    saved = snapshot(tmp_path / "s", W, 2, skip=(1,))
    report = compare(saved, write_checkpoint(tmp_path / "t", W))
    assert report.status == "inconclusive" and report.exit_code == 2
    assert "rank 1 of 2 wrote nothing" in report.reasons[0]
    assert "shards do not tile it" in report.coverage.not_compared[Q]


@pytest.mark.parametrize("ranks", [1, 2])
def test_digests_agree_with_values(ranks: int, tmp_path: Path) -> None:
    rollout = snapshot(tmp_path / "s", W, ranks, values=False)
    trainer = write_checkpoint(tmp_path / "t", make_weights(dtype=torch.float32))
    report = compare(rollout, trainer)
    assert report and report.coverage.cast == report.coverage.sampled == len(W)
    same = write_checkpoint(tmp_path / "u", W)
    assert compare(same, rollout).coverage.same == len(W)
    again = snapshot(tmp_path / "again", W, ranks, values=False, label="trainer")
    assert compare(rollout, again).coverage.same == len(W)


@pytest.mark.parametrize("both", [False, True], ids=["against values", "against digests"])
@pytest.mark.parametrize(
    "change, kind, side",
    [
        (lambda x: W[Q], "stale", "rollout"),
        (lambda x: x * 2, "scaled", "unknown"),
        (lambda x: x * torch.nan, "not loaded", "rollout"),
        (lambda x: U["model.layers.0.self_attn.q_proj.weight"], "swapped", "unknown"),
        (lambda x: torch.cat([x[:-1], x[-1:] * 1.01]), "drift", "unknown"),
    ],
)
def test_digests_tell_what_a_sample_can(
    both: bool, change: Any, kind: str, side: str, tmp_path: Path
) -> None:
    broken = dict(U) | {Q: change(U[Q])}
    rollout = snapshot(tmp_path / "s", broken, 2, values=False)
    if both:
        trainer = snapshot(tmp_path / "t", U, 2, values=False, label="trainer")
    else:
        trainer = write_checkpoint(tmp_path / "t", U)
    report = compare(rollout, trainer, previous=write_checkpoint(tmp_path / "p", W))
    group = only_group(report)
    assert (group.kind, group.side, group.names) == (kind, side, (Q,))


def test_digests_of_other_parts_are_not_compared(tmp_path: Path) -> None:
    sides = [snapshot(tmp_path / f"{n}", W, n, values=False, label=f"tp{n}") for n in (2, 4)]
    report = compare(*sides)
    assert "both sides hold digests alone, of other parts" in report.coverage.not_compared[Q]
    vectors = [n for n in W if W[n].ndim == 1]
    assert report.coverage.same == len(vectors) and report.status == "inconclusive"


def test_nothing_in_common_is_no_agreement(tmp_path: Path) -> None:
    other = {"transformer.wte.weight": W["model.embed_tokens.weight"]}
    report = compared(tmp_path, other, W)
    assert report.status == "inconclusive" and "no names in common" in report.reasons[0]


def test_a_directory_that_is_neither_is_refused(tmp_path: Path) -> None:
    good = write_checkpoint(tmp_path / "t", W)
    with pytest.raises(LayerBisectError, match="no safetensors file in"):
        compare(tmp_path, good)
    with pytest.raises(LayerBisectError, match="is no directory"):
        compare(good, tmp_path / "none")


def test_a_live_module_agrees_with_its_checkpoint(small_moe_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_moe_dir, dtype=torch.bfloat16)
    assert compare(small_moe_dir, save_weights(model, tmp_path / "s"))
    with torch.no_grad():
        model.model.layers[2].mlp.experts.gate_up_proj[5].mul_(1.5)
    group = only_group(compare(small_moe_dir, save_weights(model, tmp_path / "t")))
    assert (group.kind, group.what) == (
        "scaled",
        "layer 2 mlp.experts.5.gate_proj, mlp.experts.5.up_proj",
    )
    assert group.names[0] == "model.layers.2.mlp.experts.5.gate_proj.weight"


def test_the_json_is_the_contract_and_more(tmp_path: Path) -> None:
    broken = dict(W) | {"model.norm.weight": torch.full((64,), torch.nan).bfloat16()}
    report = compared(tmp_path, broken, U, previous=W)
    made = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert made["schema"] == 1 and made["status"] == "divergent" and made["gap"] is None
    lost = made["culprits"][0]
    assert (lost["operator"], lost["side"], lost["layer"]) == ("weights", "rollout", None)
    assert lost["point"] == "model.norm.weight" and lost["evidence"]
    assert made["weights"]["coverage"]["tensors"] == len(W)
    assert {group["kind"] for group in made["weights"]["groups"]} == {"not loaded", "stale"}
    one = compared(tmp_path / "b", dict(W) | {Q: U[Q]}, W).verdict.culprits[0]
    assert (one.layer, one.point) == (1, Q) and one.own_error > 0.1


def test_tensors_are_named_in_short() -> None:
    names = [n for n in W if ".experts." in n or n == "lm_head.weight"]
    assert described(names) == "layers 0-2 mlp.experts.0-3.*; lm_head"
    assert described([Q]) == "layer 1 self_attn.q_proj"


@given(data=st.data())
def test_an_order_is_found_whatever_it_is(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    order = data.draw(st.permutations(range(24)).filter(lambda o: list(o) != list(range(24))))
    x = make_weights(data.draw(st.integers(0, 50)))[Q][:24]
    report = compared(tmp_path_factory.mktemp("order"), {Q: x[list(order)]}, {Q: x})
    assert only_group(report).kind == "permuted"


@settings(max_examples=20)
# the weights themselves were drawn from seed 0
@given(seed=st.integers(1000, 9999), size=st.floats(0.003, 0.1))
def test_an_update_is_drift_and_nothing_else(
    seed: int, size: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = compared(tmp_path_factory.mktemp("drift"), W, updated(W, seed, size))
    assert {f.kind for f in report.findings} == {"drift"}
