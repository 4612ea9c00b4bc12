"""What is compared: two captures joined by rows, and the model that judges them."""

from __future__ import annotations

from dataclasses import dataclass

from layerbisect.bisect.join import Joined
from layerbisect.bisect.progress import Progress
from layerbisect.bisect.reference import ReferenceModel
from layerbisect.bisect.side import Side
from layerbisect.captures.points import all_points, is_large, parse


@dataclass(frozen=True)
class Case:
    """Two sides of one comparison; ``directory`` is the model's, as it was given."""

    model: ReferenceModel
    sides: tuple[Side, Side]
    joined: Joined
    progress: Progress
    directory: str

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.model.config.num_layers

    def missing(self) -> tuple[str, ...]:
        """Points that one capture was to hold and that a side does not show in every row."""
        wanted = sorted({p for s in self.sides for p in s.capture.info.points} - {"logprob"})
        return tuple(f"{s.label}: {p}" for s in self.sides for p in wanted if not s.has(p))

    def unseen_inside(self) -> int:
        """Count the layers in which a side does not show every operator alone."""
        config = self.model.config
        inner = [
            point
            for name in all_points(config.num_layers, config.moe_layers)
            if (point := parse(name)).layer is not None and not is_large(name)
        ]
        return len({p.layer for p in inner if not all(s.has(p.name) for s in self.sides)})

    def notes(self) -> list[str]:
        """What keeps the captures from being whole, in sentences."""
        notes = []
        unseen = self.unseen_inside()
        if unseen:
            notes.append(
                f"{unseen} of {self.layers} layers are not seen operator by operator: a fault in "
                "them that stays below the rounding of the whole layer cannot be seen"
            )
        loose = len(self.joined) - int(self.joined.chains.fresh.sum())
        if loose:
            notes.append(
                f"{loose} joined rows lack a row before them in one of the captures: their values "
                "are compared, and no operator is judged on them"
            )
        if self.joined.keyless:
            notes.append(
                f"{self.joined.keyless} rows are of sequences whose first tokens were not seen, "
                "and cannot be joined"
            )
        for side in self.sides:
            if side.forced:
                notes.append(
                    f"{side.label} was given its routes: its choice of experts is not judged, and "
                    "rounding is predicted with routes that may flip, so by more than is due"
                )
            notes += [f"{side.label}: {text}" for text in side.capture.problems]
            findings = side.capture.replica_findings
            notes += [f"{side.label}: {point}: {text}" for point, text in findings.items()]
        return notes
