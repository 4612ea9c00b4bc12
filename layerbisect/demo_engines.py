"""The demo's two engines: one model in two of transformers' own implementations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from layerbisect.bisect.progress import Progress
from layerbisect.faults import Truth, plant
from layerbisect.token_file import TokenSequence

Side = Literal["rollout", "trainer"]
NO_FAULT = "none"
SEQUENCES, PROMPT, LENGTH = 4, 16, 160
ENGINES: dict[Side, tuple[str, str]] = {
    "rollout": ("eager", "eager"),
    "trainer": ("sdpa", "grouped_mm"),
}
"""Attention and experts of each engine."""


def capture_both(
    folder: Path,
    model: Path,
    fault: str,
    layer: int | None,
    side: Side,
    news: Progress,
) -> Truth | None:
    """Sample tokens and capture both engines on them, planting the fault in one.

    ``folder`` gets ``tokens.jsonl`` and the captures ``rollout`` and ``trainer``.
    """
    from layerbisect.captures.transformers_adapter import Anatomy

    truth: Truth | None = None
    sequences: list[TokenSequence] = []
    for name in ENGINES:
        news.start(f"loading the {name}", 1)
        engine = _engine(model, name)
        at = Anatomy.of(engine).num_layers // 2 if layer is None else layer
        if not sequences:
            # a fault that cannot be is refused here, before the long part
            with _planted(engine, fault, at):
                pass
            sequences = sample(engine, news)
            write_tokens(folder / "tokens.jsonl", sequences)
        with _planted(engine, fault if name == side else NO_FAULT, at) as said:
            capture_tokens(engine, folder / name, name, sequences, news)
        truth = said or truth
    return truth


def _planted(engine: Any, fault: str, layer: int) -> AbstractContextManager[Truth | None]:
    return nullcontext() if fault == NO_FAULT else plant(engine, fault, layer)


def _engine(directory: Path, name: Side) -> Any:
    from layerbisect.loading import load_model

    attention, experts = ENGINES[name]
    engine: Any = load_model(directory, dtype="bfloat16", attention=attention)
    if hasattr(engine.config, "num_experts"):
        engine.set_experts_implementation(experts)
    return engine


def sample(engine: Any, news: Progress, length: int = LENGTH) -> list[TokenSequence]:
    """Let the model answer prompts of random tokens, up to ``length`` tokens, at temperature 1."""
    import torch
    from transformers import DynamicCache

    from layerbisect.captures.transformers_calls import cache_name

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(engine.config.vocab_size, (SEQUENCES, PROMPT), generator=generator)
    news.start("sampling tokens", length - PROMPT)
    held, fed = {cache_name(engine): DynamicCache(config=engine.config)}, tokens
    with torch.no_grad():
        for done in range(1, length - PROMPT + 1):
            out = engine(input_ids=fed.to(engine.device), use_cache=True, **held)
            chances = out.logits[:, -1].float().softmax(-1).cpu()
            fed = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, fed), 1)
            news.advance(done)
    rows: list[list[int]] = tokens.tolist()
    return [TokenSequence(f"s{i}", tuple(ids), PROMPT) for i, ids in enumerate(rows)]


def capture_tokens(
    engine: Any, directory: Path, label: str, sequences: Sequence[TokenSequence], news: Progress
) -> None:
    """Capture all points of ``engine`` on each sequence, one a call."""
    import torch

    from layerbisect.captures.capture import capture

    names = [s.name for s in sequences]
    news.start(f"capturing the {label}", len(sequences))
    with capture(engine, directory, points="all", label=label, names=names), torch.no_grad():
        for done, one in enumerate(sequences, 1):
            engine(input_ids=torch.tensor([one.ids], device=engine.device), use_cache=False)
            news.advance(done)


def write_tokens(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Write a file that `layerbisect.token_file.read_tokens` reads."""
    lines = [json.dumps(asdict(one)) for one in sequences]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
