"""What records say of each column: who scored it, with what weights and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from layerbisect.captures.record.call import RecordInfo, Scoring, is_score

_MOST = 4


def environments(infos: Sequence[RecordInfo]) -> dict[str, dict[str, str]]:
    """Facts of each column of log-probs, by the column and then by the fact's name.

    Facts of the generation (``model``, its revisions, ``sampling``) stand with every column: all
    of them score what was generated so. ``infos`` are of records that are judged as one step; where
    they differ in a fact, all its values are named.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for info in infos:
        for column, scoring in info.columns.items():
            if is_score(column):
                facts = found.setdefault(column, {})
                for name, value in (_of_record(info) | _of_column(scoring)).items():
                    if value and value not in facts.setdefault(name, []):
                        facts[name].append(value)
    return {
        column: {name: _joined(values) for name, values in facts.items() if values}
        for column, facts in found.items()
    }


def _of_record(info: RecordInfo) -> dict[str, str]:
    return {
        "model": info.model,
        "model_revision": info.model_revision,
        "tokenizer_revision": info.tokenizer_revision,
        "sampling": _told(info.sampling),
    }


def _of_column(scoring: Scoring) -> dict[str, str]:
    facts = {
        "engine": scoring.engine,
        "worker": scoring.worker,
        "through": scoring.through,
        "weight_version": scoring.weight_version or "",
        "digest": scoring.digest or "",
        "definition": scoring.definition,
        "cache": scoring.cache,
        "packed": "yes" if scoring.packed else "no",
        "batches": f"{len(scoring.batches):,}" if scoring.batches else "",
    }
    # a setting may be called as a fact is
    settings = {f"settings.{k}" if k in facts else k: str(v) for k, v in scoring.settings.items()}
    return facts | settings


def _told(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _joined(values: Iterable[str]) -> str:
    shown = list(values)
    rest = len(shown) - _MOST
    return " | ".join(shown[:_MOST]) + (f" | and {rest} more" if rest > 0 else "")
