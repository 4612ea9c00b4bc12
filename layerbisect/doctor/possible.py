"""What can be done here: which engines can be captured, and whose kernels can be replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from layerbisect.doctor.check import Check


def captures(packages: Mapping[str, Check], plugin: Check) -> tuple[Check, ...]:
    """Say which captures are possible with these packages."""
    transformers = _needs(
        "transformers model",
        packages,
        ("torch", "transformers"),
        "`layerbisect capture`, or in Python",
    )
    sglang = _needs(
        "SGLang server", packages, ("torch", "sglang"), "start it with LAYERBISECT_CAPTURE=DIR"
    )
    if _usable(sglang) and plugin.state != "ok":
        sglang = Check(sglang.name, plugin.state, "the plugin is not in place", plugin.advice)
    megatron = _needs(
        "Megatron-core job",
        packages,
        ("torch", "megatron-core"),
        "`with layerbisect.capture(model, DIR)` on every rank, or the hook of miles and slime",
    )
    return transformers, megatron, sglang


def replays(packages: Mapping[str, Check], kind: str) -> tuple[Check, ...]:
    """Say whose kernels `layerbisect replay` can run here.

    ``kind`` is the GPU's, "cuda", "hip" or "" for none.
    """
    return tuple(_replays(packages, kind))


def _replays(packages: Mapping[str, Check], kind: str) -> Iterator[Check]:
    interpreted = "" if kind else "on the CPU, under Triton's interpreter"
    yield _needs("torch", packages, ("torch",), "on the GPU and the CPU" if kind else "on the CPU")
    yield _needs(
        "layerbisect's Triton", packages, ("torch", "triton"), interpreted or "on the GPU", kind
    )
    yield _needs(
        "SGLang",
        packages,
        ("torch", "sglang"),
        "on the GPU" if kind else f"its torch forms, and its Triton kernels {interpreted}",
        kind,
    )
    for name, title, kinds in (
        ("aiter", "aiter", ("hip",)),
        ("transformer-engine", "TransformerEngine", ("cuda", "hip")),
        ("flash-attn", "flash-attn", ("cuda", "hip")),
    ):
        check = _needs(title, packages, ("torch", name), "on the GPU", kind)
        if _usable(check) and kind not in kinds:
            wanted = "an AMD GPU" if kinds == ("hip",) else "a GPU"
            check = Check(title, "missing", f"needs {wanted}", "replay on a machine that has one")
        yield check


def _needs(
    name: str, packages: Mapping[str, Check], wanted: tuple[str, ...], how: str, kind: str = ""
) -> Check:
    lacking = [packages[one] for one in wanted if not _usable(packages[one])]
    if lacking:
        return Check(name, lacking[0].state, f"needs {lacking[0].name}", lacking[0].advice)
    return Check(name, "ok", "possible", how, tried=not kind)


def _usable(check: Check) -> bool:
    return check.state in ("ok", "note")
