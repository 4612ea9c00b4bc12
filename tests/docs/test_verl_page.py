"""The functions of the verl page, on a batch of tensors as verl names and shapes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from layerbisect.captures.record.call import Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.saved import read_rollout
from tests.docs.test_pages import block


def batch() -> SimpleNamespace:
    """Prompts padded on the left, responses on the right, a tool's token in the second."""
    return SimpleNamespace(
        batch={
            "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
            "responses": torch.tensor([[11, 12, 0, 0], [13, 14, 15, 16]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]),
            "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]),
            "rollout_log_probs": torch.tensor([[-1.0, -2.0, 0.0, 0.0], [-0.5, 0.0, -0.25, -4.0]]),
            "old_log_probs": torch.tensor([[-1.5, -2.0, 9.0, 9.0], [-0.5, 9.0, -0.5, -4.0]]),
        }
    )


def test_what_is_written_becomes_a_record_with_a_and_c(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("engines/verl.md", "<!-- verl: write -->"), names)
    exec(block("engines/verl.md", "<!-- verl: score -->"), names)
    saved = tmp_path / "rollout.jsonl"
    names["write_saved"](batch(), saved, 1.0)

    record = read_rollout(saved)
    first, second = record
    assert first.prompt.tolist() == [5, 6] and first.response.tolist() == [11, 12]
    assert second.prompt.tolist() == [7, 8, 9] and second.mask.tolist() == [1, 0, 1, 1]
    record.save(tmp_path / "run.safetensors")

    names["add_c"](tmp_path / "run.safetensors", saved, "raw")
    scored = ScoreRecord.open(tmp_path / "run.safetensors")
    assert scored.columns == ("A", "C0")
    assert isinstance(scored.info.columns["C0"], Scoring)
    np.testing.assert_array_equal(scored[0].scores["C0"], [-1.5, -2.0])
    np.testing.assert_array_equal(scored[1].scores["C0"][[0, 2, 3]], [-0.5, -0.5, -4.0])
