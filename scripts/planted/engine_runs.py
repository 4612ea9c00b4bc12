"""What real engines computed of one small model: SGLang servers and megatron-core, on a CPU.

A *run* is one set of sequences with at most one fault planted. A server generates its own answers
and then replays them; megatron-core runs the same tokens forward. Runs have numbers in what is
captured, and no names: what was planted in which stays with the caller.

What a server or a layout recorded is kept with the digest of its plan, and recorded again only
where the plan has changed.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerbisect.captures.record.call import Call, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.models import make_tiny
from scripts.megatron_engine import run_job
from scripts.megatron_model import Layout

TINY: dict[str, Any] = dict(
    layers=6, hidden=128, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, vocab=512
)
SEQUENCES, PROMPT, RESPONSE = 4, 8, 40
LAYOUTS = {"one": Layout(), "ep2": Layout(expert=2), "pp2": Layout(pipeline=2)}

Scores = list[list[float]]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a server answered in one run.

    ``tokens`` holds each sequence's prompt and response, ``generated`` the log-probs (nat) of each
    response at generation, ``replayed`` those of the prefill replay of the same tokens, and
    ``unplanted`` those of a replay without the fault.
    """

    tokens: list[list[int]]
    generated: Scores
    replayed: Scores
    unplanted: Scores


@dataclass(frozen=True, slots=True)
class Served:
    """A server's capture, and its runs by number; the first has no fault.

    Names of requests are ``run-NN-pN``, where the letter is the pass: ``g`` the generation, ``r``
    the replay, and ``t`` a replay of the same tokens with nothing planted, which shows what the
    fault changed. The first run has also ``b``, the replays in one batch, and ``h``, prefills of
    the prompt and then of all, which finds the prompt in the prefix cache, and ``o``, replays of
    another server's tokens.
    """

    capture: Path
    runs: tuple[Answered, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """What megatron-core in one layout captured of each run, and each run's log-probs (nat)."""

    captures: tuple[Path, ...]
    scores: tuple[Scores, ...]


def small_model(folder: Path) -> Path:
    """The model that all engines load; made at the first call."""
    return folder if folder.exists() else make_tiny(folder, **TINY)


def requests(run: int, of_pass: str) -> str:
    """The pattern of one pass's request names in one run."""
    return f"run-{run:02}-{of_pass}*"


def serve(
    model: Path, folder: Path, size: int, faults: Sequence[str], others: Sequence[list[int]]
) -> Served:
    """Let a server of ``size`` tensor-parallel processes run clean, and then with each fault.

    ``others`` are tokens of another server, which are replayed clean.
    """

    def record() -> list[dict[str, Any]]:
        from tests.sglang_server import sglang_server

        with sglang_server(
            model, capture=folder / "capture", points="all", tp=size, fault=""
        ) as server:
            runs = [_answer(server, number, fault) for number, fault in enumerate(("", *faults))]
            server.plant(None)
            _share_prefills(server, runs[0])
            for at, ids in enumerate(others):
                server.replay(ids, rid=f"run-00-o{at}")
            server.captured()
        return [asdict(run) for run in runs]

    held = _once(folder, ["server", size, list(faults), list(others)], record)
    return Served(folder / "capture", tuple(Answered(**run) for run in held))


def _answer(server: Any, number: int, fault: str) -> Answered:
    """Generate, replay, and replay again with nothing planted."""

    def name(of_pass: str, at: int) -> str:
        return requests(number, of_pass).replace("*", str(at))

    draw = random.Random(1)
    vocab = range(3, TINY["vocab"])
    prompts = [draw.choices(vocab, k=PROMPT) for _ in range(SEQUENCES)]
    server.plant(fault or None)
    answers = server.generate_many(
        prompts, RESPONSE, rids=[name("g", at) for at in range(SEQUENCES)]
    )
    tokens = [answer.tokens for answer in answers]
    passes = ["r"]
    if fault:
        passes.append("t")
    replayed = []
    for of_pass in passes:
        if of_pass == "t":
            server.plant(None)
        replays = [server.replay(ids, rid=name(of_pass, at)) for at, ids in enumerate(tokens)]
        replayed.append([list(replay.prompt_logprobs[PROMPT:]) for replay in replays])
    generated = [list(answer.output_logprobs) for answer in answers]
    return Answered(tokens, generated, replayed[0], replayed[-1])


def _share_prefills(server: Any, clean: Answered) -> None:
    """Prefill the clean run's tokens in one batch, and after a prompt that is in the cache."""
    server.flush()
    server.generate_many(clean.tokens, 0, rids=[f"run-00-b{at}" for at in range(SEQUENCES)])
    server.flush()
    for at, ids in enumerate(clean.tokens):
        server.generate(ids[:PROMPT], 0, rid=f"run-00-h{at}-prompt")
        whole = server.generate(ids, 0, rid=f"run-00-h{at}-whole", logprob_start=PROMPT)
        if whole.cached != PROMPT:
            raise RuntimeError(f"{whole.cached} tokens came from the prefix cache, not {PROMPT}")


def train(
    model: Path, folder: Path, layout: str, runs: Sequence[tuple[list[list[int]], str]]
) -> Trained:
    """Run each tokens forward in megatron-core, with the fault beside them ("" for none)."""
    captures = tuple(folder / f"run-{number:02}" for number in range(len(runs)))

    def record() -> list[Scores]:
        steps = [
            {
                "do": "forward",
                "capture": str(capture),
                "points": "all",
                "vocab": TINY["vocab"],
                "tokens": tokens,
                "fault": fault,
            }
            for capture, (tokens, fault) in zip(captures, runs, strict=True)
        ]
        found = run_job({"model": str(model), "steps": steps}, LAYOUTS[layout], timeout=900)
        return found[0]

    held = _once(folder, ["trainer", layout, *map(list, runs)], record)
    return Trained(captures, tuple(held))


def _once(folder: Path, plan: list[Any], record: Callable[[], list[Any]]) -> list[Any]:
    """What was recorded into ``folder`` by this plan, recorded now where it was not."""
    text = json.dumps([plan, TINY, SEQUENCES, PROMPT, RESPONSE])
    digest = hashlib.sha256(text.encode()).hexdigest()
    done = folder / "done.json"
    if done.exists():
        held = json.loads(done.read_text())
        if held["plan"] == digest:
            results: list[Any] = held["results"]
            return results
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results = record()
    # written last, and whole: a recording that was broken off starts anew
    partial = folder / "partial.json"
    partial.write_text(json.dumps({"plan": digest, "results": results}))
    partial.rename(done)
    return results


def of_responses(scores: Scores) -> Scores:
    """Of scores of every token but the first of each sequence, those of the response."""
    return [of_sequence[PROMPT - 1 :] for of_sequence in scores]


def save_record(path: Path, run: Answered, trained: Scores) -> Path:
    """Write A, B and C of one run's responses, as those engines scored them.

    ``trained`` are the trainer's log-probs (nat) of each response.
    """
    engines = {"A": "sglang", "B0": "sglang", "C0": "megatron-core"}
    columns = {column: Scoring(engine=engine) for column, engine in engines.items()}
    calls = []
    for at, ids in enumerate(run.tokens):
        scores: Mapping[str, list[float]] = {
            "A": run.generated[at],
            "B0": run.replayed[at],
            "C0": trained[at],
        }
        calls.append(Call.of(f"call-{at}", ids[:PROMPT], ids[PROMPT:], scores))
    # a record may only gain columns, and this one may be of other runs than the last
    path.unlink(missing_ok=True)
    ScoreRecord(RecordInfo(columns=columns), calls).save(path)
    return path
