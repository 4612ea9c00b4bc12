import threading

import pytest
import torch
from torch import empty as empty_imported_before

from layerbisect.kernels.replay.poison import poisoned_empty


def test_every_way_to_make_a_tensor_without_values_is_poisoned() -> None:
    like = torch.zeros(2, 3, dtype=torch.bfloat16)
    with poisoned_empty():
        made = [
            torch.empty(2, 3),
            torch.empty((2, 3), dtype=torch.float16),
            torch.empty_like(like),
            torch.empty_strided((2, 3), (3, 1)),
            like.new_empty(2, 3),
            like.new_empty((2, 3), dtype=torch.float64),
            empty_imported_before(4, dtype=torch.complex64),
            torch.empty(3, requires_grad=True),
            torch.empty(3, dtype=torch.float8_e4m3fn),
        ]
    assert [bool(t.isnan().all()) for t in made] == [True] * len(made)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, -(2**63)),
        (torch.int32, -(2**31)),
        (torch.int8, -128),
        (torch.uint8, 255),
    ],
)
def test_integers_are_poisoned_with_what_numbers_nothing(dtype: torch.dtype, value: int) -> None:
    with poisoned_empty():
        made = torch.empty(5, dtype=dtype)
    assert made.tolist() == [value] * 5


def test_values_that_were_asked_for_stay() -> None:
    with poisoned_empty():
        assert torch.zeros(3).tolist() == [0, 0, 0]
        assert torch.ones(2).new_full((2,), 7.0).tolist() == [7, 7]
        # booleans have no value to spare, and must not raise
        assert torch.empty(2, dtype=torch.bool).shape == (2,)


def poisoned() -> bool:
    # leaves sevens in the memory that is likely to be handed out next, some of it at least
    del [torch.full((1000,), 7.0) for _ in range(50)][:]
    held = [torch.empty(1000) for _ in range(50)]
    return all(bool(one.isnan().all()) for one in held)


def test_it_ends_with_the_outermost_block_and_after_an_exception() -> None:
    with poisoned_empty():
        with poisoned_empty():
            assert poisoned()
        assert poisoned()
    assert not poisoned()
    with pytest.raises(RuntimeError, match="kernel"), poisoned_empty():
        raise RuntimeError("a kernel that crashes")
    assert not poisoned()


def test_another_thread_is_left_alone() -> None:
    seen = []
    with poisoned_empty():
        other = threading.Thread(target=lambda: seen.append(poisoned()))
        other.start()
        other.join()
        seen.append(poisoned())
    assert seen == [False, True]


def test_an_element_that_a_kernel_skips_is_seen() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y[:-1] = 2 * x[:-1]
        return y

    with poisoned_empty():
        y = kernel(torch.ones(4))
    assert y.isnan().tolist() == [False, False, False, True]
