"""Follow tensors through the torch functions that are applied to them, by identity."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_OWN = tuple(os.path.join(_HERE, name) for name in ("tracing.py", "watch.py"))


@dataclass(frozen=True, slots=True)
class Applied:
    """One torch function: its name, its arguments in words, and the line that called it."""

    name: str
    arguments: str
    file: str
    line: int

    def __str__(self) -> str:
        given = f" with {self.arguments}" if self.arguments else ""
        return f"`{self.name}`{given} at {os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A followed tensor's values at one time, and what made them from which others.

    ``label`` says which watched function's scores they are, where they are just that; ``applied``
    is None there, and where a tensor was looked at again.
    """

    values: torch.Tensor
    parents: tuple[Node, ...]
    applied: Applied | None
    label: Any = None


class Trace:
    """The tensors that descend from watched scores, and every function that was applied to them.

    Values are copied when they are made, so that a change in place shows. Tensors are held weakly:
    following them keeps no graph of gradients alive.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._current: dict[int, tuple[weakref.ref[torch.Tensor], Node]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to follow yet."""
        return bool(self._current)

    def node(self, tensor: torch.Tensor) -> Node | None:
        """Return the latest node of a tensor, if it is followed."""
        held = self._current.get(id(tensor))
        return held[1] if held is not None and held[0]() is tensor else None

    def follow(
        self,
        tensor: torch.Tensor,
        parents: tuple[Node, ...],
        applied: Applied | None,
        label: Any = None,
    ) -> Node:
        """Copy a tensor's values as they are now, and follow it from here on."""
        node = Node(tensor.detach().clone(), parents, applied, label)
        self.nodes.append(node)
        self._current[id(tensor)] = (weakref.ref(tensor), node)
        return node

    def apply(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note that a function gave ``result``, or altered what shares memory with its target."""
        given = list(tensors_in((args, kwargs)))
        parents = tuple(node for t in given if (node := self.node(t)) is not None)
        targets: list[torch.Tensor] = []
        if (name.endswith("_") and not name.endswith("__")) or name.endswith("__setitem__"):
            targets += tensors_in(args[:1])
        targets += tensors_in(kwargs.get("out"))
        touched = self._sharing(targets)
        if not parents and not touched:
            return
        applied = Applied(name, _in_words(args, kwargs, self), *_caller())
        for tensor, node in touched:
            self.follow(tensor, (node, *(p for p in parents if p is not node)), applied)
        if parents:
            for tensor in (*tensors_in(result), *targets):
                if not any(tensor is done for done, _ in touched):
                    self.follow(tensor, parents, applied)

    def _sharing(self, targets: list[torch.Tensor]) -> list[tuple[torch.Tensor, Node]]:
        """The followed tensors in the same memory as one of ``targets``."""
        memory = {t.untyped_storage().data_ptr() for t in targets} - {0}
        found = []
        for key, (reference, node) in list(self._current.items()) if memory else ():
            tensor = reference()
            if tensor is None:
                del self._current[key]
            elif tensor.untyped_storage().data_ptr() in memory:
                found.append((tensor, node))
        return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists and mappings, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def ancestors(nodes: Iterable[Node]) -> list[Node]:
    """These nodes and those that they descend from, up to what watched functions returned."""
    seen: dict[int, Node] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop(0)
        if id(node) not in seen:
            seen[id(node)] = node
            waiting += () if node.label is not None else node.parents
    return list(seen.values())


def _in_words(args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: Trace) -> str:
    """The arguments other than the tensors that are followed."""
    words = [_word(arg, trace) for arg in args]
    words += [f"{key}={word}" for key, arg in kwargs.items() if (word := _word(arg, trace))]
    return ", ".join(word for word in words if word)


def _word(value: Any, trace: Trace) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        if trace.node(value) is not None:
            return ""
        if value.numel() == 1 and value.device.type == "cpu":
            return f"a tensor of {value.item():g}"
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list) and any(True for _ in tensors_in(value)):
        return ", ".join(word for part in value if (word := _word(part, trace)))
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _caller() -> tuple[str, int]:
    """File and line of the nearest frame that is neither torch's nor ours."""
    import torch

    inside = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = os.path.abspath(frame.f_code.co_filename)
        if not name.startswith(inside) and name not in _OWN:
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
