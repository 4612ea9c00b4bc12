"""A GPTModel whose streams are given to it, for layouts that need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Layer(torch.nn.Module):
    """Adds one to the stream, and returns it as megatron-core's layers do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number + 1

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> Any:
        return hidden_states + 1, None


class Head(torch.nn.Module):
    """Returns the logits that it is given; ``output_size`` counts the whole vocabulary."""

    def __init__(self, output_size: int) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, logits: torch.Tensor) -> Any:
        return logits, None


class GPTModel(torch.nn.Module):
    """Two layers and a head; ``stream`` [s, b, hidden] and ``logits`` [s, b, vocab] are set.

    ``keywords`` says how layers are called: 0.16 and 0.19 do so by name, recomputation by place.
    """

    stream: torch.Tensor
    logits: torch.Tensor

    def __init__(self, vocab: int = 8, *, keywords: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=2)
        self.pre_process = self.post_process = True
        layers = torch.nn.ModuleList(Layer(n) for n in (0, 1))
        self.decoder = torch.nn.ModuleDict({"layers": layers})
        self.output_layer = Head(vocab)
        self.keywords = keywords

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: Any = None,
        labels: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if hasattr(self, "logits"):
            self.output_layer(self.logits)
        stream = self.stream
        for layer in self.decoder["layers"].children():
            stream, _ = layer(hidden_states=stream) if self.keywords else layer(stream)
        return stream
