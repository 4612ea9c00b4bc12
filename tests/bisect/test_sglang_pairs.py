"""The real SGLang server against transformers, and its decode against its prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.capture import capture
from layerbisect.captures.store import Capture
from layerbisect.faults import plant
from layerbisect.planted_sglang import TRUTH
from tests.sglang_server import Server, sglang_installed, sglang_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]

PREFILL_FAULTS = {
    1: (
        "norm-eps:8",
        "softmax-scale:15",
        "o-proj-permuted:0",
        "experts-swapped:8",
        "head-scaled:0",
    ),
    2: ("rope-shifted:8", "o-proj-permuted:15", "top-k-not-renormalised:0", "head-scaled:0"),
}
DECODE_FAULT = "kv-heads-regrouped:8:decode"
TRAINER_FAULTS = (("softmax-scale", 0), ("o-proj-permuted", 15))
RESPONSE = 48


@dataclass(frozen=True)
class Recorded:
    """What a server captured, closed by now, and the tokens that it answered about."""

    captures: Path
    tokens: list[list[int]]
    model: Path

    def side(self, requests: str, label: str) -> Capture:
        return Capture.open(self.captures, requests=requests, label=label)


def record(server: Server, captures: Path, model: Path, faults: tuple[str, ...]) -> Recorded:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 2000) for _ in range(16)] for _ in range(3)]
    answers = server.generate_many(prompts, RESPONSE, rids=["gen-0", "gen-1", "gen-2"])
    tokens = [answer.tokens for answer in answers]
    for index, ids in enumerate(tokens):
        server.replay(ids, rid=f"replay-{index}")
    for fault in faults:
        server.plant(fault)
        for index, ids in enumerate(tokens):
            server.replay(ids, rid=f"{fault}-{index}")
    server.plant(DECODE_FAULT)
    faulty = server.generate_many(prompts, RESPONSE, rids=["bad-gen-0", "bad-gen-1", "bad-gen-2"])
    for index, answer in enumerate(faulty):
        server.replay(answer.tokens, rid=f"bad-replay-{index}")
    server.captured()
    return Recorded(captures, tokens, model)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def recorded(
    request: pytest.FixtureRequest, tiny_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    captures = tmp_path_factory.mktemp("served") / "capture"
    with sglang_server(
        tiny_moe_dir, capture=captures, points="all", tp=request.param, fault=""
    ) as server:
        return record(server, captures, tiny_moe_dir, PREFILL_FAULTS[request.param])


@pytest.fixture(scope="module")
def trainer_model(tiny_moe_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        tiny_moe_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def trainer(
    recorded: Recorded, trainer_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("trainer") / "capture"
    forward(trainer_model, directory, recorded.tokens)
    yield directory


def forward(model: Any, directory: Path, tokens: list[list[int]]) -> None:
    with capture(model, directory, points="all", label="trainer"), torch.no_grad():
        for ids in tokens:
            model(input_ids=torch.tensor([ids]))


def blamed(verdict: Verdict) -> list[tuple[int | None, str | None, str]]:
    return [(c.layer, c.operator, c.side) for c in verdict.culprits]


def truth(fault: str, side: str) -> tuple[int | None, str, str]:
    name, layer, *_ = fault.split(":")
    modelwide = name in ("head-scaled", "final-norm-weight")
    return (None if modelwide else int(layer), TRUTH[name], side)


def test_clean_prefill_agrees(recorded: Recorded, trainer: Path) -> None:
    verdict = bisect(recorded.side("replay-*", "rollout"), trainer, model=recorded.model)
    assert verdict.status == "agree", verdict.reasons
    assert verdict.coverage.points.missing == ()
    assert verdict.coverage.rows.left_out == 0
    assert verdict.gap is not None and verdict.gap.mae > 0.005


def test_clean_decode_agrees_with_the_trainer_and_with_its_own_prefill(
    recorded: Recorded, trainer: Path
) -> None:
    decode = recorded.side("gen-*", "decode")
    assert (decode.phases == "decode").sum() == 3 * (RESPONSE - 1)
    for other in (trainer, recorded.side("replay-*", "prefill")):
        verdict = bisect(decode, other, model=recorded.model)
        assert verdict.status == "agree", verdict.reasons
        # the last generated token was never fed back: the other side alone has its row
        assert verdict.coverage.rows.left_out == 3


def test_a_fault_in_the_server_is_found_on_the_rollout_side(
    recorded: Recorded, trainer: Path, request: pytest.FixtureRequest
) -> None:
    size = request.node.callspec.params["recorded"]
    for fault in PREFILL_FAULTS[size]:
        verdict = bisect(recorded.side(f"{fault}-*", "rollout"), trainer, model=recorded.model)
        assert blamed(verdict) == [truth(fault, "rollout")], fault
        assert verdict.exit_code == 1


def test_a_fault_in_decode_alone_is_a_gap_between_decode_and_prefill(recorded: Recorded) -> None:
    verdict = bisect(
        recorded.side("bad-gen-*", "decode"),
        recorded.side("bad-replay-*", "prefill"),
        model=recorded.model,
    )
    assert blamed(verdict) == [truth(DECODE_FAULT, "decode")]
    # the first and the last head of each rank read their own KV head as before
    where = verdict.culprits[0].where
    assert where.startswith(("heads 1 to 6, ", "heads 1, 2, 5, 6, "))
    assert where.endswith((", decode rows", ", positions >= 16"))


def test_a_fault_in_transformers_is_found_on_the_trainer_side(
    recorded: Recorded, trainer_model: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    size = request.node.callspec.params["recorded"]
    name, layer = TRAINER_FAULTS[size - 1]
    with plant(trainer_model, name, layer) as planted:
        forward(trainer_model, tmp_path / "capture", recorded.tokens)
    verdict = bisect(
        recorded.side("replay-*", "rollout"), tmp_path / "capture", model=recorded.model
    )
    assert blamed(verdict) == [(planted.layer, planted.operator, "trainer")]
