"""Which faults are planted in the real engines: what they are called, and the truth of each.

Tests plant them too: see tests/planted_plugin.py for SGLang and tests/planted_megatron.py for
megatron-core. Where no report gives a fault its size, it has theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.planted.engine_runs import LAYOUTS
from scripts.planted.fault import Truth

SERVED: dict[int, tuple[str, ...]] = {
    1: (
        "o-proj-permuted:0",
        "softmax-scale:3=1.18",
        "experts-swapped:5",
        "rope-shifted:0",
        "head-scaled:0",
        "norm-weight:3",
        "sliding-window:5",
        "kv-heads-regrouped:0",
        "router-low-precision:3",
        "residual-dropped:5",
        "rope-base:3",
        "softmax-scale:0=1.18:decode",
        "kv-heads-regrouped:3:decode",
        "rope-shifted:5:decode",
    ),
    2: (
        "top-k-not-renormalised:0",
        "qk-norm-skipped:3",
        "norm-eps:5",
        "gate-up-swapped:3",
        "experts-swapped:0=5",
        "final-norm-weight:0",
        "softmax-scale:5=0.629",
        "o-proj-permuted:3",
        "rope-base:0",
        "router-low-precision:5",
        "residual-dropped:0",
        "norm-weight:5",
        "sliding-window:3",
        "o-proj-permuted:5:decode",
        "gate-up-swapped:0:decode",
        "sliding-window:0:decode",
    ),
}
"""Planted in the server, by its tensor-parallel size: ``name:layer[=value][:decode]``."""
TRAINED: dict[str, tuple[str, ...]] = {
    "one": (
        "norm-weight:0",
        "rope-base:3",
        "softmax-scale:5=1.18",
        "residual-dropped:3",
        "top-k-not-renormalised:5",
        "final-norm-weight:0",
    ),
    "ep2": (
        # the first rank has experts 0 to 3, and the second 4 to 7
        "experts-swapped:0",
        "experts-swapped:5=4",
        "o-proj-permuted:5",
        "router-low-precision:0",
        "gate-up-swapped:3",
        "norm-eps:0",
    ),
    "pp2": (
        "qk-norm-skipped:5",
        "head-scaled:0",
        "sliding-window:0",
        "kv-heads-regrouped:3",
        "rope-shifted:5",
        "o-proj-permuted:0",
    ),
}
"""Planted in megatron-core, by its layout."""


@dataclass(frozen=True, slots=True)
class About:
    """What is the same of a fault wherever it is planted; ``reports`` are public issues."""

    component: str
    operator: str
    reports: tuple[str, ...] = ()
    modelwide: bool = False


ABOUT = {
    "norm-eps": About("input_norm", "norm", ("meta-llama/llama#771",)),
    "norm-weight": About("input_norm", "norm"),
    "qk-norm-skipped": About("qk_norm", "norm"),
    "rope-base": About("rope", "rope"),
    "rope-shifted": About("positions", "rope"),
    "softmax-scale": About("attention_core", "attention"),
    "sliding-window": About("mask", "attention", ("vllm-project/vllm#49795",)),
    "kv-heads-regrouped": About("attention_core", "attention"),
    "o-proj-permuted": About("output_projection", "linear"),
    "residual-dropped": About("residual", "residual"),
    "router-low-precision": About("router_logits", "router"),
    "top-k-not-renormalised": About(
        "routing_weights", "router", ("pytorch/torchtitan#1448", "NVIDIA/Megatron-LM#1593")
    ),
    "experts-swapped": About("dispatch_permutation", "experts"),
    "gate-up-swapped": About("expert_mlp", "experts", ("nntrainer/nntrainer#4194",)),
    "final-norm-weight": About("final_norm", "norm", modelwide=True),
    "head-scaled": About("lm_head", "head", modelwide=True),
}
REPORTED_SIZES = {
    # (0.1 * m * ln 40 + 1) ** 2 with m = 1 in place of 0.707
    "softmax-scale=1.18": ("NVIDIA/Megatron-LM#1429",),
    # the multiplier of 1.59 is missing
    "softmax-scale=0.629": ("onnxruntime/mobius#548",),
}
"""Reports that give the fault's size."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as ``name:layer[=value][:decode]`` gives it."""

    text: str

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    @property
    def about(self) -> About:
        return ABOUT[self.name]

    @property
    def decode(self) -> bool:
        return self.text.endswith(":decode")

    @property
    def _layer_and_value(self) -> tuple[int, str]:
        layer, _, value = self.text.split(":")[1].partition("=")
        return int(layer), value

    @property
    def reports(self) -> tuple[str, ...]:
        _, value = self._layer_and_value
        return self.about.reports + REPORTED_SIZES.get(f"{self.name}={value}", ())

    def truth(self, side: str) -> Truth:
        """What a verdict must say of it."""
        layer, value = self._layer_and_value
        where = "decode rows|positions >= " if self.decode else ""
        if self.name == "experts-swapped":
            first = int(value or 0)
            where = rf"expert {first}, {first + 1}\b"
        elif self.name == "kv-heads-regrouped" and not self.decode:
            where = r"heads 1(, | to )2\b"
        elif self.name == "sliding-window" and not self.decode:
            where = "positions >= "
        return Truth(None if self.about.modelwide else layer, self.about.operator, side, where)


def served_faults() -> Iterator[tuple[int, int, Fault, str]]:
    """Size, run, fault and the trainer's layout of each fault in a server."""
    layouts = tuple(LAYOUTS)
    for size, faults in SERVED.items():
        for number, text in enumerate(faults):
            yield size, number + 1, Fault(text), layouts[number % len(layouts)]


def trained_faults() -> Iterator[tuple[int, str, str]]:
    """The server's size, the layout and the text of each fault in megatron-core."""
    sizes = tuple(SERVED)
    for layout, faults in TRAINED.items():
        for number, text in enumerate(faults):
            yield sizes[number % len(sizes)], layout, text
