"""What an SGLang worker says of itself: its model, its weights and the settings that matter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import WorkerError
from layerbisect.captures.sglang.info import SETTINGS

_SERVER = (
    *SETTINGS,
    "dtype",
    "tp_size",
    "dp_size",
    "ep_size",
    "pp_size",
    "page_size",
    "max_running_requests",
    "prefill_attention_backend",
    "decode_attention_backend",
    "random_seed",
    "tokenizer_path",
)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker serves, and the settings that change its numbers; "" where it does not say.

    ``vocabulary`` counts the model's tokens, None where its directory is not on this machine.
    """

    model: str
    revision: str
    weight_version: str | None
    engine: str
    settings: Mapping[str, str] = field(default_factory=dict)
    vocabulary: int | None = None

    def check_tokens(self, name: str, ids: Sequence[int]) -> None:
        """Raise WorkerError for a token ID that the model does not have: it would end the server.

        Without a tokenizer SGLang looks at none of them, and neither does the embedding.
        """
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            raise WorkerError(
                f"{name} has token ID {max(ids)}, and {self.model} has {self.vocabulary} tokens; "
                "ask a worker that serves the model which the IDs are of"
            )


def info_of(model: Mapping[str, Any], server: Mapping[str, Any]) -> WorkerInfo:
    """Read the worker's answers to ``/model_info`` and ``/server_info``."""
    version, path = server.get("version"), str(model.get("model_path") or "")
    return WorkerInfo(
        model=path,
        revision=str(server.get("revision") or ""),
        weight_version=version_of(model),
        engine="sglang" if version is None else f"sglang {version}",
        settings={k: str(server[k]) for k in _SERVER if server.get(k) is not None},
        vocabulary=vocabulary_of(path),
    )


def version_of(model: Mapping[str, Any]) -> str | None:
    """The name of the loaded weights in the answer to ``/model_info``; None where it has none."""
    version = model.get("weight_version")
    return None if version is None else str(version)


def vocabulary_of(model: str) -> int | None:
    """Read how many tokens a model has; None where its directory is not on this machine."""
    if not model:
        return None
    try:
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        # what cannot be read here is not checked
        return None
    return size if type(size) is int else None
