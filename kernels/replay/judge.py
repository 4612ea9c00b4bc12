"""Judge what an engine or an implementation made of a bundle's input.

By the same references and the same tests as bisecting judges an operator inside a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from layerbisect.kernels.judging.directions import (
    SCALES,
    STEP,
    added_share,
    gains_of,
    norm_eps_direction,
    norm_eps_unit,
)
from layerbisect.kernels.judging.logprob_noise import logprob_noise
from layerbisect.kernels.judging.measure import Output, measure_redrawn
from layerbisect.kernels.judging.own_error import OwnError
from layerbisect.kernels.replay import program
from layerbisect.kernels.replay.bundle import Bundle, BundleError
from layerbisect.kernels.rounding import rounded, shifted_grid
from layerbisect.kernels.router import weigh

Results = Mapping[str, torch.Tensor]


class Judge:
    """The exact and the low-precision outputs of a bundle, and the judgement of any other output.

    The result that is measured is the last call's first one; the weights of chosen experts are
    measured given the choice, which is judged apart.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.result = bundle.calls[-1].results[0]

    @cached_property
    def exact(self) -> Results:
        """What float64 makes of the input; BundleError where the tensors don't fit together."""
        try:
            return program.exact(self.bundle)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise BundleError(
                f"the bundle of {self.bundle.point} does not fit together: "
                f"{str(error).splitlines()[0]}; export it again"
            ) from error

    @cached_property
    def low(self) -> Results:
        """What the low-precision reference makes of it."""
        return program.low(self.bundle)

    def judge(self, produced: Results) -> OwnError:
        """Measure an output ([row, ...] by result) over the rows that are observed."""
        bundle, rows = self.bundle, self.bundle.observed
        exact, low = self.references(produced)
        given = bundle.inputs.get("mlp.expert_ids") if self.result == "mlp.expert_out" else None
        if given is not None and bundle.expert_numbers:
            # an expert is told by the model's number, and not by its place among those at hand
            given = torch.tensor(bundle.expert_numbers)[given]
        return measure_redrawn(
            Output(
                point=bundle.point,
                layer=bundle.layer,
                operator=bundle.operator,
                side=bundle.label,
                dtype=bundle.dtype,
                captured=_two_dims(produced[self.result])[rows].double(),
                exact=exact[rows],
                low=low[rows],
                flat_rows=rows,
                covers=bundle.covers,
                gains=gains_of(self.result, bundle.covers) if self.result != "logprob" else (),
                experts=None if given is None else given[rows],
                directions={n: _two_dims(d)[rows] for n, d in self._directions.items()},
                units=self._units,
                noise=None if self._noise is None else self._noise[rows],
                variance=None if bundle.variance is None else bundle.variance[rows],
            ),
            lambda draws: [low[rows] for low in self._redrawn(produced, draws)],
        )

    def references(self, produced: Results) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the exact and the low-precision output that ``produced`` is measured against.

        Both float64 [row, ...].
        """
        if self.bundle.calls[-1].operator == "router":
            return self._weighed(program.exact, produced), self._weighed(program.low, produced)
        return _two_dims(self.exact[self.result]), _two_dims(self.low[self.result])

    def _weighed(self, compute: program.Compute, produced: Results) -> torch.Tensor:
        """Weigh the experts that were chosen, whatever the reference would choose."""
        call = self.bundle.calls[-1]
        logits = program.value(self.bundle, call.tensors["logits"], compute)
        attributes = {
            name: call.attributes[name]
            for name in ("renormalise", "scoring", "softmax_after_top_k", "scaling")
            if name in call.attributes
        }
        ids = produced[call.results[1]].long().clamp(0, logits.shape[1] - 1)
        round_to = self.bundle.storage if compute is program.low else None
        return rounded(weigh(logits, ids, **attributes), round_to)

    def _redrawn(self, produced: Results, draws: int) -> Sequence[torch.Tensor]:
        found = []
        for draw in range(1, draws + 1):
            with shifted_grid(2.0 ** (-draw / (draws + 1))):
                # not the cached one, which is of the unshifted grid
                found.append(Judge(self.bundle).references(produced)[1])
        return found

    @cached_property
    def _directions(self) -> Results:
        call, exact = self.bundle.calls[-1], self.exact[self.result]
        hidden = [n for c in self.bundle.calls[:-1] for n in c.results if ":" not in n]
        if hidden and call.operator != "logprob":
            return {f"scale of {n}": self._moved(n) for n in SCALES if n in hidden}
        if call.operator == "rms_norm" and len(self.bundle.calls) == 1:
            return {"eps": norm_eps_direction(exact, self._stream, call.attributes["eps"])}
        if call.operator == "attention":
            return {"softmax scale": self._moved(call.tensors["q"])}
        if call.operator == "add":
            delta = self.bundle.inputs[call.tensors["delta"]].double()
            return {added_share(self.result): delta}
        if call.operator == "logprob":
            return {
                "logit scale": self._moved(call.tensors["logits"]),
                "offset": torch.ones_like(exact),
            }
        return {}

    @cached_property
    def _units(self) -> dict[str, float]:
        return {"eps": norm_eps_unit(self._stream)} if "eps" in self._directions else {}

    @cached_property
    def _noise(self) -> torch.Tensor | None:
        """Rounding of a log-prob, which is that of its logits: [row, 1]; None for all else."""
        call = self.bundle.calls[-1]
        if call.operator != "logprob":
            return None
        logits = program.value(self.bundle, call.tensors["logits"])
        targets = self.bundle.inputs[call.tensors["targets"]].long()
        own = logits.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
        given = program.only_scores(self.bundle)
        head = None if given else self.bundle.calls[-2]
        noise = logprob_noise(
            [logits],
            own,
            self.exact[self.result],
            self.low[self.result],
            "float32" if given else self.bundle.dtype,
            hidden=0 if head is None else self.bundle.weights[head.tensors["weight"]].shape[1],
        )
        return noise[:, None]

    @property
    def _stream(self) -> torch.Tensor:
        call = self.bundle.calls[0]
        stream = self.bundle.inputs[call.tensors["x"]].double()
        residual = call.tensors.get("residual")
        return stream if residual is None else stream + self.bundle.inputs[residual].double()

    def _moved(self, name: str) -> torch.Tensor:
        """Derivative of the output by the scale of a tensor on the way to it."""
        moved = program.exact(self.bundle, {name: lambda values: values.double() * (1 + STEP)})
        return (moved[self.result] - self.exact[self.result]) / STEP


def _two_dims(values: torch.Tensor) -> torch.Tensor:
    """View [row] as [row, 1]."""
    return values[:, None] if values.ndim == 1 else values
