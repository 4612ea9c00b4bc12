"""The recorder of forward hooks: it records what it sees, and never disturbs the engine."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from layerbisect.captures.batch import Batch
from layerbisect.captures.format import CaptureInfo, PointSeen, SequenceInfo, TensorHeader
from layerbisect.captures.points import Point
from layerbisect.captures.recorder import Recorder, Tap
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter, Scores

HIDDEN, HEAD_DIM, VOCAB = 8, 4, 11


class Layer(nn.Module):
    """A layer whose MLP writes into its input, as engines with fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, 2 * HEAD_DIM)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        mixed: torch.Tensor = self.mlp(torch.tanh(self.query(hidden))) * scale
        hidden += mixed
        return hidden


class Toy(nn.Module):
    """An embedding, two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        normed: torch.Tensor = self.norm(hidden)
        return normed


TAPS = (
    Tap(r"embed", "embed", lambda args, kwargs, output: output),
    Tap(
        r"layers\.(?P<layer>\d+)",
        "layers.{layer}.input",
        lambda args, kwargs, output: args[0],
        when="before",
    ),
    Tap(
        r"layers\.(?P<layer>\d+)\.query",
        "layers.{layer}.attn.q",
        lambda args, kwargs, output: output,
    ),
    Tap(r"norm", "final_norm", lambda args, kwargs, output: output, how="derived"),
)
POINTS = (
    "embed",
    "layers.0.input",
    "layers.0.attn.q",
    "layers.1.input",
    "layers.1.mid",
    "final_norm",
)
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def batch_of(tokens: torch.Tensor, names: Sequence[str] = ("a", "b"), start: int = 0) -> Batch:
    """Record every row of a rectangular batch."""
    count, length = tokens.shape
    rows = Rows.of(
        np.repeat(np.arange(count), length),
        np.tile(np.arange(start, start + length), count),
        tokens.reshape(-1).numpy(),
    )
    sequences = tuple(SequenceInfo(name) for name in names)
    return Batch("prefill", sequences, rows, tokens.numel(), np.arange(tokens.numel()))


@pytest.fixture
def model() -> Toy:
    """A model with fixed weights."""
    torch.manual_seed(0)
    return Toy()


@pytest.fixture
def recorder(tmp_path: Path, info: CaptureInfo) -> Recorder:
    """A recorder that is not attached yet."""
    writer = CaptureWriter(tmp_path / "capture", info)
    return Recorder(writer, POINTS, TAPS, head_dim=HEAD_DIM)


def record(recorder: Recorder, model: nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    recorder.begin(batch_of(tokens))
    with torch.no_grad():
        result: torch.Tensor = model(tokens)
    recorder.end()
    return result


def finished(recorder: Recorder) -> Capture:
    recorder.detach()
    recorder.writer.finish()
    return Capture.open(recorder.writer.directory)


def manual(model: Toy, tokens: torch.Tensor = TOKENS) -> dict[str, torch.Tensor]:
    """Compute what the recorder must have seen."""
    with torch.no_grad():
        hidden = model.embed(tokens)
        seen = {"embed": hidden.clone()}
        for i, layer in enumerate(model.layers):
            seen[f"layers.{i}.input"] = hidden.clone()
            seen[f"layers.{i}.attn.q"] = layer.get_submodule("query")(hidden)
            hidden = layer(hidden, scale=0.5)
        seen["final_norm"] = model.norm(hidden)
    return seen


def test_records_what_the_modules_see(recorder: Recorder, model: Toy) -> None:
    expected = manual(model)
    recorder.attach(model)
    result = record(recorder, model)
    torch.testing.assert_close(result, expected["final_norm"], rtol=0, atol=0)
    capture = finished(recorder)
    for point in ("embed", "layers.0.input", "layers.1.input", "final_norm"):
        # the layers write into their input after the hook saw it
        np.testing.assert_array_equal(
            capture.read(point), expected[point].reshape(6, HIDDEN).numpy()
        )
    query = capture.read("layers.0.attn.q")
    np.testing.assert_array_equal(
        query, expected["layers.0.attn.q"].reshape(6, 2, HEAD_DIM).numpy()
    )
    assert capture.points["final_norm"] == PointSeen("derived")
    assert capture.points["embed"] == PointSeen("observed")
    assert capture.points["layers.1.mid"] == PointSeen(
        "not_observable", "no module of this model shows it"
    )
    assert capture.finished and capture.problems == ()
    assert list(capture.passes[0].ranks[0].tensors) == [p for p in POINTS if p != "layers.1.mid"]


def test_nothing_is_recorded_outside_a_pass(recorder: Recorder, model: Toy) -> None:
    recorder.attach(model)
    model(TOKENS)
    recorder.end()
    assert not recorder.wants("embed") and recorder.batch is None
    record(recorder, model)
    model(TOKENS)
    assert len(finished(recorder).rows) == 6


def test_detaching_removes_every_hook(recorder: Recorder, model: Toy) -> None:
    recorder.attach(model)
    assert any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    recorder.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    recorder.detach()


def test_only_chosen_rows_are_kept(recorder: Recorder, model: Toy) -> None:
    """Padding and other people's requests are in the grid and not in the rows."""
    recorder.attach(model)
    rows = Rows.of([0, 0], [1, 2], [3, 2])
    recorder.begin(Batch("decode", (SequenceInfo("mine"),), rows, 6, np.array([2, 1])))
    assert recorder.wants("embed") and not recorder.wants("layers.0.mid")
    model(TOKENS)
    recorder.end()
    capture = finished(recorder)
    expected = manual(model)["embed"].reshape(6, HIDDEN)[[2, 1]]
    np.testing.assert_array_equal(capture.read("embed"), expected.numpy())
    assert list(capture.phases) == ["decode", "decode"]


def test_a_pass_without_chosen_rows_is_not_written(recorder: Recorder, model: Toy) -> None:
    recorder.attach(model)
    recorder.begin(Batch("decode", (), Rows.empty(), 6, np.empty(0, np.int64)))
    assert not recorder.wants("embed")
    model(TOKENS)
    recorder.end()
    record(recorder, model)
    assert len(finished(recorder).passes) == 1


def test_requires_grad_and_compute_graph_do_not_matter(recorder: Recorder, model: Toy) -> None:
    # a weight's gradient needs the input that the toy's layers write over
    model.layers.requires_grad_(False)
    recorder.attach(model)
    recorder.begin(batch_of(TOKENS))
    loss = model(TOKENS).sum()
    recorder.end()
    loss.backward()
    assert model.embed.weight.grad is not None
    assert len(finished(recorder).read("embed")) == 6


def failing(*_: object) -> Any:
    raise RuntimeError("no such attribute in this version")


@pytest.mark.parametrize(
    ("pick", "sentence"),
    [
        (failing, "embed: RuntimeError: no such attribute in this version"),
        (lambda *_: "text", "embed: AttributeError"),
        (lambda *_: torch.zeros(5, HIDDEN), r"embed: ValueError: shape \[5, 8\] does not have 6"),
        # divides evenly, and is wrong all the same
        (lambda *_: torch.zeros(12, HIDDEN), r"embed: ValueError: shape \[12, 8\] does not have 6"),
        (lambda *_: torch.zeros(()), r"embed: ValueError: shape \[\] does not have 6 rows"),
        (lambda *_: torch.zeros(6, HIDDEN).to(torch.complex64), "embed is torch.complex64"),
        (lambda *_: (_ for _ in ()).throw(MemoryError("full")), "embed: MemoryError: full"),
    ],
)
def test_an_error_in_a_tap_costs_its_point_alone(
    tmp_path: Path,
    info: CaptureInfo,
    model: Toy,
    caplog: pytest.LogCaptureFixture,
    pick: Callable[..., Any],
    sentence: str,
) -> None:
    expected = manual(model)["final_norm"]
    writer = CaptureWriter(tmp_path / "capture", info)
    recorder = Recorder(writer, POINTS, (Tap("embed", "embed", pick), *TAPS[1:]), head_dim=4)
    recorder.attach(model)
    with caplog.at_level(logging.WARNING, "layerbisect"):
        result = record(recorder, model)
    assert re.search(sentence, caplog.text)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    capture = finished(recorder)
    assert any(re.search(sentence, problem) for problem in capture.problems)
    assert any(
        "1 points were not seen in a prefill pass, embed first" in p for p in capture.problems
    )
    assert not capture.has("embed").any() and capture.has("final_norm").all()


def test_a_header_that_does_not_fit_costs_its_point_alone(
    tmp_path: Path, info: CaptureInfo, model: Toy
) -> None:
    def header_of(point: Point) -> TensorHeader:
        return TensorHeader(point.dims, {"head": (0, 1, 2)} if "head" in point.dims else {})

    writer = CaptureWriter(tmp_path / "capture", info)
    recorder = Recorder(writer, POINTS, TAPS, head_dim=HEAD_DIM, header_of=header_of)
    recorder.attach(model)
    record(recorder, model)
    capture = finished(recorder)
    assert any("does not fit [row=6, head=1, channel=any]" in p for p in capture.problems)
    assert not capture.has("layers.0.attn.q").any() and capture.has("final_norm").all()


def test_a_point_that_is_not_there_is_not_seen(
    tmp_path: Path, info: CaptureInfo, model: Toy
) -> None:
    writer = CaptureWriter(tmp_path / "capture", info)
    taps = (Tap("embed", "embed", lambda *_: None), *TAPS[1:])
    recorder = Recorder(writer, ("embed", "final_norm"), taps, head_dim=HEAD_DIM)
    recorder.attach(model)
    record(recorder, model)
    record(recorder, model)
    capture = finished(recorder)
    assert capture.problems == ("rank 0: 1 points were not seen in a prefill pass, embed first",)


def test_a_hook_that_never_fires_is_said(recorder: Recorder, model: Toy) -> None:
    class Skips(Toy):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.norm(self.embed(tokens))  # type: ignore[no-any-return]

    skips = Skips()
    recorder.attach(skips)
    record(recorder, skips)
    capture = finished(recorder)
    assert capture.problems == (
        "rank 0: 3 points were not seen in a prefill pass, layers.0.input first",
    )
    assert not capture.has("layers.0.input").any()


def test_a_pass_without_any_hook_is_said(recorder: Recorder, model: Toy) -> None:
    """As when a decode step is replayed from a CUDA graph: its rows are known, its points not."""
    recorder.attach(model)
    record(recorder, model)
    recorder.begin(batch_of(TOKENS[:, :1], start=3))
    recorder.end()
    capture = finished(recorder)
    assert len(capture.rows) == 8
    np.testing.assert_array_equal(capture.has("embed"), [True] * 6 + [False] * 2)
    assert len(capture.problems) == 1
    assert (
        "no hook fired in a prefill pass; was it replayed from a CUDA graph" in capture.problems[0]
    )


@pytest.mark.parametrize("ending", ["begin", "detach"])
def test_a_pass_that_broke_off_is_dropped_and_said(
    recorder: Recorder, model: Toy, ending: str
) -> None:
    recorder.attach(model)
    record(recorder, model)
    recorder.begin(batch_of(TOKENS + 1, names=("c", "d")))
    recorder.score(Scores(Rows.of([0], [1], [3]), np.array([-1.0])))
    with pytest.raises(IndexError):
        model(TOKENS + VOCAB)
    if ending == "begin":
        record(recorder, model)
    capture = finished(recorder)
    assert capture.problems == (
        "rank 0: a forward pass broke off before its end and was not recorded",
    )
    assert [s.name for s in capture.sequences] == ["a", "b"]
    assert len(capture.scores.rows) == 0
    assert len(capture.rows) == (12 if ending == "begin" else 6)


def test_a_point_computed_twice_is_said_and_the_first_is_kept(
    recorder: Recorder, model: Toy
) -> None:
    recorder.attach(model)
    recorder.begin(batch_of(TOKENS))
    model(TOKENS)
    model(TOKENS.flip(0))
    recorder.end()
    capture = finished(recorder)
    assert "rank 0: embed was computed twice in one pass; the first was kept" in capture.problems
    expected = manual(model)["embed"].reshape(6, HIDDEN)
    np.testing.assert_array_equal(capture.read("embed"), expected.numpy())


def test_points_may_come_from_elsewhere_than_taps(recorder: Recorder, model: Toy) -> None:
    recorder.expect("layers.1.mid", "derived")
    recorder.attach(model)
    for recorded in (True, False):
        recorder.begin(batch_of(TOKENS))
        model(TOKENS)
        if recorded:
            recorder.record("layers.1.mid", lambda: torch.ones(2, 3, HIDDEN))
            recorder.record("layers.0.mid", lambda: failing())
        recorder.end()
    capture = finished(recorder)
    assert capture.points["layers.1.mid"] == PointSeen("derived")
    assert capture.has("layers.1.mid").sum() == 6
    assert len(capture.problems) == 1 and "layers.1.mid first" in capture.problems[0]


def test_scores_are_written_with_the_pass(recorder: Recorder, model: Toy) -> None:
    recorder.attach(model)
    recorder.score(Scores(Rows.of([0], [9], [9]), np.array([-9.0])))
    recorder.begin(batch_of(TOKENS))
    recorder.score(Scores(Rows.of([0], [1], [2]), np.array([-1.0])))
    recorder.score(Scores(Rows.empty(), np.empty(0)))
    recorder.score(Scores(Rows.of([1, 1], [1, 2], [5, 6]), np.array([-2.0, -3.0], np.float32)))
    model(TOKENS)
    recorder.end()
    capture = finished(recorder)
    np.testing.assert_array_equal(capture.scores.logprob, [-1, -2, -3])


@pytest.mark.parametrize("broken", [OSError(28, "No space left on device"), ValueError("odd")])
def test_a_capture_that_cannot_be_written_does_not_stop_the_engine(
    recorder: Recorder, model: Toy, monkeypatch: pytest.MonkeyPatch, broken: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise broken

    expected = manual(model)["final_norm"]
    monkeypatch.setattr("os.replace", refuse)
    recorder.attach(model)
    recorder.begin(batch_of(TOKENS))
    torch.testing.assert_close(record(recorder, model), expected, rtol=0, atol=0)
    recorder.detach()
    assert recorder.batch is None


def test_a_table_that_is_wrong_does_not_stop_the_engine(
    tmp_path: Path, info: CaptureInfo, model: Toy
) -> None:
    writer = CaptureWriter(tmp_path / "capture", info)
    taps = (Tap("embed", "layers.{layer}.input", lambda *_: None),)
    recorder = Recorder(writer, POINTS, taps, head_dim=HEAD_DIM)
    recorder.attach(model)
    record(recorder, model)
    assert "rank 0: attaching hooks: KeyError: 'layer'" in finished(recorder).problems
