"""`layerbisect replay`: what it replays, its page, and what it refuses."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

import layerbisect
from layerbisect.bisect.chosen_bundles import choose
from layerbisect.bisect.verdict import plain
from layerbisect.bisect.verdict_json import record_from_json
from layerbisect.cli import main
from layerbisect.kernels.judging.residuals import Fit
from layerbisect.kernels.replay.bundle import load_bundle, save_bundle
from layerbisect.kernels.replay.deterministic import Pair, deterministic_table
from layerbisect.kernels.replay.report import (
    Errors,
    Replay,
    Reproduction,
    Variation,
    WorstRow,
)
from layerbisect.kernels.replay.report import Result as Ran
from layerbisect.replay_words import headline
from layerbisect.terminal.replay import render_replays
from tests.bisect.making import Engine, random_tokens

REFERENCE = "--implementation=reference"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def engine(small_moe_dir: Path) -> Engine:
    return Engine.load(small_moe_dir, "rollout")


@pytest.fixture(scope="module")
def captured(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with the MLP norm of layer 1 wrong, of two sequences of 40 tokens."""
    folder = tmp_path_factory.mktemp("captured") / "rollout"
    tokens = random_tokens(512, [40, 40])
    return engine.capture(folder, tokens, faults=[("norm-weight", 1)], names=["a", "b"])


@pytest.fixture(scope="module")
def coarse(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coarse") / "rollout"
    return engine.capture(folder, random_tokens(512, [40]), points="layers.*.input")


@pytest.fixture(scope="module")
def bundle(captured: Path, small_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "norm"
    point = "layers.1.mlp.norm"
    done = run(
        captured,
        "--model",
        small_moe_dir,
        "--point",
        point,
        REFERENCE,
        "--rows",
        24,
        "--export",
        folder,
    )
    assert done.exit_code == 1, done.output
    # a slow machine shows progress before it
    assert done.stderr.endswith(f"wrote {folder / 'repro.py'}\n")
    return folder / "bundle.safetensors"


def test_operators_of_a_layer(captured: Path, small_moe_dir: Path) -> None:
    done = run(
        captured, "--model", small_moe_dir, "--layer", 1, "--operator", "residual", REFERENCE,
        "--json", "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["schema"] == 1 and said["deterministic"] is None and said["exported"] == []
    status = {one["point"]: one["status"] for one in said["replays"]}
    assert status == {"layers.1.mid": "acquitted", "layers.2.input": "acquitted"}
    assert all([r["name"] for r in one["results"]] == ["reference"] for one in said["replays"])


def test_an_operator_within_a_stretch_is_found(captured: Path, small_moe_dir: Path) -> None:
    chosen = choose(captured, model=small_moe_dir, layer=1, operator="norm")
    # queries and keys are normed, too
    assert [one.point for one in chosen.bundles] == [
        f"layers.1.{name}" for name in ("attn.norm", "attn.q", "attn.k", "mlp.norm")
    ]


def test_without_a_layer_it_is_the_final_norm_and_the_head(
    captured: Path, small_moe_dir: Path
) -> None:
    done = run(
        captured, "--model", small_moe_dir, REFERENCE, "--requests", "b", "--rows", 20, "--json"
    )
    assert done.exit_code == 0, done.output
    replays = json.loads(done.stdout)["replays"]
    assert [(one["point"], one["rows"]) for one in replays] == [("final_norm", 20), ("logprob", 20)]


def test_a_bundle_needs_no_model_and_a_replay_is_resumed(bundle: Path, tmp_path: Path) -> None:
    arguments = (bundle, REFERENCE, "--resume", tmp_path / "kept")
    first, again = (run(*arguments) for _ in range(2))
    assert first.exit_code == again.exit_code == 1
    assert first.stdout == again.stdout
    said = first.stdout.splitlines()[0]
    assert said.startswith("convicted: layers.1.mlp.norm (norm): rollout errs beyond rounding, ")
    assert len(said) < 100
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["layers.1.mlp.norm.jsonl"]
    assert not any(line.endswith(" ") for line in first.stdout.split("\n"))
    (replayed,) = layerbisect.replay(bundle, implementations=["reference"], device="cpu")
    assert replayed.conclusion in " ".join(first.stdout.split())


NO_LAYER = "give --layer, 0 to 3"
REFUSED = [
    (["--layer", 9], "the model has no layer 9: its layers are 0 to 3"),
    (["--layer", -1], "the model has no layer -1: its layers are 0 to 3"),
    (["--layer", 1, "--operator", "mlp"], "operator must be one of norm, linear, rope, attention"),
    (["--operator", "attention"], f"attention is an operator of the layers; {NO_LAYER}"),
    (["--layer", 1, "--operator", "combine"], "layer 1 has no combine: it shows norm, linear"),
    (["--point", "layers.1.attn.score"], "unknown point 'layers.1.attn.score'"),
    (["--point", "layers.7.mid"], "the model has no layer for layers.7.mid"),
    (["--point", "layers.0.input"], "layers.0.input is what the embedding makes"),
    (["--point", "layers.2.input", "--layer", 2], "is made in layer 1, and --layer is 2"),
    (["--point", "logits"], f"logits can't be replayed; replay logprob, or {NO_LAYER}"),
    (["--point", "layers.1.mlp.expert_ids"], "is judged with their weights, at mlp.expert_weights"),
    (["--point", "layers.1.mlp.expert_out"], "what layer 1 shows of its operators is layers.1."),
    (["--requests", "nobody"], "has no rows of a sequence that matches 'nobody'"),
    (["--layer", 1, "--operator", "norm", "--implementation", "fastest"],
     "is called 'fastest': there are reference,"),
    (["--point", "layers.1.mid", "--implementation", "fastest"],
     "is called 'fastest': there are reference,"),
]  # fmt: skip


@pytest.mark.parametrize("options, said", REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_chosen_is_said_in_a_sentence(
    options: list[Any], said: str, captured: Path, small_moe_dir: Path
) -> None:
    done = run(captured, "--model", small_moe_dir, *options)
    assert done.exit_code == 2 and done.stdout == ""
    assert said in done.stderr and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_what_the_capture_does_not_show_is_named_with_its_reason(
    coarse: Path, small_moe_dir: Path
) -> None:
    def refused(*options: object) -> str:
        done = run(coarse, "--model", small_moe_dir, *options)
        assert done.exit_code == 2
        return done.stderr

    assert refused("--layer", 1, "--operator", "norm").startswith(
        "error: layer 1 shows no norm that can be replayed: layers.1.attn.norm: it was not "
    )
    assert "layers.1.attn.out can't be replayed: it was not captured" in refused(
        "--point", "layers.1.attn.out"
    )
    assert "shows neither the final norm nor the log-probs" in refused()


def test_a_source_that_is_neither(captured: Path, bundle: Path, tmp_path: Path) -> None:
    assert "is neither a capture" in run(tmp_path).stderr
    assert "is neither a capture" in run(tmp_path / "nothing").stderr
    (tmp_path / "text").write_text("no bundle")
    assert "text is no operator bundle" in run(tmp_path / "text").stderr
    assert "give --model, the checkpoint that its engine ran" in run(captured).stderr
    for options in (("--layer", 2), ("--operator", "linear"), ("--point", "layers.1.mid")):
        assert "holds layers.1.mlp.norm (norm) alone; leave" in run(bundle, *options).stderr


def test_what_would_be_overwritten_or_is_not_there(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    asked = (bundle, REFERENCE)
    assert "mine is there already" in run(*asked, "--export", tmp_path / "mine").stderr
    assert "name a directory to resume in" in run(*asked, "--resume", tmp_path / "mine").stderr
    if not torch.cuda.is_available():
        assert "torch finds 0 GPUs" in run(*asked, "--device", "cuda").stderr
    unavailable = run(bundle, "--implementation", "aiter", "--export", tmp_path / "new")
    assert "aiter can't be exported, for it can't run here" in unavailable.stderr
    assert not (tmp_path / "new").exists()


def test_what_is_not_finite_or_of_an_unknown_dtype_is_not_judged(
    bundle: Path, tmp_path: Path
) -> None:
    whole = load_bundle(bundle)
    nan = {name: torch.full_like(t, torch.nan) for name, t in whole.inputs.items()}
    save_bundle(dataclasses.replace(whole, inputs=nan), tmp_path / "nan")
    done = run(tmp_path / "nan", REFERENCE)
    assert done.exit_code == 2 and done.stdout.startswith("inconclusive: layers.1.mlp.norm")
    assert "NaN or infinity in their input" in done.stdout
    # in a header within a header, of the same length
    old, new = (rb"\"dtype\": \"%s\"" % name for name in (b"bfloat16", b"float8_e"))
    raw = bundle.read_bytes().replace(old, new)
    (tmp_path / "float8").write_bytes(raw)
    done = run(tmp_path / "float8", REFERENCE)
    assert done.exit_code == 2
    assert "is in float8_e, and only bfloat16, float16, float32 can be replayed" in done.stderr


def errors(**changes: Any) -> Errors:
    one = Errors(
        rows=144,
        relative={"p50": 0.002, "p95": 0.003, "p99": 0.003, "max": 0.004},
        ratio=1.1,
        median=1.0,
        floor=1.0,
        worst=(WorstRow(46, 55, 0.004, 1.3),),
        ulps={"0": 0.74, "<=1": 0.26, ">16": 0.0},
        fits=(),
        where="all rows",
        bound_used=0.93,
        beyond_bound=0,
        wrong_choices=None,
        nonfinite=0,
        convicted=False,
        why="error 1.1x rounding",
    )
    return dataclasses.replace(one, **changes)


GUILTY = errors(
    ratio=209.0,
    median=171.0,
    fits=(Fit("softmax scale", 0.03, 38.4, 0.9),),
    where="positions >= 96",
    bound_used=169.2,
    beyond_bound=17829,
    convicted=True,
    why="17829 elements lie beyond the worst-case bound",
)
SAME = Variation(0, 144, 0.0, "5 runs of the same 144 rows")


def ran(name: str, **changes: Any) -> Ran:
    one = Ran(
        name=name,
        package="triton 3.8.0",
        mode="fast",
        family="",
        state="ran",
        errors=errors(),
        repeats=SAME,
        batches=SAME,
        reproduces=Reproduction(0.9999, 0.5, 1.0),
    )
    return dataclasses.replace(one, **changes)


def replay_of(point: str = "layers.9.attn.context", **changes: Any) -> Replay:
    one = Replay(
        point=point,
        layer=9,
        operator="attention",
        covers=("attention",),
        label="rollout",
        dtype="bfloat16",
        device="cpu",
        rows=144,
        rows_left_out=0,
        engine_facts={"engine": "sglang", "version": "0.5.23", "device": "cpu", "backend": "x"},
        engine=GUILTY,
        results=(
            ran("triton-fast", batches=Variation(50, 144, 2.0, "in halves"), family="triton"),
            ran("triton-deterministic", mode="deterministic", family="triton", time_ms=0.5),
            ran("bad", state="garbage", errors=None, repeats=None, why="3 elements are NaN"),
            ran("wrong", errors=GUILTY, filled=("rope",)),
            Ran("aiter", "", "unspecified", "", "unavailable", "the package is not installed"),
            Ran("te", "", "unspecified", "", "unavailable", "the package is not installed"),
            Ran("dead", "", "unspecified", "", "crashed", "its process was killed"),
        ),
        status="convicted",
        conclusion="a bug in its attention, not rounding",
    )
    return dataclasses.replace(one, **changes)


def page(*replays: Replay, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, highlight=False)
    render_replays(replays, options.pop("left_out", {}), console, **options)
    return file.getvalue()


def test_the_page_says_first_what_was_found() -> None:
    text = page(replay_of(), left_out={"layers.9.mlp.out": "it was not captured"})
    first, *rest = text.splitlines()
    assert first == (
        "convicted: layers.9.attn.context (attention): rollout errs beyond rounding, 209x at p95"
    )
    assert max(map(len, rest)) <= 100
    at = [text.index(part) for part in ("a bug in its attention", "sglang 0.5.23 on cpu",
          "169x the worst-case bound", "implementation", "> bad", "> wrong", "did not run",
          "not replayed")]  # fmt: skip
    assert at == sorted(at)
    assert "where: positions >= 96" in text
    (fast,) = (line for line in text.splitlines() if "triton-fast" in line)
    # p50, p95, of bound, systematic, repeat, batch, engine's bits, time
    assert fast.split() == [
        "triton-fast", "1.0x", "1.1x", "93", "%", "none", "same", "35", "%", "99", "%", "-",
    ]  # fmt: skip
    assert "softmax scale" in text and "backend" not in text
    assert "bad: garbage: 3 elements are NaN" in text
    assert "wrong: rope by the low-precision reference" in text
    lines = text.splitlines()
    assert lines.index("  dead: crashed: its process was killed") + 1 == lines.index(
        "  aiter, te: unavailable: the package is not installed"
    )
    assert "layers.9.mlp.out: it was not captured" in text
    assert "Triton's kernels ran under its interpreter" in " ".join(text.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nonfinite": 3}, "3 rows not finite"),
        ({"wrong_choices": 1}, "1 row to the wrong experts"),
        ({}, "209x at p95"),
        ({"ratio": 1.1}, "systematically: softmax scale +0.03"),
        ({"ratio": 1.1, "fits": ()}, "17,829 elements beyond the worst-case bound"),
        ({"ratio": 1.1, "fits": (), "beyond_bound": None}, "1.3x in the worst row"),
    ],
)
def test_the_headline_of_a_conviction_says_how_far(changes: dict[str, Any], said: str) -> None:
    guilty = replay_of(engine=dataclasses.replace(GUILTY, **changes))
    assert headline(guilty).endswith(f"(attention): rollout errs beyond rounding, {said}")


def test_the_headline_of_an_acquittal_leaves_the_details_to_what_follows() -> None:
    fine = errors()
    said = f"rounding explains what rollout returned: {fine.why}; torch returns it bit for bit"
    innocent = replay_of(engine=fine, status="acquitted", conclusion=said)
    assert headline(innocent).endswith(": rounding explains what rollout returned, 1.1x at p95")
    text = page(innocent)
    assert said in " ".join(text.split())
    pairs = page(innocent, pairs=deterministic_table([innocent]))
    assert said in " ".join(pairs.split())
    # what is short enough is not said twice
    unknown = replay_of(engine=None, status="inconclusive", conclusion="3 rows are too few")
    assert page(unknown).count("3 rows are too few") == 1


def test_an_error_answers_as_replays_do(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == 2 and set(said) == {"schema", "error", "hint", "replays"}
    assert said["schema"] == 1 and said["replays"] == []
    assert f"error: {said['error']}\n" in done.stderr and "is neither a capture" in said["error"]
    wrong = json.loads(run("--device", "tpu", "--json").stdout)
    assert "tpu" in wrong["error"] and wrong["hint"] == "see `layerbisect replay --help`"


def test_replays_and_pairs_are_read_back_from_json() -> None:
    one = replay_of()
    pairs = deterministic_table([one])
    data = json.loads(json.dumps(plain([one.to_json(), *(pair.to_json() for pair in pairs)])))
    assert record_from_json(Replay, data[0]) == one
    assert tuple(record_from_json(Pair, pair) for pair in data[1:]) == pairs


def test_the_verbose_page_has_the_worst_rows_and_the_distances() -> None:
    text = page(replay_of(), verbose=True)
    for part in (
        "46 (token 55) 1.3x",
        "0: 74 %, <=1: 26 %",
        "systematic: softmax scale +0.03 (z +38.4)",
        "backend=x",
        "batches: 50 of 144 rows change, by up to 2 ulp (in halves)",
    ):
        assert part in text
    assert max(map(len, text.splitlines()[1:])) <= 100


def test_several_stretches_are_one_page() -> None:
    here = Ran("te", "", "unspecified", "", "refused", "eps")
    other = replay_of(
        "layers.9.mid", results=(ran("torch", package="torch"), here), engine=None,
        status="acquitted",
    )  # fmt: skip
    text = page(replay_of(), other)
    assert text.splitlines()[1].startswith("acquitted: layers.9.mid (attention): ")
    assert text.count("did not run") == 1
    # each name where it is the same of all stretches, and else with the points
    assert "te at layers.9.mid: refused: eps" in text
    assert "aiter, te at layers.9.attn.context: unavailable" in text
    assert "what it returned is not known" in text
    gpu = page(replay_of(device="cuda (NVIDIA H200)"))
    assert gpu.endswith("replayed on cuda (NVIDIA H200)\n")


def test_the_table_of_a_deterministic_mode() -> None:
    replays = (replay_of(), replay_of("layers.9.mid", results=()))
    text = page(*replays, pairs=deterministic_table(replays))
    (row,) = (line for line in text.splitlines() if line.startswith("  attn.context"))
    assert row.split("  ")[1:] != [] and "35 % / same" in row and "1.1x / 1.1x" in row
    assert "triton-fast" not in text
    assert "triton-fast" in page(*replays, pairs=deterministic_table(replays), verbose=True)
    none = page(replays[1], pairs=())
    assert "no implementation of these operators has such a switch" in none


def test_both_settings_are_compared(bundle: Path) -> None:
    done = run(bundle, "--deterministic", "both", "--json", "--device", "cpu")
    assert done.exit_code == 1, done.output
    said = json.loads(done.stdout)
    # only what has a switch is run, or named with why it cannot be
    assert all(
        r["family"] or r["state"] == "unavailable" or r["name"] == "reference"
        for one in said["replays"]
        for r in one["results"]
    )
    for pair in said["deterministic"]:
        assert pair["off"]["mode"] == "fast" and pair["on"]["mode"] == "deterministic"
