"""What a capture says about the states of the weights that its ranks ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from layerbisect.captures.format import RankManifest

WEIGHTS_CHANGED = "the weights changed during the capture"
"""What the error of a rank holds whose weights were updated before its capture ended."""


@dataclass(frozen=True, slots=True)
class WeightFinding:
    """Two ranks that hold different values of tensors of one name.

    ``digests`` maps the checkpoint's name of each to what the first rank and the second have.
    """

    ranks: tuple[str, str]
    digests: Mapping[str, tuple[str, str]]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order in which the second rank has them."""
        return tuple(self.digests)

    def __str__(self) -> str:
        first, second = self.ranks
        names = self.names
        which = f"{len(names):,} tensors, {names[0]} first" if names[1:] else names[0]
        return f"{first} and {second} hold different values of {which}"


def gather_fingerprints(
    described: Mapping[str, str], manifests: Sequence[RankManifest]
) -> tuple[dict[str, str], tuple[WeightFinding, ...]]:
    """Gather all ranks' fingerprints, and find ranks that hold different values of one tensor.

    ``described`` are those of the capture's description. The first digest of a name stands.
    """
    found = dict(described)
    owner = dict.fromkeys(found, "the capture's description")
    different: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for manifest in manifests:
        for name, digest in manifest.fingerprints.items():
            first = found.setdefault(name, digest)
            if first == digest:
                owner.setdefault(name, str(manifest))
            else:
                pair = owner[name], str(manifest)
                different.setdefault(pair, {})[name] = (first, digest)
    return found, tuple(WeightFinding(ranks, names) for ranks, names in different.items())


def changed(problems: Iterable[str]) -> str | None:
    """Return the problem which says that weights were updated meanwhile; None where none does."""
    return next((problem for problem in problems if WEIGHTS_CHANGED in problem), None)
