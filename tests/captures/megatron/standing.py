"""Stand-ins for a rank's GPTModel: modules that hold parameters by the names of megatron-core.

TransformerEngine cannot be installed without a GPU, so that its names are only here; those of the
local layer specs are tested on the real megatron-core as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from layerbisect.captures.megatron.place import Place

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model of one sparse and one dense layer."""

    groups: int = 2
    queries: int = 2
    head: int = 4
    hidden: int = 6
    inner: int = 8
    experts: int = 4
    vocab: int = 10
    padded: int = 12

    @property
    def config(self) -> Any:
        """What is read of TransformerConfig."""
        return SimpleNamespace(
            num_attention_heads=self.groups * self.queries,
            num_query_groups=self.groups,
            kv_channels=self.head,
            hidden_size=self.hidden,
            num_moe_experts=self.experts,
            num_layers=2,
            gated_linear_unit=True,
            layernorm_zero_centered_gamma=False,
            moe_shared_expert_gate=True,
        )

    def checkpoint(self) -> Tensors:
        """A checkpoint of which no value is there twice."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        heads = self.groups * self.queries * self.head
        mlp = {"gate": (self.inner, self.hidden), "up": (self.inner, self.hidden)}
        mlp["down"] = (self.hidden, self.inner)
        for layer in range(2):
            at = f"model.layers.{layer}"
            shapes[f"{at}.input_layernorm.weight"] = (self.hidden,)
            shapes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
            for name, rows in (("q", heads), *((n, self.groups * self.head) for n in "kv")):
                shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, self.hidden)
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
            shapes[f"{at}.self_attn.o_proj.weight"] = (self.hidden, heads)
            for name in "qk":
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (self.head,)
        for name, shape in mlp.items():
            shapes[f"model.layers.0.mlp.{name}_proj.weight"] = shape
            shapes[f"model.layers.1.mlp.shared_expert.{name}_proj.weight"] = shape
            for expert in range(self.experts):
                shapes[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"] = shape
        shapes["model.layers.1.mlp.gate.weight"] = (self.experts, self.hidden)
        shapes["model.layers.1.mlp.gate.e_score_correction_bias"] = (self.experts,)
        shapes["model.layers.1.mlp.shared_expert_gate.weight"] = (1, self.hidden)
        values = torch.arange(1.0, 1 + sum(torch.Size(s).numel() for s in shapes.values()))
        drawn = values.split([torch.Size(s).numel() for s in shapes.values()])
        return {n: v.reshape(s) for (n, s), v in zip(shapes.items(), drawn, strict=True)}


def interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Rows as megatron-core packs them: q1 q2 k1 v1 | q3 q4 k2 v2 | ..., head by head."""
    rows = []
    for group in range(sizes.groups):
        for query in range(sizes.queries):
            first = (group * sizes.queries + query) * sizes.head
            rows += [q[first + n] for n in range(sizes.head)]
        for packed in (k, v):
            rows += [packed[group * sizes.head + n] for n in range(sizes.head)]
    return torch.stack(rows)


def parameters(held: Tensors, sizes: Sizes, place: Place) -> Tensors:
    """What a rank holds of a checkpoint, by the names of the local layer specs."""
    made: Tensors = {}

    def share(whole: torch.Tensor, dim: int, of: tuple[int, int] = place.tensor) -> torch.Tensor:
        rank, size = of
        return whole.chunk(size, dim)[rank].clone()

    def mlp(name: str, stem: str, of: tuple[int, int]) -> None:
        gate, up, down = (held[f"{stem}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        made[f"{name}.linear_fc1.weight"] = torch.cat([share(gate, 0, of), share(up, 0, of)])
        made[f"{name}.linear_fc2.weight"] = share(down, 1, of)

    for name, at in (
        ("embedding.word_embeddings", "model.embed_tokens"),
        ("output_layer", "lm_head"),
    ):
        padded = torch.zeros(sizes.padded, sizes.hidden)
        padded[: sizes.vocab] = held[f"{at}.weight"]
        made[f"{name}.weight"] = share(padded, 0)
    made["decoder.final_layernorm.weight"] = held["model.norm.weight"].clone()
    for layer in range(2):
        name, at = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention = f"{name}.self_attention"
        for last in ("weight", "bias"):
            q, k, v = (held[f"{at}.self_attn.{n}_proj.{last}"] for n in "qkv")
            packed = interleaved(q, k, v, sizes)
            made[f"{attention}.linear_qkv.{last}"] = share(packed, 0)
        made[f"{attention}.linear_proj.weight"] = share(held[f"{at}.self_attn.o_proj.weight"], 1)
        for own, stored in (
            ("self_attention.q_layernorm", "self_attn.q_norm"),
            ("self_attention.k_layernorm", "self_attn.k_norm"),
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        ):
            made[f"{name}.{own}.weight"] = held[f"{at}.{stored}.weight"].clone()
    mlp("decoder.layers.0.mlp", "model.layers.0.mlp", place.tensor)
    name, at = "decoder.layers.1.mlp", "model.layers.1.mlp"
    mlp(f"{name}.shared_experts", f"{at}.shared_expert", place.tensor)
    rank, size = place.expert
    local = sizes.experts // size
    for expert in range(local):
        stem = f"{at}.experts.{rank * local + expert}"
        mlp(f"{name}.experts.local_experts.{expert}", stem, place.expert_tensor)
    made[f"{name}.router.weight"] = held[f"{at}.gate.weight"].clone()
    made[f"{name}.router.expert_bias"] = held[f"{at}.gate.e_score_correction_bias"].clone()
    made[f"{name}.shared_experts.gate_weight"] = held[f"{at}.shared_expert_gate.weight"].clone()
    return made


def by_engine(made: Mapping[str, torch.Tensor]) -> Tensors:
    """The same by the names of TransformerEngine: norms in the next layer, experts by number."""
    renamed = {}
    for name, value in made.items():
        norm, _, last = name.rpartition(".input_layernorm.")
        if norm:
            name = f"{norm}.self_attention.linear_qkv.layer_norm_{last}"
        norm, _, last = name.rpartition(".pre_mlp_layernorm.")
        # before a router it stays a module of its own
        if norm == "decoder.layers.0":
            name = f"{norm}.mlp.linear_fc1.layer_norm_{last}"
        home, _, rest = name.partition(".local_experts.")
        if rest:
            expert, linear, last = rest.split(".")
            name = f"{home}.{linear}.{last}{expert}"
        renamed[name] = value
    return renamed


def stacked(made: Mapping[str, torch.Tensor], sizes: Sizes) -> Tensors:
    """The same with the experts of 0.16's GroupedMLP: [in, out] each, one behind the other."""
    home = "decoder.layers.1.mlp.experts"
    kept = {name: value for name, value in made.items() if ".local_experts." not in name}
    for which in (1, 2):
        own = [v.T.flatten() for n, v in made.items() if n.endswith(f"linear_fc{which}.weight")
               and ".local_experts." in n]  # fmt: skip
        shape = (sizes.hidden, -1) if which == 1 else (-1, sizes.hidden)
        kept[f"{home}.weight{which}"] = torch.cat(own).reshape(shape)
    return kept


class GPTModel(torch.nn.Module):
    """Holds parameters by name; ``first`` is the whole model's number of its first layer."""

    def __init__(self, tensors: Tensors, config: Any, *, first: int = 0, tied: bool = False):
        super().__init__()
        self.config = config
        self.share_embeddings_and_output_weights = tied
        for name, value in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            if last == "expert_bias":
                module.register_buffer(last, value)
            else:
                module.register_parameter(last, torch.nn.Parameter(value))
        for number, layer in self._layers():
            layer.layer_number = torch.tensor(1 + first + number)

    def _layers(self) -> Iterator[tuple[int, Any]]:
        layers = dict(self.named_modules()).get("decoder.layers")
        if layers is not None:
            yield from ((int(n), layer) for n, layer in layers.named_children())


def tensors_of(model: torch.nn.Module) -> Tensors:
    """What a stand-in holds, by name."""
    return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
