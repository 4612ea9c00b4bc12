"""The three published experiments, on any server and trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.scores.side_by_side import compare_runs
from layerbisect.bisect.scores.update import judge_update
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.replay import replay
from layerbisect.terminal.weights import headline as weights_headline
from scripts import published_scores as published
from scripts.reproduce_megatron import MegatronTrainer
from scripts.reproduce_report import Report, agrees, convicts, maes
from scripts.reproduce_runs import Rollout, lower_stored_a

HEADERS = ("run", "A-B MAE", "published", "B-C MAE", "published", "A-C MAE", "published")


class Policy(Protocol):
    """A trainer at T0.

    Attributes:
        offset: what its scoring function takes off, planted.
        updates: steps that it took.
        held: a checkpoint or a snapshot of the weights that were saved last.
    """

    offset: float
    updates: int
    held: Path

    def collect(self, record: ScoreRecord, path: Path) -> ScoreRecord:
        """Add C, and save the record."""

    def returned(self, record: ScoreRecord, path: Path) -> ScoreRecord:
        """Add C as the trainer's scoring function returns it, and save the record."""

    def changes(self, record: ScoreRecord) -> list[str]:
        """Name what changed the scores within the scoring function."""

    def update(self, record: ScoreRecord) -> float:
        """Take an optimizer's step."""

    def save(self, folder: Path) -> Path:
        """Write the weights; returns a checkpoint."""


def three(runs: Sequence[tuple[published.Run, Verdict]]) -> list[list[str]]:
    """Rows of a table in the form of the published ones, measured and published."""
    rows = []
    for run, verdict in runs:
        found = maes(verdict)
        row = [run.name]
        for name, said in (("A-B0", run.a_b), ("B0-C0", run.b_c), ("A-C0", run.a_c)):
            row += [f"{found[name]:.6f}", f"{said:.6f}"]
        rows.append(row)
    return rows


def case_1_and_2(report: Report, rollout: Rollout, trainer: Policy) -> None:
    """Cases 1 and 2, which share a clean control."""
    record, path = rollout.generate("clean")
    clean = trainer.collect(record, path)
    control = judge([clean])

    record, path = lower_stored_a(*rollout.generate("case-1-fault"))
    fault = trainer.collect(record, path)
    fixed = trainer.collect(*rollout.generate("case-1-fixed"))
    verdicts = control, judge([fault]), judge([fixed])
    _show(report, 1, verdicts)
    report.say(f"  fixed against clean: {compare_runs([fault], [fixed], [clean]).status}\n")

    trainer.offset = published.OFFSET
    record, path = rollout.generate("case-2-fault")
    fault = trainer.returned(record, path)
    watched = trainer.changes(fault)
    trainer.offset = 0.0
    record, other = rollout.generate("case-2-fixed")
    fixed = trainer.returned(record, other)
    verdicts = control, judge([fault]), judge([fixed])
    _show(report, 2, verdicts)
    report.say(f"  fixed against clean: {compare_runs([fault], [fixed], [clean]).status}")
    for change in watched:
        report.say(f"  watched in one forward: {change}")
    if isinstance(trainer, MegatronTrainer):
        captured = trainer.captured(fault, path)
        report.expect("fault, C from the capture of the same forwards", judge([captured]), agrees)
        _check_returned(report, "fault", fault, captured, -published.OFFSET)
        _check_returned(report, "fixed", fixed, trainer.captured(fixed, other), 0.0)
    report.say()


def _check_returned(
    report: Report, name: str, returned: ScoreRecord, captured: ScoreRecord, planted: float
) -> None:
    """Compare what the scoring function returned with what the same forward's logits give."""
    difference = np.concatenate(
        [a.scores["C0"] - b.scores["C0"] for a, b in zip(returned, captured, strict=True)]
    )
    report.check(
        f"{name}, what was returned minus the capture's",
        f"{difference.min():+.6f} to {difference.max():+.6f} nat",
        # both round to float32
        bool(np.allclose(difference, planted, rtol=0, atol=1e-5)),
    )


def _show(report: Report, number: int, verdicts: tuple[Verdict, Verdict, Verdict]) -> None:
    """Print what a case's three runs measured, and what they were judged."""
    runs = published.CASE_1 if number == 1 else published.CASE_2
    side, letter = ("rollout", "A") if number == 1 else ("trainer", "C")
    report.say(f"Case {number}: {letter} minus {published.OFFSET:.2f} nat\n")
    report.table(HEADERS, three(list(zip(runs, verdicts, strict=True))))
    scores = verdicts[1].scores
    assert scores is not None
    said = published.B_REPEAT[f"case {number} fault"]
    repeats = [(r.letter, f"{r.mae:.6f}") for r in scores.repeats]
    rows = [(*row, f"{value:.6f}") for row, value in zip(repeats, (said, 0.0), strict=True)]
    report.table(("repeat", "MAE of the fault run", "published"), rows)
    if number == 1:
        pair = scores.pairs[0]
        assert pair.first_token is not None and pair.later is not None
        split = [
            ("0", f"{pair.first_token.mae:.8f}", f"{published.FIRST_TOKEN:.8f}"),
            ("1 and later", f"{pair.later.mae:.6f}", f"{published.LATER_TOKENS:.6f}"),
        ]
        report.table(("response position", "A-B MAE of the fault run", "published"), split)
    report.expect("clean", verdicts[0], agrees)
    report.expect("fault", verdicts[1], convicts(side, "logprob", "constant offset"))
    report.expect("fixed", verdicts[2], agrees)


def case_3(
    report: Report, rollout: Rollout, model: Path, trainer_at_t0: Callable[[], Policy]
) -> None:
    """Case 3: the update after rollout 0 is skipped."""
    report.say("Case 3: the rollout's weight update after rollout 0 is skipped\n")
    found: dict[str, Verdict] = {}
    for name in ("clean", "fault", "fixed"):
        trainer = trainer_at_t0()
        rollout.worker.load_weights(model, "T0")
        folder = rollout.folder / f"case-3-{name}"
        records: list[ScoreRecord] = []
        saved = model
        for step in range(3):
            record, path = rollout.generate(f"case-3-{name}/{step}", step=step)
            records.append(trainer.collect(record, path))
            if name == "fault" and step == 1:
                _carry(report, rollout, records[0], trainer, (model, saved), folder)
            if step < 2:
                trainer.update(records[-1])
                saved = trainer.save(folder)
                if not (name == "fault" and step == 0):
                    rollout.worker.load_weights(saved, f"T{trainer.updates}")
        found[name] = judge(records)
    rows = []
    for step, said in published.CASE_3.items():
        cells = [str(step)]
        for name in ("clean", "fault", "fixed"):
            scores = found[name].scores
            assert scores is not None
            cells.append(f"{scores.steps[step].maes['B0-C0']:.6f}")
        rows.append([*cells, f"{said:.6f}"])
    headers = ("rollout", "B-C MAE clean", "fault", "fixed", "published fault")
    report.table(headers, rows)
    report.expect("clean", found["clean"], agrees)
    report.expect("fault", found["fault"], convicts("rollout", "weights", "from step 0 to step 1"))
    report.expect("fixed", found["fixed"], agrees)
    report.say()


def _carry(
    report: Report,
    rollout: Rollout,
    old: ScoreRecord,
    trainer: Policy,
    weights: tuple[Path, Path],
    folder: Path,
) -> None:
    """Carry rollout 0's responses across the skipped update, and look at the weights."""
    before, after = weights

    def carried(name: str, version: str) -> ScoreRecord:
        path = folder / f"carried-{name}.safetensors"
        record = replay(
            old.without(*old.columns),
            rollout.worker,
            path,
            weight_version=version,
            batches=old.info.columns["B0"].batches,
        )
        return trainer.collect(record, path)

    def weigh(right: str) -> None:
        # asked for checksums, the server writes a snapshot where its weights have changed
        rollout.worker.weights_digest()
        snapshots = sorted((rollout.folder / "rollout-weights").iterdir())
        found = weights_headline(compare(snapshots[-1], trainer.held, previous=before))
        report.check("its weights against the trainer's", found, right in found)

    report.expect(
        "rollout 0's responses carried across, update skipped",
        judge_update(old, carried("skipped", "T0")),
        convicts("rollout", "weights", "scores as it did before"),
    )
    weigh("tensors stale on the rollout side")
    rollout.worker.load_weights(after, "T1")
    report.expect(
        "the same, update installed", judge_update(old, carried("installed", "T1")), agrees
    )
    weigh("agree: ")
    rollout.worker.load_weights(before, "T0")
