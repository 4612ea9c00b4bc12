"""What forms in the attention function are made with: its call, its mask, more keys, its sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from layerbisect.captures.attention_seam import replaced
from layerbisect.captures.errors import LayerBisectError

if TYPE_CHECKING:
    import torch

    from scripts.planted.fault import Form


@dataclass(frozen=True, slots=True)
class Attention:
    """One call of an engine's attention function.

    ``q`` [batch, head, row, channel]; ``k`` and ``v`` [batch, kv head, key, channel], all keys of
    the KV cache with them; ``mask`` as the engine made it: additive, bool, or None; ``scaling`` of
    the scores; ``function`` computes it as the engine does.
    """

    function: Callable[[Attention], torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scaling: float

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.k.shape[2]

    @property
    def decodes(self) -> bool:
        """Whether it is one new token over a longer cache."""
        return self.q.shape[2] == 1 < self.keys

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row, int64 [row]."""
        import torch

        return torch.arange(self.keys - self.q.shape[2], self.keys, device=self.q.device)

    def own(self, **changes: Any) -> torch.Tensor:
        """The engine's own context [batch, row, head, channel], with some arguments changed."""
        return self.function(replace(self, **changes) if changes else self)

    def allowed(self) -> torch.Tensor:
        """Which keys each row sees, bool [batch or 1, 1, row, key]."""
        import torch

        if self.mask is None:
            keys = torch.arange(self.keys, device=self.q.device)
            return (keys <= self.positions[:, None])[None, None]
        return self.mask if self.mask.dtype == torch.bool else self.mask >= 0

    def seeing(self, allowed: torch.Tensor) -> torch.Tensor:
        """The context where each row sees other keys; the engine's own bits where they are alike.

        ``allowed`` is bool and broadcasts to [batch, head, row, key].
        """
        if bool((allowed == self.allowed()).all()):
            return self.own()
        return self.own(mask=_additive(self.q, allowed))

    def with_keys(self, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The context with further keys that every row sees.

        ``k`` and ``v`` are [batch, kv head, more, channel]; ``added`` [head or 1, more] is added to
        their scores.
        """
        import torch

        mask = _additive(self.q, self.allowed())
        mask = mask.expand(-1, len(added), -1, -1)
        more = added.to(mask)[None, :, None].expand(len(mask), -1, mask.shape[2], -1)
        return self.own(
            k=torch.cat((self.k, k), 2),
            v=torch.cat((self.v, v), 2),
            mask=torch.cat((mask, more), 3),
        )

    def scores(self) -> torch.Tensor:
        """Scaled scores float32 [batch, head, row, key], minus infinity where a key is hidden."""
        scores = self.q.float() @ self._repeated(self.k).mT * self.scaling
        return scores.masked_fill(~self.allowed(), float("-inf"))

    def summed(self, weights: torch.Tensor, keys: slice = slice(None)) -> torch.Tensor:
        """Values summed by float32 ``weights`` [batch, head, row, key], as a context in float32."""
        return (weights @ self._repeated(self.v)[:, :, keys]).transpose(1, 2)

    def parts(self, starts: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The context of the keys from each start to the next alone, in float32.

        With the log-sum-exps of their scores, [part, batch, row, head, 1].
        """
        import torch

        contexts, sizes, whole = [], [], self.scores()
        for start, stop in zip(starts, [*starts[1:], self.keys], strict=True):
            scores = whole[..., start:stop]
            # a row that sees none of a part has no softmax there
            contexts.append(self.summed(scores.softmax(-1).nan_to_num(0.0), slice(start, stop)))
            sizes.append(scores.logsumexp(-1).transpose(1, 2)[..., None])
        return contexts, torch.stack(sizes)

    def _repeated(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.float().repeat_interleave(self.q.shape[1] // heads.shape[1], 1)


def _additive(q: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    import torch

    mask = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    return mask.masked_fill(~allowed, torch.finfo(q.dtype).min)


Change = Callable[[Attention], "torch.Tensor"]


def at_attention(
    change: Change,
    *,
    when: Literal["always", "decode", "prefill"] = "always",
    needs: Callable[[Any], str] = lambda config: "",
) -> Form:
    """Make the form in which one layer's context is what ``change`` gives.

    Args:
        change: from a call to the context, in the engine's dtype.
        when: calls that have the fault; ``decode`` are those of one token over a longer cache.
        needs: from the model's configuration to why it cannot have the fault, "" where it can.
    """

    def form(model: Any, layer: int) -> AbstractContextManager[None]:
        implementation = model.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            raise LayerBisectError(
                f"this fault needs attention that takes a mask, not {implementation!r}; "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
        if lacking := needs(model.config):
            raise LayerBisectError(lacking)

        def call(inner: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> Any:
            def function(a: Attention) -> torch.Tensor:
                context: torch.Tensor
                given = rest | {"scaling": a.scaling}
                context, _ = inner(module, a.q, a.k, a.v, a.mask, **given)
                return context

            attention = Attention(function, q, k, v, mask, rest["scaling"])
            if when != "always" and attention.decodes != (when == "decode"):
                return inner(module, q, k, v, mask, **rest)
            return change(attention).to(q.dtype), None

        return replaced(model.model.layers[layer].self_attn, call)

    return form


def shared_kv_heads(config: Any) -> str:
    """Why a model whose KV heads are not shared cannot have a fault of sharing them."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads == kv_heads:
        return f"this fault needs KV heads that are shared; the model has {heads} of either"
    return ""


def several_kv_heads(config: Any) -> str:
    """Why a model with one KV head cannot have a fault of their order."""
    one = config.num_key_value_heads == 1
    return "this fault needs several KV heads; the model has one" if one else ""
