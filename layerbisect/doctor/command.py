"""Judge the command of an engine that one means to start: what of it would break a capture."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerbisect.captures.errors import LayerBisectError
from layerbisect.doctor import megatron_table, sglang_flags
from layerbisect.doctor.arguments import Settings, read_words
from layerbisect.doctor.check import Check, worst_first
from layerbisect.doctor.megatron_rules import judge_megatron
from layerbisect.doctor.rules import Finding
from layerbisect.doctor.sglang_rules import judge_sglang
from layerbisect.doctor.variables import CAPTURE, PLATFORM, numerics, own_variables, plugin

Engine = Literal["SGLang server", "Megatron-core job"]
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z])")
_SERVERS = ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "launch_server.py")
_PREFIX = "--sglang-"
_SGLANG = (*sglang_flags.FLAGS, *sglang_flags.HARMLESS)
_MEGATRON = (*megatron_table.FLAGS, *megatron_table.JOB_FLAGS)
_CLOSE = 0.85
_LISTED = 6


@dataclass(frozen=True, slots=True)
class Judged:
    """What was found in an engine's settings.

    Args:
        engine: which engine they are of.
        checks: the findings, the worst first.
        next: the command with its problems mended; "" where there are none that flags can mend.
    """

    engine: Engine
    checks: tuple[Check, ...]
    next: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``."""
        return dataclasses.asdict(self)


def judge_command(words: Sequence[str], environment: Mapping[str, str]) -> Judged:
    """Judge a command, given as its words; variables may be set before it, as in a shell.

    Args:
        words: the command and its arguments.
        environment: what it would be started with.

    Raises:
        LayerBisectError: it starts neither engine, or a flag has no value.
    """
    given = shlex.split(words[0]) if len(words) == 1 else list(words)
    variables, start = _variables(given)
    engine, first = _engine(given, start)
    if engine == "SGLang server":
        settings = read_words(given, _SGLANG, first)
        environment = {**environment, **variables}
        findings = (
            *_capturing(environment),
            *_set(variables),
            *judge_sglang(settings, environment.get(PLATFORM, "(not set)")),
            *_rest(settings, known=True),
        )
    else:
        settings = read_words(given, _MEGATRON, first)
        variables |= _passed_on(settings)
        environment = {**environment, **variables}
        findings = (
            *_set(variables),
            *judge_megatron(settings, environment),
            *_rollout(given, settings, first),
            *_rest(settings, known=False),
        )
    checks = worst_first(one.check for one in findings)
    return Judged(engine, checks, _mended(given, settings, findings, environment, engine))


def _variables(words: Sequence[str]) -> tuple[dict[str, str], int]:
    found, at = {}, 0
    while at < len(words) and (_ASSIGNMENT.match(words[at]) or words[at] in ("env", "exec")):
        name, _, value = words[at].partition("=")
        if "=" in words[at]:
            found[name] = value
        at += 1
    return found, at


def _engine(words: Sequence[str], start: int) -> tuple[Engine, int]:
    """Say which engine the command starts, and at which word its own flags begin."""
    for at, word in enumerate(words[start:], start):
        if word in _SERVERS or Path(word).name in _SERVERS:
            return "SGLang server", at + 1
        if word == "serve" and Path(words[at - 1]).name == "sglang":
            return "SGLang server", at + 1
    known = {name for flag in _MEGATRON for name in flag.names}
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if script is not None or known & {word.partition("=")[0] for word in words}:
        return "Megatron-core job", start if script is None else script + 1
    said = shlex.join(words)
    if len(words) == 1 and Path(words[0]).is_dir():
        raise LayerBisectError(f"{said} is a directory; `layerbisect show {said}` says what it is")
    raise LayerBisectError(
        f"{said!r:.80} starts neither an SGLang server nor a Megatron-core job; give a command "
        "such as `python -m sglang.launch_server ...` or `torchrun ... train.py ...`"
    )


def _capturing(environment: Mapping[str, str]) -> Iterator[Finding]:
    found = plugin(environment)
    if found.state == "problem":
        yield Finding(found)
    if environment.get(CAPTURE):
        yield Finding(Check("capture", "ok", f"{CAPTURE}={environment[CAPTURE]}"))
    else:
        effect = "this server would capture nothing"
        yield Finding(
            Check("capture", "note", f"{CAPTURE} is not set", f"{CAPTURE}=DIR before it", effect)
        )


def _passed_on(settings: Settings) -> dict[str, str]:
    """Read the variables that a job sets for its trainer; raises LayerBisectError for none."""
    given = settings.get("variables", "{}")
    try:
        found = json.loads(given)
        return {str(name): str(value) for name, value in found.items()}
    except (ValueError, AttributeError):
        raise LayerBisectError(
            f"{settings.say('variables')} is no JSON object; quote it as one word"
        ) from None


def _set(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the variables that the command itself sets."""
    yield from (Finding(one) for one in numerics(variables) if one.state != "ok")
    own = own_variables(variables)
    if own.state == "problem":
        yield Finding(own)


def _rollout(words: Sequence[str], settings: Settings, first: int) -> Iterator[Finding]:
    """Judge SGLang's flags in a command of miles or slime, where each begins with --sglang-."""
    if not any(word.startswith(_PREFIX) for word in words):
        return
    own = [f"--{w.removeprefix(_PREFIX)}" if w.startswith(_PREFIX) else w for w in words]
    # flags of the job come to nothing here
    own = [
        w if words[i].startswith(_PREFIX) or not w.startswith("--") else "--job-flag"
        for i, w in enumerate(own)
    ]
    engine = read_words(own, _SGLANG, first)
    ranks = settings.get("engine_ranks")
    values, told = dict(engine.values), dict(engine.told)
    told = {field: said.replace("--", _PREFIX, 1) for field, said in told.items()}
    if ranks is not None:
        values["tp_size"], told["tp_size"] = ranks, settings.say("engine_ranks")
    for one in judge_sglang(Settings(values, told)):
        if one.check.name != "model":
            found = one.check.found
            found = found if _PREFIX in found else re.sub(r"\bno --", f"no {_PREFIX}", found)
            check = dataclasses.replace(
                one.check,
                name=f"rollout: {one.check.name}",
                found=found,
                advice=_FLAG.sub(_PREFIX, one.check.advice),
                effect=_FLAG.sub(_PREFIX, one.check.effect),
            )
            yield Finding(check, tuple(word.replace("--", _PREFIX, 1) for word in one.add))


def _rest(settings: Settings, *, known: bool) -> Iterator[Finding]:
    """Say which flags are not judged; ``known`` says that all that matter are known here."""
    names = {name for flag in _SGLANG for name in flag.names}
    unknown = [name for name in settings.unknown if not name.startswith(_PREFIX)]
    for name in tuple(unknown) if known else ():
        instead = sglang_flags.REMOVED.get(name)
        near = difflib.get_close_matches(name, names, 1, _CLOSE)
        if instead:
            effect = "SGLang 0.5.23 has no such flag, and does not start with it"
            yield Finding(Check("unknown flag", "problem", name, instead, effect, tried=False))
        elif near:
            check = Check("unknown flag", "note", name, f"did you mean {near[0]}")
            yield Finding(check)
        if instead or near:
            unknown = [one for one in unknown if one != name]
    if unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        effect = "nothing is known here of what they do to a capture"
        found = f"{', '.join(unknown[:_LISTED])}{more}"
        yield Finding(Check("not judged", "note", found, "", effect))


def _mended(
    words: Sequence[str],
    settings: Settings,
    findings: Iterable[Finding],
    environment: Mapping[str, str],
    engine: Engine,
) -> str:
    findings = tuple(findings)
    drop = {field for one in findings for field in one.drop if field in settings.spans}
    add = dict.fromkeys(word for one in findings for word in one.add)
    directory = engine == "SGLang server" and not environment.get(CAPTURE)
    if not (drop or add or directory):
        return ""
    gone = {i for field in drop for span in settings.spans[field] for i in range(*span)}
    kept = [word for i, word in enumerate(words) if i not in gone]
    before = [f"{CAPTURE}=captures/rollout"] if directory else []
    # what is set before a command must stay a shell's assignment
    return " ".join(
        word if _ASSIGNMENT.match(word) and " " not in word else shlex.quote(word)
        for word in (*before, *kept, *(word for word in add if word not in kept))
    )
