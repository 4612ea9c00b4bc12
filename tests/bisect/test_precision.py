"""Which kinds of operator a Precision rounds."""

from __future__ import annotations

import pytest
import torch

from layerbisect.bisect.precision import KINDS, Precision


def test_full_rounds_nothing_and_all_in_rounds_everything() -> None:
    assert set(Precision.full().values()) == {None}
    assert set(Precision.all_in(torch.bfloat16).values()) == {torch.bfloat16}
    assert Precision.all_in(None) == Precision.full() == Precision()


@pytest.mark.parametrize("kind", KINDS)
def test_only_and_all_but_are_complements(kind: str) -> None:
    only, but = Precision.only(kind, torch.float16), Precision.all_but(kind, torch.float16)
    assert only[kind] == torch.float16 and but[kind] is None
    assert all((only[each] is None) != (but[each] is None) for each in KINDS)


def test_it_is_a_hashable_mapping_in_the_order_of_the_kinds() -> None:
    precision = Precision(head=torch.bfloat16)
    assert tuple(precision) == KINDS and len(precision) == 7
    assert precision["head"] == precision.head == torch.bfloat16
    assert {precision: 1}[Precision.only("head", torch.bfloat16)] == 1


def test_unknown_kinds_are_named() -> None:
    for make in (Precision.only, Precision.all_but):
        with pytest.raises(ValueError, match="kind must be one of norm, .*, head, got 'rope'"):
            make("rope", torch.bfloat16)
    with pytest.raises(KeyError, match="rope"):
        Precision.full()["rope"]
