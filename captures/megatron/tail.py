"""The live trainer as the tail of the carried gap: its own layers run on a rollout's states.

At boundary i the trainer's layers from i on run once on the states that the rollout captured there,
and the log-probs that they end with are compared with the trainer's own: the disagreement that the
rollout's state at i carries, in nats. The trainer's own state needs no run but the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layerbisect.captures.boundary_search import Mode, probe_boundaries
from layerbisect.captures.carried import (
    BoundaryGap,
    CarriedFile,
    in_key_order,
    rows_digest,
    states_digest,
    weights_digest,
)
from layerbisect.captures.chains import first_of_each, lay_out
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.megatron.agreeing import gathered_fingerprints, reduced
from layerbisect.captures.megatron.inject import Injection, States, injected
from layerbisect.captures.megatron.job_scores import JobScores
from layerbisect.captures.megatron.model import Chunk, beyond_vocabulary, check_vocab, unwrap
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.megatron.problems import Problems
from layerbisect.captures.megatron.weights import fingerprints
from layerbisect.captures.points import boundary
from layerbisect.captures.rows import Rows
from layerbisect.captures.store import Capture

if TYPE_CHECKING:
    from layerbisect.captures.megatron.model import Model

Forward = Callable[[Sequence[Sequence[int]]], None]
"""Runs these token sequences forward through the job's own pipeline, in their order, each once."""

_NONE = States(Rows.empty(), np.empty((0, 0)))


class LiveTail:
    """Carries a rollout's states through a job's model; every rank of the job has one.

    Args:
        model: the job's GPTModel, wrapped or not, or its list of virtual pipeline chunks.
        rollout: a capture with the residual stream at layer boundaries (``points="coarse"``), of
            which this rank reads what the layers that it holds are given.
        forward: runs token sequences through the job's pipeline; every replica of the model is
            given them all, as replicas may share experts.
        label: the trainer's label, that of its capture.
        vocab: tokens in the vocabulary, where the logits have padding rows after them.

    Raises:
        LayerBisectError: a capture of another model, without whole sequences or boundaries.
    """

    def __init__(
        self,
        model: Model,
        rollout: Capture,
        forward: Forward,
        *,
        label: str = "trainer",
        vocab: int | None = None,
    ) -> None:
        self._model, self._rollout, self._forward = model, rollout, forward
        self._label, self._vocab = label, vocab
        self._chunks = unwrap(model)
        check_vocab(self._chunks, vocab)
        self._place = Place.here(self._chunks[0].config)
        self._layers = int(self._chunks[0].config.num_layers)
        if rollout.info.num_layers != self._layers:
            raise LayerBisectError(
                f"{rollout.directory} is of a model of {rollout.info.num_layers} layers, and the "
                f"job's has {self._layers}; give a capture of this model"
            )
        unique = first_of_each(rollout.keys)
        keys = rollout.keys.key[unique]
        chains = lay_out(rollout.rows.take(unique), keys) if len(unique) else None
        if chains is None or not chains.scored.any():
            raise LayerBisectError(
                f"{rollout.directory} holds no sequence of two tokens or more from its start on; "
                "capture requests with an empty cache"
            )
        self._digest, self._scored, self._chains = rows_digest(keys), chains.scored, chains
        self._states_digest = states_digest(rollout)
        self._weights = fingerprints(model, vocab=vocab)
        self._index: NDArray[np.intp] = unique[chains.row]
        if beyond := beyond_vocabulary(rollout.rows, vocab):
            raise LayerBisectError(f"{beyond}, in {rollout.directory}; give the model's own")
        sequence = np.repeat(np.arange(len(chains.lengths)), chains.lengths)
        self._rows = Rows.of(sequence, chains.position, chains.token)
        ends = np.cumsum(chains.lengths)[:-1]
        self.sequences: list[list[int]] = [part.tolist() for part in np.split(chains.token, ends)]
        self.visible = [n for n in range(self._layers + 1) if self._shows(n)]
        if not self.visible:
            raise LayerBisectError(
                f"{rollout.directory} shows no layer boundary in all its rows; capture it with "
                "points='coarse'"
            )
        self.forwards = 0

    def _shows(self, layer: int) -> bool:
        point = boundary(layer, self._layers)
        return point in self._rollout.points and bool(self._rollout.has(point)[self._index].all())

    @property
    def fingerprint(self) -> int:
        """What all ranks must have in common (48 bits): the rows and the boundaries."""
        text = f"{self._digest} {self.visible} {self._layers}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())

    def carried_gap(self, mode: Mode = "search") -> CarriedFile:
        """Probe the boundaries; all ranks call this together, and all get the same.

        One forward gives the trainer's own log-probs, and each boundary costs one more. The model
        is left as it was: nothing is kept for a backward, no random number is drawn.

        Raises:
            LayerBisectError: on all ranks, where states were not injected or tokens not scored.
        """
        with _undisturbed(self._chunks):
            own, done = self._run(None)
            self._agreed(None, np.abs(own)[self._scored], done)
            scores = self._told(in_key_order(self._chains, own))

            def probe(layer: int) -> float:
                scores, injection = self._run(layer)
                size = np.abs(scores - own)[self._scored]
                return self._agreed(layer, size, injection)

            at = probe_boundaries(self.visible, mode, probe)
        return CarriedFile(
            rollout=self._rollout.info.label,
            trainer=self._label,
            num_layers=self._layers,
            rows=self._digest,
            states=self._states_digest,
            weights=weights_digest(gathered_fingerprints(self._weights)),
            tokens=int(self._scored.sum()),
            mode=mode,
            forwards=self.forwards,
            gaps=tuple(BoundaryGap(layer, at[layer]) for layer in sorted(at)),
            scores=tuple(score if np.isfinite(score) else None for score in scores),
        )

    @property
    def _speaks(self) -> bool:
        """Whether this rank is the one that has all log-probs and tells them to the others."""
        place, scorer = self._place, any(chunk.model.post_process for chunk in self._chunks)
        return scorer and place.tensor[0] == place.context[0] == place.data[0] == 0

    def _told(self, scores: NDArray[np.float64]) -> list[float]:
        """Tell the last stage's log-probs (nat) to all ranks."""
        mine = scores if self._speaks else np.zeros_like(scores)
        return reduced(mine.tolist(), "SUM", self._chunks)

    def _run(self, layer: int | None) -> tuple[NDArray[np.float64], Injection]:
        """Run all sequences, from ``layer`` on with the rollout's states.

        Returns log-probs (float64 [flat], nat) of each place's next token: nan where there is none,
        and on all ranks but those of the last stage.
        """
        problems = Problems()
        scores = JobScores(self._chunks, self._place, self._vocab, problems)
        injection = Injection()
        states = _NONE
        if layer is not None:
            with problems.noted():
                states = self._states(layer)
        with ExitStack() as stack:
            if layer is not None:
                injection = stack.enter_context(injected(self._model, layer, states))
            stack.enter_context(scores.hooked())
            self._forward(self.sequences)
        self.forwards += 1
        found = scores.of(self._rows)
        injection.problems.extend(problems)
        return found, injection

    def _states(self, layer: int) -> States:
        held = any(min(layer, self._layers - 1) in chunk.layers for chunk in self._chunks)
        if not held:
            return _NONE
        return States(self._rows, self._rollout.read(boundary(layer, self._layers), self._index))

    def _agreed(self, layer: int | None, size: NDArray[np.float64], injection: Injection) -> float:
        """The mean of the last stage's ``size``, on all ranks; checks what all of them did."""
        place = self._place
        known = size[np.isfinite(size)] if self._speaks else size[:0]
        # under sequence parallelism each rank has rows of its own, else all have the same
        counts = place.data[0] == 0 and (place.sequence_parallel or place.tensor[0] == 0)
        total, tokens, replaced, problems = reduced(
            [
                float(known.sum()),
                float(len(known)),
                float(injection.replaced if counts else 0),
                float(len(injection.problems)),
            ],
            "SUM",
            self._chunks,
        )
        where = "the trainer's own forward" if layer is None else f"boundary {layer}"
        if problems:
            told = injection.problems[0] if injection.problems else "see the log of other ranks"
            raise LayerBisectError(f"{where} was not read out: {told}")
        if layer is not None and replaced != len(self._rows):
            raise LayerBisectError(
                f"{where} was not read out: {replaced:.0f} of {len(self._rows)} rows got the "
                "rollout's states; run without CUDA graphs, and each sequence once, in order"
            )
        if not tokens:
            raise LayerBisectError(f"{where} was not read out: no token has a finite log-prob")
        return total / tokens


def live_carried_gap(
    model: Model,
    rollout: str | PathLike[str],
    forward: Forward,
    *,
    label: str = "trainer",
    vocab: int | None = None,
    mode: Mode = "search",
    check: Callable[[], None] | None = None,
) -> CarriedFile:
    """Open a rollout's capture and carry its states; every rank of the job calls this together.

    Arguments are as :class:`LiveTail` has them; ``check`` raises where a rank must not begin.

    Raises:
        Exception: on all ranks, before any forward, where one of them cannot begin.
    """
    failed: Exception | None = None
    tail: LiveTail | None = None
    try:
        if check is not None:
            check()
        tail = LiveTail(model, Capture.open(rollout), forward, label=label, vocab=vocab)
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
        failed = error
    mine = float(tail.fingerprint if tail else 0)
    ready, least, most = reduced([float(tail is not None), mine, -mine], "MIN", unwrap(model))
    if failed is not None:
        raise failed
    assert tail is not None
    if not ready or least != -most:
        raise LayerBisectError(
            f"the ranks do not all read the same capture {rollout}, or not all may begin; put it "
            "where all of them see it, and see the log of the others"
        )
    return tail.carried_gap(mode)


@contextmanager
def _undisturbed(chunks: Sequence[Chunk]) -> Iterator[None]:
    """Run forwards that leave no trace: in evaluation mode, without gradients."""
    import torch

    parameter = next(chunks[0].model.parameters())
    devices = [parameter.device] if parameter.is_cuda else []
    training = [m for chunk in chunks for m in chunk.model.modules() if m.training]
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
