"""Compare what two holders have of each logical tensor, and say how those that differ do."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path

from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.verdict import RuledOut, Status
from layerbisect.bisect.weight_diff.alone import LoneTensors
from layerbisect.bisect.weight_diff.blocks import within_rounding
from layerbisect.bisect.weight_diff.classify import DRIFT, STALE, UNCORRELATED, Classifier
from layerbisect.bisect.weight_diff.digests import compare_digests, has_values, stored_alike
from layerbisect.bisect.weight_diff.holders import Holder, open_holder
from layerbisect.bisect.weight_diff.numbers import equal, equal_but_for_dtype, garbage
from layerbisect.bisect.weight_diff.pairs import EMBED, HEAD, unread_rows
from layerbisect.bisect.weight_diff.report import (
    Finding,
    WeightCoverage,
    WeightReport,
    described,
    tensors,
)
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
                # the same for all tensors that it keeps from being compared
                self.not_compared[name] = str(error).removeprefix(f"{name}: ")
            self.progress.advance(done + 1)
        self._classify(common, differing)
        excused: set[str] = set()
        if common:
            alone = LoneTensors(self.holders, only, set(differing))
            self.findings += alone.findings
            self.not_compared |= alone.not_compared
            self.notes += alone.notes
            excused = alone.excused
        self.progress.done()
        for holder in self.holders:
            for name, why in holder.left_out.items():
                if name not in excused:
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
        mine, theirs, unread = a.get(name), b.get(name), None
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
            unread = unread_rows(self.holders, (mine, theirs))
            for label, held in zip(self.labels, (mine, theirs), strict=True):
                if len(held.values) > rows and unread is None:
                    what = garbage(held.values[rows:].float()) or "one value"
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
        if unread is not None:
            if state != "different":
                raise LayerBisectError(unread)
            self.notes.append(f"{name}: {unread}")
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
        self._join_updates(classifier.mild, len(common))
        # an adapter leaves norms and embeddings: where these are stale as well, all is
        late = {one.side for one in self.findings if one.kind == "stale"}
        self.findings = [
            replace(one, kind="stale", how=STALE)
            if one.kind == "low rank" and one.side in late
            else one
            for one in self.findings
        ]

    def _join_updates(self, mild: Set[str], common: int) -> None:
        """Read small changes in few places as the update that moved the other tensors.

        An update by less than half the spacing of bf16 leaves most values where they were, and one
        of an embedding moves the rows of the tokens that were seen.
        """
        drifting = sum(one.kind == "drift" for one in self.findings)
        if drifting < len(mild) and drifting + len(mild) <= common / 2:
            return
        self.findings = [
            replace(one, kind="drift", how=DRIFT, where="") if one.name in mild else one
            for one in self.findings
        ]

    def _report(self, common: int, only: Mapping[str, tuple[str, ...]]) -> WeightReport:
        a, b = self.holders
        unread = sum(name in a and name in b for name in self.not_compared)
        compared = common - unread
        problems = [p for holder in self.holders for p in holder.problems]
        reasons: list[str] = list(problems)
        status: Status = "agree"
        if self.findings:
            status = "divergent"
        elif problems or self.not_compared or not compared:
            status = "inconclusive"
        if not common and not problems:
            reasons.append("no tensor could be compared: the sides have no names in common")
        elif self.not_compared:
            reasons.append(_not_compared(self.not_compared))
        strange = sum(one.how == UNCORRELATED for one in self.findings)
        if strange > compared / 2:
            reasons.append(
                f"{strange:,} of {tensors(compared)} are uncorrelated with the other side's: "
                "these are two different models, or one side was never loaded"
            )
        if status == "agree":
            reasons.append(_all_same(compared))
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
            ruled_out=self._ruled_out(status, compared),
            reasons=tuple(reasons),
            next=self._next() if unknown and self.previous is None else "",
        )

    def _ruled_out(self, status: Status, compared: int) -> tuple[RuledOut, ...]:
        found = {one.kind for one in self.findings}
        if status == "agree":
            return (RuledOut("different weights", _all_same(compared)),)
        if "stale" not in found and self.previous is not None and self.findings:
            line = "no differing tensor of one side alone equals the previous weights"
            return (RuledOut("stale weights", line),)
        return ()

    def _next(self) -> str:
        sides = " ".join(str(Path(holder.directory)) for holder in self.holders)
        return (
            f"layerbisect weights {sides} --previous DIR   # the checkpoint both sides had before"
        )


def _not_compared(reasons: Mapping[str, str]) -> str:
    """Say in one sentence what could not be compared, by what keeps most from it."""
    whys = Counter(reasons.values())
    why, most = whys.most_common(1)[0]
    names = [name for name, said in reasons.items() if said == why]
    which = f"{most:,} of them, " if most < len(reasons) else ""
    return f"{tensors(len(reasons))} could not be compared: {which}{described(names)}: {why}"


def _all_same(number: int) -> str:
    return f"all {tensors(number)} are the same" if number > 1 else "the one tensor is the same"
