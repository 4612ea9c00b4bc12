"""Which cases there are: every fault in every place that makes sense, and pairs of faults."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from layerbisect.captures.errors import LayerBisectError
from scripts.planted.case import Case, Plant
from scripts.planted.catalogue import CONTROLS, MODEL_FAULTS, SCORE_FAULTS
from scripts.planted.fault import SIDES, ModelFault, Side
from scripts.planted.scene import Scene
from scripts.planted.sizes import SIZED, SIZES

PAIRS = 120
"""Pairs of faults in one scene, a third of each kind of pair."""
DEEP = 12
"""A model of more layers is costly: each fault in one place of it, a tenth of the pairs, a third of
the controls, each on one side."""


def layers_of(scene: Scene) -> tuple[int, ...]:
    """The first, a middle and the last layer."""
    return (0, scene.layers // 2, scene.layers - 1)


def singles(scene: Scene) -> Iterator[Case]:
    """Each fault alone, in each place."""
    for fault in MODEL_FAULTS:
        if scene.dtype not in fault.dtypes:
            continue
        where = list(places(scene, fault))
        if scene.layers > DEEP and where:
            where = [where[_number(fault.name) % len(where)]]
        for plant in where:
            yield Case("single", (plant,))
    for scored in SCORE_FAULTS:
        side: Side = "trainer" if scored.columns[0].startswith("C") else "rollout"
        yield Case("score", (Plant(scored, side),))


def controls(scene: Scene) -> Iterator[Case]:
    """Each harmless difference, on either side."""
    for control in CONTROLS:
        if scene.dtype not in control.dtypes or (control.moe_only and not scene.sparse(0)):
            continue
        number = _number(control.name)
        if scene.layers > DEEP and number % 3:
            continue
        for side in SIDES if scene.layers <= DEEP else (SIDES[number // 3 % 2],):
            yield Case("control", (Plant(control, side),))


def sizes(scene: Scene) -> Iterator[Case]:
    """Each fault that comes in sizes, in the middle layer, on the rollout's side."""
    if scene.layers > DEEP:
        return
    middle = scene.layers // 2
    for sized in SIZED:
        for size in SIZES:
            plant = Plant(sized.of(size), "rollout", None if sized.none else middle)
            if _can_be(scene, plant):
                yield Case("size", (plant,), size)


def pairs(scene: Scene) -> Iterator[Case]:
    """Two faults at once: in two layers, in two operators of a layer, and one on each side."""
    draw = random.Random(0)
    pool = [f for f in MODEL_FAULTS if f.layers == "each" and f.passes == "both"]
    pool = [f for f in pool if scene.dtype in f.dtypes]
    found: set[str] = set()
    kinds = ("two layers", "two operators", "two sides")
    tries, wanted = 0, PAIRS if scene.layers <= DEEP else PAIRS // 10
    while len(found) < wanted and tries < 50 * PAIRS:
        tries += 1
        one, other = draw.sample(pool, 2)
        first, second = draw.sample(layers_of(scene), 2)
        side: Side = draw.choice(SIDES)
        kind = kinds[len(found) % len(kinds)]
        if kind == "two operators":
            second = first
            if one.operator == other.operator or one.point == other.point:
                continue
        elif kind == "two sides":
            second = draw.choice((first, second))
        opposite: Side = "trainer" if side == "rollout" else "rollout"
        case = Case(
            "double",
            (Plant(one, side, first), Plant(other, opposite if kind == kinds[2] else side, second)),
        )
        fits = all(p.side in p.what.sides for p in case.plants if isinstance(p.what, ModelFault))
        if fits and case.name not in found and all(_can_be(scene, p) for p in case.plants):
            found.add(case.name)
            yield case


def places(scene: Scene, fault: ModelFault) -> Iterator[Plant]:
    """Where one fault is planted: first, middle and last layer, on either side where it can be."""
    for side in fault.sides if fault.passes == "both" else ("rollout",):
        for layer in layers_of(scene) if fault.layers == "each" else (None,):
            plant = Plant(fault, side, layer)
            if _can_be(scene, plant):
                yield plant


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name[::-1].encode()).digest()[:4], "little")


def _can_be(scene: Scene, plant: Plant) -> bool:
    assert isinstance(plant.what, ModelFault)
    layer = plant.layer or 0
    if plant.what.dense is None and not scene.sparse(layer):
        return False
    engine = scene.engines[plant.side]
    if plant.what.tied_only and not engine.config.tie_word_embeddings:
        return False
    try:
        with plant.what.form(engine, layer):
            return True
    except LayerBisectError:
        # a model that cannot have it
        return False
