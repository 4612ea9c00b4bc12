"""Which stretches of a source are replayed: those of a layer, of an operator, or of one point."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from layerbisect.bisect.bundles import ROWS, layer_bundles, open_side
from layerbisect.bisect.end_bundles import end_bundles
from layerbisect.bisect.next_step import REPLAYED
from layerbisect.bisect.operators import STEPS, LayerPoints
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.format import CAPTURE_FILE
from layerbisect.captures.points import MOE_SUFFIXES, parse
from layerbisect.captures.store import Capture
from layerbisect.kernels.replay.bundle import Bundle, load_bundle


@dataclass(frozen=True, slots=True)
class Chosen:
    """Stretches to replay, and the points of the same choice that can't be, with the reason."""

    bundles: tuple[Bundle, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def choose(
    source: str | PathLike[str],
    *,
    model: str | PathLike[str] | None = None,
    layer: int | None = None,
    operator: str | None = None,
    point: str | None = None,
    requests: str = "*",
    rows: int = ROWS,
) -> Chosen:
    """Take bundles from a capture directory, with the checkpoint ``model``, or from a bundle file.

    Without ``layer`` and ``point`` the final norm and the head are chosen. ``operator`` is one of
    ``REPLAYED``, and ``point`` the exact name of what a stretch makes. ``requests`` is a pattern
    over sequence names; at most ``rows`` rows are taken, or the first sequence. Raises
    LayerBisectError for a source that is neither, or that doesn't show what is asked for.
    """
    path = Path(source)
    if operator is not None and operator not in REPLAYED:
        raise LayerBisectError(f"operator must be one of {', '.join(REPLAYED)}, got {operator!r}")
    if path.is_file():
        return Chosen((_of_file(path, layer, operator, point),))
    if not (path / CAPTURE_FILE).is_file():
        raise LayerBisectError(
            f"{path} is neither a capture (a directory with {CAPTURE_FILE}) nor an operator "
            "bundle (a file that `layerbisect replay --export` wrote)"
        )
    if model is None:
        raise LayerBisectError(
            f"{path} is a capture, and its operators need weights: give --model, the checkpoint "
            "that its engine ran"
        )
    reference, side = open_side(Capture.open(path, requests=requests), Path(model))
    layer = _layer_of(reference, layer, point)
    if layer is None:
        return _of_ends(reference, side, operator, point, rows)
    return _of_layer(reference, side, layer, operator, point, rows)


def _of_file(path: Path, layer: int | None, operator: str | None, point: str | None) -> Bundle:
    bundle = load_bundle(path)
    if (
        (layer is not None and layer != bundle.layer)
        or (operator is not None and not _makes(bundle, operator))
        or (point is not None and point != bundle.point)
    ):
        raise LayerBisectError(
            f"{path} holds {bundle.point} ({', '.join(bundle.covers)}) alone; leave --layer, "
            "--operator and --point out"
        )
    return bundle


def _layer_of(model: ReferenceModel, layer: int | None, point: str | None) -> int | None:
    """Number the layer that is asked for, by itself or by one of its points."""
    last = model.config.num_layers - 1
    if layer is not None and not 0 <= layer <= last:
        raise LayerBisectError(f"the model has no layer {layer}: its layers are 0 to {last}")
    if point is None:
        return layer
    asked = parse(point)
    own = asked.layer
    if asked.suffix == "input" and own is not None:
        if not own:
            raise LayerBisectError(f"{point} is what the embedding makes, which is only looked up")
        # the sum that leaves a layer is called by the name that the next one gives it
        own -= 1
    if own is not None and own > last:
        raise LayerBisectError(f"the model has no layer for {point}: its layers are 0 to {last}")
    if layer is not None and own != layer:
        place = "no layer" if own is None else f"layer {own}"
        raise LayerBisectError(f"{point} is made in {place}, and --layer is {layer}; leave it out")
    return own


def _of_ends(
    model: ReferenceModel, side: Side, operator: str | None, point: str | None, rows: int
) -> Chosen:
    layers = f"give --layer, 0 to {model.config.num_layers - 1}"
    made = end_bundles(model, side, rows=rows)
    shown = [bundle.point for bundle in made]
    missing = {n: _unseen(side, n) for n in ("final_norm", "logprob") if n not in shown}
    if point is not None and point not in ("final_norm", "logprob"):
        raise LayerBisectError(f"{point} can't be replayed; replay logprob, or {layers}")
    found = _matching(made, operator, point)
    if not found and point in missing:
        raise LayerBisectError(f"{point} can't be replayed: {missing[point]}")
    if not found and operator in (None, "head"):
        raise LayerBisectError(
            f"{side.capture.directory} shows neither the final norm nor the log-probs of tokens "
            f"that can be replayed; {layers}"
        )
    if not found:
        raise LayerBisectError(f"{operator} is an operator of the layers; {layers}")
    return Chosen(tuple(found), missing if operator is None and point is None else {})


def _of_layer(
    model: ReferenceModel,
    side: Side,
    layer: int,
    operator: str | None,
    point: str | None,
    rows: int,
) -> Chosen:
    made, refused = layer_bundles(model, side, layer, rows=rows)
    points = LayerPoints(model, side, layer)
    unseen: dict[str, str] = {}
    covers: dict[str, str] = {}
    for suffix in _left_out(points, made, refused):
        name = points.name(suffix)
        unseen[name] = refused.get(name) or _unseen(side, name, points.name("input"))
        covers[name] = points.operator(suffix)
    found = _matching(made, operator, point)
    if found:
        return Chosen(tuple(found), unseen if operator is None and point is None else {})
    if point is not None:
        shown = ", ".join(bundle.point for bundle in made) or "nothing"
        why = f"what layer {layer} shows of its operators is {shown}"
        if point.endswith("mlp.expert_ids"):
            why = "the choice of experts is judged with their weights, at mlp.expert_weights"
        why = unseen.get(point, why)
        raise LayerBisectError(f"{point} can't be replayed: {why}")
    has = list(dict.fromkeys(word for bundle in made for word in bundle.covers))
    rest = f"it shows {', '.join(has)}" if has else "it shows no operator"
    hidden = [name for name in unseen if operator in (None, covers[name])]
    if hidden:
        raise LayerBisectError(
            f"layer {layer} shows no {operator or 'operator'} that can be replayed: {hidden[0]}: "
            f"{unseen[hidden[0]]}" + (f"; {rest}" if has else "")
        )
    raise LayerBisectError(f"layer {layer} has no {operator}: {rest}")


def _matching(made: Sequence[Bundle], operator: str | None, point: str | None) -> list[Bundle]:
    return [
        bundle
        for bundle in made
        if (operator is None or _makes(bundle, operator))
        and (point is None or bundle.point == point)
    ]


def _makes(bundle: Bundle, operator: str) -> bool:
    return operator == bundle.operator or operator in bundle.covers


def _left_out(
    points: LayerPoints, made: Sequence[Bundle], refused: Collection[str]
) -> Iterator[str]:
    """Name the points of a layer that no stretch makes, on the way to its end either."""
    computed = {name for bundle in made for call in bundle.calls for name in call.results}
    for suffix in STEPS:
        if points.name(suffix) in refused:
            yield suffix
        elif suffix in computed or suffix in ("mlp.expert_in", "mlp.expert_out"):
            # those are large, and one operator with the sum of the experts where not captured
            continue
        elif points.sparse or suffix not in MOE_SUFFIXES:
            yield suffix


def _unseen(side: Side, name: str, stream: str = "") -> str:
    """Say why a point can't be replayed, in words that follow a colon.

    ``stream`` is what everything in its layer is computed from.
    """
    seen = side.capture.points.get(name)
    if seen is None:
        return "it was not captured"
    if seen.how == "not_observable":
        return seen.reason or "the engine hides it"
    if not side.has(name):
        return "some rows of the capture lack it"
    if stream and not side.has(stream):
        return f"{stream} is needed too, and was not captured"
    if side.forced and name.split(".", 2)[-1] in MOE_SUFFIXES:
        return "routes of another capture were forced on this one, so its router did not make it"
    return "what it is made from was not captured"
