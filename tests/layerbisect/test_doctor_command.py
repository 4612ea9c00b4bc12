"""What `layerbisect doctor -- COMMAND` says of a command, flag by flag."""

import json
import shlex
from pathlib import Path

import pytest

from layerbisect.captures.errors import LayerBisectError
from layerbisect.doctor.check import Check
from layerbisect.doctor.command import Judged, judge_command
from layerbisect.doctor.megatron_rules import HOOK
from tests.layerbisect.doctor_run import doctor

SERVER = "python -m sglang.launch_server --model-path policy"
JOB = "torchrun --nproc-per-node 8 train.py --num-layers 4"
CLEAN = (
    f"LAYERBISECT_CAPTURE=/c {SERVER} --disable-cuda-graph --disable-overlap-schedule "
    "--attention-backend fa3"
)


def judge(command: str, **environment: str) -> Judged:
    return judge_command(shlex.split(command), environment)


def found(command: str, name: str, **environment: str) -> Check:
    (one,) = [c for c in judge(command, **environment).checks if c.name == name]
    return one


def problems(command: str) -> set[str]:
    return {c.name for c in judge(command).checks if c.state == "problem"}


def test_a_clean_command_has_no_problem_and_needs_no_mending() -> None:
    judged = judge(CLEAN)
    assert judged.engine == "SGLang server"
    assert problems(CLEAN) == set() and judged.next == ""
    assert {c.name for c in judged.checks if c.state == "note"} == {"deterministic mode", "model"}


@pytest.mark.parametrize(
    "command",
    [
        "python -m sglang.launch_server --port 1",
        "python3 -m sglang.launch_server --port 1",
        "sglang serve --port 1",
        "/opt/venv/bin/sglang serve --port 1",
        "env A=1 sglang serve --port 1",
        "numactl -N 0 python -m sglang.launch_server --port 1",
    ],
)
def test_the_ways_to_start_a_server_are_known(command: str) -> None:
    assert judge(command).engine == "SGLang server"
    # one word, as somebody quotes it
    assert judge_command([command], {}).engine == "SGLang server"


@pytest.mark.parametrize(
    "flags, phases",
    [
        ("", "decode and prefill"),
        ("--disable-cuda-graph", ""),
        ("--disable-decode-cuda-graph", "prefill"),
        ("--disable-prefill-cuda-graph", "decode"),
        ("--disable-decode-cuda-graph --disable-prefill-cuda-graph", ""),
        ("--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill=disabled", ""),
        # the explicit choice wins over the switch
        ("--disable-cuda-graph --cuda-graph-backend-decode full", "decode"),
        ('--cuda-graph-config \'{"decode": {"backend": "disabled"}}\'', "prefill"),
        (
            '--disable-cuda-graph --cuda-graph-config \'{"prefill": {"backend": "full"}}\'',
            "prefill",
        ),
        ("--device cpu", ""),
    ],
)
def test_cuda_graphs_hide_the_passes_that_replay_one(flags: str, phases: str) -> None:
    check = found(f"{SERVER} {flags}", "CUDA graphs")
    if phases:
        assert check.state == "problem" and f"points inside {phases} passes" in check.effect
        mended = judge(f"{SERVER} {flags}").next
        assert found(mended, "CUDA graphs").state == "ok"
    else:
        assert check.state == "ok"


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--enable-torch-compile", "torch.compile"),
        ("--speculative-algorithm EAGLE3 --speculative-num-steps 3", "speculative decoding"),
        ("--quantization fp8", "quantization"),
        ("--moe-a2a-backend deepep", "experts' tokens travel"),
        ("--enable-dp-attention --dp-size 8", "attention DP"),
        ("--attn-dp-size 2", "attention DP"),
        ("--enable-eplb", "experts are moved"),
        ("--ep-num-redundant-experts 32", "redundant experts"),
        ("--attn-cp-size 2", "context parallel"),
        ("--enable-two-batch-overlap", "two-batch overlap"),
        ("--enable-amd-monokernel", "fused kernels"),
        ("--enable-lora --lora-paths a=/x b=/y", "LoRA"),
        ("--model-impl transformers", "model"),
        ("--load-format dummy", "weights"),
    ],
)
def test_what_hides_points_is_a_problem_and_is_taken_out(flags: str, name: str) -> None:
    command = f"{CLEAN} {flags} --port 30000"
    assert problems(command) == {name}
    mended = judge(command).next
    assert mended == f"{CLEAN} --port 30000"


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--kv-cache-dtype fp8_e4m3", "KV cache"),
        ("--enable-fp32-lm-head", "head in float32"),
        ("--tp 8", "tensor parallel"),
        ("--enable-aiter-allreduce-fusion", "fused all-reduce"),
        ("--flashinfer-allreduce-fusion-backend auto", "fused all-reduce"),
        ("--enable-fused-qk-norm-rope", "fused q/k norm and RoPE"),
        ("--decode-attention-backend fa3 --prefill-attention-backend fa4", "attention kernels"),
        ("--moe-runner-backend flashinfer_trtllm", "expert kernels"),
        ("--enable-deterministic-inference", "deterministic mode"),
        ("--rl-on-policy-target fsdp", "deterministic mode"),
        ("--dtype float16", "dtype"),
        ("--config server.yaml", "settings in a file"),
    ],
)
def test_what_changes_numbers_is_a_note(flags: str, name: str) -> None:
    check = found(f"{CLEAN} {flags}", name)
    assert check.state == "note" and check.effect
    assert flags.split("=")[0].split()[0].removeprefix("--") in check.found or "prefill" in flags
    assert problems(f"{CLEAN} {flags}") == set()


@pytest.mark.parametrize(
    "flags",
    [
        "--quantization unquant",
        "--kv-cache-dtype auto",
        "--kv-cache-dtype bf16",
        "--moe-a2a-backend none",
        "--ep-num-redundant-experts 0",
        "--no-enable-fused-qk-norm-rope",
        "--moe-runner-backend triton",
        "--dtype bfloat16",
        "--init-expert-location trivial",
        "--attn-dp-size 1",
        "--host 0.0.0.0 --port 30000 --mem-fraction-static 0.8 --context-length 32768",
    ],
)
def test_what_is_as_by_default_is_not_told(flags: str) -> None:
    assert [c.name for c in judge(f"{CLEAN} {flags}").checks if c.state != "ok"] == [
        c.name for c in judge(CLEAN).checks if c.state != "ok"
    ]


def test_fused_sums_are_told_where_sglang_turns_them_on_by_itself() -> None:
    check = found(f"{CLEAN} --tp-size 2", "fused all-reduce")
    assert check.found.startswith("on by default for MoE models")
    for off in (
        "--enforce-disable-flashinfer-allreduce-fusion",
        "--enable-deterministic-inference",
        "--device cpu",
    ):
        assert "fused all-reduce" not in {c.name for c in judge(f"{CLEAN} --tp 2 {off}").checks}


def test_harmless_settings_are_said_to_be() -> None:
    check = found(f"{CLEAN} --chunked-prefill-size 512 --enable-mixed-chunk", "batching")
    assert check.state == "ok" and check.found.startswith("--chunked-prefill-size 512, ")
    assert found(CLEAN, "prefix cache").state == "ok"
    off = judge(f"{CLEAN} --disable-radix-cache")
    assert "prefix cache" not in {c.name for c in off.checks}


def test_a_server_that_would_capture_nothing_is_told_and_mended() -> None:
    command = CLEAN.removeprefix("LAYERBISECT_CAPTURE=/c ")
    assert found(command, "capture").state == "note"
    assert judge(command).next == f"LAYERBISECT_CAPTURE=captures/rollout {command}"
    assert found(command, "capture", LAYERBISECT_CAPTURE="/c").state == "ok"
    blocked = found(CLEAN, "SGLang plugin", SGLANG_PLUGINS="other")
    assert blocked.state == "problem" and "nothing is captured" in blocked.effect


def test_variables_before_the_command_are_judged() -> None:
    command = f"NCCL_ALGO=Tree LAYERBISECT_PONTS=all {CLEAN}"
    assert found(command, "NCCL_ALGO").state == "note"
    assert "did you mean LAYERBISECT_POINTS" in found(command, "variables").advice
    # those of the shell have a section of their own
    assert "NCCL_ALGO" not in {c.name for c in judge(CLEAN, NCCL_ALGO="Tree").checks}


def test_flags_that_are_not_known_are_named_and_mistakes_told() -> None:
    command = f"{CLEAN} --disable-cuda-grph --xyzzy 3 --port 1"
    assert found(command, "unknown flag").advice == "did you mean --disable-cuda-graph"
    assert found(command, "not judged").found == "--xyzzy"
    removed = found(f"{CLEAN} --disable-piecewise-cuda-graph", "unknown flag")
    assert removed.state == "problem" and removed.advice == "--disable-prefill-cuda-graph"


def test_the_model_is_looked_at_where_it_is_here(tmp_path: Path) -> None:
    def model(**config: object) -> list[Check]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        command = f"python -m sglang.launch_server --model {tmp_path}"
        return [c for c in judge(command).checks if c.name in ("model", "quantization")]

    (known,) = model(architectures=["Qwen3MoeForCausalLM"])
    assert known.state == "ok"
    (unknown,) = model(architectures=["DeepseekV3ForCausalLM"])
    assert unknown.state == "problem" and "Qwen3MoeForCausalLM" in unknown.advice
    quantized = model(
        architectures=["LlamaForCausalLM"], quantization_config={"quant_method": "fp8"}
    )
    assert [c.state for c in quantized] == ["problem", "ok"]
    assert found(SERVER, "model").state == "note"


def test_a_megatron_job_is_judged_by_its_own_flags() -> None:
    judged = judge(
        f"{JOB} --tensor-model-parallel-size 2 --sequence-parallel --cuda-graph-impl local "
        "--num-experts 8 --moe-token-dispatcher-type flex --moe-router-force-load-balancing "
        "--recompute-granularity full --attention-dropout 0.0 --hidden-dropout 0"
    )
    assert judged.engine == "Megatron-core job"
    states = {c.name: c.state for c in judged.checks}
    assert {n for n, s in states.items() if s == "problem"} == {"CUDA graphs", "forced routes"}
    assert states["sequence parallel"] == states["layers"] == states["experts"] == "note"
    assert states["parallelism"] == states["recomputation"] == states["dropout"] == "ok"
    assert "--cuda-graph-impl" not in judged.next and "force-load" not in judged.next


@pytest.mark.parametrize(
    "flags, name, state",
    [
        ("--transformer-impl local", "layers", "ok"),
        ("--transformer-impl transformer_engine", "layers", "note"),
        ("--fp8-format hybrid", "FP8", "note"),
        ("--attention-dropout 0", "dropout", "note"),
        ("--context-parallel-size 2", "context parallel", "note"),
        ("--context-parallel-size 2 --keep-old-actor", "older actor", "problem"),
        ("--multi-latent-attention", "model", "problem"),
        ("--deterministic-mode", "deterministic mode", "note"),
        ("--batch-invariant-mode", "batch invariance", "note"),
        ("--moe-expert-capacity-factor 1.0", "dropped tokens", "note"),
        ("--no-gradient-accumulation-fusion", "gradient accumulation", "ok"),
        ("--tensor-model-parallel-size 8", "parallelism", "ok"),
    ],
)
def test_what_a_megatron_flag_does(flags: str, name: str, state: str) -> None:
    assert found(f"{JOB} {flags}", name).state == state


def test_gathered_context_parallelism_is_refused_as_the_hook_does() -> None:
    command = f"{JOB} --allgather-cp --context-parallel-size 2"
    assert any(c.state == "problem" and "refuses" in c.effect for c in judge(command).checks)
    assert problems(f"{JOB} --allgather-cp") == set()


def test_deterministic_mode_wants_variables() -> None:
    command = f"{JOB} --deterministic-mode"
    name = "deterministic mode"
    wants = found(command, name)
    assert wants.advice == "NCCL_ALGO=Ring and NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
    assert "refuses to start" in wants.effect
    local = found(f"NCCL_ALGO=Ring {command} --transformer-impl local", name)
    passed = """--train-env-vars '{"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}'"""
    given = found(f"{command} {passed}", name, NCCL_ALGO="Ring")
    assert "refuses" not in local.effect + given.effect


def test_the_hook_of_miles_and_slime_needs_a_place_to_write() -> None:
    hooked = f"{JOB} --custom-megatron-before-log-prob-hook-path {HOOK}"
    assert found(JOB, "capture").state == "note"
    assert found(hooked, "capture").state == "problem"
    variables = """--train-env-vars '{"LAYERBISECT_CAPTURE": "/c"}'"""
    assert found(f"{hooked} {variables}", "capture").state == "ok"
    other = found(f"{JOB} --custom-megatron-before-log-prob-hook-path a.b.c", "capture")
    assert other.state == "problem" and HOOK in other.advice


def test_the_rollout_of_a_job_is_judged_as_sglang() -> None:
    job = f"{JOB} --rollout-num-gpus-per-engine 2 --sglang-enable-torch-compile"
    graphs = found(job, "rollout: CUDA graphs")
    assert graphs.state == "problem" and "--sglang-disable-cuda-graph" in graphs.advice
    compiled = found(job, "rollout: torch.compile")
    assert compiled.found == "--sglang-enable-torch-compile"
    assert compiled.advice == "leave --sglang-enable-torch-compile out"
    ranks = found(job, "rollout: tensor parallel")
    assert ranks.found == "--rollout-num-gpus-per-engine 2"
    assert judge(job).next.endswith(" --sglang-disable-cuda-graph")
    assert not [c for c in judge(JOB).checks if c.name.startswith("rollout")]
    # the job's own flags are none of the rollout's
    own = judge(f"{JOB} --attention-backend flash --sglang-disable-cuda-graph")
    (kernels,) = [c for c in own.checks if c.name == "rollout: attention kernels"]
    assert "flash" not in kernels.found


@pytest.mark.parametrize(
    "command, message",
    [
        ("ls -l", "starts neither an SGLang server nor a Megatron-core job"),
        ("/", "is a directory; `layerbisect show /`"),
        (f"{SERVER} --quantization", "--quantization has no value"),
        (f"{SERVER} --tp-size two", "--tp-size two is no whole number"),
        (f"{JOB} --train-env-vars LAYERBISECT_CAPTURE=/c", "is no JSON object"),
    ],
)
def test_what_cannot_be_judged_is_an_error(command: str, message: str) -> None:
    with pytest.raises(LayerBisectError) as caught:
        judge(command)
    assert message in str(caught.value)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_page_of_a_command_fits_and_ends_with_what_to_run(columns: int) -> None:
    words = shlex.split(f"{SERVER} --tp 8 --enable-torch-compile --kv-cache-dtype fp8_e5m2")
    done = doctor("--", *words, COLUMNS=str(columns), NO_COLOR="1")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    # a command is copied, and is never broken
    assert max(len(x) for x in lines if not x.startswith("next: ")) <= columns
    assert any(line.startswith("the command (SGLang server): 2 problems, ") for line in lines)
    (mended,) = [line for line in lines if line.startswith("next: ")]
    assert mended.endswith(f"{SERVER} --tp 8 --kv-cache-dtype fp8_e5m2 --disable-cuda-graph")


def test_a_command_may_be_given_without_dashes_and_as_json() -> None:
    done = doctor("--json", *shlex.split(SERVER))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["schema"] == 1 and said["server"] is None
    assert said["command"]["engine"] == "SGLang server"
    assert said["command"]["checks"][0]["state"] == "problem"
    wrong = doctor("--json", "ls")
    assert wrong.returncode == 2 and "starts neither" in wrong.stderr
