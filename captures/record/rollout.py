"""Collect A and B from SGLang workers: generate once, keep A, replay the same tokens.

::

    record = collect(Worker("http://127.0.0.1:30000"), prompts, "step-12.safetensors", samples=2)

The record is on disk as soon as there is an A, and from then on only gains columns: whatever goes
wrong later, A is kept.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import LayerBisectError, RecordError, WorkerError
from layerbisect.captures.record.call import Call, Definition, RecordInfo, Scoring
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.replay import WeightWatch, check_replays, replay
from layerbisect.captures.sglang.reply import ReplyError
from layerbisect.captures.sglang.worker import RAW, Worker

# each of them is set by an argument of its own
_TAKEN = {"max_new_tokens": "max_new_tokens", "n": "samples", "beam_width": "samples"}
# what SGLang does to the logits before any score is taken, with the values that do nothing
_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
}
_NO_FILTER: Mapping[str, Any] = {"top_p": 1, "top_k": -1, "min_p": 0}
_CHANGES = ("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")


def collect(
    worker: Worker,
    prompts: Sequence[Sequence[int]],
    path: str | os.PathLike[str],
    *,
    samples: int = 1,
    max_new_tokens: int = 128,
    replays: int = 2,
    workers: Sequence[Worker] = (),
    router: Worker | None = None,
    sampling: Mapping[str, Any] | None = None,
    original_logprobs: bool = False,
    groups: Sequence[str] | None = None,
    step: int | None = None,
    digests: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreRecord:
    """Generate once, keep A in a new file, and replay the responses as :func:`replay` does.

    All samples of all prompts go in one request, and so do their replays. The cache is not emptied
    before generation: what a real rollout finds there belongs to A. Calls are named
    ``<group>.sample-<number>``.

    Args:
        prompts: token IDs of each.
        samples: responses to each prompt.
        replays, workers, router, digests, progress: as :func:`replay` takes them.
        sampling: settings for generation that differ from RAW. With a temperature, filters or
            penalties A is of another distribution than B; the record says of which.
        original_logprobs: the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1, and scores
            before it divides by the temperature.
        groups: a name for each prompt. step: the policy's updates before this rollout.

    Raises:
        LayerBisectError: arguments that cannot be.
        RecordError: there is a file at ``path``, or none can be written.
        WorkerError: as :func:`replay` raises it, and nothing is generated where another worker is
            down or serves something else. A reply to generation that cannot be used is kept
            beside ``path``, and the error names the file.
    """
    asked = [[int(token) for token in prompt] for prompt in prompts]
    names = _names(asked, groups, samples)
    settings = _settings(sampling or {}, max_new_tokens)
    check_replays(replays)
    if step is not None and step < 0:
        raise LayerBisectError(f"step is {step}; give how many updates came before, 0 or more")
    target = new_file(path)
    info = worker.info()
    for number, prompt in enumerate(asked):
        info.check_tokens(f"prompt {number}", prompt)
    watch = WeightWatch(ask_digests=digests)
    watch.look(worker, "before A")
    watch.look_around(worker, info.model, workers, router, "before A")
    sent = [prompt for prompt in asked for _ in range(samples)]
    try:
        answers = worker.generate(sent, settings)
    except ReplyError as error:
        kept = _keep_reply(target, error.reply)
        raise WorkerError(f"{error}; the reply is kept in {kept}") from error
    scoring = Scoring(
        definition=definition_of(settings, original_logprobs),
        engine=info.engine,
        worker=worker.url,
        weight_version=watch.version,
        digest=watch.digests.get(worker.url),
        cache="warm",
        batches=(tuple(name for name, _ in names),),
        settings={**info.settings, "finish": _counts(one.finish for one in answers)},
    )
    record = ScoreRecord(
        RecordInfo(
            model=info.model,
            model_revision=info.revision,
            tokenizer_revision=info.revision,
            step=step,
            sampling=settings,
            columns={"A": scoring},
        ),
        [
            Call.of(
                name,
                prompt,
                one.tokens,
                {"A": one.scores},
                group=group,
                cached={"A": one.cached},
            )
            for (name, group), prompt, one in zip(names, sent, answers, strict=True)
        ],
    )
    record.save(target)
    try:
        for one in answers:
            watch.told(worker, one.versions, "in A")
        watch.look(worker, "after A")
    except WorkerError as error:
        raise WorkerError(f"{error}; {target} keeps A") from error
    return replay(
        record,
        worker,
        target,
        replays=replays,
        workers=workers,
        router=router,
        digests=digests,
        progress=progress,
    )


def definition_of(sampling: Mapping[str, Any], original_logprobs: bool = False) -> Definition:
    """Say which distribution SGLang's scores of generated tokens are of.

    Its penalties, biases and grammars change the logits before any score is taken; then it divides
    by the temperature; its filters (top-p, top-k, min-p) choose the token and leave the score
    alone. Greedy generation scores raw logits.
    """
    changed = any(sampling.get(key) for key in _CHANGES) or _differs(sampling, _NEUTRAL)
    filtered = _differs(sampling, _NO_FILTER)
    temperature = sampling.get("temperature", 1)
    if changed:
        # with filters, or before the temperature, it is nobody's distribution
        return "unknown" if filtered or original_logprobs and temperature != 1 else "behavior"
    return "raw" if temperature in (0, 1) or original_logprobs else "temperature"


def _differs(sampling: Mapping[str, Any], neutral: Mapping[str, Any]) -> bool:
    return any(sampling.get(key, value) != value for key, value in neutral.items())


def _settings(sampling: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    taken = sorted(_TAKEN.keys() & sampling.keys())
    if taken:
        raise LayerBisectError(
            f"sampling has {taken[0]} {sampling[taken[0]]!r}; give it as {_TAKEN[taken[0]]}"
        )
    if max_new_tokens < 1:
        raise LayerBisectError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    for key, value in sampling.items():
        # JSON has no such numbers
        if isinstance(value, float) and not math.isfinite(value):
            raise LayerBisectError(f"sampling has {key} {value}; give a finite number")
    return {**RAW, **sampling, "max_new_tokens": max_new_tokens}


def _names(
    prompts: Sequence[Sequence[int]], groups: Sequence[str] | None, samples: int
) -> list[tuple[str, str]]:
    """Name the calls, sample after sample of each prompt, with the group of each."""
    if not prompts or samples < 1:
        raise LayerBisectError(
            f"{len(prompts)} prompts and {samples} samples of each are none; give 1 or more"
        )
    empty = [number for number, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise LayerBisectError(f"prompt {empty[0]} has no token; give token IDs")
    if groups is None:
        groups = [f"prompt-{number}" for number in range(len(prompts))]
    if len(groups) != len(prompts) or len(set(groups)) < len(groups):
        raise LayerBisectError(
            f"there are {len(set(groups))} different group names for {len(prompts)} prompts; "
            "give each prompt one of its own"
        )
    return [(f"{group}.sample-{n}", group) for group in groups for n in range(samples)]


def new_file(path: str | os.PathLike[str]) -> Path:
    """Find out before anything is scored whether it can be kept; raises RecordError."""
    target = Path(path)
    if target.exists():
        raise RecordError(
            f"{target} exists, and what was scored before is never overwritten; name another file"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(exist_ok=False)
        target.unlink()
    except OSError as error:
        raise RecordError(f"cannot write {target}: {error.strerror}; name another file") from error
    return target


def _keep_reply(target: Path, reply: str) -> Path:
    for number in count():
        suffix = f"-{number}" if number else ""
        kept = target.with_name(f"{target.name}.refused{suffix}.json")
        try:
            with kept.open("x", encoding="utf-8") as file:
                file.write(reply)
            return kept
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def _counts(values: Iterable[str]) -> str:
    return ", ".join(f"{value} {number}" for value, number in sorted(Counter(values).items()))
