"""Plant a fault in one of two engines, find it, and say whether the verdict is right.

Two copies of one model play the engines, each with another of transformers' own implementations of
attention and experts, so that they differ by rounding as engines do. What finds the fault is given
two capture directories and the model, and nothing else.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerbisect.bisect.progress import NoProgress, Progress
from layerbisect.bisect.verdict import Verdict
from layerbisect.captures.errors import LayerBisectError
from layerbisect.faults import FAULTS, Truth, plant

if TYPE_CHECKING:
    from layerbisect.token_file import TokenSequence

Side = Literal["rollout", "trainer"]
DEFAULT_FAULT = "rope-shifted"
NO_FAULT = "none"
SEQUENCES, PROMPT, LENGTH = 4, 16, 160
_ENGINES: dict[Side, tuple[str, str]] = {
    "rollout": ("eager", "eager"),
    "trainer": ("sdpa", "grouped_mm"),
}
"""Attention and experts of each engine."""


@dataclass(frozen=True, slots=True)
class Planted:
    """The truth, which a verdict is held against; None in a demo without a fault."""

    fault: str
    description: str
    layer: int | None
    operator: str
    point: str
    side: Side


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, what was planted, and whether the one names the other and nothing else."""

    verdict: Verdict
    planted: Planted | None
    right: bool

    @property
    def exit_code(self) -> int:
        """The verdict's own where it is right, and 2 where it is wrong."""
        return self.verdict.exit_code if self.right else 2

    def mistakes(self) -> list[str]:
        """Say in what the verdict is wrong."""
        if self.right:
            return []
        if self.planted is None:
            return [f"nothing was planted, and the verdict is {self.verdict.status!r}"]
        if not self.verdict.culprits:
            return [f"nobody is convicted: the verdict is {self.verdict.status!r}"]
        first = self.verdict.culprits[0]
        facts = {
            "layer": (first.layer, self.planted.layer),
            "operator": (first.operator, self.planted.operator),
            "side": (first.side, self.planted.side),
        }
        wrong = [f"the {k} is {got}, not {want}" for k, (got, want) in facts.items() if got != want]
        others = [c.point for c in self.verdict.culprits[1:] if not _names(c, self.planted)]
        return wrong + [f"{point} is innocent" for point in others]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict's JSON, and beside it under ``demo`` what was planted."""
        planted = None if self.planted is None else asdict(self.planted)
        demo = {"planted": planted, "right": self.right, "mistakes": self.mistakes()}
        return {**self.verdict.to_json(), "demo": demo}


def run_demo(
    *,
    fault: str = DEFAULT_FAULT,
    layer: int | None = None,
    side: Side = "rollout",
    keep: Path | None = None,
    model: Path | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Make two captures, one with a fault, and let them be judged.

    Args:
        fault: a name in `layerbisect.faults.FAULTS`, or ``none``.
        layer: where to plant it; the middle one where not given.
        side: which engine gets it.
        keep: a new or empty directory for model, tokens and captures; deleted where not given.
        model: a checkpoint to use instead of a tiny Qwen3-MoE.

    Raises:
        LayerBisectError: an unknown fault, a layer that is not there, a directory that is in use.
    """
    if fault != NO_FAULT and fault not in FAULTS:
        raise LayerBisectError(
            f"unknown fault {fault!r}: give {NO_FAULT} or one of {', '.join(FAULTS)}"
        )
    news = progress or NoProgress()
    with _folder(keep) as folder:
        if model is None:
            from layerbisect.models import make_tiny

            news.start("making a model", 1)
            model = make_tiny(folder / "model")
        truth = _capture_both(folder, model, fault, layer, side, news)
        from layerbisect.bisect.locate import bisect

        verdict = bisect(folder / "rollout", folder / "trainer", model=model, progress=news)
    if keep is None:
        verdict = replace(verdict, next="`layerbisect demo --keep DIR` keeps the captures")
    return judged(verdict, truth, side)


def judged(verdict: Verdict, truth: Truth | None, side: Side) -> Outcome:
    """Hold a verdict against the truth: all that it convicts must be what was planted."""
    if truth is None:
        return Outcome(verdict, None, verdict.status == "agree")
    planted = Planted(
        fault=truth.fault,
        description=FAULTS[truth.fault].description,
        layer=truth.layer,
        operator=truth.operator,
        point=truth.point,
        side=side,
    )
    right = (
        verdict.status == "divergent"
        and bool(verdict.culprits)
        and all(_names(culprit, planted) for culprit in verdict.culprits)
    )
    return Outcome(verdict, planted, right)


def _names(culprit: Any, planted: Planted) -> bool:
    return (culprit.layer, culprit.operator, culprit.side) == (
        planted.layer,
        planted.operator,
        planted.side,
    )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="layerbisect-demo-") as scratch:
            yield Path(scratch)
        return
    if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise LayerBisectError(f"{keep} exists and is not empty: name a new directory to keep")
    was_there = keep.exists()
    keep.mkdir(parents=True, exist_ok=True)
    try:
        yield keep
    except BaseException:
        # a demo that broke off leaves nothing that looks like one
        shutil.rmtree(keep, ignore_errors=True)
        if was_there:
            keep.mkdir()
        raise


def _capture_both(
    folder: Path, model: Path, fault: str, layer: int | None, side: Side, news: Progress
) -> Truth | None:
    """Sample tokens and capture both engines on them, planting the fault in one."""
    from layerbisect.captures.transformers_adapter import Anatomy

    truth: Truth | None = None
    sequences: list[TokenSequence] = []
    for name in _ENGINES:
        news.start(f"loading the {name}", 1)
        engine = _engine(model, name)
        at = Anatomy.of(engine).num_layers // 2 if layer is None else layer
        if not sequences:
            # a fault that cannot be is refused here, before the long part
            with _planted(engine, fault, at):
                pass
            sequences = _sample(engine, news)
            _write_tokens(folder / "tokens.jsonl", sequences)
        with _planted(engine, fault if name == side else NO_FAULT, at) as said:
            _capture(engine, folder / name, name, sequences, news)
        truth = said or truth
    return truth


def _planted(engine: Any, fault: str, layer: int) -> AbstractContextManager[Truth | None]:
    return nullcontext() if fault == NO_FAULT else plant(engine, fault, layer)


def _engine(directory: Path, name: Side) -> Any:
    from layerbisect.loading import load_model

    attention, experts = _ENGINES[name]
    engine: Any = load_model(directory, dtype="bfloat16", attention=attention)
    if hasattr(engine.config, "num_experts"):
        engine.set_experts_implementation(experts)
    return engine


def _sample(engine: Any, news: Progress) -> list[TokenSequence]:
    """Let the model answer prompts of random tokens, at temperature 1."""
    import torch

    from layerbisect.token_file import TokenSequence

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(engine.config.vocab_size, (SEQUENCES, PROMPT), generator=generator)
    news.start("sampling tokens", LENGTH - PROMPT)
    cache, fed = None, tokens
    with torch.no_grad():
        for done in range(1, LENGTH - PROMPT + 1):
            out = engine(input_ids=fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chances = out.logits[:, -1].float().softmax(-1)
            fed = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, fed), 1)
            news.advance(done)
    rows: list[list[int]] = tokens.tolist()
    return [TokenSequence(f"s{i}", tuple(ids), PROMPT) for i, ids in enumerate(rows)]


def _capture(
    engine: Any, directory: Path, label: str, sequences: Sequence[TokenSequence], news: Progress
) -> None:
    import torch

    from layerbisect.captures.transformers_capture import capture

    names = [s.name for s in sequences]
    news.start(f"capturing the {label}", len(sequences))
    with capture(engine, directory, points="all", label=label, names=names), torch.no_grad():
        for done, one in enumerate(sequences, 1):
            engine(input_ids=torch.tensor([one.ids]), use_cache=False)
            news.advance(done)


def _write_tokens(path: Path, sequences: Sequence[TokenSequence]) -> None:
    lines = [json.dumps(asdict(one)) for one in sequences]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
