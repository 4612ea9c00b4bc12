"""The first point that holds NaN or infinity, and whether an operator is to blame for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerbisect.bisect.operators import LayerPoints
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.bisect.verdict import Culprit, PointDifference
from layerbisect.captures.points import all_points, boundary, parse

_BESIDE = (".attn.q", ".attn.k", ".attn.v")
"""Points that are made side by side, none of the others."""
_ENDS = {"embed": "embedding", "final_norm": "norm"}


@dataclass(frozen=True, slots=True, eq=False)
class NonFinite:
    """The first point that is not finite, with the capture's rows (int [n]) by side."""

    point: str
    rows: tuple[tuple[Side, NDArray[np.intp]], ...]

    @property
    def sentence(self) -> str:
        """What is where, and what follows from it."""
        owners = " and ".join(f"{len(rows)} rows of {side.label}" for side, rows in self.rows)
        return (
            f"{self.point} holds NaN or infinity in {owners}, and is the first point that does; "
            "nothing after it can be judged"
        )

    def culprit(self, model: ReferenceModel) -> Culprit | None:
        """The operator that made it, of finite values, where one side alone did.

        None where both sides hold some, or where what follows is finite: then the values were not
        computed with, and the capture is damaged.
        """
        if len(self.rows) != 1:
            return None
        ((side, rows),) = self.rows
        after = _next(side, self.point, rows)
        if not _went_on(side, after, rows):
            return None
        layer, covers = _made_by(model, side, self.point)
        one = covers[0] if len(covers) == 1 else None
        unseen = () if one else (f"points between are not captured: any of {', '.join(covers)}",)
        place = side.capture.rows.take(rows[:1])
        return Culprit(
            layer=layer,
            point=self.point,
            operator=one,
            side=side.label,
            share_of_gap=None,
            own_error=float("nan"),
            floor=1.0,
            where=f"{len(rows)} rows, the first at position {int(place.position[0])}",
            evidence=(
                f"{self.point}: {len(rows)} rows hold NaN or infinity, of input that is finite in "
                f"all rows that both captures hold, and so does what follows, {after} first",
                *unseen,
            ),
        )


def first_nonfinite(
    sides: tuple[Side, Side], differences: Iterable[PointDifference]
) -> NonFinite | None:
    """Find the first point, in the order of computation, that is not finite on a side."""
    compared = {difference.point: difference.nonfinite for difference in differences}
    for name in _order(sides[0]):
        if compared.get(name) == 0:
            continue
        found = [(side, _nonfinite(side, name, np.unique(side.index))) for side in sides]
        bad = tuple((side, rows) for side, rows in found if len(rows))
        if bad:
            return NonFinite(name, bad)
    return None


def _order(side: Side) -> Iterator[str]:
    """Points in the order of computation, without those that may hold what is not finite."""
    info = side.capture.info
    for name in all_points(info.num_layers, info.moe_layers):
        # a row of logits may be padded with minus infinity; an ID is always finite
        if name != "logits" and not name.endswith("expert_ids"):
            yield name


def _nonfinite(side: Side, name: str, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    rows = rows[side.holds(name, rows)]
    if not len(rows):
        return rows
    values = side.values(name, rows)
    bad: NDArray[np.intp] = rows[~np.isfinite(values).reshape(len(rows), -1).all(1)]
    return bad


def _next(side: Side, point: str, rows: NDArray[np.intp]) -> str:
    """The next point that is made of this one, as far as rows have it; else their log-probs."""
    names = list(_order(side))
    apart = _BESIDE if point.endswith(_BESIDE) else ()
    for name in names[names.index(point) + 1 :]:
        if name != "logprob" and not name.endswith(apart) and side.holds(name, rows).all():
            return name
    return "logprob"


def _went_on(side: Side, after: str, rows: NDArray[np.intp]) -> bool:
    """Whether all that was computed of these rows up to their log-probs is not finite either.

    What was computed with goes on to the end: in a damaged capture it does not.
    """
    last = [name for name in _order(side) if name != "logprob" and side.holds(name, rows).all()]
    shown = [name for name in (after, last[-1]) if name != "logprob"]
    if not all(len(_nonfinite(side, name, rows)) for name in shown):
        return False
    places = np.isin(side.index, rows) & side.chains.scored
    scores = side.scores().numpy()[places]
    scored = bool(len(side.capture.scores.logprob)) and len(scores) > 0
    if scored:
        return not bool(np.isfinite(scores).any())
    return after != "logprob"


def _made_by(model: ReferenceModel, side: Side, point: str) -> tuple[int | None, tuple[str, ...]]:
    """The layer and the operators between the last captured points and this one."""
    layers = model.config.num_layers
    parsed = parse(point)
    if point in _ENDS or point == boundary(0, layers):
        return None, (_ENDS.get(point, "embedding"),)
    assert parsed.layer is not None
    if parsed.suffix == "input":
        layer = parsed.layer - 1
        return layer, LayerPoints(model, side, layer).covers("output")
    return parsed.layer, LayerPoints(model, side, parsed.layer).covers(parsed.suffix)
