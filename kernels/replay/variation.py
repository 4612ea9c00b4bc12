"""How an implementation's output changes with what should not matter: repeats, batch, chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from layerbisect.kernels.replay.bench import Bench, OwnCall, running
from layerbisect.kernels.replay.bits import changed_rows
from layerbisect.kernels.replay.bundle import Bundle
from layerbisect.kernels.replay.judge import Results
from layerbisect.kernels.replay.report import Variation
from layerbisect.kernels.replay.variants import GarbageError, Variant

CPU_ROWS = 64
"""On a CPU, where kernels are interpreted, no more rows than these are run again and again."""
ALONE = 8
"""Rows or sequences that are run alone."""
CHUNKED = 4
"""Sequences that are run in chunks and decoded, cut after so many rows on each device."""
CPU_CHUNKED, GPU_CHUNKED = 256, 4096
CHUNKS = 3
DECODED = 8
"""Positions of each of them that are decoded one by one."""


class _Changes:
    """Rows of an output that changed in some bit, over several comparisons."""

    def __init__(self, base: Results, dtype: torch.dtype) -> None:
        self._base, self._dtype, self._most = base, dtype, 0.0
        count = len(next(iter(base.values())))
        self._seen = torch.zeros(count, dtype=torch.bool)
        self._changed = torch.zeros(count, dtype=torch.bool)

    def compare(self, rows: torch.Tensor, made: Results) -> None:
        """Compare what was made of these rows (int64 [n]) of the base."""
        base = {n: t[rows] for n, t in self._base.items()}
        for name, values in base.items():
            if made[name].shape != values.shape or made[name].dtype != values.dtype:
                raise GarbageError(
                    f"{name} of {len(rows)} rows has the shape {list(made[name].shape)} and "
                    f"{made[name].dtype}, not {list(values.shape)} and {values.dtype}"
                )
        changed, most = changed_rows(made, base, self._dtype)
        self._seen[rows] = True
        self._changed[rows] |= changed
        self._most = max(self._most, most)

    def told(self, how: str) -> Variation:
        return Variation(int(self._changed.sum()), int(self._seen.sum()), self._most, how)


def bounded(bench: Bench) -> Bundle:
    """Take the first rows or sequences of a bundle, few enough to be run many times."""
    bundle = bench.bundle
    if bench.device != "cpu" or bundle.rows <= CPU_ROWS:
        return bundle
    ends = torch.tensor(bundle.lengths).cumsum(0)
    return bundle.only(range(max(min(2, len(ends)), int((ends <= CPU_ROWS).sum()))))


def repeats(bench: Bench, variant: Variant, part: Bundle, base: Results, times: int) -> Variation:
    """Run the same again, until it was run so many ``times``; ``base`` is what came first."""
    changes, rows = _Changes(base, part.storage), torch.arange(part.rows)
    for _ in range(times - 1):
        changes.compare(rows, bench.run(variant, part))
    return changes.told(f"{times} runs of the same {part.rows} rows")


def batches(bench: Bench, variant: Variant, part: Bundle, whole: Results) -> Variation | None:
    """Run rows, or sequences where rows attend, beside others than in the whole batch.

    ``part`` are the first ones, ``whole`` is what all of them together came to. None where there is
    only one, which has no others beside it.
    """
    units, every = len(part.lengths), len(bench.bundle.lengths)
    if every < 2:
        return None
    changes = _Changes({n: t[: part.rows] for n, t in whole.items()}, part.storage)
    alone, half = _spread(units, ALONE), units // 2
    shuffled = torch.randperm(units, generator=torch.Generator().manual_seed(0)).tolist()
    for some in (*([unit] for unit in alone), range(half), range(half, units), shuffled):
        if len(some):
            changes.compare(_rows_of(part, some), bench.run(variant, part.only(some)))
    kind = "sequences" if part.attends else "rows"
    return changes.told(
        f"{len(alone)} {kind} alone, {units} in two halves and shuffled, against all {every} in "
        "one batch"
    )


def chunks(bench: Bench, variant: Variant, calls: Sequence[OwnCall]) -> Variation | None:
    """Run a stretch's attention in chunks of the prefill and in decode steps.

    On the queries, keys and values that the variant itself came to in its own ``calls``. None where
    rows do not attend, or attention is not the variant's own.
    """
    found = next((pair for pair in calls if pair[0].operator == "attention"), None)
    if found is None or found[1].get("queries") is not None:
        return None
    call, given = found
    run, lengths = variant.runs["attention"], tuple(given["lengths"])
    most = CPU_CHUNKED if bench.device == "cpu" else GPU_CHUNKED
    prompts = _Prompts(given, _spread(len(lengths), CHUNKED), most)
    with running(bench.device):
        whole = prompts.attend(run, [(0, end) for end in prompts.ends])
        changes = _Changes({"context": whole[1].cpu()}, bench.bundle.storage)
        for spans in (*_in_chunks(prompts.ends), *_decoded(prompts.ends)):
            rows, context = prompts.attend(run, spans)
            changes.compare(rows, {"context": context.cpu()})
    return changes.told(
        f"{len(prompts.ends)} sequences of up to {max(prompts.ends)} in {CHUNKS} chunks, and "
        f"{DECODED} positions of each decoded one by one, against their whole prefill"
    )


Span = tuple[int, int]


class _Prompts:
    """Some sequences' queries, keys and values, to attend a part of the queries at a time."""

    def __init__(self, given: dict[str, Any], units: Sequence[int], most: int) -> None:
        lengths = tuple(given["lengths"])
        starts = torch.tensor((0, *lengths)).cumsum(0).tolist()
        self.ends = [min(lengths[unit], most) for unit in units]
        self._own = [
            {n: given[n][starts[u] : starts[u] + end] for n in ("q", "k", "v")}
            for u, end in zip(units, self.ends, strict=True)
        ]
        self._rest = {
            n: v for n, v in given.items() if n not in ("q", "k", "v", "lengths", "queries")
        }

    def attend(
        self, run: Callable[..., Any], spans: Sequence[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend queries [start, end) of each sequence, to the keys before ``end``, in one call.

        Sequences with no query are left out. Returns the rows of the queries among all, and their
        context.
        """
        taken, rows, first = [], [], 0
        for own, (start, end), length in zip(self._own, spans, self.ends, strict=True):
            if end > start:
                taken.append((own["q"][start:end], own["k"][:end], own["v"][:end]))
                rows.append(torch.arange(first + start, first + end))
            first += length
        q, k, v = (torch.cat(parts) for parts in zip(*taken, strict=True))
        counts, lengths = (tuple(len(part[at]) for part in taken) for at in (0, 1))
        queries = None if counts == lengths else counts
        context = run(q=q, k=k, v=v, lengths=lengths, queries=queries, **self._rest)
        found = context[0] if isinstance(context, tuple) else context
        return torch.cat(rows), found


def _in_chunks(ends: Sequence[int]) -> Iterator[list[Span]]:
    """Cut every sequence into chunks, not at round places; an engine runs them side by side."""
    for part in range(CHUNKS):
        spans = []
        for end in ends:
            cuts = [min(end, end * at // CHUNKS + 1) if at else 0 for at in range(CHUNKS)]
            spans.append((cuts[part], [*cuts[1:], end][part]))
        if any(stop > start for start, stop in spans):
            yield spans


def _decoded(ends: Sequence[int]) -> Iterator[list[Span]]:
    """Take one position of every sequence at a time."""
    positions = [_spread(end, DECODED) for end in ends]
    for step in range(max(map(len, positions))):
        yield [(at[step], at[step] + 1) if step < len(at) else (0, 0) for at in positions]


def _spread(count: int, most: int) -> list[int]:
    """Take up to so many numbers below ``count``, evenly spread, the first and the last too."""
    found: list[int] = torch.linspace(0, count - 1, min(count, most)).round().long().tolist()
    return found


def _rows_of(bundle: Bundle, units: Sequence[int]) -> torch.Tensor:
    starts = torch.tensor((0, *bundle.lengths)).cumsum(0).tolist()
    return torch.cat([torch.arange(starts[u], starts[u + 1]) for u in units])
