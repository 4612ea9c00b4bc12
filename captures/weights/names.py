"""What checkpoints call tensors, whatever wraps or stacks them in a process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from layerbisect.captures.weights.format import Part

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_STACK = re.compile(r"(?P<stem>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_PACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def plain_name(name: str) -> str:
    """Take the names of wrappers (DDP, FSDP, compilation, PEFT) out of a parameter's name."""
    bare = _WRAPPERS.sub("", name).removeprefix("base_model.model.")
    return bare.replace(".base_layer.", ".")


def stacked(name: str, shape: tuple[int, ...], hidden: int | None) -> tuple[str, ...]:
    """Name the matrices that each expert has in a stack; empty for what is no such stack.

    A stack is ``experts.gate_up_proj`` [expert, 2 x inner, hidden] or ``experts.down_proj``
    [expert, hidden, inner], as transformers 5 holds them; other orientations are left as they are.
    """
    found = _STACK.fullmatch(name)
    if found is None or len(shape) != 3:
        return ()
    gate_up = found["kind"] == "gate_up_proj"
    if hidden is not None and shape[2 if gate_up else 1] != hidden:
        return ()
    return _HALVES[found["kind"]]


def expert_names(name: str, expert: int, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Name one expert's matrices of a stack as a checkpoint does."""
    stem = name.rpartition(".")[0]
    return tuple(f"{stem}.{expert}.{kind}.weight" for kind in kinds)


def packed_name(name: str) -> str | None:
    """Name the tensor into which engines pack q, k and v, or gate and up; None for others."""
    stem, _, last = name.rpartition(".")
    home, _, kind = stem.rpartition(".")
    into = next((into for into, kinds in _PACKS.items() if kind in kinds), None)
    return into and f"{home}.{into}.{last}"


def stack_of_experts(name: str) -> tuple[str, bool] | None:
    """Say of which experts a tensor is, and whether of all at once; None for what is of none."""
    home, found, inner = name.partition(".experts.")
    return (home, not inner.partition(".")[0].isdecimal()) if found else None


def logical_parts(part: Part, hidden: int | None) -> Iterator[Part]:
    """Yield a part as a checkpoint has it: a stack's matrices one by one, anything else as it is.

    Views, so that nothing is copied. A stack that is cut along another dimension than its experts
    is left whole.
    """
    whole = tuple(total for _, _, total in part.extents)
    kinds = stacked(part.name, whole, hidden)
    if not kinds or any(stop - start != total for start, stop, total in part.extents[1:]):
        yield part
        return
    first = part.extents[0][0]
    for place, matrix in enumerate(part.values):
        names = expert_names(part.name, first + place, kinds)
        for name, view in zip(names, matrix.chunk(len(kinds)), strict=True):
            yield Part.of(name, view)
