"""What the flags of a Megatron-core job do to a capture: those that have to be read together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from layerbisect.doctor.arguments import Settings
from layerbisect.doctor.check import Check
from layerbisect.doctor.megatron_table import RULES
from layerbisect.doctor.model import model_checks
from layerbisect.doctor.rules import Finding, apply
from layerbisect.doctor.variables import CAPTURE

_TE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
TAIL = "LAYERBISECT_TAIL"
HOOK = "layerbisect.captures.megatron.hook.before_log_prob"

_FUSED = {
    "apply_rope_fusion": ("RoPE", "--no-rope-fusion"),
    "bias_swiglu_fusion": ("SwiGLU", "--no-bias-swiglu-fusion"),
    "bias_dropout_fusion": ("dropout and add", "--no-bias-dropout-fusion"),
    "masked_softmax_fusion": ("softmax", "--no-masked-softmax-fusion"),
}


def judge_megatron(settings: Settings, environment: Mapping[str, str]) -> tuple[Finding, ...]:
    """Judge a job's flags, with the environment that its command runs in."""
    checks = (
        *_capture(settings, environment),
        *_layers(settings),
        *_dropout(settings),
        *_ranks(settings),
        *_experts(settings),
        *_context(settings, environment),
        *_fusions(settings),
        *_determinism(settings, environment),
        *model_checks(settings.get("hf_checkpoint")),
    )
    return (*(Finding(one) for one in checks), *apply(RULES, settings))


def _capture(settings: Settings, environment: Mapping[str, str]) -> Iterator[Check]:
    name = "capture"
    hook = settings.get("hook")
    if hook not in (None, HOOK):
        advice = f"--custom-megatron-before-log-prob-hook-path {HOOK}"
        yield Check(name, "problem", settings.say("hook"), advice, "this hook captures nothing")
    elif hook is None:
        advice = (
            f"in miles and slime --custom-megatron-before-log-prob-hook-path {HOOK}; elsewhere "
            "`with layerbisect.capture(model, DIR)` on every rank"
        )
        effect = "nothing is captured unless the training script does so itself"
        yield Check(name, "note", "no hook is given", advice, effect)
    elif CAPTURE not in environment:
        advice = f"""--train-env-vars '{{"{CAPTURE}": "/shared/captures/trainer"}}'"""
        effect = "the hook does nothing without it"
        yield Check(name, "problem", f"{CAPTURE} is not set", advice, effect)
    else:
        yield Check(name, "ok", "the hook is given, and where it writes")


def _layers(settings: Settings) -> Iterator[Check]:
    name = "layers"
    kind = settings.get("transformer_impl", "transformer_engine")
    if kind == "local":
        yield Check(name, "ok", "--transformer-impl local: every point is seen")
        return
    given = "transformer_impl" in settings.told
    effect = (
        "TransformerEngine fuses attn.norm, and mlp.norm of dense layers, into the linear layer "
        "after it: they are told as not seen"
    )
    advice = "--transformer-impl local shows them, with other kernels"
    found = f"{kind}{'' if given else ' by default'}"
    yield Check(name, "note", found, advice, effect, tried=False)


def _dropout(settings: Settings) -> Iterator[Check]:
    name = "dropout"
    off = [f for f in ("attention_dropout", "hidden_dropout") if _zero(settings.get(f))]
    if len(off) == 2:
        yield Check(name, "ok", "0")
        return
    said = [
        settings.say(f) if f in settings.told else f"{f} 0.1 by default"
        for f in ("attention_dropout", "hidden_dropout")
        if f not in off
    ]
    effect = (
        "off in a log-prob forward, whose model is in eval mode; a training forward is another "
        "function (docs/training.md)"
    )
    yield Check(name, "note", ", ".join(said), "--attention-dropout 0 --hidden-dropout 0", effect)


def _zero(value: object) -> bool:
    try:
        return float(str(value)) == 0
    except ValueError:
        return False


def _ranks(settings: Settings) -> Iterator[Check]:
    given = [
        f
        for f in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
        )
        if settings.number(f) > 1
    ]
    if given:
        effect = "each rank writes its part, and they are joined on reading"
        tried = all(settings.number(f) <= (4 if "tensor" in f else 2) for f in given)
        said = ", ".join(settings.say(f) for f in given)
        yield Check("parallelism", "ok", said, "", effect, tried)


def _experts(settings: Settings) -> Iterator[Check]:
    if not settings.get("num_moe_experts"):
        return
    if settings.get("moe_router_dtype") is None:
        effect = (
            "router logits are computed in the model's dtype: near ties fall to other experts than "
            "in an engine that rounds otherwise"
        )
        advice = "--moe-router-dtype fp32, and compare"
        yield Check("router dtype", "note", "no --moe-router-dtype", advice, effect, tried=False)
    kind = str(settings.get("moe_token_dispatcher_type", "allgather"))
    spread = settings.number("expert_model_parallel_size") > 1
    hidden = ""
    if kind not in ("allgather", "alltoall"):
        hidden = "mlp.expert_in and mlp.expert_out"
    elif spread:
        hidden = "mlp.expert_in" + (" and mlp.expert_out" if kind == "allgather" else "")
    if hidden:
        effect = f"{hidden} of single experts are told as not seen; the layer's own points are seen"
        found = f"the {kind} dispatcher" + (" with expert parallelism" if spread else "")
        advice = "--moe-token-dispatcher-type alltoall" if kind != "alltoall" else ""
        yield Check("experts", "note", found, advice, effect, tried=kind == "allgather")


def _context(settings: Settings, environment: Mapping[str, str]) -> Iterator[Check]:
    if settings.get("allgather_cp") and settings.number("context_parallel_size") > 1:
        effect = "the hook refuses it with context parallelism: nothing is captured"
        advice = "leave --allgather-cp out"
        yield Check("context parallel", "problem", "--allgather-cp", advice, effect)
    if settings.get("use_routing_replay") and environment.get(TAIL):
        effect = "the hook does not run the live tail with it, whose forwards would disturb it"
        advice = f"leave --use-routing-replay or {TAIL} out"
        yield Check("live tail", "problem", "--use-routing-replay", advice, effect)


def _fusions(settings: Settings) -> Iterator[Check]:
    live = [_FUSED[name] for name in _FUSED if settings.get(name) is not False]
    if live:
        effect = "where the model takes such a kernel, last bits change; no point is hidden"
        found = f"on by default: {', '.join(what for what, _ in live)}"
        advice = f"{' '.join(flag for _, flag in live)}, and compare"
        yield Check("fused kernels", "note", found, advice, effect, tried=False)
    if settings.get("gradient_accumulation_fusion") is not False:
        return
    effect = "concerns the backward alone"
    yield Check(
        "gradient accumulation", "ok", settings.say("gradient_accumulation_fusion"), "", effect
    )


def _determinism(settings: Settings, environment: Mapping[str, str]) -> Iterator[Check]:
    name = "deterministic mode"
    if not settings.get("deterministic_mode"):
        effect = "sums whose order atomics choose may differ from run to run, in MoE layers on GPUs"
        advice = "--deterministic-mode, and compare"
        yield Check(name, "note", "off", advice, effect, tried=False)
        return
    found = settings.say("deterministic_mode")
    wanted = [] if environment.get("NCCL_ALGO") else ["NCCL_ALGO=Ring"]
    if settings.get("transformer_impl") != "local" and environment.get(_TE) != "0":
        wanted.append(f"{_TE}=0")
    if wanted:
        effect = "Megatron-core 0.16 refuses to start so; 0.19 sets what is not set"
        without = " and ".join(wanted)
        yield Check(name, "note", f"{found} without {without}", without, effect, tried=False)
        return
    effect = "algorithms that repeat bit for bit: other last bits than a job without it"
    yield Check(name, "note", found, "capture with what the job runs with", effect, tried=False)
