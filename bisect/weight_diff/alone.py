"""Tensors that one side alone holds: missing on the other, or absent there for a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from layerbisect.bisect.weight_diff.digests import has_values
from layerbisect.bisect.weight_diff.holders import Held, Holder
from layerbisect.bisect.weight_diff.numbers import distance, equal, equal_but_for_dtype
from layerbisect.bisect.weight_diff.pairs import EMBED, HEAD, unread_rows
from layerbisect.bisect.weight_diff.report import Finding, layer_of
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.weights.names import packed_name, stack_of_experts

_COMPUTED = ".inv_freq"
_AHEAD = "mtp."
_SCALES = ("_scale", "_scale_inv", "_scale_2", "_zero_point")


class LoneTensors:
    """Says of every tensor of one side alone why it is on that side alone.

    What the other side should have is among ``findings``. ``not_compared`` says of the rest that
    could not be judged why, ``excused`` names what the sides themselves said that they left out,
    where that explains a tensor, and ``notes`` has what is rightly absent.
    """

    def __init__(
        self,
        holders: tuple[Holder, Holder],
        only: Mapping[str, tuple[str, ...]],
        differing: set[str],
    ) -> None:
        self.findings: list[Finding] = []
        self.not_compared: dict[str, str] = {}
        self.excused: set[str] = set()
        self.notes: list[str] = []
        self._holders = holders
        self._only = only
        self._places = [_Places(only[h.label], h.left_out) for h in holders]
        for side, holder in enumerate(holders):
            lone = set(only[holder.label])
            lone -= self._heads(side, lone)
            lone -= self._adapters(side, lone, differing)
            lone -= self._not_needed(side, lone)
            lone -= self._unread(side, lone)
            self._missing(side, lone)

    def _heads(self, side: int, lone: set[str]) -> set[str]:
        """A head that one side alone has must be the embedding that the other ties it to."""
        holder, other = self._holders[side], self._holders[1 - side]
        heads = sorted(n for n in lone if n.endswith(HEAD))
        embeds = [n for n in other.names() if n.endswith(EMBED)]
        if not heads or not embeds or other.problems:
            return set()
        head = heads[0]
        try:
            tied, apart = self._tied(side, head, embeds[0])
        except LayerBisectError as error:
            self.not_compared[head] = str(error)
            return {head}
        if tied:
            self.notes.append(f"{head} of {holder.label} is the embedding, as if tied")
            return {head}
        evidence = [f"{other.label} has no head of its own, {holder.label} has one"]
        if apart is not None:
            evidence.append(
                f"{head} of {holder.label} is {apart:.2g} from the embedding of {other.label}"
            )
        # the side whose configuration says that it has a head lacks it otherwise
        off = other if other.tied is False else holder
        how = "the head is missing" if off is other else "the head is not tied to the embedding"
        found = Finding(head, "tied head", off.label, how, apart or 1.0, 2.0**-9)
        self.findings.append(replace(found, evidence=tuple(evidence)))
        return {head}

    def _tied(self, side: int, head: str, embed: str) -> tuple[bool, float | None]:
        """Whether a head is an embedding, and how far it is from the other side's."""
        holder, other = self._holders[side], self._holders[1 - side]
        if not has_values(holder):
            assert holder.snapshot is not None
            if embed not in holder:
                raise LayerBisectError(f"{holder.label} holds no values to compare with {embed}")
            own = [
                {(p.header.extents, p.header.dtype): p.header.digest for p in held}
                for held in (holder.snapshot.parts(head), holder.snapshot.parts(embed))
            ]
            if own[0].keys() != own[1].keys():
                raise LayerBisectError(f"digests of other parts than {embed} has")
            return own[0] == own[1], None
        mine = holder.get(head)
        # the embeddings are compared with each other, too
        if embed in holder and _same_rows((holder, holder), (mine, holder.get(embed))):
            return True, None
        if not has_values(other):
            return False, None
        theirs = other.get(embed)
        rows = min(len(mine.values), len(theirs.values))
        a, b = mine.numbers()[:rows], theirs.numbers()[:rows]
        tied = _same_rows((holder, other), (mine, theirs))
        return tied, distance(a, b) if a.shape == b.shape else None

    def _adapters(self, side: int, lone: set[str], differing: set[str]) -> set[str]:
        holder, lacking = self._holders[side], self._holders[1 - side].label
        adapters = {n for n in lone if ".lora_" in n}
        stems = {n.split(".lora_")[0] + ".weight" for n in adapters}
        if stems & differing:
            self.notes.append(
                f"{holder.label} holds {len(adapters)} adapter tensors beside its weights; "
                "merge them before saving, to compare what it computes with"
            )
        elif adapters:
            how = f"the adapter of {holder.label} is not on {lacking}"
            line = f"{lacking} holds none of {len(adapters)} adapter tensors, nor merged ones"
            self.findings += [
                Finding(name, "adapter", lacking, how, 1.0, 2.0**-9, evidence=(line,))
                for name in sorted(adapters)
            ]
        return adapters

    def _not_needed(self, side: int, lone: set[str]) -> set[str]:
        """What a side can do without: what is computed anew, and layers that only speculate."""
        holder = self._holders[side]
        computed = {n for n in lone if n.endswith(_COMPUTED)}
        ahead = {n for n in lone if n.startswith(_AHEAD)}
        if holder.main_layers is not None:
            ahead |= {n for n in lone if (layer_of(n) or 0) >= holder.main_layers}
        for names, what in (
            (computed, "frequencies of rotary embeddings, which are computed anew"),
            (ahead, "of layers that only predict further tokens"),
        ):
            if names:
                self.notes.append(f"{len(names):,} on {holder.label} alone: {what}")
        return computed | ahead

    def _unread(self, side: int, lone: set[str]) -> set[str]:
        """What the other side may hold, where that could not be seen."""
        found = {name: why for name in sorted(lone) if (why := self._why_unread(side, name))}
        self.not_compared |= found
        return set(found)

    def _why_unread(self, side: int, name: str) -> str | None:
        holder, other = self._holders[side], self._holders[1 - side]
        theirs = self._places[1 - side]
        held = theirs.of(name)
        for each in held:
            if each in other.left_out:
                self.excused |= {n for n in held if n in other.left_out}
                return f"left out by {other.label}: {other.left_out[each]}"
        if held:
            return f"packed on {holder.label} and on {other.label} in different ways"
        if _tail(name) in theirs.tails:
            return f"of another name on {other.label}, such as {theirs.tails[_tail(name)]}"
        if name.endswith(_SCALES):
            return f"scales of quantised values, which {other.label} does not have"
        return other.problems[0] if other.problems else None

    def _missing(self, side: int, lone: set[str]) -> None:
        label, lacking = (self._holders[s].label for s in (side, 1 - side))
        line = f"{lacking} holds no such tensors, and names no reason for leaving them out"
        self.findings += [
            Finding(name, "missing", lacking, f"on {label} alone", 1.0, 2.0**-9, evidence=(line,))
            for name in sorted(lone)
        ]


class _Places:
    """Where what a side alone holds or left out may be part of a tensor, or a tensor of it."""

    def __init__(self, lone: Iterable[str], left_out: Iterable[str]) -> None:
        lone = tuple(lone)
        self.tails = {_tail(name): name for name in lone}
        self._names = {*lone, *left_out}
        self._packed: dict[str, list[str]] = {}
        self._experts: dict[tuple[str, bool], list[str]] = {}
        for name in self._names:
            into, experts = packed_name(name), stack_of_experts(name)
            if into is not None:
                self._packed.setdefault(into, []).append(name)
            if experts is not None:
                self._experts.setdefault(experts, []).append(name)

    def of(self, name: str) -> list[str]:
        """Name what may hold ``name``, or be held by it."""
        found = [each for each in (name, packed_name(name)) if each in self._names]
        found += self._packed.get(name, [])
        experts = stack_of_experts(name)
        if experts is not None:
            found += self._experts.get((experts[0], True), [])
            if experts[1]:
                found += self._experts.get((experts[0], False), [])
        return [each for each in found if each is not None]


def _same_rows(holders: tuple[Holder, Holder], held: tuple[Held, Held]) -> bool:
    """Whether two vocabularies' rows are equal, but for padding and dtype.

    Raises LayerBisectError where those of both are, and one has more that are no padding.
    """
    rows = min(len(one.values) for one in held)
    a, b = (one.values[:rows] for one in held)
    if not (equal(a, b) or equal_but_for_dtype(a, b)):
        return False
    if (unread := unread_rows(holders, held)) is not None:
        raise LayerBisectError(unread)
    return True


def _tail(name: str) -> str:
    """What a name ends with, whatever its model is part of."""
    _, found, inner = name.rpartition("layers.")
    return inner if found else ".".join(name.rsplit(".", 2)[-2:])
