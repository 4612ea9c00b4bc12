"""Others' Triton kernels run as ours do: on a GPU or interpreted, into poisoned memory."""

from tests.kernels.triton_forms.conftest import device, unwritten_is_seen

__all__ = ["device", "unwritten_is_seen"]
