"""The files of a capture: what each rank wrote, and which of its passes belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from layerbisect.captures.errors import CaptureError
from layerbisect.captures.format import MANIFEST_FILE, RankManifest, from_json
from layerbisect.captures.passfile import PassFile

_PASS_NAME = re.compile(r"(pass|again)-(\d{6,})\.safetensors", re.ASCII)


def read_text(path: Path) -> str:
    """Read a small file of a capture; raises CaptureError where that fails."""
    if path.is_symlink():
        raise CaptureError(f"{path} is a symbolic link; a capture holds plain files alone")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CaptureError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CaptureError(f"{path} is damaged: it is not UTF-8; capture again") from None


def read_manifests(folder: Path) -> list[RankManifest]:
    """Read what each rank says of its part, in rank order; raises CaptureError where none does."""
    found: list[RankManifest] = []
    for path in sorted(folder.glob(f"rank-*/{MANIFEST_FILE}")):
        if path.parent.is_symlink():
            raise CaptureError(
                f"{path.parent} is a symbolic link; a capture holds what lies inside it alone"
            )
        manifest = from_json(RankManifest, read_text(path), path)
        if path.parent.name != f"rank-{manifest.rank}":
            raise CaptureError(f"{path} is damaged: it is of rank {manifest.rank}; capture again")
        found.append(manifest)
    found.sort(key=lambda m: m.rank)
    if not found:
        raise CaptureError(f"{folder} is an empty capture: no rank wrote anything; capture again")
    sizes = sorted({m.world_size for m in found})
    if len(sizes) > 1:
        raise CaptureError(
            f"{folder} holds parts of different captures: of {sizes} ranks; "
            "capture again into a new directory"
        )
    runs = {m.run: m for m in found}
    if len(runs) > 1:
        first, other, *_ = runs.values()
        raise CaptureError(
            f"{folder} holds parts of different captures: {first} and {other} did not write "
            "together; capture again into a new directory"
        )
    return found


def read_passes(
    folder: Path, manifest: RankManifest, *, recomputed: bool = False
) -> dict[int, PassFile]:
    """Open the passes of one rank's folder, by their number.

    A finished manifest lists them; in an unfinished capture it is those that are there. With
    ``recomputed`` they are those that a backward computed again, and without it the others.
    """
    if manifest.finished:
        names = [summary.file for summary in manifest.passes]
    else:
        names = sorted(p.name for p in folder.iterdir() if _PASS_NAME.fullmatch(p.name))
    files: dict[int, PassFile] = {}
    read: set[str] = set()
    for name in names:
        match = _PASS_NAME.fullmatch(name)
        if not match or (folder / name).is_symlink() or name in read:
            raise CaptureError(
                f"{folder / MANIFEST_FILE} names {name!r}, which is not one more pass of this "
                "capture; a capture holds plain files inside its directory alone, each once"
            )
        read.add(name)
        if (match[1] == "again") != recomputed:
            continue
        if not (folder / name).is_file():
            raise CaptureError(
                f"{folder} lists {name} and does not hold it; bring it back, or capture again"
            )
        file = PassFile(folder / name)
        if file.header.index != int(match[2]):
            raise CaptureError(
                f"{file.path} is damaged: it says that it is pass {file.header.index}; "
                "capture again"
            )
        files[int(match[2])] = file
    told = {summary.file: summary.rows for summary in manifest.passes}
    for file in files.values():
        if told.get(file.path.name, len(file.rows)) != len(file.rows):
            raise CaptureError(
                f"{file.path} has {len(file.rows)} rows and its manifest says "
                f"{told[file.path.name]}; "
                "capture again"
            )
    return files


def pair(
    manifests: Sequence[RankManifest],
    files: Sequence[Mapping[int, PassFile]],
    *,
    recomputed: bool = False,
) -> tuple[list[tuple[PassFile, ...]], list[str]]:
    """Pair the ranks' passes by number, each replica's for itself.

    Returns the passes that every rank of a replica holds, and a sentence where some are held by a
    few alone: a crash between two ranks' writing leaves such a last pass. What is ``recomputed`` is
    paired among those ranks that computed anything again.
    """
    joint: list[tuple[PassFile, ...]] = []
    problems: list[str] = []
    for replica in sorted({m.replica for m in manifests}):
        members = [i for i, m in enumerate(manifests) if m.replica == replica]
        if recomputed:
            numbers = sorted(set().union(*(files[i] for i in members)))
            joint += [tuple(files[i][n] for i in members if n in files[i]) for n in numbers]
            continue
        found, missing = _pair([manifests[i] for i in members], [files[i] for i in members])
        joint += found
        problems += missing
    return joint, problems


def _pair(
    manifests: Sequence[RankManifest], files: Sequence[Mapping[int, PassFile]]
) -> tuple[list[tuple[PassFile, ...]], list[str]]:
    union, common = set().union(*files), set(files[0]).intersection(*files)
    joint = [tuple(rank[index] for rank in files) for index in sorted(common)]
    for ranks in joint:
        phases = sorted({file.header.phase for file in ranks})
        if len(phases) > 1:
            raise CaptureError(
                f"{ranks[0].path} is a {' and a '.join(phases)} pass on different ranks: "
                "the ranks' passes do not belong together; capture again"
            )
    if union == common:
        return joint, []
    first = min(union - common)
    lacking = ", ".join(
        str(m) for m, held in zip(manifests, files, strict=True) if first not in held
    )
    return joint, [
        f"{len(union - common)} passes are not on every rank and are left out, "
        f"pass {first} first, which {lacking} did not write"
    ]
