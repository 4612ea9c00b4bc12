"""Reproduce the three published experiments on a tiny model, and judge each run.

::

    python -m scripts.reproduce_cases --work /tmp/cases

A real SGLang server generates and replays on the CPU, a transformers model is the trainer; 4
prompts, 2 samples each. What is planted, and nothing else, is simulated: Case 1 lowers the stored A
by 0.10 nat from response position 1 on, Case 2 both frozen C, Case 3 skips one weight update. Each
has a clean run, a fault run, and a run with the fault taken out. The judge sees records alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from layerbisect.bisect.scores.judge import judge
from layerbisect.bisect.scores.side_by_side import compare_runs
from layerbisect.bisect.scores.update import judge_update
from layerbisect.bisect.verdict import Verdict
from layerbisect.bisect.weight_diff.compare import compare
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.replay import replay
from layerbisect.render_weights import headline as weights_headline
from scripts import published_scores as published
from scripts.reproduce_report import Report, agrees, convicts, maes
from scripts.reproduce_runs import Rollout, Trainer, lower_stored_a, make_model, serve

VOCAB = 2048


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


HEADERS = ("run", "A-B MAE", "published", "B-C MAE", "published", "A-C MAE", "published")


def arithmetic(report: Report) -> None:
    """Print what the published figures allow to be recomputed."""
    report.say("The published figures, recomputed\n")
    rows = published.recomputed()
    report.table(("what", "published", "recomputed"), rows)
    report.wrong += [f"recomputed {what}: {found}" for what, said, found in rows if said != found]
    bounds = [
        (name, f"{least:.6f}", f"{a_c:.6f}", f"{most:.6f}")
        for name, least, a_c, most in published.bounds()
    ]
    report.table(("run", "|A-B - B-C|", "A-C MAE", "A-B + B-C"), bounds)
    report.wrong += [f"{n}: the triangle" for n, lo, mid, hi in bounds if not lo <= mid <= hi]


def case_1_and_2(report: Report, rollout: Rollout, model: Path) -> ScoreRecord:
    """Cases 1 and 2, which share a clean control."""
    trainer = Trainer(model)

    def run(name: str, *, stored: bool = False, offset: float = 0.0) -> ScoreRecord:
        record, path = rollout.generate(name)
        if stored:
            record, path = lower_stored_a(record, path)
        trainer.offset = offset
        return trainer.collect(record, path)

    clean = run("clean")
    control = judge([clean])
    for number, runs in ((1, published.CASE_1), (2, published.CASE_2)):
        side, letter = ("rollout", "A") if number == 1 else ("trainer", "C")
        planted = {"stored": True} if number == 1 else {"offset": published.OFFSET}
        fault = run(f"case-{number}-fault", **planted)
        fixed = run(f"case-{number}-fixed")
        verdicts = control, judge([fault]), judge([fixed])
        report.say(f"Case {number}: {letter} minus {published.OFFSET:.2f} nat\n")
        report.table(HEADERS, three(list(zip(runs, verdicts, strict=True))))
        assert verdicts[1].scores is not None
        said = published.B_REPEAT[f"case {number} fault"]
        repeats = [(r.letter, f"{r.mae:.6f}") for r in verdicts[1].scores.repeats]
        rows = [(*row, f"{value:.6f}") for row, value in zip(repeats, (said, 0.0), strict=True)]
        report.table(("repeat", "MAE of the fault run", "published"), rows)
        if number == 1:
            pair = verdicts[1].scores.pairs[0]
            assert pair.first_token is not None and pair.later is not None
            split = [
                ("0", f"{pair.first_token.mae:.8f}", f"{published.FIRST_TOKEN:.8f}"),
                ("1 and later", f"{pair.later.mae:.6f}", f"{published.LATER_TOKENS:.6f}"),
            ]
            report.table(("response position", "A-B MAE of the fault run", "published"), split)
        report.expect("clean", verdicts[0], agrees)
        report.expect("fault", verdicts[1], convicts(side, "logprob", "constant offset"))
        report.expect("fixed", verdicts[2], agrees)
        comparison = compare_runs([fault], [fixed], [clean])
        report.say(f"  fixed against clean: {comparison.status}")
        if number == 2:
            trainer.offset = published.OFFSET
            for change in trainer.changes(fault):
                report.say(f"  watched in one forward: {change}")
            trainer.offset = 0.0
        report.say()
    return clean


def one_worker(report: Report, rollout: Rollout) -> None:
    """Five passes on one worker, compared pair by pair."""
    passes, said = published.WORKERS["within one worker"]
    record, _ = rollout.generate("five-passes", replays=passes)
    scores = judge([record]).scores
    assert scores is not None
    (repeat,) = scores.repeats
    report.say(
        f"{passes} passes on one worker, {len(repeat.pairs)} pairs: mean absolute difference "
        f"{repeat.mae:.6f} nat (published {said:.6f}); over workers and through a router nothing "
        "was run here\n"
    )


def case_3(report: Report, rollout: Rollout, model: Path) -> None:
    """Case 3: the update after rollout 0 is skipped."""
    report.say("Case 3: the rollout's weight update after rollout 0 is skipped\n")
    found: dict[str, Verdict] = {}
    for name in ("clean", "fault", "fixed"):
        trainer = Trainer(model)
        rollout.worker.load_weights(model, "T0")
        folder = rollout.folder / f"case-3-{name}"
        records: list[ScoreRecord] = []
        saved = model
        for step in range(3):
            record, path = rollout.generate(f"case-3-{name}/{step}", step=step)
            records.append(trainer.collect(record, path))
            if name == "fault" and step == 1:
                carry(report, rollout, records[0], trainer, (model, saved), folder)
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


def carry(
    report: Report,
    rollout: Rollout,
    old: ScoreRecord,
    trainer: Trainer,
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

    report.expect(
        "rollout 0's responses carried across, update skipped",
        judge_update(old, carried("skipped", "T0")),
        convicts("rollout", "weights", "scores as it did before"),
    )
    rollout.worker.weights_digest()
    snapshots = sorted((rollout.folder / "rollout-weights").iterdir())
    weighed = compare(snapshots[-1], after, previous=before)
    report.say(f"  its weights against the trainer's: {weights_headline(weighed)}")
    rollout.worker.load_weights(after, "T1")
    report.expect(
        "the same, update installed", judge_update(old, carried("installed", "T1")), agrees
    )
    rollout.worker.load_weights(before, "T0")


def temperatures(report: Report, rollout: Rollout, model: Path) -> None:
    """The trainer divides logits by the rollout's temperature, the rollout scores without."""
    report.say("Temperature: the rollout scores raw, the trainer divides logits by T\n")
    rollout.worker.load_weights(model, "T0")
    trainer = Trainer(model)
    rows, verdicts = [], {}
    for temperature, said in published.TEMPERATURE.items():
        record, path = rollout.generate(f"temperature-{temperature}", temperature=temperature)
        trainer.temperature = temperature
        verdicts[temperature] = judge([trainer.collect(record, path)])
        rows.append(
            (f"{temperature}", f"{maes(verdicts[temperature])['B0-C0']:.6f}", f"{said:.6f}")
        )
    report.table(("T", "B-C MAE", "published"), rows)
    for temperature, verdict in verdicts.items():
        wanted = convicts("trainer", "logprob", f"C0 is of logits divided by {temperature:.2f}")
        report.expect(f"T = {temperature}", verdict, wanted)
    report.say()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 where every verdict names what was planted, 2 where nothing can be run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="new directory for all records")
    parser.add_argument("--tokens", type=int, default=128, help="response tokens")
    parser.add_argument("--page", type=Path, help="write what is printed as a page, too")
    options = parser.parse_args(arguments)
    if options.work.exists():
        print(f"error: {options.work} exists; name a new directory by --work", file=sys.stderr)
        return 2
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    from transformers.utils import logging

    logging.disable_progress_bar()
    report = Report()
    options.work.mkdir(parents=True)
    model = make_model(options.work / "T0", VOCAB)
    arithmetic(report)
    with serve(model, options.work, options.tokens, VOCAB) as rollout:
        case_1_and_2(report, rollout, model)
        one_worker(report, rollout)
        case_3(report, rollout, model)
        temperatures(report, rollout, model)
    report.say("every verdict names what was planted" if not report.wrong else "WRONG:")
    for one in report.wrong:
        report.say(f"  {one}")
    if options.page:
        options.page.write_text(report.page(options.tokens), encoding="utf-8")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
