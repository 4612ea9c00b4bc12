"""Weight snapshots: what was saved in any number of parts is read whole, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.weights.format import Part, SnapshotInfo, digest
from layerbisect.captures.weights.names import plain_name
from layerbisect.captures.weights.snapshot import save_weights, write_rank
from layerbisect.captures.weights.store import WeightSnapshot

ROOT = Path(__file__).parents[3]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def info(world_size: int, values: bool = True) -> SnapshotInfo:
    return SnapshotInfo("test", "1", "rollout", "bfloat16", world_size, values)


def draw(
    shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [x.contiguous().view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*bits)


def shards(whole: torch.Tensor, name: str, cuts: list[list[int]]) -> Iterator[Part]:
    """Cut a tensor at ``cuts`` of each dimension."""
    edges = [[0, *sorted(c), n] for c, n in zip(cuts, whole.shape, strict=True)]
    for row in range(len(edges[0]) - 1):
        for column in range(len(edges[1]) - 1):
            at = ((edges[0][row], edges[0][row + 1]), (edges[1][column], edges[1][column + 1]))
            view = whole[at[0][0] : at[0][1], at[1][0] : at[1][1]]
            yield Part.of(name, view, {d: (*at[d], whole.shape[d]) for d in range(2)})


@given(data=st.data())
def test_shards_in_any_order_are_read_as_the_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, columns = (data.draw(st.integers(1, 9)) for _ in range(2))
    whole = draw((rows, columns), data.draw(st.sampled_from(DTYPES)))
    cuts = [
        data.draw(
            st.lists(st.integers(1, n - 1), unique=True, max_size=3) if n > 1 else st.just([])
        )
        for n in (rows, columns)
    ]
    parts = list(shards(whole, "w", cuts))
    # a replica of any of them changes nothing
    parts += data.draw(st.lists(st.sampled_from(parts), max_size=2))
    directory = tmp_path_factory.mktemp("snapshot")
    for rank in data.draw(st.permutations(range(len(parts)))):
        write_rank(directory, info(len(parts)), rank, [parts[rank]])
    snapshot = WeightSnapshot.open(directory)
    read = snapshot.tensor("w")
    assert snapshot.problems == () and read.disagreements == ()
    assert snapshot.shape("w") == (rows, columns)
    assert same_bits(read.values, whole)


@given(data=st.data())
def test_a_part_that_is_missing_is_never_filled_in(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = draw((6, 4))
    parts = list(shards(whole, "w", [[2, 4], [1]]))
    lost = data.draw(st.integers(0, len(parts) - 1))
    directory = tmp_path_factory.mktemp("snapshot")
    for rank, part in enumerate(parts):
        if rank != lost:
            write_rank(directory, info(len(parts)), rank, [part])
    snapshot = WeightSnapshot.open(directory)
    assert f"rank {lost} of 6 wrote nothing" in snapshot.problems[0]
    with pytest.raises(CaptureError, match="w: shards do not tile it"):
        snapshot.tensor("w")


def test_replicas_that_differ_are_a_finding(tmp_path: Path) -> None:
    whole = draw((4, 4))
    other = whole.clone()
    other[1, 2] += 1
    for rank, values in enumerate((whole, other)):
        write_rank(tmp_path / "s", info(2), rank, [Part.of("w", values)])
    read = WeightSnapshot.open(tmp_path / "s").tensor("w")
    assert same_bits(read.values, whole)
    assert read.disagreements[0].startswith("replicas disagree: rank 1 differs in 1 values")


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    whole = draw((4, 4))
    for rank, (start, stop) in enumerate(((0, 3), (2, 4))):
        part = Part.of("w", whole[start:stop], {0: (start, stop, 4)})
        write_rank(tmp_path / "s", info(2), rank, [part])
    with pytest.raises(CaptureError, match="w: shards overlap without being replicas"):
        WeightSnapshot.open(tmp_path / "s").tensor("w")


def test_ranks_that_hold_different_dtypes_are_refused(tmp_path: Path) -> None:
    for rank, dtype in enumerate((torch.bfloat16, torch.float32)):
        part = Part.of("w", draw((2, 4), dtype), {0: (2 * rank, 2 * rank + 2, 4)})
        write_rank(tmp_path / "s", info(2), rank, [part])
    with pytest.raises(CaptureError, match="ranks hold it as BF16 and as F32"):
        WeightSnapshot.open(tmp_path / "s").tensor("w")


def test_digests_cover_every_byte_and_keep_a_sample(tmp_path: Path) -> None:
    large = draw((300, 100))
    write_rank(tmp_path / "s", info(1, values=False), 0, [Part.of("w", large)])
    snapshot = WeightSnapshot.open(tmp_path / "s")
    (part,) = snapshot.parts("w")
    sampled = snapshot.sampled(part, "w")
    assert len(sampled) <= 4096 and same_bits(sampled, large.reshape(-1)[::8])
    assert part.header.digest == digest(large)
    changed = large.clone()
    # a value that is not sampled
    changed[0, 1] += 1
    assert digest(changed) != digest(large)
    assert digest(large.float()) != digest(large) != digest(large.T)
    with pytest.raises(CaptureError, match="holds digests alone"):
        snapshot.tensor("w")
    files = (tmp_path / "s").rglob("*.safetensors")
    assert sum(f.stat().st_size for f in files) < large.nbytes / 2


@pytest.fixture(scope="module")
def model(small_moe_dir: Path) -> Any:
    """The small Qwen3-MoE in transformers, whose experts are stacked."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(small_moe_dir, dtype=torch.bfloat16)


def test_a_live_module_is_saved_as_its_checkpoint(
    model: Any, small_moe_dir: Path, tmp_path: Path
) -> None:
    save_weights(model, tmp_path / "s", weight_version="step-7")
    snapshot = WeightSnapshot.open(tmp_path / "s")
    assert snapshot.info.weight_version == "step-7" and snapshot.info.label == "trainer"
    assert (snapshot.info.engine, snapshot.info.dtype) == ("transformers", "bfloat16")
    assert snapshot.info.tied is False
    with safe_open(small_moe_dir / "model.safetensors", framework="pt") as stored:
        assert snapshot.names() == tuple(sorted(stored.keys()))
        for name in snapshot.names():
            assert same_bits(snapshot.tensor(name).values, stored.get_tensor(name)), name


def test_wrappers_do_not_change_names(model: Any, tmp_path: Path) -> None:
    compiled: Any = torch.compile(model, backend="eager")
    save_weights(compiled, tmp_path / "s")
    assert "model.norm.weight" in WeightSnapshot.open(tmp_path / "s").names()
    assert plain_name("module._orig_mod.model.norm.weight") == "model.norm.weight"
    assert plain_name("base_model.model.model.a.base_layer.weight") == "model.a.weight"
    # a layer that is itself called module is none of them
    assert plain_name("model.submodule.weight") == "model.submodule.weight"


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from layerbisect.captures.weights.snapshot import save_weights

rank, directory = int(sys.argv[1]), sys.argv[2]
# no process talks to another
dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
module = torch.nn.Module()
module.experts = torch.nn.Module()
for home, name, shape in ((module, "weight", (7, 4)), (module.experts, "gate_up_proj", (4, 6, 8))):
    whole = torch.arange(7 * 64.0)[: torch.Size(shape).numel()].reshape(shape)
    local = DTensor.from_local(
        whole.chunk(2)[rank], mesh, [Shard(0)], run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )
    home.register_parameter(name, torch.nn.Parameter(local))
root = torch.nn.Module()
root.mlp = module
save_weights(root, directory)
"""


def test_sharded_parameters_are_saved_as_shards(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDED, str(rank), tmp_path / "s"], cwd=ROOT)
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    snapshot = WeightSnapshot.open(tmp_path / "s")
    assert snapshot.problems == ()
    assert [p.header.extents[0] for p in snapshot.parts("mlp.weight")] == [(0, 4, 7), (4, 7, 7)]
    assert torch.equal(snapshot.tensor("mlp.weight").values, torch.arange(28.0).reshape(7, 4))
    for expert, matrix in enumerate(torch.arange(192.0).reshape(4, 6, 8)):
        for part, half in zip(("gate", "up"), matrix.chunk(2), strict=True):
            read = snapshot.tensor(f"mlp.experts.{expert}.{part}_proj.weight")
            assert torch.equal(read.values, half)


def test_what_is_no_float_is_left_out_with_its_reason(tmp_path: Path) -> None:
    parts = [Part.of("a", draw((2, 2))), Part.of("b", torch.arange(3))]
    write_rank(tmp_path / "s", info(1), 0, parts)
    snapshot = WeightSnapshot.open(tmp_path / "s")
    assert snapshot.names() == ("a",)
    assert snapshot.left_out == {"b": "torch.int64 is no dtype of weights"}


def test_a_directory_holds_one_snapshot(tmp_path: Path, small_moe_dir: Path) -> None:
    parts = [Part.of("a", draw((2, 2)))]
    write_rank(tmp_path / "s", info(2), 0, parts)
    with pytest.raises(CaptureError, match="rank-0 is there already; name a new directory"):
        write_rank(tmp_path / "s", info(2), 0, parts)
    with pytest.raises(CaptureError, match="holds another snapshot"):
        write_rank(tmp_path / "s", info(3), 1, parts)
    with pytest.raises(CaptureError, match="is a model directory"):
        write_rank(small_moe_dir, info(1), 0, parts)
    with pytest.raises(CaptureError, match="two tensors are called a"):
        write_rank(tmp_path / "t", info(1), 0, parts * 2)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CaptureError, match="cannot write"):
        write_rank(file, info(1), 0, parts)


def test_what_is_damaged_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def saved(name: str) -> Path:
        return write_rank(tmp_path / name, info(1), 0, [Part.of("a", draw((8, 8)))])

    with pytest.raises(CaptureError, match=r"no weights.json in"):
        WeightSnapshot.open(tmp_path)
    path = saved("description") / "weights.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(CaptureError, match=r"weights.json is damaged.*; save the weights again"):
        WeightSnapshot.open(path.parent)
    path = saved("manifest") / "rank-0" / "manifest.json"
    raw = json.loads(path.read_text())
    raw["tensors"]["a"]["extents"][0] = [0, 9, 8]
    path.write_text(json.dumps(raw))
    with pytest.raises(CaptureError, match=r"the part \[0, 9\) is not within a total of 8"):
        WeightSnapshot.open(tmp_path / "manifest")
    raw["tensors"]["a"]["extents"][0] = [0, 4, 4]
    path.write_text(json.dumps(raw))
    with pytest.raises(CaptureError, match="the manifest says BF16"):
        WeightSnapshot.open(tmp_path / "manifest").tensor("a")
    path = saved("tensors") / "rank-0" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CaptureError, match=r"weights.safetensors is damaged"):
        WeightSnapshot.open(tmp_path / "tensors").tensor("a")
    saved("mixed")
    (tmp_path / "mixed" / "rank-0" / "manifest.json").write_text(
        (tmp_path / "tensors" / "rank-0" / "manifest.json")
        .read_text()
        .replace('"rank": 0', '"rank": 1')
    )
    with pytest.raises(CaptureError, match="the folders were mixed up"):
        WeightSnapshot.open(tmp_path / "mixed")


def test_a_rank_that_failed_says_so(tmp_path: Path) -> None:
    write_rank(tmp_path / "s", info(1), 0, (), errors=("RuntimeError: no such layer",))
    assert WeightSnapshot.open(tmp_path / "s").problems == (
        f"rank 0 of {tmp_path / 's'}: RuntimeError: no such layer",
    )


def test_writing_leaves_no_half_file_behind(tmp_path: Path, monkeypatch: Any) -> None:
    from layerbisect.captures.weights import snapshot as weight_snapshot

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_snapshot, "write_tensors", fails)
    with pytest.raises(CaptureError, match="No space left on device"):
        write_rank(tmp_path / "s", info(1), 0, [Part.of("a", draw((2, 2)))])
    assert "wrote nothing" in WeightSnapshot.open(tmp_path / "s").problems[0]
