"""WHAT"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerbisect.captures.errors import LayerBisectError
from layerbisect.kernels.replay.bench import Bench
from layerbisect.kernels.replay.bundle import HEADER_KEY, Bundle, BundleError, bundle_from
from layerbisect.kernels.replay.examine import engine_errors, examine
from layerbisect.kernels.replay.implementation import Implementation
from layerbisect.kernels.replay.replayer import report, usable_part
from layerbisect.kernels.replay.report import Errors, Replay, Result
from layerbisect.kernels.replay.variants import Variant, variants
from layerbisect.replay_words import columns, figures, headline

BUNDLE = "bundle.safetensors"
REPEATS = 5
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
}


def implementations() -> list[Implementation]:
    """List what is run beside the low-precision reference."""
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the bundle, print the figures, and return 1 where the engine errs beyond rounding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("bundle", nargs="?", type=Path, default=Path(__file__).with_name(BUNDLE))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        replay = run(read_bundle(given.bundle), given.device)
    except (LayerBisectError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:
        # Python's own exit code would say that the engine errs
        traceback.print_exc()
        return 2
    print(json.dumps(replay.to_json(), indent=2) if given.json else page(replay))
    return replay.exit_code


def run(bundle: Bundle, device: str) -> Replay:
    """Judge what the engine returned, and what each implementation does with the same input."""
    known = implementations()
    usable, reason = usable_part(bundle)
    if reason:
        return report(bundle, usable, device, None, (), reason)
    bench = Bench(usable, device)
    engine = engine_errors(bench)
    results: list[Result] = []
    for one in variants(usable, lambda operator: [k for k in known if k.operator == operator]):
        results.append(examine(bench, one, REPEATS) if isinstance(one, Variant) else one)
    return report(bundle, usable, device, engine, tuple(results))


def read_bundle(path: Path) -> Bundle:
    """Read a safetensors file: the length of a JSON header, the header, and the tensors' bytes."""
    raw = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        facts = header.pop("__metadata__", {}).get(HEADER_KEY)
        tensors = {name: _tensor(one, raw[8 + length :]) for name, one in header.items()}
    except (struct.error, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"{path} is no operator bundle: {error}; export it again") from None
    return bundle_from(facts, tensors, path)


def _tensor(one: dict[str, Any], data: bytes) -> torch.Tensor:
    start, end = one["data_offsets"]
    kind = _DTYPES[one["dtype"]]
    # a buffer of its own, which may be written to; one of no bytes is refused
    part = bytearray(data[start:end])
    flat = torch.frombuffer(part, dtype=kind) if part else torch.empty(0, dtype=kind)
    return flat.reshape(one["shape"])


def page(replay: Replay) -> str:
    """Write the figures as `layerbisect replay` does, in plain text."""
    facts = replay.engine_facts
    engine = " ".join(facts.get(name, "") for name in ("engine", "version", "device")).strip()
    lines = [
        headline(replay),
        *([f"because: {replay.conclusion}"] if replay.conclusion not in headline(replay) else []),
        "",
        f"{replay.dtype}, {replay.rows} rows, replayed on {replay.device}",
        f"{replay.label}: {engine}",
    ]
    if replay.engine is not None:
        lines += [f"  {text}" for text in figures(replay.engine)]
    heads, cells = columns(replay.results)
    rows = [["implementation", *heads]]
    for one in replay.results:
        if one.state == "ran":
            rows.append([one.name, *(cell(one) for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines.append("")
    for first, *rest in rows:
        right = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    for one in replay.results:
        if one.why or one.state != "ran":
            lines.append(f"{one.name}: {one.state}{f': {one.why}' if one.why else ''}")
        errors: Errors | None = one.errors
        if errors is not None and errors.convicted:
            lines.append(f"{one.name}: beyond rounding: {errors.why}")
    return "\n".join(lines)


def package(distribution: str) -> str:
    """Name a package with the version that is installed."""
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return distribution


if __name__ == "__main__":
    sys.exit(main())
