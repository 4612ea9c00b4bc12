"""What scores would be by one fault or another, from full logits, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

CHUNK_VALUES = 1 << 23
"""Logits that are held in float32 at once, unless one row has more."""
SHARDS = (2, 4, 8, 16, 32, 64)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
# a filter that keeps more tokens than this hardly renormalises
_MOST_KEPT = 4096
# logits that a search for a temperature goes through each time
_SEARCHED = 1 << 24
_LOWEST, _HIGHEST = 0.2, 5.0

Scores = NDArray[np.float64]


def by_temperature(
    logits: torch.Tensor, tokens: NDArray[np.int64], temperatures: Sequence[float]
) -> NDArray[np.float64]:
    """Log-probs of ``tokens`` by logits [row, vocab] over each temperature, [temperature, row]."""
    import torch

    found = np.empty((len(temperatures), len(tokens)))
    for rows, piece, target in _pieces(logits, tokens):
        chosen = piece.gather(1, target[:, None])[:, 0]
        for number, temperature in enumerate(temperatures):
            scaled = piece / temperature
            scores = chosen / temperature - torch.logsumexp(scaled, 1)
            found[number, rows] = scores.double().cpu().numpy()
    return found


def fit(logits: torch.Tensor, tokens: NDArray[np.int64], scores: Scores) -> float:
    """Find the temperature whose log-probs are nearest to ``scores`` by mean absolute distance.

    Evenly chosen rows are searched where there are many: first all over 0.2 to 5, as the distance
    may have several valleys, then ever closer.
    """
    every = max(1, logits.numel() // _SEARCHED)
    some, ids, wanted = logits[::every], tokens[::every], scores[::every]
    grid = np.linspace(np.log(_LOWEST), np.log(_HIGHEST), 33)
    for _ in range(6):
        found = by_temperature(some, ids, np.exp(grid).tolist())
        best = int(np.abs(found - wanted).mean(1).argmin())
        step = grid[1] - grid[0]
        grid = np.linspace(grid[best] - step, grid[best] + step, 9)
    return float(np.exp(grid[4]))


def factor(raw: Scores, scores: Scores) -> float:
    """Find the factor whose multiple of ``raw`` is nearest to ``scores`` by absolute distance."""
    used = raw < 0
    if not used.any():
        return 1.0
    # the weighted median of the ratios
    ratio, weight = scores[used] / raw[used], -raw[used]
    order = np.argsort(ratio)
    half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return float(ratio[order][min(half, len(order) - 1)])


def by_shard(logits: torch.Tensor, tokens: NDArray[np.int64], vocab: int) -> dict[int, Scores]:
    """Log-probs normalised over the token's own shard alone, by the number of equal shards."""
    import torch

    counts = [count for count in SHARDS if count <= vocab]
    found = {count: np.empty(len(tokens)) for count in counts}
    for rows, piece, target in _pieces(logits, tokens):
        chosen = piece.gather(1, target[:, None])[:, 0]
        piece[:, vocab:] = -torch.inf
        for count in counts:
            width = -(-piece.shape[1] // count)
            filled = torch.nn.functional.pad(
                piece, (0, width * count - piece.shape[1]), value=-torch.inf
            )
            sums = torch.logsumexp(filled.view(len(piece), count, width), 2)
            local = sums.gather(1, (target // width)[:, None])[:, 0]
            found[count][rows] = (chosen - local).double().cpu().numpy()
    return found


def by_filter(
    logits: torch.Tensor, tokens: NDArray[np.int64], scores: Scores, vocab: int
) -> tuple[int, Scores, dict[float, Scores]]:
    """Log-probs renormalised over the likeliest tokens: the best k, its scores, and by each top-p.

    ``scores`` are what k is fitted to, by mean absolute distance.
    """
    import torch

    most = min(vocab, _MOST_KEPT)
    distance = np.zeros(most)
    nuclei = {mass: np.empty(len(tokens)) for mass in NUCLEI}

    def kept(piece: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen logits [row], and normalizers over the k likeliest tokens [row, k]."""
        chosen = piece.gather(1, target[:, None])[:, 0]
        return chosen, torch.logcumsumexp(piece[:, :vocab].topk(most, 1).values, 1)

    for rows, piece, target in _pieces(logits, tokens):
        chosen, sums = kept(piece, target)
        wanted = torch.from_numpy(scores[rows]).to(chosen)
        distance += (chosen[:, None] - sums - wanted[:, None]).abs().double().sum(0).cpu().numpy()
        whole = torch.logsumexp(piece[:, :vocab], 1)
        mass = (sums - whole[:, None]).exp()
        for least, found in nuclei.items():
            # the token that reaches the mass is kept as well
            last = torch.searchsorted(mass, mass.new_full((len(mass), 1), least))
            reached = sums.gather(1, last.clamp(max=most - 1))[:, 0]
            norm = torch.where(last[:, 0] < most, reached, whole)
            found[rows] = (chosen - norm).double().cpu().numpy()
    best = int(distance.argmin())
    top = np.empty(len(tokens))
    for rows, piece, target in _pieces(logits, tokens):
        chosen = piece.gather(1, target[:, None])[:, 0]
        norm = torch.logsumexp(piece[:, :vocab].topk(best + 1, 1).values, 1)
        top[rows] = (chosen - norm).double().cpu().numpy()
    return best + 1, top, nuclei


def _pieces(
    logits: torch.Tensor, tokens: NDArray[np.int64]
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows, their logits in float32 or more as a copy, and their tokens."""
    import torch

    step = max(1, CHUNK_VALUES // logits.shape[1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    for start in range(0, len(tokens), step):
        rows = slice(start, start + step)
        target = torch.from_numpy(tokens[rows]).to(logits.device)
        yield rows, logits[rows].detach().to(dtype, copy=True), target
