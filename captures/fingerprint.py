"""Digest a sample of a weight, so that two holders of one tensor can be compared cheaply."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

SAMPLE = 4096
"""At most so many elements are read."""

# numpy's and torch's names for a dtype, in safetensors' words
_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def fingerprint(tensor: torch.Tensor | NDArray[np.generic], dtype: str | None = None) -> str:
    """Digest shape, dtype and the raw bytes of evenly strided elements, as 16 hex digits.

    The same for a torch tensor on any device and for a numpy array. numpy has no bfloat16: give
    its bits as uint16 with ``dtype="BF16"``. Values count in the dtype in which they are stored, so
    a cast changes the digest; a change in an element that is not sampled does not.
    """
    shape = tuple(int(n) for n in tensor.shape)
    step = max(1, -(-int(np.prod(shape)) // SAMPLE))
    name = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, np.ndarray):
        data = np.ascontiguousarray(tensor.reshape(-1)[::step]).tobytes()
    else:
        import torch

        sample = tensor.detach().reshape(-1)[::step].to("cpu").contiguous()
        data = sample.view(torch.uint8).numpy().tobytes()
    head = f"{list(shape)} {dtype or _NAMES.get(name, name)} ".encode()
    return hashlib.blake2b(head + data, digest_size=8).hexdigest()
