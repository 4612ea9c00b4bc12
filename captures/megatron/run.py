"""Agree with the other ranks on what to call a capture, without waiting for any."""

from __future__ import annotations

import itertools
import uuid
from os import PathLike

_COUNT = itertools.count()


def run_name(directory: str | PathLike[str]) -> str:
    """Name this capture: the same on all ranks, which make their captures in the same order.

    The first rank that asks the job's key-value store sets the name, and nobody waits for anybody.
    Without a store, or with one that cannot do that, there is none.
    """
    import torch

    number = next(_COUNT)
    if not torch.distributed.is_initialized():
        return ""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        name: bytes = store.compare_set(f"layerbisect/{number}/{directory}", "", uuid.uuid4().hex)
    except Exception:  # noqa: BLE001 - a capture needs no name
        return ""
    return name.decode()
