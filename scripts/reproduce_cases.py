"""Reproduce the three published experiments on a tiny model, and judge each run.

::

    python -m scripts.reproduce_cases --work /tmp/cases
    python -m scripts.reproduce_cases --work /tmp/megatron --trainer megatron --layout pp2-ep2

A real SGLang server generates and replays on the CPU, a transformers model or a job on the real
megatron-core is the trainer; 4 prompts, 2 samples each. What is planted, and nothing else, is
simulated: Case 1 lowers the stored A by 0.10 nat from response position 1 on, Case 2 both frozen C,
Case 3 skips one weight update. Each has a clean run, a fault run, and a run with the fault taken
out. The judge sees records alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from layerbisect.bisect.scores.judge import judge
from scripts import published_scores as published
from scripts.reproduce_experiments import Policy, case_1_and_2, case_3
from scripts.reproduce_megatron import LAYOUTS, MegatronTrainer, actor_job
from scripts.reproduce_report import Report, convicts, maes
from scripts.reproduce_runs import Rollout, Trainer, make_model, serve

VOCAB = 2048


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
    parser.add_argument("--trainer", choices=("transformers", "megatron"), default="transformers")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="pp2-ep2", help="of the Megatron job (%(default)s)"
    )
    parser.add_argument("--page", type=Path, help="write what is printed into a page, too")
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
    megatron = options.trainer == "megatron"
    described = None
    if not megatron:
        arithmetic(report)
    with ExitStack() as stack:
        at_t0: Callable[[], Policy] = partial(Trainer, model)
        if megatron:
            layout = LAYOUTS[options.layout]
            job = stack.enter_context(actor_job(model, options.work / "job", layout))
            at_t0 = partial(MegatronTrainer, job)
            described = {"layout": options.layout, **job.described()}
        rollout = stack.enter_context(serve(model, options.work, options.tokens, VOCAB))
        case_1_and_2(report, rollout, at_t0())
        if not megatron:
            one_worker(report, rollout)
        case_3(report, rollout, model, at_t0)
        if not megatron:
            temperatures(report, rollout, model)
    report.say("every verdict names what was planted" if not report.wrong else "WRONG:")
    for one in report.wrong:
        report.say(f"  {one}")
    if options.page:
        report.write_page(options.page, options.tokens, described)
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
