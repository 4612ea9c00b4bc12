"""Packages that are not here, and GPUs that are not here: a reason, and never an import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from layerbisect.kernels.others import aiter, flash_attention, sglang, transformer_engine
from layerbisect.kernels.others.common import device_refuses, missing
from layerbisect.kernels.replay.implementation import OPERATORS, Implementation, Unavailable

PROVIDERS = (aiter, flash_attention, sglang, transformer_engine)


def test_on_a_cpu_without_the_packages_all_is_unavailable_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("aiter", "flash_attn", "flash_attn_interface", "sglang", "transformer_engine"):
        # how an import that must not happen is blocked
        monkeypatch.setitem(sys.modules, package, None)
    listed = [
        i for operator in OPERATORS for p in PROVIDERS for i in p.implementations(operator, "cpu")
    ]
    assert {i.name for i in listed} == {
        "aiter",
        "flash-attn-2",
        "flash-attn-3",
        "flash-attn-4",
        "sglang",
        "te",
        "te-flash",
        "te-fused",
        "te-unfused",
    }
    for found in listed:
        assert isinstance(found, Unavailable)
        assert found.why.endswith(" is not installed")
        assert found.operator in OPERATORS


@pytest.mark.parametrize("provider", [aiter, flash_attention, transformer_engine])
def test_an_installed_package_for_gpus_is_not_imported_on_a_cpu(
    provider: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("aiter", "flash_attn", "flash_attn/cute", "transformer_engine"):
        # sglang's tests may have imported it
        monkeypatch.delitem(sys.modules, package, raising=False)
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "flash_attn_interface.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = provider.implementations("attention", "cpu")  # type: ignore[attr-defined]
    assert found
    assert all("and the device is cpu" in i.why for i in found)


def test_on_a_gpu_of_its_kind_an_installed_package_is_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.version.hip", "7.0")
    (offered,) = aiter.implementations("attention", "cuda")
    assert isinstance(offered, Implementation)
    monkeypatch.setattr("torch.version.hip", None)
    (refused,) = aiter.implementations("attention", "cuda")
    assert refused == Unavailable(
        "aiter", "attention", "it is for hip, and torch is built for cuda"
    )


def test_a_folder_of_another_distribution_is_not_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_a_package" / "cute").mkdir(parents=True)
    (tmp_path / "half_a_package" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    whole = missing("half_a_package")
    assert whole == "the package half_a_package is not installed, only something in its folder"
    assert missing("half_a_package.cute") is None
    absent = missing("half_a_package.other")
    assert absent == "the package half_a_package is installed without half_a_package.other"


def test_a_device_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_refuses("cpu", "hip") == "it needs a GPU (hip), and the device is cpu"
    monkeypatch.setattr("torch.version.hip", None)
    assert device_refuses("cuda:1", "cuda") is None
