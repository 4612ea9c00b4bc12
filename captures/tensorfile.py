"""Write tensors into a safetensors file: https://huggingface.co/docs/safetensors.

The library's own writer takes two to three times as long, and a capture writes a file in every
forward pass of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""What safetensors calls each dtype that a pass may hold."""


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors, of any device and layout, and text; raises OSError where that fails."""
    import torch

    # the widest first, so that each starts at a multiple of its width
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, value in ordered:
        start, end = end, end + value.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[str(value.dtype)],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            # torch refuses to view no values as bytes
            if value.numel():
                flat = value.detach().to("cpu").contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
