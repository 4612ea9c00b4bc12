"""What an SGLang process holds, mapped to checkpoint tensors; with modules that stand in for its.

The real modules are seen by tests/bisect/weight_diff/test_server.py.
"""

from __future__ import annotations

import shutil
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from layerbisect.captures.sglang import plugin as sglang_plugin
from layerbisect.captures.sglang import weight_session as sglang_weight_session
from layerbisect.captures.sglang.weight_session import WeightSession
from layerbisect.captures.sglang.weights import weights_of
from layerbisect.captures.weights.format import Part
from layerbisect.captures.weights.store import WeightSnapshot


class Stand(torch.nn.Module):
    """A module with given attributes and parameters."""

    def __init__(self, parameters: dict[str, torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank_in_group=rank, world_size=size)


def held_by(
    modules: dict[str, torch.nn.Module], *, block: Any = None, **settings: Any
) -> tuple[dict[str, Part], dict[str, str]]:
    """Map modules at dotted paths."""
    root = torch.nn.Module()
    for path, module in modules.items():
        home = root
        *stem, last = path.split(".")
        for name in stem:
            if not hasattr(home, name):
                home.add_module(name, torch.nn.Module())
            home = getattr(home, name)
        home.add_module(last, module)
    root.quant_config = SimpleNamespace(weight_block_size=block)  # type: ignore[assignment]
    args = {"enable_eplb": False, "ep_num_redundant_experts": 0, "init_expert_location": "trivial"}
    runner = SimpleNamespace(model=root, server_args=SimpleNamespace(**(args | settings)))
    parts, left_out = weights_of(runner)
    return {part.name: part for part in parts}, left_out


def qkv(rank: int, size: int, weight: torch.Tensor, **more: torch.Tensor) -> Stand:
    """Eight query heads and two KV heads of 4 channels, over ``size`` processes."""
    return Stand(
        {"weight": weight, **more},
        tp_group=group(rank, size),
        kv_tp_group=group(rank, size),
        num_heads=8 // size,
        num_kv_heads=max(1, 2 // size),
        num_kv_head_replicas=max(1, size // 2),
        total_num_kv_heads=2,
        head_size=4,
        v_head_size=4,
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_packed_qkv_tiles_with_replicated_kv_heads(size: int) -> None:
    whole = {name: torch.randn(rows, 6) for name, rows in (("q", 32), ("k", 8), ("v", 8))}
    rebuilt = {name: torch.full_like(w, torch.nan) for name, w in whole.items()}
    for rank in range(size):
        kv = rank * 2 // size
        share = [whole["q"].chunk(size)[rank]]
        for name in "kv":
            heads = whole[name].view(2, 4, 6)
            share.append((heads[kv] if size >= 2 else heads).reshape(-1, 6))
        parts, _ = held_by({"a.qkv_proj": qkv(rank, size, torch.cat(share))})
        for name in whole:
            part = parts[f"a.{name}_proj.weight"]
            start, stop, total = part.extents[0]
            assert total == len(whole[name])
            rebuilt[name][start:stop] = part.values
    for name, values in whole.items():
        assert torch.equal(rebuilt[name], values)


def test_block_scales_are_cut_in_blocks() -> None:
    weight = torch.randn(12 * 4, 8).to(torch.float8_e4m3fn)
    scale = torch.randn(12, 2)
    parts, left_out = held_by(
        {"a.qkv_proj": qkv(0, 1, weight, weight_scale_inv=scale)}, block=[4, 4]
    )
    assert left_out == {}
    assert torch.equal(parts["a.k_proj.weight_scale_inv"].values, scale[8:10])
    assert parts["a.q_proj.weight_scale_inv"].extents == ((0, 8, 8), (0, 2, 2))
    _, left_out = held_by({"a.qkv_proj": qkv(0, 1, weight, weight_scale_inv=scale)}, block=[16, 16])
    assert "blocks of 16 rows straddle" in left_out["a.qkv_proj.weight_scale_inv"]


def test_gate_up_and_linears_are_cut_as_their_group_is() -> None:
    gate, up, down = torch.randn(8, 6), torch.randn(8, 6), torch.randn(6, 8)
    packed = torch.cat([gate[4:], up[4:]])
    parts, _ = held_by(
        {
            "mlp.gate_up_proj": Stand(
                {"weight": packed}, tp_group=group(1, 2), output_sizes=[8, 8]
            ),
            "mlp.down_proj": Stand(
                {"weight": down[:, 4:], "bias": torch.randn(6)},
                tp_group=group(1, 2),
                input_size_per_partition=4,
            ),
            "mlp.gate": Stand({"weight": torch.randn(4, 6)}),
        }
    )
    assert torch.equal(parts["mlp.up_proj.weight"].values, up[4:])
    assert parts["mlp.up_proj.weight"].extents == ((4, 8, 8), (0, 6, 6))
    assert parts["mlp.down_proj.weight"].extents == ((0, 6, 6), (4, 8, 8))
    assert parts["mlp.down_proj.bias"].extents == ((0, 6, 6),)
    assert parts["mlp.gate.weight"].extents == ((0, 4, 4), (0, 6, 6))


def experts(w13: torch.Tensor, w2: torch.Tensor, **attributes: Any) -> Stand:
    """Four of eight experts, the second half of each matrix."""
    usual: dict[str, Any] = dict(
        hidden_size=6, intermediate_size_per_partition=4, moe_tp_size=2, moe_tp_rank=1,
        moe_ep_rank=1, num_local_experts=4, quant_method=None,
    )  # fmt: skip
    return Stand({"w13_weight": w13, "w2_weight": w2}, **(usual | attributes))


def test_experts_are_numbered_over_the_whole_model() -> None:
    w13, w2 = torch.randn(4, 8, 6), torch.randn(4, 6, 4)
    parts, left_out = held_by({"mlp.experts": experts(w13, w2)})
    assert left_out == {} and len(parts) == 12
    up = parts["mlp.experts.5.up_proj.weight"]
    assert torch.equal(up.values, w13[1, 4:]) and up.extents == ((4, 8, 8), (0, 6, 6))
    down = parts["mlp.experts.7.down_proj.weight"]
    assert torch.equal(down.values, w2[3]) and down.extents == ((0, 6, 6), (4, 8, 8))
    method = SimpleNamespace(load_up_proj_weight_first=True)
    parts, _ = held_by({"mlp.experts": experts(w13, w2, quant_method=method)})
    assert torch.equal(parts["mlp.experts.5.up_proj.weight"].values, w13[1, :4])


@pytest.mark.parametrize(
    "attributes, settings, said",
    [
        ({"use_triton_kernels": True}, {}, "packed for a kernel (use_triton_kernels)"),
        ({"hidden_size": 8}, {}, "experts of [8, 6], where [8, 8] is expected"),
        ({"use_intel_amx_backend": True}, {}, "packed for AMX"),
        ({}, {"enable_eplb": True}, "the engine numbers places of experts, not experts"),
    ],
)
def test_what_a_kernel_packed_is_left_out(
    attributes: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    layer = experts(torch.randn(4, 8, 6), torch.randn(4, 6, 4), **attributes)
    parts, left_out = held_by({"mlp.experts": layer}, **settings)
    assert parts == {}
    assert left_out["mlp.experts.w13_weight"] == said


def test_shared_experts_behind_the_routed_ones_are_said_to_be_left_out() -> None:
    packed = torch.randn(5, 8, 6), torch.randn(5, 6, 4)
    layer = experts(*packed, _num_local_routed=4, num_local_experts=5)
    parts, left_out = held_by({"mlp.experts": layer})
    assert len(parts) == 12
    assert left_out["mlp.shared_experts.up_proj.weight"] == "held behind the routed experts"


def test_what_is_of_the_engine_alone_is_no_weight() -> None:
    layer = Stand({"weight": torch.randn(4), "k_scale": torch.ones(1)})
    scale: Any = layer.k_scale
    scale._skip_weight_check = True
    assert held_by({"attn": layer})[0].keys() == {"attn.weight"}


def test_quantised_values_without_their_scales_are_left_out() -> None:
    layer = Stand({"weight": torch.randn(4, 4).to(torch.float8_e4m3fn)})
    parts, left_out = held_by({"a.o_proj": layer})
    assert parts == {} and left_out == {"a.o_proj.weight": "quantised without scales by block"}


@pytest.mark.parametrize("rank, rows", [(0, (0, 64)), (1, (64, 100))])
def test_padding_of_the_vocabulary_is_left_out(rank: int, rows: tuple[int, int]) -> None:
    at = SimpleNamespace(org_vocab_start_index=rows[0], org_vocab_end_index=rows[1])
    weight = torch.randn(64, 6)
    parts, _ = held_by(
        {"embed_tokens": Stand({"weight": weight}, shard_indices=at, org_vocab_size=100)}
    )
    part = parts["embed_tokens.weight"]
    assert part.extents[0] == (*rows, 100)
    assert torch.equal(part.values, weight[: rows[1] - rows[0]])


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WeightSession:
    """One process of a server of one, which asks SGLang nothing."""
    version: Any = ModuleType("sglang.version")
    version.__version__ = "0"
    monkeypatch.setitem(sys.modules, "sglang.version", version)
    place = SimpleNamespace(rank=0, world=1, sizes={"tp": 1})
    monkeypatch.setattr(sglang_weight_session, "layout_of", lambda runner: place)
    monkeypatch.setattr(sglang_weight_session, "weight_version", lambda runner: "v1")
    monkeypatch.setenv("LAYERBISECT_WEIGHTS_FIRST", "")
    monkeypatch.delenv("LAYERBISECT_WEIGHTS_FIRST")
    return WeightSession(tmp_path)


def runner(**settings: Any) -> Any:
    model = torch.nn.Module()
    model.norm = Stand({"weight": torch.ones(4)})
    return SimpleNamespace(
        model=model,
        dtype=torch.bfloat16,
        is_draft_worker=False,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        **settings,
    )


def ask(
    session: WeightSession,
    sums: tuple[str, ...] = ("a",),
    action: str = "checksum",
    selector: str = "all",
    skip: list[str] | None = None,
    success: bool = True,
) -> None:
    """Let a process answer a request about its weights, as SGLang does."""
    payload = [SimpleNamespace(per_gpu_checksum=one) for one in sums]
    session.checked(
        SimpleNamespace(success=success, payload=payload if action == "checksum" else None),
        SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner())),
        SimpleNamespace(action=action, selector=selector, skip_tensor_list=skip),
    )


def written(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_checksum_writes_a_snapshot_where_the_weights_changed(
    session: WeightSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(session, action="snapshot")
    ask(session, selector="draft")
    ask(session, success=False)
    assert written(tmp_path) == []
    for _ in range(6):
        ask(session)
    ask(session, action="compare")
    assert written(tmp_path) == ["000"]
    snapshot = WeightSnapshot.open(tmp_path / "000")
    assert snapshot.names() == ("norm.weight",) and snapshot.problems == ()
    assert snapshot.info.weight_version == "v1" and snapshot.info.label == "rollout"
    ask(session, ("b",))
    assert written(tmp_path) == ["000", "001"]
    # the same again under another version, and what it held before
    monkeypatch.setattr(sglang_weight_session, "weight_version", lambda runner: "v2")
    ask(session, ("b",))
    ask(session, ("a",))
    ask(session, ("a",))
    assert written(tmp_path) == ["000", "001", "002", "003"]
    shutil.rmtree(tmp_path / "003")
    ask(session, ("a",))
    assert written(tmp_path) == ["000", "001", "002", "004"]


def test_checksums_that_do_not_tell_all_weights_spare_no_snapshot(
    session: WeightSession, tmp_path: Path
) -> None:
    # another stage of a pipeline is not among them
    for _ in range(2):
        ask(session, ("a", "b"))
    for _ in range(2):
        ask(session, skip=["norm"])
    assert written(tmp_path) == ["000", "001", "002", "003"]


def test_a_later_server_goes_on_counting(
    session: WeightSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(session)
    monkeypatch.delenv("LAYERBISECT_WEIGHTS_FIRST")
    ask(WeightSession(tmp_path))
    # a process of the same server counts as the one that started it
    ask(WeightSession(tmp_path), action="snapshot")
    assert written(tmp_path) == ["000", "001"]


def test_digests_on_request(
    session: WeightSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERBISECT_WEIGHTS_FORM", "digests")
    ask(session)
    assert not WeightSnapshot.open(tmp_path / "000").info.values


def test_an_error_is_in_the_snapshot_and_not_in_the_engine(
    session: WeightSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LAYERBISECT_WEIGHTS_FORM", "both")
    ask(session)
    (problem,) = WeightSnapshot.open(tmp_path / "000").problems
    assert "LAYERBISECT_WEIGHTS_FORM is 'both': set it to values or digests" in problem
    assert "LAYERBISECT_WEIGHTS_FORM" in caplog.text
    # not even where nothing can be written
    (tmp_path / "001").write_text("")
    ask(session, ("b",))
    assert "cannot write" in caplog.text


def test_the_plugin_hooks_nothing_else_for_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks: list[tuple[str, str]] = []

    class Kind(Enum):
        AFTER = "after"

    class Registry:
        @staticmethod
        def register(target: str, hook: Any, kind: Kind) -> None:
            hooks.append((target.rpartition(".")[2], kind.value))

    module: Any = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry, module.HookType = Registry, Kind
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("LAYERBISECT_CAPTURE", raising=False)
    monkeypatch.setenv("LAYERBISECT_WEIGHTS_FIRST", "0")
    monkeypatch.setenv("LAYERBISECT_WEIGHTS", str(tmp_path / "weights"))
    sglang_plugin.register()
    assert hooks == [("check_weights", "after")]
    assert not (tmp_path / "weights").exists()
