"""Make captures for tests: from a real model in many layouts, by hand, and by changing others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerbisect.captures.capture import capture
from layerbisect.captures.format import CaptureInfo, How, SequenceInfo, TensorHeader
from layerbisect.captures.points import parse
from layerbisect.captures.replay_decode import decode_like_rollout
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture
from layerbisect.captures.writer import CaptureWriter, Scores
from layerbisect.faults import plant
from layerbisect.loading import load_model

INFO = CaptureInfo(
    engine="test",
    engine_version="1",
    label="rollout",
    device="cpu",
    dtype="float32",
    num_layers=1,
    moe_layers=(),
    points=("layers.0.input",),
)

Fault = tuple[str, int | None]
Change = Callable[[str, NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True)
class Line:
    """One row of a capture written by hand."""

    sequence: str
    position: int
    token: int
    value: float = 0.0


def write_lines(
    directory: Path,
    passes: Sequence[Sequence[Line]],
    *,
    label: str = "rollout",
    salts: Mapping[str, str] | None = None,
    scored: bool = True,
    cached: Sequence[Line] = (),
) -> Capture:
    """Write a capture of one point with one channel, and open it.

    A row's log-prob is minus its value; position 0 has none. Of ``cached`` lines the tokens are
    known though no row was computed.
    """
    writer = CaptureWriter(directory, replace(INFO, label=label))
    for lines in passes:
        names = list(dict.fromkeys(line.sequence for line in (*lines, *cached)))
        rows = _rows(lines, names)
        later = [line for line in lines if line.position > 0]
        values = np.array([-line.value for line in later])
        writer.write_pass(
            "prefill",
            [SequenceInfo(name, (salts or {}).get(name, "")) for name in names],
            rows,
            {"layers.0.input": torch.tensor([[line.value] for line in lines])},
            {"layers.0.input": TensorHeader(("row", "hidden"))},
            context=_rows(cached, names),
            scores=Scores(_rows(later, names), values) if scored and later else None,
        )
    writer.finish()
    return Capture.open(directory)


def _rows(lines: Sequence[Line], names: Sequence[str]) -> Rows:
    return Rows.of(
        [names.index(line.sequence) for line in lines],
        [line.position for line in lines],
        [line.token for line in lines],
    )


def rewrite(
    source: Path,
    target: Path,
    *,
    label: str | None = None,
    points: Callable[[str], bool] = lambda name: True,
    rows: NDArray[np.bool_] | None = None,
    change: Change = lambda name, values: values,
    logprobs: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = lambda values: values,
    info: Mapping[str, Any] | None = None,
    tokens: Callable[[NDArray[np.int64]], NDArray[np.int64]] = lambda tokens: tokens,
    context: bool = False,
    unfed: bool = False,
    how: Callable[[str], How] = lambda name: "observed",
) -> Path:
    """Copy a capture as one pass, with some of its points or rows, and values changed.

    ``change`` gets each point's name and values; ``logprobs`` the log-probs, or is None for none;
    ``how`` says of a point how it was seen.
    With ``context`` the tokens of rows that are left out stay known, as those of a cached prefix;
    with ``unfed`` they keep their log-probs, as a generation's last token does.
    """
    old = Capture.open(source)
    index = np.flatnonzero(np.ones(len(old.rows), bool) if rows is None else rows)
    kept = [n for n in old.points if points(n) and old.has(n).any()]
    wanted = tuple(n for n in old.info.points if points(n))
    fresh = {"label": label or old.label, "points": wanted} | dict(info or {})
    writer = CaptureWriter(target, replace(old.info, **fresh))
    dtype = getattr(torch, old.info.dtype)
    tensors = {}
    for name in kept:
        values = torch.from_numpy(change(name, old.read(name, index).copy()).copy())
        tensors[name] = values if name.endswith("expert_ids") else values.to(dtype)
    scores = None
    if logprobs is not None:
        table = old.scores.rows
        held = set(zip(old.rows.sequence[index], old.rows.position[index], strict=True))
        inside = np.array(
            [unfed or p in held for p in zip(table.sequence, table.position, strict=True)]
        )
        scored = table.take(inside)
        scores = Scores(_with(scored, tokens), logprobs(old.scores.logprob[inside].copy()))
    writer.write_pass(
        "forward",
        old.sequences,
        _with(old.rows.take(index), tokens),
        tensors,
        {name: TensorHeader(parse(name).dims, how=how(name)) for name in kept},
        scores=scores,
        context=old.rows if context else None,
    )
    writer.finish()
    return target


def _with(rows: Rows, tokens: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Rows:
    return Rows.of(rows.sequence, rows.position, tokens(rows.token.copy()))


@dataclass
class Engine:
    """A transformers model that plays an engine, and captures itself in a layout."""

    model: Any
    label: str
    faults: tuple[Fault, ...] = field(default=())

    @classmethod
    def load(
        cls,
        directory: Path,
        label: str,
        *,
        dtype: str = "bfloat16",
        attention: str = "eager",
        experts: str = "eager",
    ) -> Engine:
        """Load a checkpoint as one of two engines that round differently."""
        model: Any = load_model(directory, dtype=dtype, attention=attention)
        if hasattr(model.config, "num_experts"):
            model.set_experts_implementation(experts)
        return cls(model, label)

    def capture(
        self,
        directory: Path,
        tokens: Sequence[Sequence[int]],
        *,
        layout: str = "single",
        points: str | Sequence[str] = "all",
        faults: Sequence[Fault] = (),
        names: Sequence[str] | None = None,
    ) -> Path:
        """Run all sequences in a layout while faults are planted, and capture the run."""
        with ExitStack() as stack:
            for name, layer in faults:
                stack.enter_context(plant(self.model, name, layer))
            names = names or [f"s{i}" for i in range(len(tokens))]
            stack.enter_context(
                capture(self.model, directory, points=points, label=self.label, names=names)
            )
            stack.enter_context(torch.no_grad())
            for arguments in _calls(self.model, tokens, layout):
                self.model(**arguments)
        return directory


PROMPT = 8


def _calls(model: Any, tokens: Sequence[Sequence[int]], layout: str) -> Iterator[dict[str, Any]]:
    if layout == "single":
        for ids in tokens:
            yield {"input_ids": torch.tensor([ids]), "use_cache": False}
    elif layout == "padded":
        width = max(map(len, tokens)) + 5
        ids, mask = torch.zeros(2, len(tokens), width, dtype=torch.long)
        for row, one in enumerate(tokens):
            # on either side
            at = slice(0, len(one)) if row % 2 else slice(width - len(one), width)
            ids[row, at], mask[row, at] = torch.tensor(one), 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        yield {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": False,
        }
    elif layout == "packed":
        flat = [token for one in tokens for token in one]
        places = [place for one in tokens for place in range(len(one))]
        yield {
            "input_ids": torch.tensor([flat]),
            "position_ids": torch.tensor([places]),
            "use_cache": False,
        }
    elif layout == "decode":
        decode_like_rollout(model, tokens, [PROMPT] * len(tokens))
    elif layout == "batched decode":
        decode_like_rollout(model, tokens, [PROMPT] * len(tokens), batch_size=len(tokens))
    elif layout == "chunked prefill":
        decode_like_rollout(model, tokens, [len(one) - 1 for one in tokens], 7)
    else:
        raise ValueError(layout)


def random_tokens(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Draw sequences of tokens."""
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, vocab, (length,), generator=draw) for length in lengths]
    found: list[list[int]] = [one.tolist() for one in drawn]
    return found
