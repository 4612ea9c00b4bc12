"""What goes into the experts of a Megatron-core layer and comes out of them, by slot of each row.

The dispatcher lays rows out by expert, and for each expert by token, as the router's map has them:
so a place in that order is a slot of a row. Where it is seen depends on the dispatcher, and on
whether experts are spread over ranks (by expert parallelism, or each of them by expert tensor
parallelism):

===========  =========  ==============================  ==========================================
dispatcher   experts    mlp.expert_in                   mlp.expert_out
===========  =========  ==============================  ==========================================
allgather    here       ``mlp.experts``, in             ``mlp.experts``, out
alltoall     here       ``mlp.experts``, in             ``mlp.experts``, out
alltoall     spread     not observable                  what ``combine_postprocess`` of the
                                                        dispatcher is given, on the tokens' rank
allgather    spread     not observable                  not observable
flex         any        not observable                  not observable
===========  =========  ==============================  ==========================================

Megatron's experts weigh what they give back, between their two projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from layerbisect.captures.format import PointSeen
from layerbisect.captures.megatron.model import Chunk
from layerbisect.captures.megatron.place import Place
from layerbisect.captures.recorder import Recorder
from layerbisect.captures.wrapping import method_wrapped

if TYPE_CHECKING:
    import torch

_AWAY = "experts of other ranks are given it, which do not know whose rows they are given"
_ADDED = "the dispatcher adds the experts of several ranks up in its collective"


@contextmanager
def recorded(chunk: Chunk, place: Place, recorder: Recorder) -> Iterator[None]:
    """Let ``recorder`` see the experts of a chunk's layers, as far as they can be seen."""
    hidden = unseen(chunk, place)
    with ExitStack() as stack:
        for layer, path in chunk.layers.items():
            mlp = chunk.model.get_submodule(path).mlp
            into, out = (f"layers.{layer}.mlp.{name}" for name in ("expert_in", "expert_out"))
            wanted = [p for p in (into, out) if p in recorder.points and p not in hidden]
            if wanted and hasattr(mlp, "router"):
                for point in wanted:
                    recorder.expect(point)
                one = _LayerExperts(recorder, into, out, int(chunk.config.moe_router_topk))
                one.attach(mlp, _spread(place), stack)
        yield


def unseen(chunk: Chunk, place: Place) -> dict[str, PointSeen]:
    """Say of this chunk's expert points which cannot be seen, and why."""
    into = out = ""
    kind = str(chunk.config.moe_token_dispatcher_type)
    if getattr(chunk.config, "moe_latent_size", None):
        into = out = "the experts work in a latent space, which their rows are projected to"
    elif kind not in ("alltoall", "allgather"):
        into = out = f"the {kind} dispatcher lays rows out in kernels of its own"
    elif _spread(place):
        into, out = (_AWAY, "") if kind == "alltoall" else (_ADDED, _ADDED)
    return {
        f"layers.{layer}.mlp.{name}": PointSeen("not_observable", why)
        for layer in chunk.layers
        for name, why in (("expert_in", into), ("expert_out", out))
        if why
    }


def orders(chunk: Chunk, place: Place) -> dict[str, str]:
    """Say in which order rows go to the experts, and what comes back is added up.

    Read in the sources of Megatron-core 0.16 and 0.19; that of its expert-parallel collectives is
    not known.
    """
    import torch

    config = chunk.config
    if not config.num_moe_experts:
        return {}
    kind = str(config.moe_token_dispatcher_type)
    if kind not in ("alltoall", "allgather"):
        unknown = f"as the kernels of the {kind} dispatcher have it"
        return {"moe_dispatch_order": unknown, "moe_combine_order": unknown}
    if config.moe_permute_fusion:
        added = "in a kernel of TransformerEngine"
    elif next(chunk.model.parameters()).is_cuda and (
        not torch.are_deterministic_algorithms_enabled()
    ):
        added = "in no fixed order, by atomic additions"
    else:
        added = "by expert number"
    if kind == "allgather" and _spread(place):
        added += ", then over ranks"
    return {"moe_dispatch_order": "by expert number, then by token", "moe_combine_order": added}


def by_slot(rows: torch.Tensor, routed: torch.Tensor, slots: int) -> torch.Tensor:
    """Bring rows in the dispatcher's order to the slots of their tokens.

    Args:
        rows: [row, hidden], by expert and for each expert by token.
        routed: the router's map, bool [token, expert].
        slots: of each token; experts' numbers ascend over them.

    Returns:
        [token, slot, hidden], 0 in slots that a token does not use.

    Raises:
        ValueError: the map has another number of rows, or of slots.
    """
    expert, token = routed.T.nonzero(as_tuple=True)
    if len(rows) != len(token):
        raise ValueError(_padded(f"{len(rows)} rows where the router sends {len(token)}"))
    slot = routed.cumsum(1)[token, expert] - 1
    if len(slot) and int(slot.max()) >= slots:
        most = int(slot.max()) + 1
        raise ValueError(_padded(f"a token in {most} slots where it has {slots}"))
    placed = rows.new_zeros(len(routed), slots, rows.shape[-1])
    placed[token, slot] = rows
    return placed


class _LayerExperts:
    """Records one layer's experts; between its router and them it holds the router's map."""

    def __init__(self, recorder: Recorder, into: str, out: str, slots: int) -> None:
        self._recorder, self._into, self._out, self._slots = recorder, into, out, slots
        self._routed: torch.Tensor | None = None

    def attach(self, mlp: Any, spread: bool, stack: ExitStack) -> None:
        """Register the hooks until ``stack`` closes."""
        handles = [mlp.router.register_forward_hook(self._route)]
        if spread:
            dispatcher = mlp.token_dispatcher
            stack.enter_context(method_wrapped(dispatcher, "combine_postprocess", self._combine))
        else:
            # rows are given up as soon as they were used, where activations are offloaded
            handles.append(mlp.experts.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(mlp.experts.register_forward_hook(self._after, with_kwargs=True))
        for handle in handles:
            stack.callback(handle.remove)

    def _route(self, router: Any, args: tuple[Any, ...], output: Any) -> None:
        self._routed = None
        with self._recorder.guarded(f"the router before {self._out}"):
            if self._recorder.wants(self._into) or self._recorder.wants(self._out):
                self._routed = output[1].detach()

    def _before(self, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder.record(self._into, partial(self._permuted, args, kwargs, None))

    def _after(
        self, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._recorder.record(self._out, partial(self._permuted, args, kwargs, output[0]))
        self._routed = None

    def _combine(self, own: Callable[..., Any], rows: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.record(self._out, lambda: by_slot(rows, self._map(), self._slots))
        self._routed = None
        return own(rows, *args, **kwargs)

    def _permuted(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        names = ("permuted_local_hidden_states", "tokens_per_expert")
        given, counts = (*args, *(kwargs.get(name) for name in names[len(args) :]))[:2]
        rows = given if output is None else output
        routed = self._map()
        wanted, told = routed.sum(0).tolist(), torch.as_tensor(counts).tolist()
        if told != wanted:
            raise ValueError(_padded(f"rows {told} by expert where the router sends {wanted}"))
        return by_slot(rows, routed, self._slots)

    def _map(self) -> torch.Tensor:
        if self._routed is None:
            raise ValueError("its router was not seen: it was replayed from a CUDA graph, or fused")
        return self._routed


def _padded(given: str) -> str:
    return (
        f"the experts are given {given}, so that it is not known whose these are; capture without "
        "moe_router_padding_for_quantization and moe_pad_expert_input_to_capacity"
    )


def _spread(place: Place) -> bool:
    """Whether an expert's rows, or an expert, are on several ranks."""
    return place.expert[1] > 1 or place.expert_tensor[1] > 1
