"""More than one fault: all are named, and one that is everywhere is named once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.weight_evidence import owner
from layerbisect.captures.store import Capture
from layerbisect.fault_tools import forward_replaced
from tests.bisect.conftest import Clean
from tests.bisect.making import Fault, rewrite

Named = tuple[int | None, str | None, str]


def named(verdict: Verdict) -> set[Named]:
    assert verdict.status == "divergent" and verdict.exit_code == 1, verdict.reasons
    return {(c.layer, c.operator, c.side) for c in verdict.culprits}


def with_faults(
    clean: Clean, tmp_path: Path, rollout: Sequence[Fault] = (), trainer: Sequence[Fault] = ()
) -> Verdict:
    made = {}
    for label, faults in (("rollout", rollout), ("trainer", trainer)):
        made[label] = getattr(clean, label)
        if faults:
            engine = clean.engines[label]
            made[label] = engine.capture(tmp_path / label, clean.tokens, faults=faults)
    return bisect(made["rollout"], made["trainer"], model=clean.model)


def test_two_layers(clean: Clean, tmp_path: Path) -> None:
    verdict = with_faults(clean, tmp_path, [("softmax-scale", 0), ("o-proj-permuted", 3)])
    assert named(verdict) == {(0, "attention", "rollout"), (3, "linear", "rollout")}
    # what makes most of the gap comes first
    shares = [c.share_of_gap or 0.0 for c in verdict.culprits]
    assert shares == sorted(shares, reverse=True) and verdict.culprits[0].layer == 3


def test_two_operators_of_one_layer(clean: Clean, tmp_path: Path) -> None:
    verdict = with_faults(clean, tmp_path, (), [("norm-eps", 2), ("experts-swapped", 2)])
    assert named(verdict) == {(2, "norm", "trainer"), (2, "experts", "trainer")}


def test_two_operators_of_one_kind_in_one_layer(clean: Clean, tmp_path: Path) -> None:
    verdict = with_faults(clean, tmp_path, [("norm-eps", 2), ("norm-weight", 2)])
    assert {c.point for c in verdict.culprits} == {"layers.2.mlp.norm", "layers.2.attn.norm"}
    assert named(verdict) == {(2, "norm", "rollout")}


def test_one_on_each_side(clean: Clean, tmp_path: Path) -> None:
    verdict = with_faults(clean, tmp_path, [("rope-shifted", 1)], [("top-k-not-renormalised", 2)])
    assert named(verdict) == {(1, "rope", "rollout"), (2, "router", "trainer")}


def test_both_sides_at_one_operator_each_in_its_own_way(clean: Clean, tmp_path: Path) -> None:
    verdict = with_faults(clean, tmp_path, [("softmax-scale", 2)], [("kv-heads-regrouped", 2)])
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (2, "attention", "both")
    assert {line.split(":")[0] for line in culprit.evidence} == {"rollout", "trainer"}


@pytest.mark.parametrize("fault", ["o-proj-permuted", "norm-eps", "softmax-scale", "rope-shifted"])
def test_the_same_fault_on_both_sides_makes_no_gap(
    clean: Clean, fault: str, tmp_path: Path
) -> None:
    verdict = with_faults(clean, tmp_path, [(fault, 1)], [(fault, 1)])
    assert verdict.culprits == (), verdict.culprits
    assert verdict.status == "agree"
    assert any("both sides compute it alike" in r.evidence for r in verdict.ruled_out)


def test_faults_of_one_operator_in_other_rows_are_not_alike(clean: Clean, tmp_path: Path) -> None:
    made = {}
    for label, at in (("rollout", 10), ("trainer", 30)):
        engine = clean.engines[label]

        def wrong(own: Any, x: torch.Tensor, at: int = at) -> torch.Tensor:
            out: torch.Tensor = own(x)
            return torch.cat([out[:, :at], 1.5 * out[:, at : at + 1], out[:, at + 1 :]], 1)

        with forward_replaced(engine.model.get_submodule("model.layers.2.self_attn.o_proj"), wrong):
            made[label] = engine.capture(tmp_path / label, clean.tokens)
    (culprit,) = bisect(made["rollout"], made["trainer"], model=clean.model).culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (2, "linear", "both")


def test_a_fault_in_every_layer_is_one_culprit(clean: Clean, tmp_path: Path) -> None:
    faults = [("rope-base", layer) for layer in range(4)]
    verdict = with_faults(clean, tmp_path, faults)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (None, "rope", "rollout")
    assert culprit.point == "layers.*.attn.q" and culprit.where.startswith("4 of 4 layers")
    # any of them shows it
    assert verdict.next.endswith("--layer 0 --operator rope`")
    assert culprit.share_of_gap == pytest.approx(1.0, abs=0.1)


def test_a_setting_of_all_norms_is_one_culprit(clean: Clean, tmp_path: Path) -> None:
    model = clean.engines["rollout"].model
    norms = [m for n, m in model.named_modules() if n.endswith(("layernorm", "model.norm"))]
    before = [norm.variance_epsilon for norm in norms]
    try:
        for norm in norms:
            norm.variance_epsilon = 1e-2
        made = clean.engines["rollout"].capture(tmp_path / "eps", clean.tokens)
    finally:
        for norm, eps in zip(norms, before, strict=True):
            norm.variance_epsilon = eps
    (culprit,) = bisect(made, clean.trainer, model=clean.model).culprits
    assert (culprit.layer, culprit.operator, culprit.side) == (None, "norm", "rollout")
    assert any("eps" in line for line in culprit.evidence)


# --- weights


@contextmanager
def stale(model: Any, names: Iterable[str], by: float) -> Iterator[None]:
    """Let parameters be off by a share of themselves, as those of an earlier step are."""
    draw = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                values = parameter.data
                stack.callback(values.copy_, values.clone())
                noise = torch.randn(values.shape, generator=draw)
                values.copy_(values.float() * (1 + by * noise))
        yield


@pytest.mark.parametrize("fingerprints", [True, False], ids=["fingerprints", "none"])
@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_stale_weights_are_one_culprit(
    clean: Clean, side: str, fingerprints: bool, tmp_path: Path
) -> None:
    engine = clean.engines[side]
    with stale(engine.model, [""], 0.05):
        made = engine.capture(tmp_path / "stale", clean.tokens)
    if not fingerprints:
        made = rewrite(made, tmp_path / "bare", info={"fingerprints": {}})
    given = {"rollout": clean.rollout, "trainer": clean.trainer} | {side: made}
    verdict = bisect(given["rollout"], given["trainer"], model=clean.model)
    first = verdict.culprits[0]
    assert (first.layer, first.operator, first.side) == (None, "weights", side)
    assert first.share_of_gap == pytest.approx(1.0, abs=0.3)
    if fingerprints:
        assert verdict.culprits == (first,)
        assert "tensors compared differ from the model directory" in first.evidence[0]
        assert "loaded" in verdict.next
    # the ends hold weights, too, which are not in any layer
    assert {c.operator for c in verdict.culprits} <= {"weights"}


@pytest.mark.parametrize("fingerprints", [True, False], ids=["fingerprints", "none"])
def test_a_stage_with_stale_weights_is_one_culprit(
    clean: Clean, fingerprints: bool, tmp_path: Path
) -> None:
    engine = clean.engines["rollout"]
    with stale(engine.model, ["layers.1.", "layers.2.", "layers.3."], 0.05):
        made = engine.capture(tmp_path / "stale", clean.tokens, faults=[("rope-shifted", 2)])
    if not fingerprints:
        made = rewrite(made, tmp_path / "bare", info={"fingerprints": {}})
    verdict = bisect(made, clean.trainer, model=clean.model)
    first = next(c for c in verdict.culprits if c.operator == "weights")
    assert first.where == "3 of 4 layers, 1 the first" and first.layer is None
    # a wrong rotation of queries that are wrong already cannot be told apart
    assert len(verdict.culprits) == 1


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_a_stale_layer_of_which_ranks_hold_shards_is_one_culprit(
    clean: Clean, side: str, tmp_path: Path
) -> None:
    engine = clean.engines[side]
    with stale(engine.model, ["layers.2."], 0.05):
        made = engine.capture(tmp_path / "stale", clean.tokens)
    # under tensor parallelism no rank holds more than norms and routers whole
    held = Capture.open(made).info.fingerprints
    whole = {n: digest for n, digest in held.items() if "norm" in n or ".gate." in n}
    made = rewrite(made, tmp_path / "sharded", info={"fingerprints": whole})
    given = {"rollout": clean.rollout, "trainer": clean.trainer} | {side: made}
    verdict = bisect(given["rollout"], given["trainer"], model=clean.model)
    assert [(c.layer, c.operator, c.side) for c in verdict.culprits] == [(2, "weights", side)]


def test_two_wrong_tensors_are_two_operators_faults(clean: Clean, tmp_path: Path) -> None:
    faults = [("norm-weight", 0), ("rope-shifted", 2), ("norm-weight", 2)]
    verdict = with_faults(clean, tmp_path, (), faults)
    expected = {(0, "norm", "trainer"), (2, "rope", "trainer"), (2, "norm", "trainer")}
    assert named(verdict) == expected


def test_weights_too_little_off_to_see_are_known_by_their_fingerprints(
    clean: Clean, tmp_path: Path
) -> None:
    engine = clean.engines["rollout"]
    with stale(engine.model, ["proj"], 0.001):
        made = engine.capture(tmp_path / "stale", clean.tokens)
    verdict = bisect(made, clean.trainer, model=clean.model)
    assert named(verdict) == {(None, "weights", "rollout")}
    assert "no operator errs beyond rounding by it" in verdict.culprits[0].evidence


def test_another_fault_beside_stale_weights_is_named_too(clean: Clean, tmp_path: Path) -> None:
    engine = clean.engines["rollout"]
    with stale(engine.model, ["proj", "norm"], 0.05):
        made = engine.capture(tmp_path / "stale", clean.tokens, faults=[("softmax-scale", 1)])
    verdict = bisect(made, clean.trainer, model=clean.model)
    assert named(verdict) == {(None, "weights", "rollout"), (1, "attention", "rollout")}


@pytest.mark.parametrize(
    ("part", "operator", "point"),
    [
        ("layers.2.self_attn.o_proj", "linear", "layers.2.attn.out"),
        ("layers.2.mlp.gate.", "router", "layers.2.mlp.router_logits"),
        ("layers.2.input_layernorm", "norm", "layers.2.attn.norm"),
        ("layers.2.mlp.experts", "experts", "layers.2.mlp.out"),
        ("model.norm", "norm", "final_norm"),
        ("lm_head", "head", "logprob"),
        ("embed_tokens", "embedding", "embed"),
    ],
)
def test_one_wrong_tensor_is_its_operator_s_fault(
    clean: Clean, part: str, operator: str, point: str, tmp_path: Path
) -> None:
    engine = clean.engines["trainer"]
    with stale(engine.model, [part], 0.05):
        made = engine.capture(tmp_path / "wrong", clean.tokens)
    (culprit,) = bisect(clean.rollout, made, model=clean.model).culprits
    layer = 2 if "layers.2" in part else None
    assert (culprit.layer, culprit.operator, culprit.side) == (layer, operator, "trainer")
    assert culprit.point == point
    assert any("its weights differ from the model directory" in line for line in culprit.evidence)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_wrong_projection_is_no_rotation_and_no_norm(
    clean: Clean, part: str, tmp_path: Path
) -> None:
    engine = clean.engines["rollout"]
    with stale(engine.model, [f"layers.1.self_attn.{part}"], 0.05):
        made = engine.capture(tmp_path / "wrong", clean.tokens)
    assert named(bisect(made, clean.trainer, model=clean.model)) == {(1, "linear", "rollout")}


@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_a_wrong_norm_of_queries_or_keys(clean: Clean, part: str, tmp_path: Path) -> None:
    engine = clean.engines["rollout"]
    with stale(engine.model, [f"layers.1.self_attn.{part}"], 0.05):
        made = engine.capture(tmp_path / "wrong", clean.tokens)
    assert named(bisect(made, clean.trainer, model=clean.model)) == {(1, "norm", "rollout")}


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("model.layers.7.self_attn.k_norm.weight", (7, "norm")),
        ("model.layers.7.post_attention_layernorm.weight", (7, "norm")),
        ("model.layers.7.self_attn.v_proj.bias", (7, "linear")),
        ("model.layers.7.mlp.down_proj.weight", (7, "linear")),
        ("model.layers.7.mlp.experts.3.down_proj.weight", (7, "experts")),
        ("model.layers.7.mlp.experts.gate_up_proj", (7, "experts")),
        ("model.layers.7.mlp.gate.weight", (7, "router")),
        ("model.embed_tokens.weight", (None, "embedding")),
        ("model.norm.weight", (None, "norm")),
        ("lm_head.weight", (None, "head")),
        ("model.layers.7.something.weight", (7, "weights")),
        ("visual.patch.weight", (None, "weights")),
    ],
)
def test_each_tensor_has_an_operator(name: str, of: tuple[int | None, str]) -> None:
    assert owner(name) == of
