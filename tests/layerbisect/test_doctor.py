"""What `layerbisect doctor` says about a machine."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from layerbisect.captures.numerics_environment import VARIABLES as NUMERICS
from layerbisect.cli import main
from layerbisect.doctor.check import Check
from layerbisect.doctor.health import examine
from layerbisect.doctor.packages import INSTALL, MINIMUM, TRIED, build_of
from layerbisect.doctor.variables import VARIABLES
from tests.layerbisect.doctor_run import ROOT, doctor

EVERYTHING = {
    "layerbisect": "0.1.0",
    "torch": "2.14.1+cu130",
    "transformers": "5.19.0",
    "sglang": "0.5.23",
    "megatron-core": "0.16.1",
    "triton": "3.8.0",
    "ray": "2.50.0",
    "amd-aiter": "0.1.5",
    "transformer-engine": "2.8.0",
    "flash-attn": "2.8.3",
}
ENTRY = metadata.EntryPoint("layerbisect", "layerbisect.captures.sglang.plugin:register", "group")
H200 = "echo 'NVIDIA H200, 9.0, 570.1, 143771, 143000'"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What is installed, as a test may change it; nothing but that is found on this machine."""
    packages = dict(EVERYTHING)

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [ENTRY] if "layerbisect" in packages else []
    )
    # tools are written there, and find nothing but the shell's own commands
    monkeypatch.setenv("PATH", str(tmp_path))
    return packages


def check(name: str, **environment: str) -> Check:
    health = examine(environment)
    (found,) = [c for c in (*health.checks, *health.captures) if c.name == name]
    return found


def write_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_with_everything_here_every_capture_is_possible(installed: dict[str, str]) -> None:
    health = examine({})
    assert {c.name: c.state for c in health.captures} == {
        "transformers model": "ok",
        "Megatron-core job": "ok",
        "SGLang server": "ok",
    }
    states = {c.name: c.state for c in health.checks}
    assert {name for name, state in states.items() if state != "ok"} == {"GPU"}
    assert check("torch").found == "2.14.1+cu130, for CUDA 13.0"
    assert check("aiter").found == "0.1.5 (amd-aiter)"


@pytest.mark.parametrize("name", [name for name in INSTALL if name != "aiter"])
def test_what_is_missing_comes_with_what_to_do(installed: dict[str, str], name: str) -> None:
    del installed[name]
    found = check(name)
    assert found.state == "missing" and found.found == "not installed" and found.advice


@pytest.mark.parametrize(
    "name, version, state",
    [
        ("transformers", "4.57.1", "problem"),
        ("transformers", "5.19.0", "ok"),
        ("transformers", "5.24.0.dev0", "ok"),
        ("transformers", "5.30.1", "note"),
        ("transformers", "6.0", "note"),
        ("sglang", "0.5.10", "problem"),
        ("sglang", "0.5.16.post1", "note"),
        ("sglang", "0.5.23", "ok"),
        ("sglang", "0.5.23.post2", "ok"),
        ("sglang", "0.5.230", "note"),
        ("megatron-core", "0.15.2", "problem"),
        ("megatron-core", "0.16.1", "ok"),
        ("megatron-core", "0.17.0", "note"),
        ("megatron-core", "0.19.2", "ok"),
        ("torch", "2.5.1+cpu", "problem"),
        ("torch", "2.6.0a0+git1234", "note"),
        ("torch", "2.14.1+rocm7.1", "ok"),
    ],
)
def test_versions_that_are_too_old_or_were_not_tried_are_told(
    installed: dict[str, str], name: str, version: str, state: str
) -> None:
    installed[name] = version
    found = check(name)
    assert found.state == state
    if state == "note":
        assert f"tried with {TRIED[name][0]}" in found.found
    if state == "problem":
        assert "is the oldest that is supported" in found.advice
    if state == "note":
        # it may work: captures are still possible
        assert all(c.state == "ok" for c in examine({}).captures)


@pytest.mark.parametrize(
    "version, kind, words",
    [
        ("2.14.1+cu130", "cuda", "for CUDA 13.0"),
        ("2.9.0+cu128", "cuda", "for CUDA 12.8"),
        ("2.14.1+rocm7.1", "hip", "for ROCm 7.1"),
        ("2.14.1+cpu", "cpu", "for the CPU alone"),
        ("2.6.0a0+git1234", "", "a build that does not say what it is for"),
    ],
)
def test_what_torch_is_built_for_is_in_its_version(version: str, kind: str, words: str) -> None:
    assert build_of(version) == (kind, words)


def test_what_torch_is_built_for_is_read_where_its_version_does_not_say() -> None:
    import torch

    built = "cuda" if torch.version.cuda else "hip" if torch.version.hip else "cpu"
    assert build_of(torch.__version__.partition("+")[0])[0] == built


def test_a_capture_needs_its_engine_and_the_plugin(installed: dict[str, str]) -> None:
    del installed["sglang"]
    assert check("SGLang server").found == "needs sglang"
    assert check("transformers model").state == "ok"
    installed["sglang"] = "0.5.23"
    del installed["layerbisect"]
    assert check("SGLang plugin").state == "missing"
    assert check("SGLang server").state == "missing"
    assert "pip install layerbisect" in check("SGLang server").advice
    assert check("layerbisect").state == "problem"


@pytest.mark.parametrize(
    "variable, value, state, advice",
    [
        ("SGLANG_PLUGINS", "other", "problem", "SGLANG_PLUGINS=other,layerbisect"),
        ("SGLANG_PLUGINS", "other, layerbisect", "ok", ""),
        ("SGLANG_PLATFORM", "their_npu", "problem", "unset SGLANG_PLATFORM"),
        ("SGLANG_PLATFORM", "layerbisect_cpu", "ok", ""),
    ],
)
def test_variables_that_leave_the_plugin_out_are_told(
    installed: dict[str, str], variable: str, value: str, state: str, advice: str
) -> None:
    found = check("SGLang plugin", **{variable: value})
    assert (found.state, found.advice) == (state, advice)
    assert check("SGLang server", **{variable: value}).state == state


def test_variables_that_make_a_server_capture_are_told(installed: dict[str, str]) -> None:
    assert check("variables", HOME="/root").found.startswith("no LAYERBISECT_* is set")
    capturing = check("variables", LAYERBISECT_CAPTURE="/x", LAYERBISECT_POINTS="all")
    assert capturing.found == "LAYERBISECT_CAPTURE=/x, LAYERBISECT_POINTS=all"
    assert capturing.state == "ok"
    assert check("variables", LAYERBISECT_POINTS="all").state == "problem"
    weights = check("variables", LAYERBISECT_WEIGHTS="/w")
    assert weights.state == "ok" and "snapshots" in weights.advice
    assert check("variables", SGLANG_PLATFORM="layerbisect_cpu").state == "ok"


def test_a_variable_that_nothing_reads_is_told(installed: dict[str, str]) -> None:
    found = check("variables", LAYERBISECT_CAPTURE="/x", LAYERBISECT_PONTS="all")
    assert found.state == "problem" and found.found.endswith("LAYERBISECT_PONTS=all")
    assert found.advice == "nothing reads LAYERBISECT_PONTS; did you mean LAYERBISECT_POINTS"
    unlike = check("variables", LAYERBISECT_XYZZY="1").advice
    assert unlike.startswith("nothing reads LAYERBISECT_XYZZY; known are LAYERBISECT_CAPTURE, ")
    for name in VARIABLES:
        told = check("variables", **{name: "1", "LAYERBISECT_CAPTURE": "/x"})
        assert told.state == "ok", name


def test_every_variable_that_is_documented_is_known() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {m for page in pages for m in re.findall(r"LAYERBISECT_[A-Z_]*[A-Z]", page.read_text())}
    assert named and named <= set(VARIABLES)


def test_variables_that_change_numbers_are_told_with_what_they_do() -> None:
    (clean,) = examine({"HOME": "/root"}).environment
    assert clean.state == "ok" and str(len(NUMERICS)) in clean.found
    (found,) = examine({"NVIDIA_TF32_OVERRIDE": "0"}).environment
    assert (found.name, found.state) == ("NVIDIA_TF32_OVERRIDE", "note")
    assert found.found.startswith("'0', read by ") and "TF32" in found.effect and found.advice
    assert len(examine({one.name: "1" for one in NUMERICS}).environment) == len(NUMERICS)


def test_a_variable_that_hides_points_says_which() -> None:
    (on,) = examine({"SGLANG_USE_AITER": "1"}).environment
    (off,) = examine({"SGLANG_USE_AITER": "0"}).environment
    assert "hides attn.k and attn.v" in on.effect and "hides" not in off.effect
    assert not on.tried


AMD_STATIC = {
    "gpu_data": [
        {
            "gpu": n,
            "asic": {"market_name": "AMD Instinct MI355X", "target_graphics_version": "gfx950"},
            "driver": {"name": "amdgpu", "version": "6.14.14"},
        }
        for n in (0, 1)
    ]
}
AMD_MEMORY = {
    "gpu_data": [
        {
            "gpu": n,
            "mem_usage": {
                "total_vram": {"value": 294896, "unit": "MB"},
                "used_vram": {"value": used, "unit": "MB"},
            },
        }
        for n, used in ((0, 283), (1, 200000))
    ]
}
ROCM = {
    "card0": {
        "Card Series": "AMD Instinct MI300X",
        "GFX Version": "gfx942",
        "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "301989888",
    },
    "system": {"Driver version": "6.10.5"},
}


@pytest.mark.parametrize(
    "tool, script, state, found",
    [
        (
            "nvidia-smi",
            f"{H200}; {H200}",
            "ok",
            "2 x NVIDIA H200 (sm_90); driver 570.1; all free (140 GiB each)",
        ),
        (
            "nvidia-smi",
            "echo 'NVIDIA H200, 9.0, 570.1, 143771, 20000'",
            "ok",
            "1 x NVIDIA H200 (sm_90); driver 570.1; GPU 0 has 20 of 140 GiB free",
        ),
        ("nvidia-smi", "echo 'GPU, [N/A], 570.1, [N/A], 1'", "ok", "1 x GPU; driver 570.1"),
        ("nvidia-smi", "echo 'no driver' >&2; exit 9", "problem", "nvidia-smi failed: no driver"),
        ("nvidia-smi", "exit 0", "missing", "none"),
        (
            "amd-smi",
            f"case $1 in static) echo '{json.dumps(AMD_STATIC)}';; "
            f"*) echo '{json.dumps(AMD_MEMORY)}';; esac",
            "ok",
            "2 x AMD Instinct MI355X (gfx950); driver 6.14.14; GPU 1 has 93 of 288 GiB free; "
            "the others are free",
        ),
        (
            "amd-smi",
            f"case $1 in static) echo '{json.dumps(AMD_STATIC['gpu_data'])}';; *) echo '[]';; esac",
            "ok",
            "2 x AMD Instinct MI355X (gfx950); driver 6.14.14",
        ),
        (
            "rocm-smi",
            f"echo 'WARNING: low power'; echo '{json.dumps(ROCM)}'",
            "ok",
            "1 x AMD Instinct MI300X (gfx942); driver 6.10.5; all free (192 GiB each)",
        ),
        ("rocm-smi", "echo nothing", "problem", "rocm-smi did not answer in JSON: 'nothing'"),
    ],
)
def test_gpus_are_named_by_their_own_tool(
    installed: dict[str, str], tmp_path: Path, tool: str, script: str, state: str, found: str
) -> None:
    installed["torch"] = "2.14.1+rocm7.1" if tool != "nvidia-smi" else "2.14.1+cu130"
    write_tool(tmp_path, tool, script)
    assert (check("GPU").state, check("GPU").found) == (state, found)


def test_torch_for_other_devices_than_are_here_is_told(
    installed: dict[str, str], tmp_path: Path
) -> None:
    write_tool(tmp_path, "nvidia-smi", H200)
    assert check("torch").state == "ok"
    for version, words in (("2.14.1+cpu", "the CPU alone"), ("2.14.1+rocm7.1", "ROCm 7.1")):
        installed["torch"] = version
        found = check("torch")
        assert found.state == "problem" and words in found.effect
        assert found.advice == "install torch's build for CUDA"


def test_kernels_that_can_be_replayed_depend_on_the_gpu(
    installed: dict[str, str], tmp_path: Path
) -> None:
    without = {c.name: c.state for c in examine({}).replays}
    assert without == {
        "torch": "ok",
        "layerbisect's Triton": "ok",
        "SGLang": "ok",
        "aiter": "missing",
        "TransformerEngine": "missing",
        "flash-attn": "missing",
    }
    write_tool(tmp_path, "nvidia-smi", H200)
    found = {c.name: c for c in examine({}).replays}
    assert {name for name, c in found.items() if c.state != "ok"} == {"aiter"}
    assert found["aiter"].found == "needs an AMD GPU"


@pytest.mark.parametrize("columns", [80, 100])
def test_the_page_has_every_check_and_fits(columns: int) -> None:
    done = doctor(COLUMNS=str(columns), NO_COLOR="1", SGLANG_USE_AITER="1")
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "\x1b" not in done.stdout
    health = json.loads(doctor("--json").stdout)
    assert health["schema"] == 1
    for section in ("checks", "captures", "replays"):
        for one in health[section]:
            assert one["name"] in done.stdout
            assert one["state"] in ("ok", "note", "missing", "problem")
    assert health["command"] is None and health["server"] is None
    assert "SGLANG_USE_AITER" in done.stdout
    assert "* read in the engine's source or documentation; not tried on a GPU" in done.stdout


def test_names_of_captures_are_as_ever(installed: dict[str, str]) -> None:
    health = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert [c["name"] for c in health["captures"]] == [
        "transformers model",
        "Megatron-core job",
        "SGLang server",
    ]
    assert {"name", "state", "found", "advice"} <= health["captures"][0].keys()


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from layerbisect.cli import main\n"
        "words = 'python -m sglang.launch_server --model-path x'.split()\n"
        "try: main(['doctor', '--json', '--', *words])\n"
        "except SystemExit as leaving: assert leaving.code == 0\n"
        "heavy = {'torch', 'transformers', 'sglang', 'triton', 'numpy'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "set()\n"
    assert MINIMUM.keys() <= INSTALL.keys() and TRIED.keys() <= INSTALL.keys()
