from __future__ import annotations

import sys
from types import ModuleType

import pytest

from layerbisect.kernels.replay import known
from layerbisect.kernels.replay.implementation import OPERATORS, Implementation, Unavailable


def test_every_operator_has_torch_and_what_is_missing_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # its import takes seconds, and its own tests have it
    monkeypatch.setitem(sys.modules, "sglang", None)
    for operator in OPERATORS:
        found = known.implementations(operator, "cpu")
        names = [i.name for i in found]
        assert "torch" in names
        assert len(set(names)) == len(names)
        for one in found:
            assert one.operator == operator
            assert isinstance(one, Implementation) or one.why


def test_the_order_is_that_of_the_providers_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    names = [[i.name for i in known.implementations("attention", "cpu")] for _ in range(2)]
    assert names[0] == names[1]
    assert names[0].index("torch") < names[0].index("sglang") < names[0].index("aiter")


def test_a_provider_that_raises_is_unavailable_and_the_others_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = ModuleType("layerbisect.kernels.others.broken")

    def implementations(operator: str, device: str) -> list[Unavailable]:
        raise OSError("libfoo.so: cannot open shared object file")

    broken.implementations = implementations  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    providers = (broken.__name__, "layerbisect.kernels.others.torch_ops")
    monkeypatch.setattr(known, "PROVIDERS", providers)
    first, *others = known.implementations("add", "cpu")
    assert first == Unavailable(
        "others.broken", "add", "OSError: libfoo.so: cannot open shared object file"
    )
    assert [i.name for i in others] == ["torch"]


def test_an_operator_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="operator must be one of rms_norm, .* got 'softmax'"):
        known.implementations("softmax", "cpu")
