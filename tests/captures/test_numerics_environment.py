"""What of the environment a capture records: named variables alone, and torch's switches."""

from __future__ import annotations

import os
import subprocess
import sys

from layerbisect.captures.numerics_environment import VARIABLES, numerics_environment


def test_only_named_variables_that_are_set_are_recorded() -> None:
    environ = {"NCCL_ALGO": "Ring", "NVIDIA_TF32_OVERRIDE": "0", "API_TOKEN": "secret"}
    found = numerics_environment(environ)
    assert {k: v for k, v in found.items() if not k.startswith("torch.")} == {
        "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_ALGO": "Ring",
    }


def test_switches_of_torch_are_recorded_where_it_is_loaded() -> None:
    import torch

    found = numerics_environment({})
    assert found["torch.float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert found["torch.deterministic_algorithms"] == "False"
    assert all(type(value) is str for value in found.values())


def said(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_not_loaded_to_ask_it() -> None:
    code = (
        "import sys; from layerbisect.captures.numerics_environment import numerics_environment\n"
        "print(numerics_environment({}), 'torch' in sys.modules)"
    )
    assert said(code).strip() == "{} False"


def test_a_precision_set_in_torchs_newer_way_is_said_to_be_so() -> None:
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from layerbisect.captures.numerics_environment import numerics_environment\n"
        "print(numerics_environment({})['torch.cuda.matmul.allow_tf32'])"
    )
    assert said(code).strip() == "set by fp32_precision"


def test_every_variable_says_who_reads_it_and_what_it_changes() -> None:
    names = [one.name for one in VARIABLES]
    assert len(set(names)) == len(names)
    assert all(one.who and one.effect for one in VARIABLES)
