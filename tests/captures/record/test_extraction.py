"""Log-probs from logits: the shift, the normalizer over all shards, and the memory it takes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from layerbisect.captures.errors import TrainerError
from layerbisect.captures.record.extraction import (
    TokenScores,
    response_scores,
    vocab_parallel_scores,
)

ROOT = Path(__file__).parents[3]


def exact(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return torch.log_softmax(logits.double() / temperature, -1)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (3, 9))
    mask = torch.zeros(3, 9, dtype=torch.int64)
    mask[0, 3:], mask[1, 1:5], mask[2, 8:] = 1, 1, 1
    return (torch.randn(3, 9, 50) * 4).to(dtype), ids, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [None, 0.9])
def test_row_j_scores_token_j_plus_1(dtype: torch.dtype, temperature: float | None) -> None:
    logits, ids, mask = batch(dtype)
    found = response_scores(logits, ids, mask, temperature=temperature)
    assert [len(each.logprob) for each in found] == [6, 4, 1]
    logprobs = exact(logits, temperature or 1.0)
    for row, each in enumerate(found):
        for place, scores in zip(mask[row].nonzero()[:, 0].tolist(), range(99), strict=False):
            before, token = logprobs[row, place - 1], ids[row, place]
            assert each.logprob[scores] == pytest.approx(float(before[token]), abs=3e-6)
            # the model's own logit, whatever it is divided by
            assert each.logit[scores] == float(logits[row, place - 1, token].double())
            entropy = -float((before.exp() * before).sum())
            assert each.entropy[scores] == pytest.approx(entropy, abs=3e-6)


def test_padding_rows_of_the_vocabulary_are_left_out() -> None:
    logits, ids, mask = batch()
    padded = torch.cat([logits, torch.full((3, 9, 6), 20.0)], -1)
    whole = response_scores(logits, ids, mask)
    for found, expected in zip(response_scores(padded, ids, mask, vocab=50), whole, strict=True):
        np.testing.assert_array_equal(found.logprob, expected.logprob)
    worse = response_scores(padded, ids, mask)[0]
    assert np.abs(worse.logprob - whole[0].logprob).min() > 1


def test_a_masked_vocabulary_has_an_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [5.0, 5.0, 5.0]]])
    (found,) = response_scores(logits, torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))
    assert found.logprob[0] == pytest.approx(-np.log(2))
    assert found.entropy[0] == pytest.approx(np.log(2))


class Largest(TorchDispatchMode):
    """Remembers the largest float32 tensor that anything made, ``given`` apart."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0
        self.given = given.data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            made = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32
            if made and tensor.untyped_storage().data_ptr() != self.given:
                self.values = max(self.values, tensor.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_logits_never_exist_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 65, 1000).to(dtype).requires_grad_()
    ids = torch.randint(0, 1000, (4, 65))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    with Largest(logits) as largest:
        found = response_scores(logits, ids, mask, chunk=16_000)
    # 256 scored rows of 1000 would be 256,000
    assert 0 < largest.values <= 16_000
    whole = exact(logits.detach())[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose([f.logprob for f in found], whole.numpy(), atol=5e-6, rtol=0)


@given(data=st.data())
def test_shards_give_what_the_whole_vocabulary_gives(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.integers(3, 40)), data.draw(st.integers(0, 7))
    cuts = data.draw(st.sets(st.integers(1, vocab - 1), max_size=4))
    bounds = [0, *sorted(cuts), vocab]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 5
    targets = torch.arange(rows) * 7 % vocab
    # an engine pads the last shard
    padded = torch.cat([logits, torch.full((rows, 5), 30.0)], 1)
    stops = [*bounds[1:-1], vocab + 5]
    shards = [(a, padded[:, a:b]) for a, b in zip(bounds[:-1], stops, strict=True)]
    order = data.draw(st.permutations(shards))
    whole = exact(logits).gather(1, targets[:, None])[:, 0].numpy()
    found = vocab_parallel_scores(order, targets, vocab=vocab, chunk=data.draw(st.integers(1, 99)))
    np.testing.assert_allclose(found.logprob, whole, atol=5e-6, rtol=0)


def test_normalizing_each_shard_by_itself_is_not_what_is_returned() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(32, 64), torch.randint(0, 64, (32,))
    shards = [(start, logits[:, start : start + 16]) for start in range(0, 64, 16)]
    found = vocab_parallel_scores(shards, targets).logprob
    whole = exact(logits).gather(1, targets[:, None])[:, 0].numpy()
    local = [exact(logits[i : i + 1].view(1, 4, 16))[0].view(-1)[t] for i, t in enumerate(targets)]
    # a quarter of the vocabulary has about a quarter of the mass
    assert np.abs(np.array([float(v) for v in local]) - whole).mean() == pytest.approx(
        np.log(4), abs=0.2
    )
    np.testing.assert_allclose(found, whole, atol=1e-6)


RANK = """
import sys
import torch
import torch.distributed as dist
from layerbisect.captures.errors import TrainerError
from layerbisect.captures.record.extraction import vocab_parallel_scores

torch.set_num_threads(1)
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
logits, targets = (torch.randn(11, 70) * 3).bfloat16(), torch.randint(0, 70, (11,))
# 70 tokens in two shards of 40, the second padded
padded = torch.cat([logits, torch.full((11, 10), 9.0).bfloat16()], 1)
shard = (40 * rank, padded[:, 40 * rank : 40 * rank + 40])
found = vocab_parallel_scores([shard], targets, vocab=70, group=dist.group.WORLD, chunk=100)
whole = torch.log_softmax(logits.double(), -1)
chosen = whole.gather(1, targets[:, None])[:, 0]
assert (torch.from_numpy(found.logprob) - chosen).abs().max() < 3e-6, found.logprob - chosen
entropy = -(whole.exp() * whole).sum(-1)
assert (torch.from_numpy(found.entropy) - entropy).abs().max() < 3e-6
try:
    vocab_parallel_scores([(0, shard[1])], targets, vocab=80, group=dist.group.WORLD)
except TrainerError as error:
    assert "overlap" in str(error), error
else:
    raise AssertionError("two first shards are no vocabulary")
dist.destroy_process_group()
"""


def test_two_processes_share_one_normalizer(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RANK, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_what_does_not_fit_is_refused() -> None:
    logits, ids, mask = batch()
    for changed, message in (
        (lambda: response_scores(logits[0], ids, mask), r"logits are \[9, 50\]"),
        (lambda: response_scores(logits[:, 1:], ids, mask), r"\[3, 8, 50\] for input_ids \[3, 9\]"),
        (lambda: response_scores(logits, ids, mask[:, 1:]), r"mask is \[3, 8\]"),
        (lambda: response_scores(logits, ids, mask * 2), "value 2; give 0 or 1"),
        (lambda: response_scores(logits, ids, mask.float() / 2), "value 0.5"),
        (lambda: response_scores(logits, ids, torch.ones_like(mask)), "input position 0"),
        (lambda: response_scores(logits, ids + 2, mask), "token ID 5[01] is outside .* of 50"),
        (lambda: response_scores(logits, ids, mask, vocab=30), "outside the vocabulary of 30"),
        (lambda: response_scores(logits, ids, mask, vocab=60), "hold 50 rows of a vocabulary of 6"),
        (lambda: response_scores(logits, ids, mask, temperature=0.0), "temperature is 0.0"),
        (
            lambda: vocab_parallel_scores([(0, logits[0]), (40, logits[0])], ids[0]),
            "hold 100 rows of a vocabulary of 90",
        ),
        (lambda: vocab_parallel_scores([(0, logits[0])], ids[0, 1:]), "for 8 targets"),
        (lambda: vocab_parallel_scores([], ids[0]), r"logits are \[\]"),
    ):
        with pytest.raises(TrainerError, match=message):
            changed()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_is_named(value: float) -> None:
    logits, ids, mask = batch()
    logits[1, 2, 7] = value
    with pytest.raises(TrainerError, match=r"sequence 1 at input position 3 \(token \d+\) is nan"):
        response_scores(logits, ids, mask)
    with pytest.raises(TrainerError, match=r"row 2 \(token"):
        vocab_parallel_scores([(0, logits[1])], ids[1])


def test_nothing_to_score_is_nothing() -> None:
    logits, ids, mask = batch()
    found = response_scores(logits, ids, mask * 0)
    assert [len(each.logprob) for each in found] == [0, 0, 0]
    assert isinstance(found[0], TokenScores)
