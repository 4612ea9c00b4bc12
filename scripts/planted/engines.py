"""The benchmark's cases on real engines: SGLang servers as rollout, megatron-core as trainer.

    python -m scripts.planted.engines --work DIR

records all of them into DIR, on a CPU, and writes two indexes. ``cases.json`` holds what a locator
may be given of each case, ``truths.json`` what was planted in it, under the same number. Running it
again keeps what is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.store import Capture
from scripts.planted.engine_plan import SERVED, Fault, served_faults, trained_faults
from scripts.planted.engine_runs import (
    LAYOUTS,
    Answered,
    Served,
    Trained,
    requests,
    save_record,
    serve,
    small_model,
    train,
)
from scripts.planted.fault import Truth, held_out


@dataclass(frozen=True, slots=True)
class Part:
    """One side of a case: some requests of a capture, and what to call them."""

    directory: Path
    label: str
    requests: str = "*"

    def open(self) -> Capture:
        """Open it for the locator."""
        return Capture.open(self.directory, label=self.label, requests=self.requests)


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Two captures of the same tokens by real engines, and what was planted in one of them.

    Attributes:
        name: engine, layout and fault, for people; nothing that the locator is given has it.
        component: the place, in the reports' words; "" for a control.
        reports: the public issues that it is a reading of.
        rollout, trainer: the sides, labelled so, or ``decode`` and ``prefill``, or by layout.
        record: file of A, B and C, where the sides are a rollout and a trainer.
        model: the checkpoint directory that both loaded.
        truth: what a verdict must say; None for a control.
        engines: of either side, with the layout.
        held_out: whether the fault is among those kept aside.
    """

    name: str
    component: str
    reports: tuple[str, ...]
    rollout: Part
    trainer: Part
    record: Path | None
    model: Path
    truth: Truth | tuple[Truth, ...] | None
    engines: tuple[str, str]
    held_out: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """All that was recorded; ``trained`` has the number of a run in a layout by its key.

    A key is the tensor-parallel size of the server whose tokens they are, the number of that
    server's run, and the fault in megatron-core.
    """

    folder: Path
    model: Path
    served: dict[int, Served]
    trained: dict[str, Trained]
    numbers: dict[str, dict[tuple[int, int, str], int]]

    def rollout(self, size: int, run: int, of_pass: str, label: str = "rollout") -> Part:
        return Part(self.served[size].capture, label, requests(run, of_pass))

    def trainer(self, layout: str, size: int, run: int, fault: str, label: str = "trainer") -> Part:
        number = self.numbers[layout][size, run, fault]
        return Part(self.trained[layout].captures[number], label)

    def record(self, layout: str, size: int, run: int, fault: str) -> Path:
        """Write the record of a server's run that was trained on in a layout."""
        number = self.numbers[layout][size, run, fault]
        answered: Answered = self.served[size].runs[run]
        path = self.folder / "records" / layout / f"run-{number:02}.safetensors"
        return save_record(path, answered, self.trained[layout].scores[number])


def record_cases(folder: Path) -> Iterator[EngineCase]:
    """Record into ``folder`` what is not there yet, and yield the cases that it makes."""
    recorded = record_all(folder)
    yield from _faults_of_servers(recorded)
    yield from _faults_of_trainers(recorded)
    yield from _controls(recorded)


def record_all(folder: Path) -> Recorded:
    """Let all engines run, servers first: it is their answers that megatron-core runs forward."""
    model = small_model(folder / "model")
    served: dict[int, Served] = {}
    for size, faults in SERVED.items():
        # the second replays what the first answered, too
        others = [one.runs[0].tokens for one in served.values()]
        served[size] = serve(model, folder / f"server-{size}", size, faults, sum(others, []))
    keys: dict[str, list[tuple[int, int, str]]] = {
        layout: [*((size, 0, "") for size in SERVED)] for layout in LAYOUTS
    }
    for size, run, _, layout in served_faults():
        keys[layout].append((size, run, ""))
    for size, layout, text in trained_faults():
        keys[layout].append((size, 0, text))
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


def _faults_of_servers(recorded: Recorded) -> Iterator[EngineCase]:
    for size, run, fault, layout in served_faults():
        about, server = fault.about, f"sglang tp{size}"
        shared: dict[str, Any] = dict(
            component=about.component,
            reports=fault.reports,
            model=recorded.model,
            held_out=held_out(fault.name),
        )
        yield EngineCase(
            name=f"{server}: {fault.text}",
            rollout=recorded.rollout(size, run, "g" if fault.decode else "r"),
            trainer=recorded.trainer(layout, size, run, ""),
            record=recorded.record(layout, size, run, ""),
            truth=fault.truth("rollout"),
            engines=(server, f"megatron {layout}"),
            **shared,
        )
        if fault.decode:
            yield EngineCase(
                name=f"{server} decode against prefill: {fault.text}",
                rollout=recorded.rollout(size, run, "g", "decode"),
                trainer=recorded.rollout(size, run, "r", "prefill"),
                record=None,
                truth=fault.truth("decode"),
                engines=(f"{server} decode", f"{server} prefill"),
                **shared,
            )


def _faults_of_trainers(recorded: Recorded) -> Iterator[EngineCase]:
    for number, (size, layout, text) in enumerate(trained_faults()):
        fault = Fault(text)
        # what a trainer is compared with is now a prefill, now what was really generated
        of_pass = "rrg"[number % 3]
        yield EngineCase(
            name=f"megatron {layout}: {text}",
            component=fault.about.component,
            reports=fault.reports,
            rollout=recorded.rollout(size, 0, of_pass),
            trainer=recorded.trainer(layout, size, 0, text),
            record=recorded.record(layout, size, 0, text),
            model=recorded.model,
            truth=fault.truth("trainer"),
            engines=(f"sglang tp{size}", f"megatron {layout}"),
            held_out=held_out(fault.name),
        )


def _controls(recorded: Recorded) -> Iterator[EngineCase]:
    def control(
        engines: tuple[str, str],
        rollout: Part,
        trainer: Part,
        *reports: str,
        record: Path | None = None,
    ) -> EngineCase:
        name = f"clean: {engines[0]} against {engines[1]}"
        model = recorded.model
        return EngineCase(name, "", reports, rollout, trainer, record, model, None, engines, False)

    parity = ("radixark/Megatron-LM#30", "radixark/Megatron-LM#29")
    for size in SERVED:
        prefill = recorded.rollout(size, 0, "r", "prefill")
        yield control(
            (f"sglang tp{size} decode", f"sglang tp{size} prefill"),
            recorded.rollout(size, 0, "g", "decode"),
            prefill,
        )
        yield control(
            (f"sglang tp{size} prefill in one batch", f"sglang tp{size} prefill"),
            recorded.rollout(size, 0, "b", "batch"),
            prefill,
            "vllm-project/vllm#32480",
        )
        yield control(
            (f"sglang tp{size} prefill after a cached prompt", f"sglang tp{size} prefill"),
            recorded.rollout(size, 0, "h", "cached"),
            prefill,
            "sgl-project/sglang#34683",
            "sgl-project/sglang#10721",
        )
        for layout in LAYOUTS:
            for of_pass, word in (("r", "prefill"), ("g", "decode")):
                yield control(
                    (f"sglang tp{size} {word}", f"megatron {layout}"),
                    recorded.rollout(size, 0, of_pass),
                    recorded.trainer(layout, size, 0, ""),
                    *parity,
                    record=recorded.record(layout, size, 0, ""),
                )
    yield control(
        ("sglang tp1", "sglang tp2"),
        recorded.rollout(1, 0, "r", "tp1"),
        recorded.rollout(2, 0, "o", "tp2"),
        "pytorch/pytorch#144359",
    )
    first, *others = LAYOUTS
    for layout in others:
        yield control(
            (f"megatron {first}", f"megatron {layout}"),
            recorded.trainer(first, 1, 0, "", first),
            recorded.trainer(layout, 1, 0, "", layout),
            *(("NVIDIA-NeMo/RL#4243",) if layout == "ep2" else ()),
        )


def write_index(folder: Path, cases: Iterable[EngineCase]) -> None:
    """Write ``cases.json``, which tells nothing of what was planted, and ``truths.json``."""
    given, truths = {}, {}
    for number, case in enumerate(cases):
        key = f"case-{number:03}"
        given[key] = {
            "rollout": _index_part(case.rollout, folder),
            "trainer": _index_part(case.trainer, folder),
            "record": None if case.record is None else str(case.record.relative_to(folder)),
            "model": str(case.model.relative_to(folder)),
        }
        told = case.truth if isinstance(case.truth, tuple) else filter(None, (case.truth,))
        truths[key] = {
            "name": case.name,
            "component": case.component,
            "reports": case.reports,
            "engines": case.engines,
            "held_out": case.held_out,
            "truth": [asdict(one) for one in told],
        }
    for name, held in (("cases", given), ("truths", truths)):
        (folder / f"{name}.json").write_text(json.dumps(held, indent=1) + "\n")


def read_index(folder: Path) -> Iterator[EngineCase]:
    """The cases of :func:`write_index`, without any engine."""
    given, truths = (json.loads((folder / f"{n}.json").read_text()) for n in ("cases", "truths"))
    for key, paths in given.items():
        about = truths[key]
        record, truth = paths["record"], tuple(Truth(**one) for one in about["truth"])
        yield EngineCase(
            name=about["name"],
            component=about["component"],
            reports=tuple(about["reports"]),
            rollout=_part(paths["rollout"], folder),
            trainer=_part(paths["trainer"], folder),
            record=record and folder / record,
            model=folder / paths["model"],
            truth=truth if len(truth) > 1 else truth[0] if truth else None,
            engines=(about["engines"][0], about["engines"][1]),
            held_out=about["held_out"],
        )


def _index_part(part: Part, folder: Path) -> dict[str, str]:
    directory = str(part.directory.relative_to(folder))
    return {"directory": directory, "label": part.label, "requests": part.requests}


def _part(held: dict[str, str], folder: Path) -> Part:
    return Part(folder / held["directory"], held["label"], held["requests"])


def main() -> None:
    """Record, and write the indexes."""
    parser = argparse.ArgumentParser(description="Record the benchmark's cases on real engines.")
    parser.add_argument("--work", type=Path, required=True, help="directory to record into")
    folder: Path = parser.parse_args().work.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cases = list(record_cases(folder))
    write_index(folder, cases)
    planted = sum(case.truth is not None for case in cases)
    print(f"{planted} cases with a fault and {len(cases) - planted} without one in {folder}")


if __name__ == "__main__":
    main()
