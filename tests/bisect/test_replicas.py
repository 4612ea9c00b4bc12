"""Where ranks hold differing copies of a point, that is the culprit, and not what is judged on one.

The copies are a second rank's files beside those of a one-rank capture of a real engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from layerbisect.bisect.locate import bisect
from layerbisect.bisect.verdict import Verdict
from layerbisect.fault_tools import forward_replaced
from tests.bisect.conftest import Clean
from tests.bisect.engine_pairs import corrupted
from tests.bisect.making import rewrite

VALUES = 64


def on_two_ranks(source: Path, target: Path) -> Path:
    """Copy a capture, and write it down as that of two ranks which hold the same."""
    rewrite(source, target)
    shutil.copytree(target / "rank-0", target / "rank-1")
    for rank in (0, 1):
        path = target / f"rank-{rank}" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rank": rank, "world_size": 2}))
    return target


def parted(clean: Clean, tmp_path: Path, point: str, rank: int, source: Path) -> Verdict:
    """Judge a trainer of which one rank's copy of a point has wrong values."""
    whole = on_two_ranks(source, tmp_path / "whole")
    capture = corrupted(whole, tmp_path / "parted", rank, point, VALUES)
    return bisect(clean.rollout, capture, model=clean.model)


def test_the_same_copies_on_two_ranks_agree(clean: Clean, tmp_path: Path) -> None:
    capture = on_two_ranks(clean.trainer, tmp_path / "two")
    assert bisect(clean.rollout, capture, model=clean.model).status == "agree"


def test_copies_that_part_by_a_rounding_are_a_finding_and_nobodys_fault(
    clean: Clean, tmp_path: Path
) -> None:
    """As where ranks add the terms of a sum in different orders."""
    point = "layers.2.input"
    whole = on_two_ranks(clean.trainer, tmp_path / "whole")
    capture = corrupted(whole, tmp_path / "parted", 1, point, VALUES, bit=1)
    verdict = bisect(clean.rollout, capture, model=clean.model)
    assert verdict.status == "agree" and not verdict.culprits
    assert any(f"{point}: replicas disagree" in note for note in verdict.coverage.notes)


@pytest.mark.parametrize(
    ("point", "operator"),
    [
        ("layers.1.attn.norm", "norm"),
        ("layers.2.input", "residual"),
        ("layers.3.mid", "residual"),
        ("layers.1.mlp.router_logits", "router"),
        ("final_norm", "norm"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_point_at_which_copies_part_is_the_culprit(
    clean: Clean, tmp_path: Path, point: str, operator: str, rank: int
) -> None:
    verdict = parted(clean, tmp_path, point, rank, clean.trainer)
    (culprit,) = verdict.culprits
    layer = int(point.split(".")[1]) if "." in point else None
    assert verdict.status == "divergent"
    assert (culprit.layer, culprit.point, culprit.operator) == (layer, point, operator)
    assert culprit.side == "trainer" and culprit.where == "copies on some ranks"
    assert any("should hold the same copy do not" in line for line in culprit.evidence)
    told = next(line for line in culprit.evidence if "replicas disagree" in line)
    assert told.startswith(f"{point}: replicas disagree: rank-1 differs in {VALUES} values of ")
    # the copy of the first rank is the one that is judged
    follows = [line for line in culprit.evidence if "it follows from this" in line]
    assert not follows or rank == 0
    assert follows or rank == 1 or not point.startswith("layers.1.attn")


def test_a_fault_judged_on_copies_that_agree_is_named_beside_it(
    clean: Clean, tmp_path: Path
) -> None:
    engine = clean.engines["trainer"]
    module = engine.model.get_submodule("model.layers.3.self_attn.o_proj")
    with forward_replaced(module, lambda own, *args, **kwargs: 1.2 * own(*args, **kwargs)):
        made = engine.capture(tmp_path / "faulty", clean.tokens)
    verdict = parted(clean, tmp_path, "layers.1.mlp.norm", 0, made)
    found = {(c.layer, c.point, c.operator) for c in verdict.culprits}
    assert found == {
        (1, "layers.1.mlp.norm", "norm"),
        (3, "layers.3.attn.out", "linear"),
    }


def test_what_only_one_side_shows_is_looked_at_too(clean: Clean, tmp_path: Path) -> None:
    point = "layers.2.mid"
    whole = on_two_ranks(clean.trainer, tmp_path / "whole")
    capture = corrupted(whole, tmp_path / "parted", 1, point, VALUES)
    other = rewrite(clean.rollout, tmp_path / "other", points=lambda name: name != point)
    (culprit,) = bisect(other, capture, model=clean.model).culprits
    assert (culprit.layer, culprit.point, culprit.operator) == (2, point, "residual")


def test_of_a_coarse_capture_the_layer_that_made_the_copies_is_named(
    clean: Clean, tmp_path: Path
) -> None:
    def coarse(name: str) -> bool:
        return name.endswith((".input", ".output")) or name == "final_norm"

    source = rewrite(clean.trainer, tmp_path / "coarse", points=coarse)
    verdict = parted(clean, tmp_path, "layers.2.input", 1, source)
    (culprit,) = verdict.culprits
    assert (culprit.layer, culprit.point, culprit.operator) == (1, "layers.2.input", None)
    assert "it may be any of" in culprit.evidence[-1]
    assert "layers.1" in verdict.next
