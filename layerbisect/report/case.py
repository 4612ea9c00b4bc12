"""Sections that every verdict has: what was convicted, what was ruled out, and where it ran."""

from __future__ import annotations

from collections.abc import Mapping

from layerbisect.bisect.verdict import Verdict
from layerbisect.report.blocks import Cell, Facts, Section, Table
from layerbisect.terminal.verdict import side_words
from layerbisect.wording import count, percent, times


def culprits_section(verdict: Verdict) -> Section | None:
    """Each culprit with all its evidence."""
    if not verdict.culprits:
        return None
    blocks = []
    for number, one in enumerate(verdict.culprits, 1):
        share = "not probed" if one.share_of_gap is None else percent(one.share_of_gap)
        facts = [
            ("operator", one.operator or "not known: the points between are not captured"),
            ("side", one.side),
            ("where", one.where),
            ("share of the gap", share),
        ]
        if not verdict.of_scores:
            facts.append(
                ("own error", f"{times(one.own_error)} rounding, floor {times(one.floor)}")
            )
        facts += [("evidence", sentence) for sentence in one.evidence]
        layer = "" if one.layer is None else f", layer {one.layer}"
        title = f"{number}. {one.point}{layer}, {side_words(one.side)}"
        blocks.append(Facts(tuple(facts), title))
    lead = (
        "What the evidence convicts. An own error is what an operator added on the input that it "
        "was itself given, so it does not depend on the other side."
    )
    if verdict.of_scores:
        lead = "What the scores alone convict."
    if verdict.status != "divergent":
        lead = "What was found beside a verdict that accuses nobody."
        return Section("culprits", "Suspected", lead, tuple(blocks))
    return Section("culprits", "Convicted", lead, tuple(blocks))


def ruled_out_section(verdict: Verdict) -> Section | None:
    """The hypotheses that the evidence excludes."""
    if not verdict.ruled_out:
        return None
    rows = tuple(
        (Cell(out.hypothesis, strong=True), Cell(out.evidence)) for out in verdict.ruled_out
    )
    table = Table("Hypotheses that the evidence excludes", ("ruled out", "because"), rows)
    lead = f"{count(len(rows), 'other explanation')} that the evidence excludes."
    return Section("ruled-out", "What was ruled out", lead, (table,))


def environment_section(verdict: Verdict) -> Section | None:
    """What differs between the sides' environments; what is the same is counted and listed."""
    sides = verdict.environments
    if not sides:
        return None
    facts = list(dict.fromkeys(name for found in sides.values() for name in found))
    values = {name: [found[name] for found in sides.values() if name in found] for name in facts}
    apart = [name for name in facts if len(set(values[name])) > 1]
    same = [n for n in facts if n not in apart and len(values[n]) == len(sides)]
    alone = [name for name in facts if name not in apart and name not in same]
    blocks: list[Table] = []
    if apart:
        blocks.append(_environments("What differs", apart, sides))
    if alone:
        blocks.append(_environments("What only some sides say", alone, sides))
    if same:
        rows = tuple((Cell(name), Cell(values[name][0])) for name in same)
        blocks.append(Table("What is the same", ("fact", "all sides"), rows))
    verb = "differs" if len(apart) == 1 else "differ"
    lead = (
        f"{count(len(apart), 'fact')} of {len(facts)} {verb} between the sides. A difference is no "
        "fault; it is where to look when something changed."
    )
    return Section("environment", "Environment", lead, tuple(blocks))


def _environments(caption: str, names: list[str], sides: Mapping[str, Mapping[str, str]]) -> Table:
    rows = tuple(
        (Cell(name, strong=True), *(Cell(found.get(name, "-")) for found in sides.values()))
        for name in names
    )
    return Table(caption, ("fact", *sides), rows)
