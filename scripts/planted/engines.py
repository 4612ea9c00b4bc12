"""The benchmark's cases on real engines: SGLang servers as rollout, megatron-core as trainer.

::

    python -m scripts.planted.engines --work DIR

records all of them into DIR, on a CPU, and writes two indexes. ``cases.json`` holds what a locator
may be given of each case, ``truths.json`` what was planted in it. Running it again keeps what is
there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.store import Capture
from scripts.planted.engine_case import EngineCase, Part, write_index
from scripts.planted.engine_plan import SERVED, Planted, served_faults, trained_faults
from scripts.planted.engine_runs import (
    LAYOUTS,
    Answered,
    Served,
    Trained,
    of_responses,
    requests,
    save_record,
    serve,
    small_model,
    train,
)
from scripts.planted.engine_sizes import apart, changed, first_changed
from scripts.planted.fault import held_out

Key = tuple[int, int, str]
"""The tensor-parallel size of the server whose tokens megatron-core runs forward, the number of
that server's run, and the fault in megatron-core."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """All that was recorded; ``numbers`` has the number of a run in a layout by its key."""

    folder: Path
    model: Path
    served: dict[int, Served]
    trained: dict[str, Trained]
    numbers: dict[str, dict[Key, int]]

    def answered(self, size: int, run: int) -> Answered:
        """What a server answered in one of its runs."""
        return self.served[size].runs[run]

    def rollout(self, size: int, run: int, of_pass: str, label: str = "rollout") -> Part:
        """One pass of a server's run."""
        return Part(self.served[size].capture, label, requests(run, of_pass))

    def trainer(self, layout: str, key: Key, label: str = "trainer") -> Part:
        """What megatron-core captured of a run."""
        return Part(self.trained[layout].captures[self.numbers[layout][key]], label)

    def scores(self, layout: str, key: Key) -> list[list[float]]:
        """Log-probs (nat) of a run's responses in megatron-core."""
        return of_responses(self.trained[layout].scores[self.numbers[layout][key]])

    def record(self, layout: str, key: Key) -> Path:
        """Write the record of a run that megatron-core has scored in a layout."""
        number = self.numbers[layout][key]
        path = self.folder / "records" / layout / f"run-{number:02}.safetensors"
        return save_record(path, self.answered(*key[:2]), self.scores(layout, key))


def record_cases(folder: Path) -> Iterator[EngineCase]:
    """Record into ``folder`` what is not there yet, and yield the cases that it makes."""
    recorded = record_all(folder)
    yield from fault_cases(recorded)
    yield from pass_controls(recorded)
    yield from layout_controls(recorded)


def fault_cases(recorded: Recorded) -> Iterator[EngineCase]:
    """Cases with a fault, in a server or in megatron-core."""
    for size, run, planted, layout in served_faults():
        yield from _of_server(recorded, size, run, planted, layout)
    for number, (size, layout, planted) in enumerate(trained_faults()):
        # what a trainer is compared with is now a prefill, now what was really generated
        yield _of_trainer(recorded, size, layout, planted, "rrg"[number % 3])


def record_all(folder: Path) -> Recorded:
    """Let all engines run, servers first: it is their answers that megatron-core runs forward."""
    model = small_model(folder / "model")
    served: dict[int, Served] = {}
    for size, faults in SERVED.items():
        # the second replays what the first answered, too
        others = [ids for one in served.values() for ids in one.runs[0].tokens]
        served[size] = serve(model, folder / f"server-{size}", size, faults, others)
    keys: dict[str, list[Key]] = {layout: [(size, 0, "") for size in SERVED] for layout in LAYOUTS}
    for size, run, _, layout in served_faults():
        keys[layout].append((size, run, ""))
    for size, layout, planted in trained_faults():
        keys[layout].append((size, 0, planted.text))
    trained = {
        layout: train(
            model,
            folder / f"trainer-{layout}",
            layout,
            [(served[size].runs[run].tokens, text) for size, run, text in of_layout],
        )
        for layout, of_layout in keys.items()
    }
    numbers = {
        layout: {key: number for number, key in enumerate(of_layout)}
        for layout, of_layout in keys.items()
    }
    return Recorded(folder, model, served, trained, numbers)


def _of_server(
    recorded: Recorded, size: int, run: int, planted: Planted, layout: str
) -> Iterator[EngineCase]:
    """A fault in a server, held against megatron-core; one of decode steps also against prefill."""
    server, key = f"sglang tp{size}", (size, run, "")
    answered, decode = recorded.answered(size, run), planted.fault.decode
    taken = recorded.rollout(size, run, "g" if decode else "r")
    # no other decode has these tokens: the replay stands for one without the fault
    whole = recorded.rollout(size, run, "r" if decode else "t")
    wrong = answered.generated if decode else answered.replayed
    shared: dict[str, Any] = dict(
        component=planted.component,
        reports=planted.reports,
        model=recorded.model,
        held_out=held_out(planted.fault.name),
        effect=apart(wrong, answered.unplanted),
        output=changed(whole.open(), taken.open(), planted.point, decode=decode),
    )
    yield EngineCase(
        name=f"{server}: {planted.text}",
        rollout=taken,
        trainer=recorded.trainer(layout, key),
        record=recorded.record(layout, key),
        truth=planted.truth("rollout"),
        engines=(server, f"megatron {layout}"),
        floor=apart(answered.unplanted, recorded.scores(layout, key)),
        **shared,
    )
    if decode:
        clean = recorded.answered(size, 0)
        yield EngineCase(
            name=f"{server} decode against prefill: {planted.text}",
            rollout=recorded.rollout(size, run, "g", "decode"),
            trainer=recorded.rollout(size, run, "r", "prefill"),
            record=None,
            truth=planted.truth("decode"),
            engines=(f"{server} decode", f"{server} prefill"),
            floor=apart(clean.generated, clean.replayed),
            **shared,
        )


def _of_trainer(
    recorded: Recorded, size: int, layout: str, planted: Planted, of_pass: str
) -> EngineCase:
    key, clean = (size, 0, planted.text), (size, 0, "")
    taken, whole = (recorded.trainer(layout, one) for one in (key, clean))
    right = recorded.scores(layout, clean)
    return EngineCase(
        name=f"megatron {layout}: {planted.text}",
        component=planted.component,
        reports=planted.reports,
        rollout=recorded.rollout(size, 0, of_pass),
        trainer=taken,
        record=recorded.record(layout, key),
        model=recorded.model,
        truth=planted.truth("trainer"),
        engines=(f"sglang tp{size}", f"megatron {layout}"),
        held_out=held_out(planted.fault.name),
        effect=apart(recorded.scores(layout, key), right),
        floor=apart(recorded.answered(size, 0).replayed, right),
        output=changed(whole.open(), taken.open(), planted.point),
    )


def _control(
    rollout: Part,
    trainer: Part,
    engines: tuple[str, str],
    recorded: Recorded,
    reports: tuple[str, ...] = (),
    record: Path | None = None,
) -> EngineCase:
    name, model = f"clean: {engines[0]} against {engines[1]}", recorded.model
    return EngineCase(name, "", reports, rollout, trainer, record, model, None, engines, False)


def pass_controls(recorded: Recorded) -> Iterator[EngineCase]:
    """Clean runs of each server: its passes against its prefill, and against megatron-core."""
    for size in SERVED:
        server = f"sglang tp{size}"
        for of_pass, word, reports in (
            ("g", "decode", ()),
            ("b", "prefill in one batch", ("vllm-project/vllm#32480",)),
            (
                "h",
                "prefill after a cached prompt",
                ("sgl-project/sglang#34683", "sgl-project/sglang#10721"),
            ),
        ):
            yield _control(
                recorded.rollout(size, 0, of_pass, word.split()[-1]),
                recorded.rollout(size, 0, "r", "prefill"),
                (f"{server} {word}", f"{server} prefill"),
                recorded,
                reports,
            )
        for layout in LAYOUTS:
            for of_pass, word in (("r", "prefill"), ("g", "decode")):
                yield _control(
                    recorded.rollout(size, 0, of_pass),
                    recorded.trainer(layout, (size, 0, "")),
                    (f"{server} {word}", f"megatron {layout}"),
                    recorded,
                    ("radixark/Megatron-LM#30", "radixark/Megatron-LM#29"),
                    recorded.record(layout, (size, 0, "")),
                )


def layout_controls(recorded: Recorded) -> Iterator[EngineCase]:
    """Clean runs of the same tokens by one engine in two layouts."""
    yield _control(
        recorded.rollout(1, 0, "r", "tp1"),
        recorded.rollout(2, 0, "o", "tp2"),
        ("sglang tp1", "sglang tp2"),
        recorded,
        ("pytorch/pytorch#144359",),
    )
    first, *others = LAYOUTS
    for layout in others:
        yield _control(
            recorded.trainer(first, (1, 0, ""), first),
            recorded.trainer(layout, (1, 0, ""), layout),
            (f"megatron {first}", f"megatron {layout}"),
            recorded,
            ("NVIDIA-NeMo/RL#4243",) if layout == "ep2" else (),
        )


def untrue(folder: Path) -> Iterator[str]:
    """Check by bits alone that each fault begins where its truth says; yield what is not so."""
    recorded = record_all(folder)
    for size, run, planted, _ in served_faults():
        whole, taken = (recorded.rollout(size, run, of_pass).open() for of_pass in "tr")
        # a fault of decode steps leaves the replay as it is
        yield from _untrue(f"sglang tp{size}", planted, whole, taken, planted.fault.decode)
    for size, layout, planted in trained_faults():
        keys = ((size, 0, ""), (size, 0, planted.text))
        whole, taken = (recorded.trainer(layout, key).open() for key in keys)
        yield from _untrue(f"megatron {layout}", planted, whole, taken, False)


def _untrue(
    engine: str, planted: Planted, whole: Capture, taken: Capture, hidden: bool
) -> Iterator[str]:
    # no capture has logits, so that a fault of the head shows in none
    hidden = hidden or planted.point not in whole.points
    found, wanted = first_changed(whole, taken), None if hidden else planted.point
    if found != wanted:
        yield f"{engine}: {planted.text} first shows at {found}, not at {wanted}"


def main() -> None:
    """Record, and write the indexes."""
    parser = argparse.ArgumentParser(description="Record the benchmark's cases on real engines.")
    parser.add_argument("--work", type=Path, required=True, help="directory to record into")
    parser.add_argument("--check", action="store_true", help="check each truth by bits, too")
    given = parser.parse_args()
    folder: Path = given.work.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cases = list(record_cases(folder))
    write_index(folder, cases)
    planted = sum(case.truth is not None for case in cases)
    print(f"{planted} cases with a fault and {len(cases) - planted} without one in {folder}")
    if given.check:
        wrong = list(untrue(folder))
        print("\n".join(wrong or ["each fault begins where its truth says"]))
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
