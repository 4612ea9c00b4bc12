"""Hold a module in eval mode and give its own modes back; say which weights it has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from layerbisect.captures.weights.format import digest

if TYPE_CHECKING:
    import torch


@contextmanager
def evaluating(module: torch.nn.Module | None) -> Iterator[None]:
    """Put a module into eval mode, and on leaving give each submodule the mode that it had."""
    if module is None:
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        # some modules do more on a change of mode than set the flag, such as unmerge an adapter
        module.train(modes[0][1])
        for part, mode in modes:
            part.training = mode


@contextmanager
def same_random_state() -> Iterator[None]:
    """Give torch's random generators back as they were: scoring in train mode draws dropout."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def weights_digest(module: torch.nn.Module) -> str:
    """Digest names, dtypes, shapes and all bytes of a module's parameters, as 32 hex digits.

    Reads every byte that this process holds (of a sharded parameter its own shard), one parameter
    at a time: about a second a gigabyte on one core, plus the copy from the device.
    """
    whole = hashlib.blake2b(digest_size=16)
    for name, parameter in module.named_parameters():
        held = parameter.detach()
        if hasattr(held, "to_local"):
            held = held.to_local()
        whole.update(f"{name} {held.dtype} {digest(held)} ".encode())
    return whole.hexdigest()
