"""Make a small model to work on, and say whether it behaves like one.

    python scripts/make_model.py tiny-qwen3-moe DIR
    python scripts/make_model.py tiny-qwen3-moe DIR --layers 4 --seed 7 --no-check
    python scripts/make_model.py smollm2 DIR

After writing it, the model answers a few prompts of random tokens in fp32, and a table says on
those tokens how far bf16 is from fp32, what each layer adds to the residual stream, how the experts
are used, and how sharp the attention is. The maker itself is `layerbisect.models`.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from layerbisect import models
from layerbisect.captures.errors import LayerBisectError


@dataclass(frozen=True)
class LayerHealth:
    """What one layer does.

    Attributes:
        attn_share, mlp_share: root mean square of the branch over that of the stream it joins,
            in the median over rows
        attn_entropy: of the attention weights over log(number of keys), in the mean; 1 is uniform
        expert_load: smallest and largest share of slots that an expert takes, over the fair share
        flips: share of rows whose set of experts differs between bf16 and fp32
    """

    attn_share: float
    mlp_share: float
    attn_entropy: float
    expert_load: tuple[float, float] | None
    flips: float | None


@dataclass(frozen=True)
class Health:
    """How a model behaves on its own answers (all in nat).

    Attributes:
        entropy: mean entropy of the next-token distribution
        logprob_mean, logprob_std: of the response tokens
        gap_mean, gap_max: absolute log-prob difference of the response tokens, bf16 to fp32
    """

    rows: int
    entropy: float
    logprob_mean: float
    logprob_std: float
    gap_mean: float
    gap_max: float
    layers: tuple[LayerHealth, ...]


def measure(
    directory: Path, *, sequences: int = 4, prompt: int = 16, response: int = 96, seed: int = 0
) -> Health:
    """Sample answers of the model at ``directory`` in fp32 and measure it on them."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager"
        )
        if hasattr(model.config, "num_experts"):
            model.set_experts_implementation("eager")
        return model.eval()

    exact, rounded = load(torch.float32), load(torch.bfloat16)
    vocab = exact.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        prompts = torch.randint(vocab, (sequences, prompt), generator=generator)
        tokens = exact.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=response,
            min_new_tokens=response,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        seen, attentions, logits = _watch(exact, tokens)
        seen_low, _, logits_low = _watch(rounded, tokens)

    logprobs, logprobs_low = logits.float().log_softmax(-1), logits_low.float().log_softmax(-1)
    answer = slice(prompt - 1, -1)
    picked, picked_low = (
        x[:, answer].gather(-1, tokens[:, prompt:, None])[..., 0] for x in (logprobs, logprobs_low)
    )
    gap = (picked - picked_low).abs()
    layers = [
        _layer_health(exact.config, seen[i], seen_low[i], attentions[i]) for i in sorted(seen)
    ]
    return Health(
        rows=tokens.numel(),
        entropy=-(logprobs.exp() * logprobs)[:, answer].sum(-1).mean().item(),
        logprob_mean=picked.mean().item(),
        logprob_std=picked.std().item(),
        gap_mean=gap.mean().item(),
        gap_max=gap.max().item(),
        layers=tuple(layers),
    )


def _watch(model: Any, tokens: Any) -> tuple[dict[int, dict[str, Any]], Any, Any]:
    """Run one forward and return each layer's stream, branches and expert IDs, then attention
    weights and logits."""
    seen: dict[int, dict[str, Any]] = defaultdict(dict)

    def keep(i: int, name: str, pick: Callable[[Any, Any], Any]) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[i][name] = pick(args, output)

        return hook

    handles = []
    for i, layer in enumerate(model.model.layers):
        hooks = [
            (layer.input_layernorm, "input", lambda args, _: args[0]),
            (layer.self_attn, "attn", lambda _, output: output[0]),
            (layer.post_attention_layernorm, "mid", lambda args, _: args[0]),
            (layer.mlp, "mlp", lambda _, output: output),
        ]
        if hasattr(layer.mlp, "gate"):
            hooks.append((layer.mlp.gate, "experts", lambda _, output: output[2]))
        for module, name, pick in hooks:
            handles.append(module.register_forward_hook(keep(i, name, pick)))
    try:
        result = model(tokens, output_attentions=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen, result.attentions, result.logits


def _layer_health(
    config: Any, seen: dict[str, Any], low: dict[str, Any], weights: Any
) -> LayerHealth:
    """Reduce what one layer showed; ``weights`` is [sequence, head, query, key]."""
    import torch

    def share(branch: str, stream: str) -> float:
        return float((seen[branch].norm(dim=-1) / seen[stream].norm(dim=-1)).median())

    keys = torch.arange(1, weights.shape[-1] + 1)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1) / keys.log().clamp_min(1e-9)
    load: tuple[float, float] | None = None
    flips: float | None = None
    if "experts" in seen:
        ids, ids_low = (x["experts"].sort(-1).values for x in (seen, low))
        count = torch.bincount(ids.flatten(), minlength=config.num_experts).float()
        load = ((count.min() / count.mean()).item(), (count.max() / count.mean()).item())
        flips = (ids != ids_low).any(-1).float().mean().item()
    return LayerHealth(
        attn_share=share("attn", "input"),
        mlp_share=share("mlp", "mid"),
        # the first query has one key and no entropy
        attn_entropy=entropy[..., 1:].mean().item(),
        expert_load=load,
        flips=flips,
    )


def show(health: Health, console: Console) -> None:
    """Print a table of the layers and two lines on the output."""
    table = Table("layer", "attn/stream", "mlp/stream", "attn entropy", "expert load", "flips")
    for i, layer in enumerate(health.layers):
        load = layer.expert_load
        table.add_row(
            str(i),
            f"{layer.attn_share:.3f}",
            f"{layer.mlp_share:.3f}",
            f"{layer.attn_entropy:.2f}",
            "-" if load is None else f"{load[0]:.2f} to {load[1]:.2f}",
            "-" if layer.flips is None else f"{layer.flips:.1%}",
        )
    console.print(table)
    console.print(
        f"{health.rows} rows: entropy {health.entropy:.2f} nat, log-prob of response tokens "
        f"{health.logprob_mean:.2f} ± {health.logprob_std:.2f} nat"
    )
    console.print(
        f"bf16 against fp32: mean |log-prob gap| {health.gap_mean:.4f} nat, "
        f"max {health.gap_max:.3f} nat"
    )


TINY = {"tiny-qwen3-moe": "qwen3_moe", "tiny-qwen3": "qwen3", "tiny-llama": "llama"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kind", type=click.Choice([*TINY, "smollm2"]))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
@click.option("--layers", default=16, show_default=True)
@click.option("--hidden", default=256, show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--kv-heads", default=4, show_default=True)
@click.option("--head-dim", default=32, show_default=True)
@click.option("--experts", default=16, show_default=True)
@click.option("--top-k", default=4, show_default=True)
@click.option("--vocab", default=2048, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights on disk.")
@click.option("--check/--no-check", default=True, show_default=True, help="Measure the model.")
def main(kind: str, directory: Path, check: bool, **options: Any) -> None:
    """Write a small model of KIND into the new directory DIRECTORY.

    The options count for the tiny models only; smollm2 comes as it is.
    """
    try:
        if kind == "smollm2":
            models.make_smollm2(directory)
        else:
            models.make_tiny(directory, TINY[kind], **options)
    except LayerBisectError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(f"wrote {directory}", err=True)
    if check:
        show(measure(directory), Console())


if __name__ == "__main__":
    main()
