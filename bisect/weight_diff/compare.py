"""Compare what two holders have of each logical tensor, and say how those that differ do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.verdict import RuledOut, Status
from layerbisect.bisect.weight_diff.blocks import within_rounding
from layerbisect.bisect.weight_diff.classify import STALE, UNCORRELATED, Classifier
from layerbisect.bisect.weight_diff.digests import compare_digests, has_values, stored_alike
from layerbisect.bisect.weight_diff.holders import Holder, open_holder
from layerbisect.bisect.weight_diff.numbers import distance, equal, equal_but_for_dtype, garbage
from layerbisect.bisect.weight_diff.pairs import EMBED, HEAD
from layerbisect.bisect.weight_diff.report import Finding, WeightCoverage, WeightReport
from layerbisect.captures.errors import LayerBisectError


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    previous: str | os.PathLike[str] | None = None,
    labels: tuple[str, str] = ("rollout", "trainer"),
    progress: Progress | None = None,
) -> WeightReport:
    """Compare two checkpoints or weight snapshots tensor by tensor, in bounded memory.

    Args:
        previous: what both sides held before, such as the checkpoint before the last update; with
            it, the side that is off can be told.
        labels: for sides that have no label of their own, or the same one.

    Raises:
        LayerBisectError: a directory that is no checkpoint or snapshot, or a damaged one.
    """
    holders = open_holder(first, labels[0]), open_holder(second, labels[1])
    if holders[0].label == holders[1].label:
        holders[0].label, holders[1].label = labels
    before = None if previous is None else open_holder(previous, "previous")
    return _Comparison(holders, before, progress or NoProgress()).run()


class _Comparison:
    def __init__(
        self, holders: tuple[Holder, Holder], previous: Holder | None, progress: Progress
    ) -> None:
        self.holders = holders
        self.previous = previous
        self.progress = progress
        self.labels = (holders[0].label, holders[1].label)
        self.findings: list[Finding] = []
        self.not_compared: dict[str, str] = {}
        self.notes: list[str] = []
        self.counts = dict.fromkeys(("same", "cast", "quantised", "sampled"), 0)
        self.bytes = self.shards = 0

    def run(self) -> WeightReport:
        a, b = self.holders
        names = [set(holder.names()) for holder in self.holders]
        common = sorted(names[0] & names[1])
        only = {
            label: tuple(sorted(mine - theirs))
            for label, mine, theirs in (
                (a.label, names[0], names[1]),
                (b.label, names[1], names[0]),
            )
        }
        self.progress.start("comparing tensors", len(common))
        differing = []
        for done, name in enumerate(common):
            try:
                if self._differs(name):
                    differing.append(name)
            except LayerBisectError as error:
                self.not_compared[name] = str(error)
            self.progress.advance(done + 1)
        self._lone_head(only)
        self._classify(common, differing)
        self._adapters(only, set(differing))
        self.progress.done()
        for holder in self.holders:
            for name, why in holder.left_out.items():
                self.not_compared.setdefault(name, f"left out by {holder.label}: {why}")
        return self._report(len(common), only)

    def _differs(self, name: str) -> bool:
        """Look whether a tensor is the same, and count it; raises LayerBisectError."""
        a, b = self.holders
        if stored_alike(name, a, b):
            self._count(name, "same", a.shape(name))
            return False
        if not has_values(a) or not has_values(b):
            look = compare_digests(name, a, b)
            self.counts["sampled"] += 1
            self._count(name, look.state, a.shape(name))
            return look.state == "different"
        mine, theirs = a.get(name), b.get(name)
        for holder, held in zip(self.holders, (mine, theirs), strict=True):
            if held.disagreements:
                how = "copies of one part differ between ranks"
                found = Finding(name, "replicas", holder.label, how, 0.0, 1.0)
                self.findings.append(replace(found, evidence=held.disagreements))
        if mine.values.shape != theirs.values.shape:
            if not self._padded(name, len(mine.values), len(theirs.values)):
                self._count(name, "different", a.shape(name))
                return True
            rows = min(len(mine.values), len(theirs.values))
            for label, held in zip(self.labels, (mine, theirs), strict=True):
                if len(held.values) > rows:
                    what = garbage(held.values[rows:].float()) or "not constant"
                    self.notes.append(
                        f"{name}: rows from {rows} on are on {label} alone, taken for padding of "
                        f"the vocabulary ({what})"
                    )
            mine, theirs = (replace(held, values=held.values[:rows]) for held in (mine, theirs))
        state = "different"
        if mine.scale is None and theirs.scale is None:
            if equal(mine.values, theirs.values):
                state = "same" if mine.values.dtype == theirs.values.dtype else "cast"
            elif equal_but_for_dtype(mine.values, theirs.values):
                state = "cast"
        else:
            numbers = mine.numbers(), theirs.numbers()
            if equal(*numbers):
                state = "same"
            elif within_rounding(mine, theirs, numbers):
                state = "quantised"
        self._count(name, state, a.shape(name))
        return state == "different"

    def _padded(self, name: str, *rows: int) -> bool:
        shapes = [holder.shape(name) for holder in self.holders]
        return name.endswith((EMBED, HEAD)) and shapes[0][1:] == shapes[1][1:] and min(rows) > 0

    def _count(self, name: str, state: str, shape: tuple[int, ...]) -> None:
        if state in self.counts:
            self.counts[state] += 1
        snapshot = self.holders[0].snapshot
        size = 1
        for n in shape:
            size *= n
        self.bytes += size * self.holders[0].itemsize(name)
        self.shards += len(snapshot.parts(name)) if snapshot is not None else 1

    def _classify(self, common: list[str], differing: list[str]) -> None:
        self.progress.start("saying how tensors differ", len(differing))
        classifier = Classifier(self.holders, common, differing, self.previous)
        for done, name in enumerate(differing):
            try:
                self.findings.append(classifier.classify(name))
            except LayerBisectError as error:
                line = f"{name}: {error}"
                found = Finding(name, "different", "unknown", "cannot be read", 0.0, 1.0)
                self.findings.append(replace(found, evidence=(line,)))
            self.progress.advance(done + 1)
        # an adapter leaves norms and embeddings: where these are stale as well, all is
        late = {one.side for one in self.findings if one.kind == "stale"}
        self.findings = [
            replace(one, kind="stale", how=STALE)
            if one.kind == "low rank" and one.side in late
            else one
            for one in self.findings
        ]

    def _lone_head(self, only: Mapping[str, tuple[str, ...]]) -> None:
        """A head that one side alone has must be the embedding that the other ties it to."""
        for side, holder in enumerate(self.holders):
            other = self.holders[1 - side]
            heads = [n for n in only[holder.label] if n.endswith(HEAD)]
            embeds = [n for n in other.names() if n.endswith(EMBED)]
            if not heads or not embeds or not has_values(holder) or not has_values(other):
                continue
            head, embed = holder.get(heads[0]), other.get(embeds[0])
            rows = min(len(head.values), len(embed.values))
            a, b = head.numbers()[:rows], embed.numbers()[:rows]
            if a.shape == b.shape and (
                equal(head.values[:rows], embed.values[:rows])
                or equal_but_for_dtype(head.values[:rows], embed.values[:rows])
            ):
                self.notes.append(f"{heads[0]} of {holder.label} is the embedding, as if tied")
                continue
            evidence = [f"{other.label} has no head of its own, {holder.label} has one"]
            if a.shape == b.shape:
                evidence.append(
                    f"{heads[0]} of {holder.label} is {distance(a, b):.2g} from the embedding of "
                    f"{other.label}"
                )
            # the side whose configuration says that it has a head lacks it otherwise
            off = other if other.tied is False else holder
            how = "the head is missing" if off is other else "the head is not tied to the embedding"
            apart = distance(a, b) if a.shape == b.shape else 1.0
            found = Finding(heads[0], "tied head", off.label, how, apart, 2.0**-9)
            self.findings.append(replace(found, evidence=tuple(evidence)))

    def _adapters(self, only: Mapping[str, tuple[str, ...]], differing: set[str]) -> None:
        for side, holder in enumerate(self.holders):
            adapters = [n for n in only[holder.label] if ".lora_" in n]
            stems = {n.split(".lora_")[0] + ".weight" for n in adapters}
            if stems & differing:
                self.notes.append(
                    f"{holder.label} holds {len(adapters)} adapter tensors beside its weights; "
                    "merge them before saving, to compare what it computes with"
                )
            elif adapters:
                lacking = self.labels[1 - side]
                how = f"the adapter of {holder.label} is not on {lacking}"
                line = f"{lacking} holds none of {len(adapters)} adapter tensors, nor merged ones"
                self.findings += [
                    Finding(name, "adapter", lacking, how, 1.0, 2.0**-9, evidence=(line,))
                    for name in adapters
                ]

    def _report(self, common: int, only: Mapping[str, tuple[str, ...]]) -> WeightReport:
        a, b = self.holders
        unread = [name for name in self.not_compared if name in a and name in b]
        compared = common - len(unread)
        problems = [p for holder in self.holders for p in holder.problems]
        reasons: list[str] = []
        status: Status = "agree"
        if self.findings:
            status = "divergent"
        elif not compared:
            status = "inconclusive"
            reasons.append("no tensor could be compared: the sides have no names in common")
        elif problems or unread:
            status = "inconclusive"
        reasons += problems
        if unread:
            why = self.not_compared[unread[0]]
            reasons.append(f"{len(unread):,} tensors could not be compared: {unread[0]}: {why}")
        strange = sum(one.how == UNCORRELATED for one in self.findings)
        if strange > compared / 2:
            reasons.append(
                f"{strange:,} of {compared:,} tensors are uncorrelated with the other side's: "
                "these are two different models, or one side was never loaded"
            )
        if status == "agree":
            reasons.append(f"all {compared:,} tensors that could be compared are the same")
            alone = {label: len(names) for label, names in only.items() if names}
            reasons += [f"{n:,} tensors are on {label} alone" for label, n in alone.items()]
        coverage = WeightCoverage(
            tensors=compared,
            bytes=self.bytes,
            shards=self.shards,
            only=only,
            not_compared=self.not_compared,
            notes=tuple(self.notes),
            **self.counts,
        )
        versions = {holder.label: holder.version for holder in self.holders}
        unknown = any(one.side == "unknown" for one in self.findings)
        return WeightReport(
            status=status,
            labels=self.labels,
            versions=versions,
            findings=tuple(self.findings),
            coverage=coverage,
            ruled_out=self._ruled_out(compared),
            reasons=tuple(reasons),
            next=self._next() if unknown and self.previous is None else "",
        )

    def _ruled_out(self, compared: int) -> tuple[RuledOut, ...]:
        if not compared:
            return ()
        found = {one.kind for one in self.findings}
        if not found and not self.not_compared:
            return (RuledOut("different weights", f"all {compared:,} tensors are the same"),)
        if "stale" not in found and self.previous is not None and self.findings:
            line = "no differing tensor of one side alone equals the previous weights"
            return (RuledOut("stale weights", line),)
        return ()

    def _next(self) -> str:
        sides = " ".join(str(Path(holder.directory)) for holder in self.holders)
        return (
            f"layerbisect weights {sides} --previous DIR   # the checkpoint both sides had before"
        )
