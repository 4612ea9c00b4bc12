"""With logits at hand, a difference of scores is parted into the model's and the extraction's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from layerbisect.bisect.scores import hypotheses as score_hypotheses
from layerbisect.bisect.scores.logit_pair import compare_logits
from layerbisect.bisect.scores.logits import explain, fit_temperature
from layerbisect.bisect.scores.split import split, split_record
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.trainer import score
from layerbisect.captures.record.transformers_scores import model_scores
from layerbisect.loading import load_model

VOCAB = 512
PADDED = 528
Array = NDArray[np.float64]


class Lab:
    """A small model in float32 and, as another engine would run it, in bfloat16."""

    def __init__(self, directory: Path) -> None:
        self.models = {
            "float32": load_model(directory, dtype="float32", attention="eager"),
            "bfloat16": load_model(directory, dtype="bfloat16", attention="sdpa"),
        }
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCAB, (8, 65), generator=generator)
        self.logits = {name: self._logits(model) for name, model in self.models.items()}
        # drawn by the model, as a rollout's tokens are
        chances = self.logits["bfloat16"].float().softmax(-1)
        self.tokens = torch.multinomial(chances, 1, generator=generator)[:, 0].numpy()

    def _logits(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=self.ids, use_cache=False).logits
        return logits[:, :-1].reshape(-1, VOCAB)

    def scores(self, name: str, temperature: float = 1.0) -> Array:
        logprobs = (self.logits[name].double() / temperature).log_softmax(-1)
        chosen: Array = logprobs.gather(1, torch.from_numpy(self.tokens)[:, None])[:, 0].numpy()
        return chosen

    def chosen(self, name: str) -> Array:
        found: Array = self.logits[name].double()[range(len(self.tokens)), self.tokens].numpy()
        return found


@pytest.fixture(scope="module", params=["qwen3", "moe"])
def lab(request: pytest.FixtureRequest, small_qwen3_dir: Path, small_moe_dir: Path) -> Lab:
    return Lab(small_moe_dir if request.param == "moe" else small_qwen3_dir)


# bfloat16 moves these models' scores by 0.017 nat
TOLERANCE = 0.03


def both(lab: Lab, change: Callable[[Array], Array], tolerance: float = TOLERANCE) -> Any:
    """Split a clean float32 side minus a bfloat16 side whose scores were changed."""
    return split(
        lab.scores("float32"),
        lab.chosen("float32"),
        change(lab.scores("bfloat16")),
        lab.chosen("bfloat16"),
        tolerance=tolerance,
    )


def test_two_engines_of_one_model_agree(lab: Lab) -> None:
    found = both(lab, lambda scores: scores)
    assert found.kind == "agree"
    # what rounding does, it does to the logits
    assert both(lab, lambda scores: scores, tolerance=0.01).kind == "upstream"
    assert found.logit_share + found.normalizer_share == pytest.approx(1)


def test_the_published_offset_is_no_logit_and_no_temperature(lab: Lab) -> None:
    found = both(lab, lambda scores: scores - 0.10, tolerance=0.01)
    assert found.kind == "constant"
    assert re.search(r"first is above second by 0\.(09[6-9]|10[0-4])", found.summary)
    assert found.mae == pytest.approx(0.1, abs=0.01)
    assert found.normalizer_share > 0.9


@pytest.mark.parametrize("temperature", [0.9, 0.8])
def test_a_temperature_is_the_normalizer_s(lab: Lab, temperature: float) -> None:
    found = both(lab, lambda scores: lab.scores("bfloat16", temperature))
    assert found.kind == "normalizer"
    assert "temperature" in found.summary
    assert found.mae > 0.05


def test_other_weights_are_upstream(lab: Lab) -> None:
    other = lab.logits["bfloat16"].float() @ torch.eye(VOCAB)[torch.randperm(VOCAB)]
    scores = other.double().log_softmax(-1)[range(len(lab.tokens)), lab.tokens].numpy()
    logit = other.double()[range(len(lab.tokens)), lab.tokens].numpy()
    found = split(lab.scores("float32"), lab.chosen("float32"), scores, logit)
    assert found.kind == "upstream"
    assert found.logit_share > 0.9


def test_a_constant_on_all_logits_of_a_row_cancels(lab: Lab) -> None:
    shift = np.random.default_rng(0).normal(0, 3, len(lab.tokens))
    scores, logit = lab.scores("float32"), lab.chosen("float32")
    found = split(scores, logit, scores, logit + shift)
    assert found.kind == "cancels"
    assert found.mae == 0
    assert found.normalizer_mae == pytest.approx(found.logit_mae)


def test_columns_that_do_not_fit_are_refused() -> None:
    ones = np.ones(3)
    with pytest.raises(LayerBisectError, match="2 and 3 tokens"):
        split(ones, ones, ones, ones[:2])
    with pytest.raises(LayerBisectError, match="0 tokens"):
        split(*[ones[:0]] * 4)
    with pytest.raises(LayerBisectError, match="not finite"):
        split(ones, ones * np.nan, ones, ones)


def test_a_record_s_columns_are_split(small_qwen3_dir: Path) -> None:
    model = load_model(small_qwen3_dir, dtype="float32")
    random = np.random.default_rng(0)
    calls = []
    for number in range(6):
        asked, answered = random.integers(0, VOCAB, (2, 9))
        with torch.no_grad():
            (b,) = model_scores(model, [Call.of("x", asked, answered, {})])
        # one token nobody asked for and nobody scored
        b.logprob[4] = np.nan
        scores = {"B0": b.logprob, "B0.logit": b.logit}
        mask = np.arange(9) != 4
        calls.append(Call.of(f"c{number}", asked, answered, scores, mask=mask))
    columns = {"B0": Scoring(), "B0.logit": Scoring()}
    record = ScoreRecord(RecordInfo(columns=columns), calls)
    assert split_record(record, "B0", "C0") is None
    hot = score(record, lambda some: model_scores(model, some, temperature=0.8), grad=False)
    found = split_record(hot, "B0", "C0")
    assert found is not None
    assert (found.tokens, found.kind) == (48, "normalizer")
    # the model gave the very logits
    assert found.logit_mae == 0
    assert split_record(hot, "B0", "C1") is None


@pytest.mark.parametrize("temperature", [0.9, 0.8, 1.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_temperature_is_fitted(lab: Lab, temperature: float, dtype: str) -> None:
    logits = lab.logits[dtype]
    tempered = fit_temperature(logits, lab.tokens, lab.scores(dtype, temperature))
    assert tempered.better == "temperature"
    assert tempered.temperature == pytest.approx(temperature, rel=1e-3)
    assert tempered.mae_after < 1e-3 < 0.02 < tempered.divided_mae
    assert tempered.mae_before > tempered.divided_mae
    divided = fit_temperature(logits, lab.tokens, lab.scores(dtype) / temperature)
    assert divided.better == "divided log-probs"
    assert divided.divided_by == pytest.approx(temperature, rel=1e-6)
    assert divided.divided_mae < 1e-6
    assert f"{temperature:.4f}" in divided.summary


def test_a_temperature_is_fitted_under_the_noise_of_another_engine(lab: Lab) -> None:
    found = fit_temperature(lab.logits["bfloat16"], lab.tokens, lab.scores("float32", 0.9))
    assert found.better == "temperature"
    assert found.temperature == pytest.approx(0.9, abs=0.005)
    clean = fit_temperature(lab.logits["bfloat16"], lab.tokens, lab.scores("float32"))
    assert clean.better == "neither"
    assert clean.temperature == pytest.approx(1, abs=0.005)


def faults(lab: Lab) -> dict[str, tuple[Array, float]]:
    """Scores that one fault makes of the float32 logits, and the value to be found."""
    z = lab.logits["float32"].double()
    chosen = lab.chosen("float32")
    raw = lab.scores("float32")
    places = np.arange(len(z))
    # 528 columns over four ranks, the last of which holds the padding
    local = padded(lab).double()
    local[:, VOCAB:] = -torch.inf
    shard = local.view(len(z), 4, PADDED // 4).logsumexp(-1).numpy()
    order = z.sort(-1, descending=True).values
    mass = order.softmax(-1).cumsum(-1)
    kept = (mass - order.softmax(-1)) < 0.95
    nucleus = order.masked_fill(~kept, -torch.inf).logsumexp(-1).numpy()
    return {
        "offset": (raw - 0.1, -0.1),
        "temperature": (lab.scores("float32", 0.8), 0.8),
        "divided log-probs": (raw / 0.9, 0.9),
        "padded vocabulary": (chosen - padded(lab).double().logsumexp(-1).numpy(), 16),
        "one of 4 shards": (chosen - shard[places, lab.tokens // (PADDED // 4)], 4),
        "top-k": (chosen - order[:, :20].logsumexp(-1).numpy(), 20),
        "top-p": (chosen - nucleus, 0.95),
    }


def padded(lab: Lab) -> torch.Tensor:
    """The float32 logits with the padding rows that a head of 528 rows would have."""
    filled = torch.full((len(lab.tokens), PADDED - VOCAB), 4.0)
    return torch.cat([lab.logits["float32"], filled], 1)


FAULTS = (
    "offset",
    "temperature",
    "divided log-probs",
    "padded vocabulary",
    "one of 4 shards",
    "top-k",
    "top-p",
)


@pytest.mark.parametrize("chunk", [1 << 23, PADDED * 100])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_extraction_is_told_from_the_others(
    lab: Lab, fault: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_hypotheses, "CHUNK_VALUES", chunk)
    scores, value = faults(lab)[fault]
    found = explain(padded(lab), lab.tokens, scores, vocab=VOCAB)
    assert [h.name for h in found.best] == [fault]
    assert found.best[0].value == pytest.approx(value, rel=1e-3)
    assert found.best[0].mae < 1e-3 < found.raw_mae
    assert {"raw", *FAULTS} <= {h.name for h in found.tried}
    assert found.best[0].summary in found.summary


def test_raw_scores_have_no_fault(lab: Lab) -> None:
    for name in ("float32", "bfloat16"):
        # another engine's scores, and its own rounded to bfloat16
        for scores in (lab.scores("float32"), lab.scores("bfloat16")):
            found = explain(lab.logits[name], lab.tokens, scores)
            assert found.best == ()
            assert "no hypothesis is nearer" in found.summary
    random = np.random.default_rng(0)
    noisy = lab.scores("float32") + random.standard_t(2, len(lab.tokens)) * 0.02
    assert explain(padded(lab), lab.tokens, noisy, vocab=VOCAB).best == ()


def test_chance_explains_nothing(lab: Lab) -> None:
    # the right logits in another order: no single fault makes these scores
    scores = np.roll(lab.scores("float32"), 1)
    found = explain(lab.logits["float32"], lab.tokens, scores)
    assert found.raw_mae > 0.5
    assert found.best == ()
    fitted = fit_temperature(lab.logits["float32"], lab.tokens, scores)
    assert fitted.better == "neither"


def compared(lab: Lab, scores: Array, logits: torch.Tensor | None = None) -> Any:
    return compare_logits(
        lab.logits["float32"],
        lab.logits["bfloat16"] if logits is None else logits,
        lab.tokens,
        lab.scores("float32"),
        scores,
        first="B0",
        second="C0",
        tolerance=TOLERANCE,
    )


def test_full_logits_tell_extraction_from_the_model(lab: Lab) -> None:
    clean = compared(lab, lab.scores("bfloat16"))
    assert clean.kind == "agree"
    assert clean.explained == {}
    hot = compared(lab, lab.scores("bfloat16", 0.9))
    assert hot.kind == "extraction"
    assert list(hot.explained) == ["C0"]
    assert hot.explained["C0"].best[0].name == "temperature"
    assert "C0's scores are not those of its logits" in hot.summary
    assert "the logits agree" in hot.summary
    # first minus second is the sum of its parts
    assert hot.first_own < 1e-5
    assert abs(hot.mae - hot.second_own) <= hot.model + 1e-5


def test_a_fault_of_the_model_is_not_one_of_extraction(lab: Lab) -> None:
    other = lab.logits["bfloat16"].float() + torch.randn(VOCAB) * 0.5
    raw = other.double().log_softmax(-1)[range(len(lab.tokens)), lab.tokens].numpy()
    assert compared(lab, raw, other).kind == "upstream"
    mixed = compared(lab, raw - 0.1, other)
    assert mixed.kind == "both"
    assert [h.name for h in mixed.explained["C0"].best] == ["offset"]


def test_a_row_s_constant_is_said_to_cancel(lab: Lab) -> None:
    moved = lab.logits["float32"] + torch.randn(len(lab.tokens), 1)
    found = compared(lab, lab.scores("float32"), moved)
    assert found.kind == "cancels"
    assert found.logit_mae > 0.5
    assert found.centred_mae < 1e-5


def test_what_cannot_be_compared_is_refused(lab: Lab) -> None:
    z, tokens, raw = lab.logits["float32"], lab.tokens, lab.scores("float32")
    for call, message in (
        (lambda: explain(z, tokens[1:], raw), r"\[512, 512\], \[511\] and \[512\]"),
        (lambda: explain(z[:5], tokens[:5], raw[:5]), "5 rows tell no fault from chance; give 16"),
        (lambda: fit_temperature(z, tokens, raw * np.nan), "a score is not finite"),
        (lambda: compare_logits(z, padded(lab), tokens, raw, raw), "512 and 528 logits a row"),
    ):
        with pytest.raises(LayerBisectError, match=message):
            call()
    assert compare_logits(z, padded(lab), tokens, raw, raw, vocab=VOCAB).kind == "agree"
