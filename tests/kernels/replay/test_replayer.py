"""Replays on real captures: what is said of each implementation, of the engine, and of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from layerbisect.bisect.bundles import layer_bundles, open_side
from layerbisect.bisect.end_bundles import end_bundles
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.replayer import replay
from layerbisect.kernels.replay.report import Replay, Result

if TYPE_CHECKING:
    from tests.bisect.conftest import Clean

FAKES = "tests.kernels.replay.fakes"
LAYER = 2


def bundles_of(directory: Path, model: Path, layer: int = LAYER) -> dict[str, Bundle]:
    """Every stretch of a layer, and the ends, by point."""
    reference, side = open_side(Capture.open(directory), model)
    made, _ = layer_bundles(reference, side, layer)
    made += end_bundles(reference, side)
    return {bundle.point.removeprefix(f"layers.{layer}."): bundle for bundle in made}


@pytest.fixture(scope="module")
def bundles(clean: Clean) -> dict[str, Bundle]:
    """The stretches of one layer of a clean capture."""
    return bundles_of(clean.rollout, clean.model)


def run(bundle: Bundle, *names: str, **more: Any) -> Replay:
    """Replay in this process, by the fakes."""
    options: dict[str, Any] = {"isolate": False, "known": FAKES, "repeats": 3} | more
    return replay(bundle, names=names or None, **options)


def only(found: Replay) -> Result:
    (result,) = found.results
    return result


def test_the_right_one_reproduces_a_clean_engine(bundles: dict[str, Bundle]) -> None:
    found = run(bundles["attn.out"], "reference", "right")
    assert (found.status, found.exit_code) == ("acquitted", 0)
    assert found.point == "layers.2.attn.out" and found.rows == 144
    reference, right = found.results
    assert reference.package == "layerbisect"
    assert right.package == "fakes 1.0"
    for result in found.results:
        assert result.state == "ran" and result.errors and not result.errors.convicted
        assert result.repeats and result.repeats.none and result.repeats.of == 64
        assert result.time_ms is None and result.chunks is None
    assert right.reproduces and right.reproduces.exact
    # one that sums in float64 rounds some element otherwise
    assert reference.reproduces and 0.999 < reference.reproduces.equal_elements < 1
    assert found.conclusion.startswith("rounding explains what rollout returned: error 1.0x")
    assert "right returns it bit for bit" in found.conclusion


def test_what_misbehaves_is_told_from_what_errs(bundles: dict[str, Bundle]) -> None:
    expected: Mapping[str, tuple[str, str]] = {
        "raises": ("crashed", "RuntimeError: no kernel image is available"),
        "refuses": ("refused", "refuses does not support dtype=torch.bfloat16"),
        "unwritten": ("unwritten", "128 of 18432 elements of attn.out are what the memory held"),
        "half_written_scratch": ("unwritten", "made from it, in row 3 of 144"),
        "garbage": ("garbage", "attn.out has nothing to do with the exact output"),
        "zeros": ("garbage", "its relative error is 1, its correlation with it 0.00"),
        "computes_nan": ("garbage", "128 of 18432 elements of attn.out are NaN or infinite"),
        "wrong_shape": ("garbage", "attn.out has the shape [144, 127], not [144, 128]"),
        "wrong_dtype": ("garbage", "attn.out is torch.float64, not torch.bfloat16"),
        "writes_into_its_weight": ("garbage", "it wrote into self_attn.o_proj.weight"),
        "squeezes": ("garbage", "attn.out of 1 rows has the shape [128]"),
        "returns_none": ("garbage", "linear returned NoneType where 1 tensors are due"),
        "absent": ("unavailable", "it needs a GPU (cuda), and the device is cpu"),
    }
    found = run(bundles["attn.out"], *expected, "right")
    results = {result.name: result for result in found.results}
    for name, (state, why) in expected.items():
        assert results[name].state == state, name
        assert why in results[name].why, results[name].why
        assert results[name].errors is None
    assert results["right"].state == "ran"
    assert found.status == "acquitted"


def test_errors_of_implementations(bundles: dict[str, Bundle]) -> None:
    found = run(bundles["attn.out"], "right", "scaled", "one_row")
    assert found.status == "acquitted"
    right, scaled, one_row = (result.errors for result in found.results)
    assert right and scaled and one_row
    assert not right.convicted
    assert right.bound_used is not None and 0.1 < right.bound_used <= 1 and right.beyond_bound == 0
    # one correct rounding of nearly all elements
    assert right.ulps["0"] > 0.98 and sum(right.ulps.values()) == pytest.approx(1)
    assert scaled.convicted and scaled.beyond_bound
    assert scaled.relative["p50"] == pytest.approx(0.05, rel=0.1)
    gain = next(fit for fit in scaled.fits if fit.name == "gain")
    assert gain.coefficient == pytest.approx(0.05, rel=0.05)
    assert one_row.convicted and one_row.where == "channel 7"
    assert found.conclusion.endswith("beyond rounding are scaled, one_row")


def test_an_engine_that_errs_is_convicted_and_the_one_that_errs_so_is_named(
    bundles: dict[str, Bundle],
) -> None:
    clean = bundles["attn.out"]
    wrong = scaled_output(clean)
    alone = run(wrong, "reference", "right")
    assert (alone.status, alone.exit_code) == ("convicted", 1)
    assert alone.engine and alone.engine.convicted
    assert "1 of 1 implementations computes the same input right: a bug in its linear" in (
        alone.conclusion
    )
    named = run(wrong, "right", "scaled")
    assert named.status == "convicted"
    assert "scaled returns the same bit for bit, so the fault is that" in named.conclusion
    other = run(wrong, "right", "one_row")
    assert "though one_row errs otherwise" in other.conclusion
    none = run(wrong, "reference", "absent")
    assert "no implementation could be run beside it" in none.conclusion
    like_it = run(wrong, "one_row")
    assert "are the weights and attributes of the bundle those that it ran?" in like_it.conclusion


def test_of_several_operators_none_is_named_alone(bundles: dict[str, Bundle]) -> None:
    clean = bundles["attn.q"]
    wrong = replace(clean, captured={"attn.q": 1.05 * clean.captured["attn.q"]})
    found = run(wrong, "right")
    assert found.status == "convicted"
    assert found.conclusion.endswith("right: a bug in its linear, norm or rope, not rounding")


def scaled_output(bundle: Bundle) -> Bundle:
    """Give a bundle of attn.out the output that a wrong factor makes."""
    x, weight = bundle.inputs["attn.context"], bundle.weights["self_attn.o_proj.weight"]
    made = (1.05 * (x.flatten(1).float() @ weight.float().T)).to(x.dtype)
    return replace(bundle, captured={"attn.out": made})


def test_an_engine_that_returned_nothing_but_nan(bundles: dict[str, Bundle]) -> None:
    clean = bundles["attn.out"]
    lost = {n: t * torch.nan for n, t in clean.captured.items()}
    found = run(replace(clean, captured=lost), "right")
    assert found.status == "convicted" and found.engine and found.engine.nonfinite == 144
    assert "144 rows hold NaN or infinity" in found.conclusion
    reproduces = only(found).reproduces
    assert reproduces and reproduces.equal_elements == 0
    json.dumps(found.to_json(), allow_nan=False)


def test_an_error_that_is_known_to_change_nothing(bundles: dict[str, Bundle]) -> None:
    why = "keys and queries are turned alike"
    found = run(replace(scaled_output(bundles["attn.out"]), acquitted=why), "right")
    assert found.status == "acquitted"
    assert found.engine and not found.engine.convicted and found.engine.fits
    assert found.conclusion.startswith("what rollout returned changes nothing: ")
    assert why in found.conclusion


def test_an_engine_whose_output_is_not_known(bundles: dict[str, Bundle]) -> None:
    unknown = replace(bundles["attn.out"], captured={})
    found = run(unknown, "right")
    assert (found.status, found.engine) == ("acquitted", None)
    assert found.conclusion == (
        "what rollout returned is not in the bundle, so implementations alone are judged: none of "
        "1 errs beyond rounding"
    )
    assert only(found).reproduces is None
    assert run(unknown, "right", "scaled").status == "convicted"
    assert run(unknown, "reference", "raises").status == "inconclusive"


def test_a_planted_fault_is_convicted_and_what_inherits_it_is_not(
    clean: Clean, tmp_path: Path
) -> None:
    faulty = clean.engines["rollout"].capture(
        tmp_path / "c", clean.tokens, faults=[("softmax-scale", LAYER)]
    )
    made = bundles_of(faulty, clean.model)
    guilty = run(made["attn.context"], "attend")
    assert guilty.status == "convicted"
    assert guilty.engine and guilty.engine.fits[0].name == "softmax scale"
    assert "a bug in its attention, not rounding" in guilty.conclusion
    for point in ("attn.q", "attn.out", "mlp.norm", "mlp.out", "logprob"):
        assert run(made[point], "reference").status == "acquitted", point


def test_every_stretch_of_a_clean_capture(bundles: dict[str, Bundle]) -> None:
    torch_alone = "layerbisect.kernels.others.torch_ops"
    for point, bundle in bundles.items():
        found = run(bundle, "reference", "torch", known=torch_alone)
        assert found.status == "acquitted", found.conclusion
        for result in found.results:
            assert result.state == "ran", (point, result)
            assert result.errors and not result.errors.convicted, (point, result.errors)
        json.dumps(found.to_json(), allow_nan=False)


def test_operators_that_an_implementation_lacks_are_named(bundles: dict[str, Bundle]) -> None:
    found = run(bundles["attn.q"], "right")
    assert found.covers == ("linear", "norm", "rope")
    assert only(found).state == "ran"
    assert only(found).filled == ("rms_norm", "rope")


def test_wrong_choices_of_experts(bundles: dict[str, Bundle]) -> None:
    clean = bundles["mlp.expert_weights"]
    found = run(clean, "reference")
    assert found.engine and found.engine.wrong_choices == 0 and found.status == "acquitted"
    ids = clean.captured["mlp.expert_ids"].clone()
    logits = clean.inputs["mlp.router_logits"]
    ids[5, 1] = logits[5].argmin()
    wrong = replace(clean, captured={**clean.captured, "mlp.expert_ids": ids})
    found = run(wrong, "reference")
    assert found.engine and found.engine.wrong_choices == 1
    assert found.status == "convicted"
    assert "1 rows chose other experts than those with the best scores" in found.conclusion
    # without weights the choice is judged alone
    alone = replace(clean, captured={"mlp.expert_ids": ids})
    found = run(alone, "reference")
    assert found.engine and found.engine.wrong_choices == 1 and not found.engine.fits
    right = replace(clean, captured={"mlp.expert_ids": clean.captured["mlp.expert_ids"]})
    assert run(right, "reference").status == "acquitted"


def test_rows_with_nan_in_their_input_are_set_aside(bundles: dict[str, Bundle]) -> None:
    x = bundles["attn.out"].inputs["attn.context"].clone()
    x[[3, 50]] = torch.nan
    captured = bundles["attn.out"].captured["attn.out"].clone()
    captured[[3, 50]] = torch.nan
    bad = replace(bundles["attn.out"], inputs={"attn.context": x}, captured={"attn.out": captured})
    found = run(bad, "right")
    assert (found.status, found.rows, found.rows_left_out) == ("acquitted", 142, 2)
    assert found.conclusion.endswith("2 rows with NaN or infinity in their input are set aside")
    q = bundles["attn.context"].inputs["attn.q"].clone()
    q[50] = torch.inf
    inputs = {**bundles["attn.context"].inputs, "attn.q": q}
    found = run(replace(bundles["attn.context"], inputs=inputs), "attend")
    assert (found.status, found.rows, found.rows_left_out) == ("acquitted", 96, 48)
    assert found.conclusion.endswith(
        "48 rows of sequences with NaN or infinity in their input are set aside"
    )


def test_what_cannot_be_judged_says_why(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["attn.out"]
    x = bundle.inputs["attn.context"]
    cases = [
        (
            replace(bundle, inputs={"attn.context": x * torch.nan}),
            "0 rows are too few to judge, which takes 4; 144 rows with NaN",
        ),
        (bundle.only([0, 1, 2]), "3 rows are too few to judge, which takes 4"),
        (
            replace(bundle, observed=bundle.observed[:0]),
            "no row of it is observed, so there is nothing to judge",
        ),
        (
            replace(bundle, weights={n: w * torch.inf for n, w in bundle.weights.items()}),
            "numbers in self_attn.o_proj.weight are NaN or infinite",
        ),
    ]
    for bad, why in cases:
        found = run(bad, "right")
        assert (found.status, found.exit_code, found.results) == ("inconclusive", 2, ())
        assert why in found.conclusion
        assert found.engine is None


def test_few_rows_are_judged_but_not_for_systematic_errors(bundles: dict[str, Bundle]) -> None:
    found = run(bundles["attn.out"].only(range(20)), "right")
    assert found.status == "acquitted"
    assert "20 rows are too few to find a systematic error, which takes 64" in found.conclusion


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 1}, "repeats must be at least 2, got 1"),
        ({"timeout_s": 0}, "timeout_s must be above 0, got 0"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:NUMBER, got 'tpu'"),
        ({"device": "cuda:99"}, "so cuda:99 is not there; use cpu"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, bundles: dict[str, Bundle]) -> None:
    with pytest.raises(LayerBisectError, match=message):
        run(bundles["attn.out"], "right", **options)


def test_a_name_that_no_implementation_has(bundles: dict[str, Bundle]) -> None:
    with pytest.raises(LayerBisectError) as error:
        run(bundles["attn.context"], "attend", "tritn")
    assert str(error.value) == (
        "no implementation of attention is called 'tritn': there are reference, attend, by_chunk, "
        "no_chunks, absent"
    )


def test_tensors_that_do_not_fit_are_the_bundle_s_fault(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["attn.out"]
    cut = {n: w[:, :-1] for n, w in bundle.weights.items()}
    with pytest.raises(LayerBisectError, match="does not fit together"):
        run(replace(bundle, weights=cut), "right")
    other = {n: t[:, :-1] for n, t in bundle.captured.items()}
    with pytest.raises(LayerBisectError, match=r"as attn.out has the shape \[144, 127\], and"):
        run(replace(bundle, captured=other), "right")
    call = replace(bundle.calls[0], operator="linear", attributes={"shards": 2})
    with pytest.raises(LayerBisectError, match="sets 'shards' to 2"):
        run(replace(bundle, calls=(call,)), "right")
