"""The real megatron-core on this machine's CPU: what everything that is said of it rests on."""

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from layerbisect.models import make_tiny
from layerbisect.planted_sglang import TRUTH
from scripts.megatron_engine import JobError, Rank, run_job
from scripts.megatron_model import Layout
from tests.planted_megatron import plant

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

TINY: dict[str, Any] = dict(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, vocab=256
)
SEQUENCES = [
    [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]
    for seed, length in enumerate((20, 33, 27, 12))
]
LAYOUTS = {
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "ep2": Layout(expert=2),
    "pp2 ep2": Layout(pipeline=2, expert=2),
    "pp2 in two chunks": Layout(pipeline=2, virtual=2),
    "tp2 ep2 etp1": Layout(tensor=2, expert=2, expert_tensor=1),
}
EXACT = {"bf16": False}
"""Float32, where layouts differ by rounding alone, and by little."""

Scores = NDArray[np.float64]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny(folder / family, family, **TINY)
        for family in ("qwen3_moe", "qwen3", "llama")
    }


def run(model: Path, layout: Layout, *steps: dict[str, Any], **config: Any) -> list[Scores]:
    """The log-probs of SEQUENCES, end to end, in each forward step."""
    whole = [{"do": "forward", "tokens": SEQUENCES, **step} for step in steps]
    first = run_job({"model": str(model), "config": config, "steps": whole}, layout)[0]
    return [np.concatenate(scores) for scores in first]


@cache
def transformers_scores(model: Path, dtype: torch.dtype) -> Scores:
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    scores: list[torch.Tensor] = []
    with torch.no_grad():
        for tokens in SEQUENCES:
            ids = torch.tensor([tokens])
            everything = judge(ids).logits[0, :-1].float().log_softmax(-1)
            scores.append(everything.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(scores).double().numpy()


FAULTS = [f"{name}:2" for name in TRUTH]


@cache
def one_rank(model: Path) -> list[Scores]:
    """Clean, with each fault, and clean again, in float32."""
    return run(model, Layout(), {}, *({"fault": fault} for fault in FAULTS), {}, **EXACT)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "llama"])
def test_computes_what_transformers_computes(models: dict[str, Path], family: str) -> None:
    model = models[family]
    got = one_rank(model)[0] if family == "qwen3_moe" else run(model, Layout(), {}, **EXACT)[0]
    np.testing.assert_allclose(got, transformers_scores(model, torch.float32), atol=1e-4)


def test_the_last_stage_has_the_tied_embedding_too(models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "tied"
    model.mkdir()
    config = json.loads((models["llama"] / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(models["llama"] / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    got = run(model, Layout(pipeline=2), {}, **EXACT)[0]
    np.testing.assert_allclose(got, transformers_scores(model, torch.float32), atol=1e-4)


def test_bf16_is_as_near_to_float32_as_transformers_is_and_repeats(
    models: dict[str, Path],
) -> None:
    model = models["qwen3_moe"]
    got, again, by_one = run(model, Layout(), {}, {}, {"micro_batch": 1})
    exact = transformers_scores(model, torch.float32)
    of_transformers = np.abs(transformers_scores(model, torch.bfloat16) - exact).mean()
    assert 0 < np.abs(got - exact).mean() < 1.5 * of_transformers
    assert np.corrcoef(got, exact)[0, 1] > 0.999
    np.testing.assert_array_equal(got, again)
    # padding on the right is not seen
    assert np.abs(got - by_one).mean() < of_transformers


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_and_without_faults(models: dict[str, Path], name: str) -> None:
    model, layout = models["qwen3_moe"], LAYOUTS[name]
    expected = one_rank(model)
    # with one KV head a rank there is nothing to regroup
    left_out = ["kv-heads-regrouped:2"] if layout.tensor > 1 else []
    faults = [fault for fault in FAULTS if fault not in left_out]
    got = run(model, layout, {}, *({"fault": fault} for fault in faults), {}, **EXACT)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-4)
    np.testing.assert_array_equal(got[0], got[-1])
    for fault, scores in zip(faults, got[1:-1], strict=True):
        alone = expected[1 + FAULTS.index(fault)]
        np.testing.assert_allclose(scores, alone, atol=1e-4, err_msg=fault)


def test_every_fault_shows_and_is_undone(models: dict[str, Path]) -> None:
    clean, *faulty, again = one_rank(models["qwen3_moe"])
    np.testing.assert_array_equal(clean, again)
    shown = {
        fault: np.abs(scores - clean).mean() for fault, scores in zip(FAULTS, faulty, strict=True)
    }
    assert min(shown.values()) > 1e-3, shown


@pytest.mark.parametrize("text", ["norm-weight", "norm-weight:4", "norm-weights:1", ""])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no such fault in a model of 4 layers"):
        with plant([_Chunk()], text):
            pass


class _Chunk(torch.nn.Module):
    class config:
        num_layers = 4

    decoder = None


def test_a_rank_that_fails_ends_the_others(models: dict[str, Path], tmp_path: Path) -> None:
    step = {"do": f"{__name__}:fail_on_one", "folder": str(tmp_path)}
    job = {"model": str(models["llama"]), "steps": [step]}
    with pytest.raises(JobError, match=r"rank 1 failed[\s\S]*OSError: the disk of rank 1"):
        run_job(job, Layout(pipeline=2))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    _await_gone(pids)


def fail_on_one(rank: Rank, step: dict[str, Any]) -> None:
    """A step, run in a rank's process: rank 1 fails once rank 0 is there, and waits for it."""
    folder = Path(step["folder"])
    (folder / str(rank.number)).write_text(str(os.getpid()))
    torch.distributed.barrier()
    if rank.number == 1:
        raise OSError("the disk of rank 1 is full")
    time.sleep(600)


def _await_gone(pids: Sequence[int]) -> None:
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.1)


def test_a_job_that_takes_too_long_is_ended(models: dict[str, Path]) -> None:
    job = {"model": str(models["llama"]), "steps": []}
    with pytest.raises(JobError, match="no end after 0.5 s"):
        run_job(job, timeout=0.5)


def test_scores_go_to_a_file_and_tokens_come_from_one(
    models: dict[str, Path], tmp_path: Path
) -> None:
    tokens, scores, job = (tmp_path / name for name in ("tokens.json", "out.json", "job.json"))
    tokens.write_text(json.dumps(SEQUENCES[:2]))
    step = {"do": "forward", "tokens": str(tokens), "logprobs": str(scores)}
    job.write_text(json.dumps({"model": str(models["llama"]), "steps": [step]}))
    ranks = run_job(job, Layout(tensor=2))
    assert json.loads(scores.read_text()) == ranks[0][0]
    assert [len(one) for one in ranks[0][0]] == [len(one) - 1 for one in SEQUENCES[:2]]
    assert ranks[1] == [None]
