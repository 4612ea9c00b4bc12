"""C collected from real small models: alone, padded, packed, and by a callable."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerbisect.captures.errors import LayerBisectError, RecordError, TrainerError
from layerbisect.captures.record.alignment import aligned_scores
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.extraction import TokenScores
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.trainer import score
from layerbisect.captures.record.transformers_scores import model_scores
from layerbisect.loading import load_model

VOCAB = 512


def calls(number: int = 4, **fields: Any) -> list[Call]:
    random = np.random.default_rng(0)
    made = []
    for i in range(number):
        response = random.integers(0, VOCAB, 5 + 2 * i)
        scores = {"A": np.full(len(response), -1.5)}
        asked = random.integers(0, VOCAB, 3 + i)
        made.append(Call.of(f"call-{i}", asked, response, scores, **fields))
    return made


def record(of: list[Call] | None = None) -> ScoreRecord:
    return ScoreRecord(RecordInfo(model="m", columns={"A": Scoring()}), of or calls())


@pytest.fixture(scope="module")
def load(small_qwen3_dir: Path, small_moe_dir: Path) -> Callable[..., Any]:
    """A dense or a mixture-of-experts model, by dtype and attention; each loaded once."""
    loaded: dict[tuple[str, str, str], Any] = {}

    def get(dtype: str = "float32", attention: str = "sdpa", family: str = "qwen3") -> Any:
        directory = small_moe_dir if family == "moe" else small_qwen3_dir
        key = (dtype, attention, family)
        if key not in loaded:
            loaded[key] = load_model(directory, dtype=dtype, attention=attention)
        return loaded[key].eval()

    return get


def by_hand(model: Any, call: Call) -> Any:
    """The method's own lines, for one call: shift, float32, gather."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(call.tokens)[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(call.prompt) - 1 : -1].float(), -1)
    return logprobs.gather(1, torch.from_numpy(call.response)[:, None])[:, 0].double().numpy()


@pytest.mark.parametrize("family", ["qwen3", "moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c_is_what_the_model_gives_each_token(
    load: Callable[..., Any], dtype: str, family: str, tmp_path: Path
) -> None:
    model = load(dtype, family=family)
    seen: list[tuple[int, int]] = []
    score(record(), model, tmp_path / "r", weight_version="7", progress=lambda *n: seen.append(n))
    found = ScoreRecord.open(tmp_path / "r")
    assert found.columns == ("A", "C0", "C0.logit", "C0.entropy", "C1", "C.grad")
    for call in found:
        np.testing.assert_allclose(call.scores["C0"], by_hand(model, call), atol=2e-6)
        np.testing.assert_array_equal(call.scores["C0"], call.scores["C1"])
        np.testing.assert_array_equal(call.scores["C0"], call.scores["C.grad"])
        assert (0 < call.scores["C0.entropy"]).all()
        assert (call.scores["C0.entropy"] <= np.log(VOCAB)).all()
    how = found.info.columns["C1"]
    assert how.engine.startswith("transformers 5.")
    assert (how.weight_version, how.packed, how.definition) == ("7", False, "raw")
    assert how.batches == tuple((name,) for name in found.names)
    assert how.settings["dtype"] == dtype
    assert how.settings["attention"] == "sdpa"
    assert how.settings["gradients"] == "off"
    assert found.info.columns["C.grad"].settings["gradients"] == "on"
    assert how.digest == found.info.columns["C.grad"].digest is not None
    assert seen == [(n, 12) for n in range(1, 13)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_batches_score_each_call_as_if_alone(
    load: Callable[..., Any], attention: str, layout: str
) -> None:
    model = load("float32", attention)
    chosen: dict[str, Any] = {"packed": True} if layout == "packed" else {"padding": layout}
    # the last batch is smaller
    found = score(record(), model, repeats=1, grad=False, batch_size=3, **chosen)
    for call in found:
        np.testing.assert_allclose(call.scores["C0"], by_hand(model, call), atol=2e-5)
    how = found.info.columns["C0"]
    assert how.batches == (("call-0", "call-1", "call-2"), ("call-3",))
    assert how.packed == (layout == "packed")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", ["restart", "go on"])
@pytest.mark.parametrize("layout", ["alone", "right", "left", "packed"])
def test_documents_in_one_call_do_not_see_each_other(
    load: Callable[..., Any], attention: str, positions: str, layout: str
) -> None:
    model = load("float32", attention)
    first = calls(1)[0]
    total = len(first.tokens)
    counted = np.concatenate([np.arange(2), np.arange(total - 2)])
    two = Call.of(
        "two",
        first.prompt,
        first.response,
        {"A": first.scores["A"]},
        starts=[0, 2],
        positions=counted if positions == "restart" else None,
    )
    chosen: dict[str, Any] = {"packed": True} if layout == "packed" else {}
    chosen |= {"padding": layout} if layout in ("right", "left") else {}
    size = 1 if layout == "alone" else 5
    found = score(record([two, *calls()]), model, repeats=1, grad=False, batch_size=size, **chosen)
    # rotary positions are relative, so both ways of counting score alike
    second = Call.of("second", two.tokens[2:3], two.tokens[3:], {})
    np.testing.assert_allclose(found[0].scores["C0"], by_hand(model, second), atol=3e-5)
    whole = Call.of("whole", two.prompt, two.response, {})
    assert np.abs(found[0].scores["C0"] - by_hand(model, whole)).max() > 0.1
    for call in found[1:]:
        np.testing.assert_allclose(call.scores["C0"], by_hand(model, call), atol=3e-5)


def test_positions_that_jump_are_not_taken_for_documents(load: Callable[..., Any]) -> None:
    first = calls(1)[0]
    jumped = np.arange(len(first.tokens)) + 40 * (np.arange(len(first.tokens)) > 1)
    scores = {"A": first.scores["A"]}
    call = Call.of("jumped", first.prompt, first.response, scores, positions=jumped)
    found, eager = (
        score(record([call]), load("float32", kind), repeats=1, grad=False)[0].scores["C0"]
        for kind in ("sdpa", "eager")
    )
    np.testing.assert_allclose(found, eager, atol=2e-5)
    apart = Call.of("apart", call.tokens[2:3], call.tokens[3:], {})
    assert np.abs(found - by_hand(load(), apart)).max() > 0.1


def test_the_gradient_forward_runs_in_the_mode_that_the_trainer_had(
    load: Callable[..., Any],
) -> None:
    model = load()
    model.train()
    # a trainer that freezes a part of its model
    model.model.layers[1].eval()
    before = {name: part.training for name, part in model.named_modules()}
    seen = []
    hook = model.register_forward_hook(
        lambda m, a, out: seen.append(
            (
                m.training,
                m.model.layers[0].training,
                m.model.layers[1].training,
                torch.is_grad_enabled(),
                out.logits.requires_grad,
            )
        )
    )
    try:
        found = score(record(calls(1)), model)
    finally:
        hook.remove()
    frozen = (False, False, False, False, False)
    assert seen == [frozen, frozen, (True, True, False, True, True)]
    assert {name: part.training for name, part in model.named_modules()} == before
    assert all(p.grad is None for p in model.parameters())
    assert found.info.columns["C.grad"].settings["mode"] == "train"
    assert found.info.columns["C0"].settings["mode"] == "eval"


def test_dropout_moves_c_grad_alone_and_draws_nothing_from_the_trainer(
    load: Callable[..., Any],
) -> None:
    model = load("float32", "eager")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    model.train()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    try:
        found = score(record(calls(1)), model)
    finally:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
    call = found[0]
    np.testing.assert_array_equal(call.scores["C0"], call.scores["C1"])
    assert np.abs(call.scores["C.grad"] - call.scores["C0"]).max() > 0.01
    assert torch.equal(torch.get_rng_state(), state)


class Breaks(Exception):
    """What a forward may raise, such as lack of memory."""


def test_modes_come_back_and_the_file_keeps_what_it_had_when_a_forward_fails(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    model = load()
    model.train()
    model.lm_head.eval()
    before = {name: part.training for name, part in model.named_modules()}
    random = torch.get_rng_state()
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        torch.rand(1)
        if passes > 6:
            raise Breaks

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(Breaks):
        score(record(), model, tmp_path / "r")
    hook.remove()
    assert {name: part.training for name, part in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), random)
    kept = ScoreRecord.open(tmp_path / "r")
    assert kept.columns == ("A", "C0", "C0.logit", "C0.entropy")
    saved = list(kept)
    # and collecting goes on where it broke off
    whole = score(kept, model, tmp_path / "r")
    assert whole.columns == ("A", "C0", "C0.logit", "C0.entropy", "C1", "C.grad")
    np.testing.assert_array_equal(whole[3].scores["C0"], saved[3].scores["C0"])
    with pytest.raises(RecordError, match="has C0, C1, C.grad already"):
        score(whole, model)


def test_a_column_is_not_repeated_by_other_weights(load: Callable[..., Any]) -> None:
    model = load()
    found = score(record(calls(1)), model, repeats=1, grad=False)
    # the last of all bytes
    weight = model.lm_head.weight.data
    kept = weight[-1, -1].item()
    weight[-1, -1] += 1e-3
    try:
        said = "C0 was scored by weights of digest .{8} and the trainer has .{8} now; load the"
        with pytest.raises(RecordError, match=said) as caught:
            score(found, model)
        # the advice is code that runs
        advised = str(caught.value).split("`")[1].removesuffix(".save(COPY)")
        afresh = eval(advised, {"record": found})
        assert score(afresh, model, repeats=1).columns == found.columns + ("C.grad",)
    finally:
        weight[-1, -1] = kept
    assert "C1" in score(found, model).columns


def test_a_column_is_not_repeated_in_another_dtype(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "r.safetensors"
    score(record(calls(1)), load("bfloat16"), path, repeats=1, grad=False)
    said = (
        "^C0 was scored in bfloat16 and the trainer computes in float32 now; load it in bfloat16 "
        ".--dtype bfloat16. to add repeats, or score a copy that has no C, made by "
        f"`ScoreRecord.open.'{path}'..without.'C0', 'C0.logit', 'C0.entropy'..save.COPY.`$"
    )
    with pytest.raises(RecordError, match=said):
        score(ScoreRecord.open(path), load("float32"), path)


def test_weights_that_change_meanwhile_are_no_frozen_trainer(
    load: Callable[..., Any], tmp_path: Path
) -> None:
    model = load()
    norm = model.model.norm.weight
    passes = 0

    def update(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            norm.data[3] += 0.25

    hook = model.register_forward_hook(update)
    with pytest.raises(TrainerError, match="the weights changed while C1 was scored"):
        score(record(calls(1)), model, tmp_path / "r")
    hook.remove()
    norm.data[3] -= 0.25
    assert "C1" not in ScoreRecord.open(tmp_path / "r").columns


def test_a_callable_may_return_logits_log_probs_or_both(load: Callable[..., Any]) -> None:
    model = load()

    def logits(some: Sequence[Call]) -> list[Any]:
        return [
            model(input_ids=torch.from_numpy(c.tokens)[None], use_cache=False).logits[0]
            for c in some
        ]

    def logprobs(some: Sequence[Call]) -> list[Any]:
        return [torch.from_numpy(by_hand(model, c)).requires_grad_() for c in some]

    def both(some: Sequence[Call]) -> Sequence[Any]:
        return model_scores(model, some, temperature=None)

    expected = score(record(), model)
    for scorer, companions in ((logits, True), (logprobs, False), (both, True)):
        model.train()
        found = score(record(), scorer, module=model, engine="mine 1", batch_size=3)
        assert model.training
        assert ("C0.logit" in found.columns) == companions
        for call, other in zip(found, expected, strict=True):
            for column in ("C0", "C1", "C.grad"):
                np.testing.assert_allclose(call.scores[column], other.scores[column], atol=2e-5)
            if companions:
                logit = call.scores["C0.logit"]
                np.testing.assert_allclose(logit, other.scores["C0.logit"], atol=2e-5)
        assert found.info.columns["C0"].engine == "mine 1"
        assert found.info.columns["C0"].digest == expected.info.columns["C0"].digest


def test_a_callable_with_temperature_is_told_from_the_raw_score(load: Callable[..., Any]) -> None:
    model = load()
    raw = score(record(), model, repeats=1, grad=False)
    for temperature in (0.9, 0.8):

        def scorer(some: Sequence[Call], t: float = temperature) -> Sequence[TokenScores]:
            return model_scores(model, some, temperature=t)

        found = score(record(), scorer, repeats=1, grad=False, definition="temperature")
        assert found.info.columns["C0"].definition == "temperature"
        for call, other in zip(found, raw, strict=True):
            np.testing.assert_array_equal(call.scores["C0.logit"], other.scores["C0.logit"])
            assert np.abs(call.scores["C0"] - other.scores["C0"]).mean() > 0.05


def row(call: Call, change: Callable[[np.ndarray], Any] = lambda values: values) -> Any:
    return change(np.full(len(call.response), -1.0))


def placed(place: int, value: float) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values[place] = value
        return values

    return change


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (lambda some: None, r"returned None .NoneType. in C0 for 2 calls from"),
        (lambda some: (row(c) for c in some), r"returned <generator.* .generator. in C0 for 2"),
        (lambda some: [None for c in some], r"C0: call 'call-0' came back with scores of object"),
        (lambda some: [row(c) for c in some][1:], r"returned 1 rows of scores in C0 for 2 calls"),
        (lambda some: [row(c, lambda v: v[1:]) for c in some], r"C0: call 'call-0' .* \[4\] for 5"),
        (lambda some: [row(c, placed(2, np.nan)) for c in some], r"nan at response position 2"),
        (lambda some: [row(c, placed(4, -np.inf)) for c in some], r"-inf at response position 4"),
        (lambda some: [row(c)[None, None] for c in some], r"\[1, 1, 5\] for 5 response tokens"),
        (lambda some: ["what" for _ in some], "scores of <U4"),
        (lambda some: [np.zeros((3, VOCAB)) for _ in some], r"logits \[3, 512\] for its 8 tokens"),
        (lambda some: [np.zeros((len(c.tokens), 9)) for c in some], "outside the vocabulary of 9"),
        (
            lambda some: [np.full((len(c.tokens), VOCAB), np.nan) for c in some],
            "C0: call 'call-0' .* nan at response position 0",
        ),
    ],
)
def test_what_is_no_score_of_these_calls_is_refused(
    scorer: Any, message: str, tmp_path: Path
) -> None:
    record().save(tmp_path / "r")
    before = (tmp_path / "r").read_bytes()
    with pytest.raises(TrainerError, match=message):
        score(ScoreRecord.open(tmp_path / "r"), scorer, tmp_path / "r", batch_size=2)
    assert (tmp_path / "r").read_bytes() == before


def test_a_model_that_cannot_score_a_call_says_why(load: Callable[..., Any]) -> None:
    model = load()
    bad = calls(2)
    strange = Call.of("strange", [1, 2], [3, VOCAB + 1], {"A": [-1.0, -1.0]})
    with pytest.raises(TrainerError, match="'strange' has token ID 513 at position 3, .* 512"):
        score(record([*bad, strange]), model)
    other = dataclasses.replace(bad[0], context={"adapter": "a"})
    with pytest.raises(TrainerError, match="'call-0' was scored with adapter beside its tokens"):
        score(record([other]), model)
    with pytest.raises(TrainerError, match="cannot score with a Linear"):
        score(record(), torch.nn.Linear(2, 2))
    with pytest.raises(LayerBisectError, match="batch_size 0"):
        score(record(), model, batch_size=0)

    class Headless(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs, logits_to_keep=1)

    with pytest.raises(TrainerError, match=r"Headless returned logits \[1, 1, 512\] for \[1, 8\]"):
        score(record(), Headless())


def test_masked_out_tokens_may_come_without_a_score() -> None:
    some = calls(1, mask=[1, 0, 1, 1, 1])
    found = score(record(some), lambda batch: [row(c, placed(1, -np.inf)) for c in batch])
    assert np.isnan(found[0].scores["C0"][1])


def test_aligned_scores_belong_to_the_saved_tokens() -> None:
    some = calls(3)
    rows = {c.name: torch.full((len(c.response),), -0.5, dtype=torch.bfloat16) for c in some}
    whole = aligned_scores(
        some,
        rows,
        tokens=[torch.from_numpy(c.tokens) for c in some],
        masks=[np.ones(len(c.response), int) for c in some],
    )
    assert {name: len(v) for name, v in whole.items()} == {c.name: len(c.response) for c in some}
    assert whole["call-0"].dtype == np.float64
    swapped = [some[0].response, some[2].response[:7], some[2].response]
    with pytest.raises(TrainerError, match=r"'call-1' came back with token \d+ at response posit"):
        aligned_scores(some, rows, tokens=swapped)
    with pytest.raises(TrainerError, match="'call-0' came back with 7 token IDs for 5"):
        aligned_scores(some, rows, tokens=[some[1].response] * 3)
    with pytest.raises(TrainerError, match="'call-1' came back with the mask value 0 at .* 6"):
        masks = [np.arange(len(c.response)) < 6 for c in some]
        aligned_scores(some, rows, masks=masks)
    with pytest.raises(TrainerError, match="no scores for call 'call-2'"):
        aligned_scores(some, dict(list(rows.items())[:2]))
