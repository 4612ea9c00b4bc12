"""A change of scores after their calculation is traced to the operation and the line."""

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.trainer import score
from layerbisect.captures.score_steps.change import describe_change
from layerbisect.captures.score_steps.watch import ScoreSteps
from layerbisect.loading import load_model

Scores = tuple[torch.Tensor, torch.Tensor]


def calculate_log_probs_and_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    """Score as frameworks do: log-probs and entropy side by side."""
    logp = torch.log_softmax(logits.float(), -1)
    chosen = logp.gather(-1, tokens[..., None]).squeeze(-1)
    return chosen, -(logp.exp() * logp).sum(-1)


FRAMEWORK = types.SimpleNamespace(calculate=calculate_log_probs_and_entropy)


def lowered(logits: torch.Tensor, tokens: torch.Tensor, offset: float = 0.10) -> Scores:
    log_probs, entropy = FRAMEWORK.calculate(logits, tokens)
    log_probs = log_probs - offset
    return log_probs, entropy


def lowered_in_place(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    log_probs, entropy = FRAMEWORK.calculate(logits, tokens)
    log_probs[:, 1:] -= 0.10
    return log_probs, entropy


def lowered_under_a_view(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    log_probs, entropy = FRAMEWORK.calculate(logits, tokens)
    log_probs.data.view(-1)[:4].sub_(0.10)
    return log_probs, entropy


def divided(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    parts = [FRAMEWORK.calculate(logits[i : i + 1], tokens[i : i + 1])[0] for i in range(2)]
    return {"entropy": None, "log_probs": torch.cat(parts) / 0.9}


def rounded_then_moved(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    log_probs, _ = FRAMEWORK.calculate(logits, tokens)
    log_probs = log_probs.to(torch.bfloat16).float()
    return torch.roll(log_probs, 1, dims=-1)


def masked(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    log_probs, _ = FRAMEWORK.calculate(logits, tokens)
    return log_probs * (torch.arange(8) < 5)


def by_numpy(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    log_probs, _ = FRAMEWORK.calculate(logits, tokens)
    return log_probs.numpy() - 0.10


def beneath_numpy(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    log_probs, _ = FRAMEWORK.calculate(logits, tokens)
    log_probs.numpy()[...] -= 0.10
    return log_probs


def untouched(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    log_probs, entropy = FRAMEWORK.calculate(logits, tokens)
    return log_probs.view(2, 8).detach().clone(), entropy


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    number = next(start + i for i, line in enumerate(lines) if text in line)
    return f"test_watch.py:{number}"


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 8, 40) * 3, torch.randint(0, 40, (2, 8))


CASES: list[tuple[Callable[..., Any], list[tuple[str, str]]]] = [
    (lowered, [("- offset", "`Tensor.sub` with 0.1 at {} changed the scores of `calculate` "
                "(call 1): every value lowered by 0.100000")]),
    (lowered_in_place, [("-= 0.10", "`Tensor.sub_` with 0.1 at {} changed the scores of "
                         "`calculate` (call 1): 14 of 16 values, from position 1 on, lowered by "
                         "0.100000")]),
    (lowered_under_a_view, [("sub_(", "`Tensor.sub_` with 0.1 at {} changed the scores of "
                             "`calculate` (call 1): 4 of 16 values lowered by 0.100000")]),
    (divided, [("/ 0.9", "`Tensor.div` with 0.9 at {} changed the scores of `calculate` (calls 1 "
                "to 2): every value multiplied by 1.111111")]),
    (rounded_then_moved, [
        ("bfloat16", "`Tensor.to` with torch.bfloat16 at {} changed the scores of `calculate` "
         "(call 1): every value rounded to bfloat16"),
        ("roll", "`roll` with 1, dims=-1 at {} changed the scores of `calculate` (call 1): every "
         "value moved 1 position later"),
    ]),
    (masked, [("arange", "`Tensor.mul` with a tensor [8] at {} changed the scores of `calculate` "
               "(call 1): 6 of 16 values, from position 5 on, set to 0")]),
    (beneath_numpy, [("", "something that is no torch function changed the scores of `calculate` "
                      "(call 1): every value lowered by 0.100000")]),
]  # fmt: skip


@pytest.mark.parametrize(("wrapper", "expected"), CASES, ids=[c[0].__name__ for c in CASES])
@pytest.mark.parametrize("outer", [True, False], ids=["both watched", "inner alone"])
def test_the_operation_and_its_line_are_named(
    wrapper: Any, expected: list[tuple[str, str]], outer: bool, inputs: tuple[Any, Any]
) -> None:
    plain = wrapper(*inputs)
    with ScoreSteps() as steps:
        steps.watch_attribute(FRAMEWORK, "calculate")
        result = (steps.watch(wrapper) if outer else wrapper)(*inputs)
    assert FRAMEWORK.calculate is calculate_log_probs_and_entropy
    assert steps.errors == []
    torch.testing.assert_close(result, plain, rtol=0, atol=0)
    wanted = [text.format(line_of(wrapper, code)) for code, text in expected]
    if outer:
        (change,) = steps.changes()
        assert change.after == wrapper.__name__
        assert str(change).splitlines() == wanted
    else:
        for number, change in enumerate(steps.changes(), 1):
            one = [text.replace("(calls 1 to 2)", f"(call {number})") for text in wanted]
            assert str(change).splitlines() == one
            assert change.after is None


def test_what_numpy_did_shows_without_a_line(inputs: tuple[Any, Any]) -> None:
    with ScoreSteps() as steps:
        steps.watch_attribute(FRAMEWORK, "calculate")
        steps.watch(by_numpy)(*inputs)
    (change,) = steps.changes()
    assert change.change.kind == "offset"
    assert change.change.amount == pytest.approx(-0.1, abs=1e-6)
    assert "every value lowered by 0.100000; no torch function was seen to do it" in str(change)


def test_scores_that_stay_are_said_to_stay(inputs: tuple[Any, Any]) -> None:
    with ScoreSteps() as steps:
        steps.watch_attribute(FRAMEWORK, "calculate")
        steps.watch(untouched)(*inputs)
        steps.watch(untouched)(*inputs)
    said = [str(change) for change in steps.changes()]
    assert said == [
        f"the scores of `calculate` (call {n}) and what `untouched` returned are the same"
        for n in (1, 2)
    ]


def test_three_nested_functions_give_consecutive_pairs(inputs: tuple[Any, Any]) -> None:
    with ScoreSteps() as steps:
        steps.watch_attribute(FRAMEWORK, "calculate")
        middle = steps.watch(lowered)

        def outermost(*args: Any) -> Any:
            return middle(*args)[0] * 2.0

        steps.watch(outermost)(*inputs)
    first, second = steps.changes()
    assert (first.before, first.after, first.change.kind) == ("calculate", "lowered", "offset")
    assert (second.before, second.after, second.change.kind) == ("lowered", "outermost", "scale")
    assert len(first.steps) == len(second.steps) == 1


def test_gradients_and_random_state_are_left_alone(inputs: tuple[Any, Any]) -> None:
    logits, tokens = inputs

    def gradient(watch: bool) -> Any:
        torch.manual_seed(3)
        leaf = logits.clone().requires_grad_()
        with ScoreSteps() as steps:
            if watch:
                steps.watch_attribute(FRAMEWORK, "calculate")
            log_probs = (steps.watch(lowered) if watch else lowered)(leaf, tokens)[0]
            (torch.nn.functional.dropout(log_probs, 0.5) ** 2).sum().backward()
        return leaf.grad

    assert torch.equal(gradient(True), gradient(False))


def test_an_error_of_ours_stops_nobody_and_an_error_of_theirs_is_theirs(
    inputs: tuple[Any, Any],
) -> None:
    def broken_pick(result: Any) -> Any:
        raise KeyError("nothing there")

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    with ScoreSteps() as steps:
        steps.watch_attribute(FRAMEWORK, "calculate", pick=broken_pick)
        found = steps.watch(lowered)(*inputs)[0]
        assert steps.watch(lambda: "text", "texter")() == "text"
        with pytest.raises(ZeroDivisionError):
            steps.watch(fails)()
        after = steps.watch(lowered)(*inputs)[0]
    assert torch.equal(found, after)
    assert steps.errors == [
        "KeyError: 'nothing there'",
        "LayerBisectError: `texter` returned a str in which no scores were found; say with pick= "
        "where they are",
    ]
    # outside the context a watched function is what it was
    assert torch.equal(steps.watch(lowered)(*inputs)[0], found)
    assert len(steps.captures) == 2


def test_watched_attributes_come_back(inputs: tuple[Any, Any]) -> None:
    class Base:
        def scores(self, *args: Any) -> Scores:
            return calculate_log_probs_and_entropy(*args)

        @staticmethod
        def fixed(*args: Any) -> Scores:
            return calculate_log_probs_and_entropy(*args)

        @classmethod
        def of_class(cls, *args: Any) -> Scores:
            return cls.fixed(*args)

    class Derived(Base):
        pass

    model = torch.nn.Linear(2, 2)
    before = dict(vars(Base)), dict(vars(Derived)), dict(vars(model))
    with pytest.raises(RuntimeError), ScoreSteps() as steps:
        steps.watch_attribute(Derived, "scores")
        steps.watch_attribute(Base, "fixed")
        steps.watch_attribute(Base, "of_class")
        steps.watch_attribute(model, "forward", "head")
        Derived().scores(*inputs)
        Base.of_class(*inputs)
        model(torch.ones(1, 2))
        raise RuntimeError
    assert [c.name for c in steps.captures] == ["scores", "fixed", "of_class", "head"]
    assert (dict(vars(Base)), dict(vars(Derived)), dict(vars(model))) == before
    with ScoreSteps() as steps:
        with pytest.raises(LayerBisectError, match="SimpleNamespace has no attribute nothing; wat"):
            steps.watch_attribute(FRAMEWORK, "nothing")
        with pytest.raises(LayerBisectError, match="SimpleNamespace.none is a NoneType"):
            steps.watch_attribute(types.SimpleNamespace(none=None), "none")
        with pytest.raises(LayerBisectError, match="is a Linear; watch its 'forward'"):
            steps.watch_attribute(torch.nn.Sequential(model), "0")


@pytest.mark.parametrize(
    ("result", "pick", "count"),
    [
        (torch.zeros(3), None, 1),
        ((None, torch.zeros(3), torch.ones(3)), None, 1),
        ([torch.zeros(3), torch.zeros(4)], None, 2),
        ({"loss": torch.zeros(1), "logprobs": [torch.zeros(3), torch.zeros(2)]}, None, 2),
        ({"mine": torch.zeros(3), "log_probs": torch.zeros(9)}, "mine", 1),
        ((torch.zeros(9), torch.zeros(3)), 1, 1),
        ({"a": {"b": torch.zeros(3)}}, lambda result: result["a"]["b"], 1),
        ([-0.5, -1.0, -2.0], None, 1),
        (np.zeros(3), None, 1),
    ],
)
def test_scores_are_found_in_what_frameworks_return(result: Any, pick: Any, count: int) -> None:
    with ScoreSteps() as steps:
        assert steps.watch(lambda: result, "f", pick=pick)() is result
    assert steps.errors == []
    assert len(steps.captures[0].values) == count
    assert steps.captures[0].values[0].shape == (3,)


def test_the_published_offset_is_found_in_a_real_trainer(small_moe_dir: Path) -> None:
    model = load_model(small_moe_dir, dtype="bfloat16")
    asked, given_ = np.random.default_rng(0).integers(0, 512, (2, 2, 12))
    calls = [Call.of(f"c{i}", asked[i, :4], given_[i], {"A": [-1.0] * 12}) for i in range(2)]
    record = ScoreRecord(RecordInfo(columns={"A": Scoring()}), calls)

    def actor(wrapper: Callable[..., Scores]) -> Callable[[Any], Any]:
        def forward(some: Any) -> list[Any]:
            ids = torch.from_numpy(np.stack([c.tokens for c in some]))
            logits = model(input_ids=ids, use_cache=False).logits[:, 3:-1]
            return list(wrapper(logits, ids[:, 4:])[0])

        return forward

    with ScoreSteps() as steps:
        steps.watch_attribute(FRAMEWORK, "calculate")
        wrapper = steps.watch(lowered)
        fault = score(record, actor(wrapper), module=model, batch_size=2)
    clean = score(record, actor(calculate_log_probs_and_entropy), module=model, batch_size=2)
    difference = fault[0].scores["C0"] - clean[0].scores["C0"]
    np.testing.assert_allclose(difference, -0.1, atol=1e-5)
    said = [str(change) for change in steps.changes()]
    line = line_of(lowered, "- offset")
    assert said == [
        f"`Tensor.sub` with 0.1 at {line} changed the scores of `calculate` (call {n}): "
        "every value lowered by 0.100000"
        for n in (1, 2, 3)
    ]
    assert steps.errors == []


VALUES = arrays(
    np.float64,
    array_shapes(min_dims=1, max_dims=2, min_side=5, max_side=9),
    elements=st.floats(-30, -(2**-10), width=32),
    unique=True,
)


@given(before=VALUES, amount=st.floats(0.01, 3), data=st.data())
def test_a_plain_change_is_said_plainly(before: Any, amount: float, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["offset", "scale", "constant", "lag", "order", "rounding"]))
    makers: dict[str, Callable[[], Any]] = {
        "offset": lambda: before - amount,
        "scale": lambda: before * (1 + amount),
        "constant": lambda: np.full_like(before, amount),
        "lag": lambda: np.roll(before, 1, -1),
        "order": lambda: np.flip(before),
        "rounding": lambda: torch.from_numpy(before).bfloat16().double().numpy(),
    }
    after = makers[kind]().astype(np.float32).astype(np.float64)
    found = describe_change(before, after)
    if np.array_equal(before, after):
        assert found.kind == "same"
        return
    assert found.kind == kind
    if kind in ("offset", "scale"):
        wanted = -amount if kind == "offset" else 1 + amount
        assert found.amount == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    assert found.max_abs == np.abs(after - before).max()
    assert found.mean_abs == pytest.approx(np.abs(after - before).mean())


def test_noise_is_no_offset_and_no_factor() -> None:
    random = np.random.default_rng(0)
    before: Any = -random.exponential(1, 200)
    after: Any = before - 0.1 + random.normal(0, 1e-3, 200)
    assert describe_change(before, after).kind == "other"
    assert describe_change(before, before * 1.1 + random.normal(0, 1e-3, 200)).kind == "other"


def test_shapes_and_what_is_no_number_are_told() -> None:
    before: Any = -np.arange(1.0, 10).reshape(1, 9)
    assert describe_change(before, before[:, 1:]).summary == (
        "[1, 9] became [1, 8]: positions 1 to 8 are kept"
    )
    assert describe_change(before, before[0]).summary == "[1, 9] became [9] with the same values"
    assert describe_change(before, np.exp(before)).kind == "exp"
    after = before.copy()
    after[0, 3] = np.nan
    assert describe_change(before, after).summary == (
        "1 of 9 values changed, 1 of them to what is no number"
    )
    assert describe_change(after, after).kind == "same"


def test_a_compiled_function_is_left_whole(inputs: tuple[Any, Any]) -> None:
    lower = torch.compile(lambda scores: scores - 0.1, backend="eager", fullgraph=True)
    with ScoreSteps() as steps:
        calculate = steps.watch(calculate_log_probs_and_entropy)
        wrapper = steps.watch(lambda *args: lower(calculate(*args)[0]), "wrapper")
        found = wrapper(*inputs)
    assert torch.equal(found, calculate_log_probs_and_entropy(*inputs)[0] - 0.1)
    (change,) = steps.changes()
    assert (change.after, change.change.kind) == ("wrapper", "offset")
    assert steps.errors == []
