"""The flags that `layerbisect doctor` knows are those of the installed engines."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from layerbisect.doctor import megatron_table, sglang_flags
from layerbisect.doctor.sglang_hides import HIDES
from layerbisect.doctor.sglang_numbers import NUMBERS

ROOT = Path(__file__).parents[2]
SGLANG = importlib.util.find_spec("sglang") is not None
KINDS = {
    "_StoreTrueAction": "switch",
    "DeprecatedStoreTrueAction": "switch",
    "BooleanOptionalAction": "optional",
}
# of megatron/training/arguments.py, which the package of megatron-core does not have
SCRIPT_ALONE = {
    "bias_swiglu_fusion",
    "fp16_lm_cross_entropy",
    "recompute_activations",
    "use_flash_attn",
}
READ_PARSER = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps({
    name: [action.dest, type(action).__name__, action.nargs]
    for name, action in parser._option_string_actions.items()
}))
"""


@pytest.fixture(scope="module")
def parser() -> dict[str, list[Any]]:
    """SGLang's own flags: what each sets, how, and how many words it takes."""
    done = subprocess.run(
        [sys.executable, "-c", READ_PARSER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.skipif(not SGLANG, reason="needs SGLang")
def test_every_sglang_flag_is_one_of_the_installed_server(parser: dict[str, list[Any]]) -> None:
    for flag in (*sglang_flags.FLAGS, *sglang_flags.HARMLESS):
        for name in flag.names:
            # argparse takes a beginning that fits one flag alone
            fits = [name] if name in parser else [one for one in parser if one.startswith(name)]
            assert len(fits) == 1, (name, fits)
            dest, kind, words = parser[fits[0]]
            assert dest == flag.field, name
            several = "values" if words in ("*", "+") else "value"
            assert KINDS.get(kind, several) == flag.kind, name


@pytest.mark.skipif(not SGLANG, reason="needs SGLang")
def test_flags_that_are_told_as_removed_are_not_there(parser: dict[str, list[Any]]) -> None:
    for name, instead in sglang_flags.REMOVED.items():
        assert name not in parser and instead in parser


def test_every_rule_is_over_a_setting_that_is_read() -> None:
    known = {flag.field for flag in sglang_flags.FLAGS}
    assert {rule.field for rule in (*HIDES, *NUMBERS)} <= known
    assert {rule.state for rule in HIDES} == {"problem"}
    assert "problem" not in {rule.state for rule in NUMBERS}
    read = {flag.field for flag in (*megatron_table.FLAGS, *megatron_table.JOB_FLAGS)}
    assert {rule.field for rule in megatron_table.RULES} <= read


def test_no_flag_is_spelled_twice() -> None:
    for flags in (
        (*sglang_flags.FLAGS, *sglang_flags.HARMLESS),
        (*megatron_table.FLAGS, *megatron_table.JOB_FLAGS),
    ):
        names = [name for flag in flags for name in flag.names]
        assert len(names) == len(set(names))


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_every_megatron_flag_sets_a_field_of_the_installed_configuration() -> None:
    fields: dict[str, str] = {}
    place = metadata.distribution("megatron-core").locate_file("megatron/core")
    for name in ("transformer/transformer_config.py", "model_parallel_config.py"):
        tree = ast.parse(Path(str(place), name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = ast.unparse(node.value) if node.value else ""
    known = {flag.field: flag for flag in megatron_table.FLAGS}
    assert known.keys() - SCRIPT_ALONE <= fields.keys()
    assert SCRIPT_ALONE.isdisjoint(fields)
    # a flag is named by its field, unless the configuration says otherwise
    for field in ("fp8", "fp4"):
        assert known[field].names[0] in fields[field]


def test_every_flag_on_the_page_is_known() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    tables = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`(--[a-z0-9-]+)", tables)) - {"--json", "--server", "--sglang-"}
    known = {
        name
        for flag in (
            *sglang_flags.FLAGS,
            *megatron_table.FLAGS,
            *megatron_table.JOB_FLAGS,
        )
        for name in flag.names
    }
    assert named and named <= known
    # what hides points is on the page
    spelled = {flag.field: flag.names[0] for flag in sglang_flags.FLAGS}
    assert {spelled[rule.field] for rule in HIDES} <= named


def test_the_page_shows_what_is_printed() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    own = ("SGLANG_", "LAYERBISECT_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    words = shlex.split(shown.split("captures/rollout ")[1].split(" --disable-cuda-graph\n")[0])
    done = subprocess.run(
        [sys.executable, "-m", "layerbisect", "doctor", "--", *words],
        cwd=ROOT,
        env=environment | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith(shown)
