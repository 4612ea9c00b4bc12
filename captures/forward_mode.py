"""In which mode a model was called: what a training forward does beside what a frozen one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Dropout:
    """A module that drops values with probability ``p``.

    ``point`` is the first point that its drawing changes; empty where the module's place is none
    that is known.
    """

    module: str
    p: float
    point: str


@dataclass(frozen=True, slots=True)
class ForwardMode:
    """How a model was called.

    ``training`` is the model's mode, ``gradients`` whether they were enabled. ``recompute`` names
    the setting by which parts of the forward are computed again in the backward, empty without one.
    ``dropout`` lists what was active, ``noise`` the settings by which a router draws at random.
    """

    training: bool
    gradients: bool
    recompute: str = ""
    dropout: tuple[Dropout, ...] = ()
    noise: Mapping[str, str] = field(default_factory=dict)


class ModeWatch:
    """Tells each mode once: a model in training mode is looked through at every call."""

    def __init__(self, describe: Callable[[], ForwardMode], tell: Callable[[ForwardMode], None]):
        self._describe, self._tell = describe, tell
        self._seen: set[tuple[bool, bool]] = set()

    def see(self, training: bool) -> None:
        """Note a call of a model in training mode, or not."""
        import torch

        key = (training, torch.is_grad_enabled())
        if training or key not in self._seen:
            self._seen.add(key)
            self._tell(self._describe())


def dropout_modules(root: torch.nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the path and probability of each of torch's dropout modules that is active."""
    from torch.nn.modules.dropout import _DropoutNd

    for path, module in root.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            yield path, float(module.p)


def merged(modes: Iterator[ForwardMode]) -> tuple[ForwardMode, ...]:
    """Join what ranks say of one mode: each knows its own modules."""
    found: dict[tuple[bool, bool, str], ForwardMode] = {}
    for mode in modes:
        key = (mode.training, mode.gradients, mode.recompute)
        before = found.get(key, replace(mode, dropout=(), noise={}))
        found[key] = replace(
            before,
            dropout=tuple(dict.fromkeys((*before.dropout, *mode.dropout))),
            noise={**before.noise, **mode.noise},
        )
    return tuple(found.values())
