"""Take C from a capture of the trainer: each response token's log-prob, found by what it has seen.

A capture holds the log-probs of whatever the job's ranks scored, in the order in which they did. A
token is looked up by the key of its prefix, so the order of samples over data-parallel ranks,
packing and padding need no account.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.errors import RecordError, TrainerError
from layerbisect.captures.format import CaptureInfo
from layerbisect.captures.record.alignment import aligned_scores
from layerbisect.captures.record.call import Call, Scoring, is_score
from layerbisect.captures.record.file import ScoreRecord
from layerbisect.captures.record.trainer import afresh
from layerbisect.captures.rows import PrefixKeys, Rows, prefix_keys
from layerbisect.captures.store import Capture
from layerbisect.captures.telling import CaptureWarning


def score_from_capture(
    record: ScoreRecord,
    capture: Capture | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    weight_version: str | None = None,
) -> ScoreRecord:
    """Add ``C0``, ``C1``, ... to a record, from the log-probs in a capture of the trainer.

    There are as many columns as the capture has scores of the response token that it has fewest of:
    two where the job scored the batch twice, or gave it to two replicas. They come in the order in
    which sequences begin, replica after replica, those that hold the whole call before those that
    share its beginning alone. Columns that the record has already are kept.

    A call's ``context`` must be the capture's salt: one with ``{"adapter": "sql"}`` is looked for
    among the sequences that were captured with the salt ``adapter:sql``.

    Args:
        record: what was scored.
        capture: the trainer's capture, or its directory.
        path: file that the record is saved to; None to save nothing.
        weight_version: the state of the weights, by the trainer's own count; what the capture says
            where not given.

    Returns:
        The record with its new columns. Their ``digest`` stands for a sample of all weights, and is
        left out under tensor parallelism, where no rank holds a matrix whole.

    Raises:
        TrainerError: response tokens without a score; scores of more than one state of the weights;
            a capture of the rollout engine, or with another's routes.
        RecordError: all columns are there already, or another engine or other weights scored them.
        CaptureError: no capture is there.

    Warns:
        CaptureWarning: the capture is not whole, though it has all scores that are needed.
    """
    opened = capture if isinstance(capture, Capture) else Capture.open(capture)
    _check_source(opened)
    calls, table = list(record), _Table.of(opened)
    found = [table.find(call) for call in calls]
    repeats = _fewest(opened, calls, found)
    scoring = _scoring(opened, weight_version)
    wanted = [f"C{number}" for number in range(repeats)]
    _check_columns(record, wanted, scoring)
    for number, column in enumerate(wanted):
        if column not in record.columns:
            scores = aligned_scores(calls, [one.take(number) for one in found])
            record = record.with_column(column, scores, scoring)
    if opened.problems:
        others = f" (and {len(opened.problems) - 1} more)" if opened.problems[1:] else ""
        warnings.warn(
            f"the capture {opened.directory} has all scores, but is not whole: "
            f"{opened.problems[0]}{others}",
            CaptureWarning,
            stacklevel=2,
        )
    if path is not None:
        record.save(path)
    return record


def captured_scores(record: Sequence[Call], capture: Capture) -> dict[str, NDArray[np.float64]]:
    """Look each response token's log-prob up in a capture of either engine, by what it has seen.

    Returns for each call its first captured scores, float64 [response], nat; nan for a token that
    the capture has none of. Raises TrainerError for positions that do not count tokens one by one.
    """
    table = _Table.of(capture)
    return {call.name: table.find(call).take(0) for call in record}


@dataclass(frozen=True, slots=True)
class _Found:
    """The scores of one call's response tokens.

    ``count`` int64 [response] says how many each token has; ``logprob`` float64 [sum of count]
    holds them, token by token.
    """

    count: NDArray[np.int64]
    logprob: NDArray[np.float64]

    def take(self, number: int) -> NDArray[np.float64]:
        """Each token's score of that number, float64 [response]; nan where it has fewer."""
        taken = np.full(len(self.count), np.nan)
        has = self.count > number
        taken[has] = self.logprob[(np.cumsum(self.count) - self.count)[has] + number]
        return taken


@dataclass(frozen=True, slots=True)
class _Table:
    """A capture's scores, sorted by one half of their keys and then in the order of the passes."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    sequence: NDArray[np.int32]
    logprob: NDArray[np.float64]

    @classmethod
    def of(cls, capture: Capture) -> _Table:
        scores = capture.scores
        known = np.flatnonzero(scores.keys.known)
        order = known[np.argsort(scores.keys.key["high"][known], kind="stable")]
        key = scores.keys.key[order]
        return cls(key["high"], key["low"], scores.rows.sequence[order], scores.logprob[order])

    def find(self, call: Call) -> _Found:
        key = _keys(call).key
        start = np.searchsorted(self.high, key["high"], "left")
        stop = np.searchsorted(self.high, key["high"], "right")
        token = np.repeat(np.arange(len(key)), stop - start)
        # the places from start to stop of each token, end to end
        before = np.cumsum(stop - start) - (stop - start)
        at = np.arange(len(token)) + (start - before)[token]
        same = self.low[at] == key["low"][token]
        token, at = token[same], at[same]
        # who has seen the last token has seen the whole call: one forward makes one column
        sequence = self.sequence[at]
        whole = np.isin(sequence, sequence[token == len(key) - 1])
        order = np.lexsort((at, sequence, ~whole, token))
        return _Found(np.bincount(token, minlength=len(key)), self.logprob[at[order]])


def _keys(call: Call) -> PrefixKeys:
    """Key of each response token's prefix, with itself; documents see nothing of each other."""
    total = len(call.tokens)
    document = np.zeros(total, np.int64)
    document[call.starts[1:]] = 1
    document = np.cumsum(document)
    position = np.arange(total) - call.starts[document]
    steps = np.diff(call.positions)
    if (steps[document[1:] == document[:-1]] != 1).any():
        raise TrainerError(
            f"call {call.name!r} has positions that do not count its tokens one by one, and a "
            "capture does; score it with a function of your own by "
            "layerbisect.captures.record.trainer.score"
        )
    rows = Rows.of(document, position, call.tokens)
    salts = [_salt(call)] * len(call.starts)
    whole = prefix_keys(rows, Rows.empty(), salts, [call.name] * len(salts))
    response = slice(len(call.prompt), None)
    return PrefixKeys(whole.key[response], whole.known[response])


def _salt(call: Call) -> str:
    return " ".join(f"{what}:{value}" for what, value in sorted(call.context.items()))


def _check_source(capture: Capture) -> None:
    info, here = capture.info, capture.directory
    if info.engine == "sglang":
        raise TrainerError(
            f"{here} is a capture of sglang, the rollout engine, whose scores are A or B; give the "
            "trainer's"
        )
    if info.routes != "own":
        raise TrainerError(
            f"{here} was captured with routes that were {info.routes}; give a capture in which the "
            "trainer's own router chose"
        )
    if capture.weights_moved is not None:
        raise TrainerError(
            f"{here} has scores of more than one state of the weights ({capture.weights_moved}); "
            "hold every update back until the capture has ended, and capture again"
        )


def _fewest(capture: Capture, calls: Sequence[Call], found: Sequence[_Found]) -> int:
    """How many scores each token that takes part has at least; raises TrainerError for none."""
    lacking = [(one.count == 0) & call.mask for call, one in zip(calls, found, strict=True)]
    calls_lacking = [n for n, tokens in enumerate(lacking) if tokens.any()]
    if not calls_lacking:
        counts = [one.count[call.mask] for call, one in zip(calls, found, strict=True)]
        if not any(map(len, counts)):
            raise TrainerError("the masks leave all response tokens out, and none has to be scored")
        return int(np.concatenate(counts).min())
    first = calls[calls_lacking[0]]
    salt = f" (captured with the salt {_salt(first)!r})" if first.context else ""
    problems = f"; the capture says: {'; '.join(capture.problems[:3])}" if capture.problems else ""
    raise TrainerError(
        f"{capture.directory} has no score of {sum(int(t.sum()) for t in lacking)} of "
        f"{sum(len(t) for t in lacking)} response tokens, in {len(calls_lacking)} of {len(calls)} "
        f"calls, the first in {first.name!r}{salt} at response position "
        f"{int(lacking[calls_lacking[0]].argmax())}; capture a forward over all of the record's "
        f"calls, each whole and with the record's token IDs, with the point logprob{problems}"
    )


def _check_columns(record: ScoreRecord, wanted: Sequence[str], scoring: Scoring) -> None:
    there = [c for c in record.columns if c[0] == "C" and is_score(c)]
    for column in there:
        known = record.info.columns[column]
        other = known.digest and scoring.digest and known.digest != scoring.digest
        if known.engine != scoring.engine or other:
            what = "other weights" if known.engine == scoring.engine else known.engine or "another"
            raise RecordError(
                f"{column} was scored by {what}, and the capture is of {scoring.engine}: columns "
                f"of C are repeats of each other; {afresh(record)}"
            )
    if all(column in there for column in wanted):
        raise RecordError(
            f"the record has {', '.join(wanted)} already, and the capture has no further scores of "
            f"all response tokens; scores are never overwritten: {afresh(record)}"
        )


def _scoring(capture: Capture, weight_version: str | None) -> Scoring:
    info = capture.info
    layout = {name: str(size) for name, size in info.parallel.items()}
    return Scoring(
        engine=f"{info.engine} {info.engine_version}",
        weight_version=info.weight_version if weight_version is None else weight_version,
        digest=_digest(info),
        settings={"dtype": info.dtype, "device": info.device, **layout},
    )


def _digest(info: CaptureInfo) -> str | None:
    cut = any(info.parallel.get(name, 1) > 1 for name in ("tp", "etp"))
    if cut or not info.fingerprints:
        # norms and routers alone may stand still while all else is updated
        return None
    text = json.dumps(dict(sorted(info.fingerprints.items())))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
