"""Which faults are planted in the real engines: what they are called, and the truth of each.

The forms are those of `layerbisect.planted_sglang` and, in megatron-core, of
tests/planted_megatron.py, and where no report gives a fault its size, it has theirs. Some are
planted smaller, too: down to what no score shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layerbisect.planted_sglang import FORMS, NO_LAYER, TRUTH, Fault
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
        "norm-weight:0=1.01",
        "softmax-scale:5=1.03",
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
        "head-scaled:0=1.003",
        "norm-weight:3=1.003",
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
        "norm-weight:5=1.01",
    ),
    "ep2": (
        # the first rank has experts 0 to 3, and the second 4 to 7
        "experts-swapped:0",
        "experts-swapped:5=4",
        "o-proj-permuted:5",
        "router-low-precision:0",
        "gate-up-swapped:3",
        "norm-eps:0",
        "head-scaled:0=1.003",
    ),
    "pp2": (
        "qk-norm-skipped:5",
        "head-scaled:0",
        "sliding-window:0",
        "kv-heads-regrouped:3",
        "rope-shifted:5",
        "o-proj-permuted:0",
        "softmax-scale:0=1.03",
    ),
}
"""Planted in megatron-core, by its layout."""


COMPONENTS = {
    "norm-eps": "input_norm",
    "norm-weight": "input_norm",
    "qk-norm-skipped": "qk_norm",
    "rope-base": "rope",
    "rope-shifted": "positions",
    "softmax-scale": "attention_core",
    "sliding-window": "mask",
    "kv-heads-regrouped": "attention_core",
    "o-proj-permuted": "output_projection",
    "residual-dropped": "residual",
    "router-low-precision": "router_logits",
    "top-k-not-renormalised": "routing_weights",
    "experts-swapped": "dispatch_permutation",
    "gate-up-swapped": "expert_mlp",
    "final-norm-weight": "final_norm",
    "head-scaled": "lm_head",
}
REPORTS: dict[str, tuple[str, ...]] = {
    "norm-eps": ("meta-llama/llama#771",),
    "sliding-window": ("vllm-project/vllm#49795",),
    "top-k-not-renormalised": ("pytorch/torchtitan#1448", "NVIDIA/Megatron-LM#1593"),
    "gate-up-swapped": ("nntrainer/nntrainer#4194",),
    # (0.1 * m * ln 40 + 1) ** 2 with m = 1 in place of 0.707
    "softmax-scale=1.18": ("NVIDIA/Megatron-LM#1429",),
    # the multiplier of 1.59 is missing
    "softmax-scale=0.629": ("onnxruntime/mobius#548",),
}
"""By the fault's name, with its value where that is the reported size. Most faults have no report
of their own here: the forms that transformers is given follow the reports more closely."""


_PLACES = {
    "experts-swapped": r"expert {value}, {next}\b",
    "kv-heads-regrouped": r"heads 1(, | to )2\b",
    "sliding-window": "positions >= ",
}
_DECODED = "decode rows|positions >= "


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault as ``text`` gives it, and what is known of it."""

    text: str

    @property
    def fault(self) -> Fault:
        """Its parts."""
        return Fault.parse(self.text)

    @property
    def component(self) -> str:
        """The place, in the reports' words."""
        return COMPONENTS[self.fault.name]

    @property
    def reports(self) -> tuple[str, ...]:
        """The public issues that it is a reading of."""
        name, value = self.fault.name, self.fault.value
        return REPORTS.get(name, ()) + REPORTS.get(f"{name}={value}", ())

    @property
    def point(self) -> str:
        """The first point that comes out wrong."""
        point = FORMS[self.fault.name][1]
        return point if self.fault.name in NO_LAYER else f"layers.{self.fault.layer}.{point}"

    def truth(self, side: str) -> Truth:
        """What a verdict must say of it."""
        fault = self.fault
        first = int(fault.of(0))
        place = _DECODED if fault.decode else _PLACES.get(fault.name, "")
        place = place.format(value=first, next=first + 1)
        layer = None if fault.name in NO_LAYER else fault.layer
        return Truth(layer, TRUTH[fault.name], side, place)


def served_faults() -> Iterator[tuple[int, int, Planted, str]]:
    """Size, run, fault and the trainer's layout of each fault in a server."""
    layouts = tuple(LAYOUTS)
    for size, faults in SERVED.items():
        for number, text in enumerate(faults):
            yield size, number + 1, Planted(text), layouts[number % len(layouts)]


def trained_faults() -> Iterator[tuple[int, str, Planted]]:
    """The server's size, the layout and the fault, of each in megatron-core."""
    sizes = tuple(SERVED)
    for layout, faults in TRAINED.items():
        for number, text in enumerate(faults):
            yield sizes[number % len(sizes)], layout, Planted(text)
