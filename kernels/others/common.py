"""What the modules beside this one share: finding a package, and refusing what it cannot do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from importlib.machinery import PathFinder
from itertools import accumulate

import torch

from layerbisect.kernels.replay.implementation import (
    Implementation,
    Unavailable,
    Unsupported,
)

Found = Implementation | Unavailable


def missing(module: str) -> str | None:
    """Return why a module cannot be used here, or None where it is found; never imports it."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return f"the package {package} is not installed"
    if inner:
        # its parent would be imported by find_spec
        places = spec.submodule_search_locations
        if places is None or PathFinder.find_spec(module, list(places)) is None:
            return f"the package {package} is installed without {module}"
    elif spec.origin is None:
        # another distribution puts files into a folder of this name
        return f"the package {package} is not installed, only something in its folder"
    return None


def version(distribution: str) -> str:
    """Return ``distribution``'s name with its version, or the name alone where none is recorded."""
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return distribution


def refuse(name: str, attribute: str, value: object, *supported: object) -> None:
    """Raise Unsupported unless ``value`` is one of the ``supported``."""
    if not any(value is s or value == s for s in supported):
        raise Unsupported(f"{name} does not support {attribute}={value!r}")


def refuse_tensor(name: str, argument: str, value: torch.Tensor | None) -> None:
    """Raise Unsupported where an optional tensor was given."""
    if value is not None:
        raise Unsupported(f"{name} takes no {argument}, got shape {list(value.shape)}")


def device_refuses(device: str, kind: str) -> str | None:
    """Return why ``device`` runs nothing for ``kind``, "cuda" or "hip"; None where it does."""
    found = "hip" if torch.version.hip else "cuda"
    if not device.startswith("cuda"):
        return f"it needs a GPU ({kind}), and the device is {device}"
    if found != kind:
        return f"it is for {kind}, and torch is built for {found}"
    return None


def sequences(
    lengths: Sequence[int], queries: Sequence[int] | None
) -> list[tuple[slice, slice, int]]:
    """Return each sequence's rows of q, its rows of k and v, and its number of keys before them."""
    spans, q_start, k_start = [], 0, 0
    for length, count in zip(lengths, queries or lengths, strict=True):
        spans.append(
            (slice(q_start, q_start + count), slice(k_start, k_start + length), length - count)
        )
        q_start, k_start = q_start + count, k_start + length
    return spans


def asked(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each row's value [row] of ``values`` [row, vocab], nan for a negative target."""
    found = values.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return found.masked_fill(targets < 0, torch.nan)


def starts(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where each run of rows starts, and where the last ends: int32 [run + 1]."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
