"""What the settings of an SGLang server do to a capture: those that have to be read together."""

from __future__ import annotations

from collections.abc import Iterator

from layerbisect.doctor.arguments import Settings
from layerbisect.doctor.check import Check
from layerbisect.doctor.model import model_checks
from layerbisect.doctor.rules import Finding, apply
from layerbisect.doctor.sglang_graphs import graphs
from layerbisect.doctor.sglang_hides import HIDES
from layerbisect.doctor.sglang_numbers import NUMBERS

_STANDARD_ROUTING = ("auto", "triton")


def judge_sglang(settings: Settings, platform: str | None = None) -> tuple[Finding, ...]:
    """Judge a server's settings; ``platform`` is its SGLANG_PLATFORM, None where not known."""
    return (
        *graphs(settings),
        *_speculation(settings),
        *_lora(settings),
        *_ranks(settings),
        *_attention(settings),
        *_routing(settings),
        *_determinism(settings),
        *_fusion(settings),
        *_overlap(settings),
        *_cpu(settings, platform),
        *apply(HIDES, settings),
        *apply(NUMBERS, settings),
        *(Finding(one) for one in model_checks(settings.get("model_path"))),
        *_harmless(settings),
    )


def _speculation(settings: Settings) -> Iterator[Finding]:
    name = "speculative decoding"
    if not settings.get("speculative_algorithm"):
        return
    if settings.get("enable_return_aux_hidden_states"):
        # it then only names which states are returned
        return
    effect = (
        "passes that verify drafts hold tokens that are not in the sequence, and are not recorded: "
        "of generated tokens nothing is seen; their prefill replay is"
    )
    found = settings.say("speculative_algorithm")
    advice = "leave --speculative-algorithm out, or compare the prefill replay alone"
    check = Check(name, "problem", found, advice, effect, tried=False)
    given = tuple(f for f in settings.told if f.startswith("speculative_"))
    yield Finding(check, (), given)


def _lora(settings: Settings) -> Iterator[Finding]:
    given = [f for f in ("enable_lora", "lora_paths") if settings.get(f)]
    if given:
        effect = "the reference is computed from the checkpoint, which lacks the adapter"
        advice = "merge the adapter into the checkpoint, and serve that"
        found = ", ".join(settings.say(f) for f in given)
        check = Check("LoRA", "problem", found, advice, effect, tried=False)
        yield Finding(check, (), tuple(given))


def _ranks(settings: Settings) -> Iterator[Finding]:
    tensor, pipeline = settings.number("tp_size"), settings.number("pp_size")
    attention = settings.number("attn_dp_size")
    if attention > 1 or settings.get("enable_dp_attention"):
        field = "attn_dp_size" if attention > 1 else "enable_dp_attention"
        effect = (
            "the MLP works on other rows than attention does: all mlp points are told as not seen"
        )
        advice = "capture without it"
        check = Check("attention DP", "problem", settings.say(field), advice, effect, tried=False)
        # which counts replicas where attention is not divided
        yield Finding(check, (), ("attn_dp_size", "enable_dp_attention", "dp_size"))
    if tensor > 1:
        effect = (
            "attn.out and mlp.out are one part of a sum on each rank, and are added up on reading; "
            "the engine's own sum rounds otherwise"
        )
        tried = tensor == 2 and settings.get("device") == "cpu"
        check = Check("tensor parallel", "note", settings.say("tp_size"), "", effect, tried)
        yield Finding(check)
    if pipeline > 1:
        effect = "each stage writes its own layers"
        yield Finding(
            Check("pipeline parallel", "note", settings.say("pp_size"), "", effect, tried=False)
        )
    if settings.number("nnodes") > 1:
        effect = "every rank writes into LAYERBISECT_CAPTURE"
        advice = "name a directory that every node sees"
        check = Check("nodes", "note", settings.say("nnodes"), advice, effect, tried=False)
        yield Finding(check)


def _attention(settings: Settings) -> Iterator[Finding]:
    name = "attention kernels"
    both = settings.get("attention_backend")
    prefill = settings.get("prefill_attention_backend") or both
    decode = settings.get("decode_attention_backend") or both
    effect = "the kernel decides in which order attention sums; no point is hidden"
    if prefill != decode:
        effect = (
            "generation (A) and its prefill replay (B) run through different kernels, and differ "
            "by their rounding at least"
        )
        found = f"prefill {prefill or 'by default'}, decode {decode or 'by default'}"
        yield Finding(Check(name, "note", found, "", effect, tried=False))
    elif both is None:
        found = "no --attention-backend: SGLang chooses by GPU and model"
        advice = "name it, so that runs can be compared"
        yield Finding(Check(name, "note", found, advice, effect, tried=False))
    else:
        tried = both == "torch_native" and settings.get("device") == "cpu"
        yield Finding(Check(name, "ok", settings.say("attention_backend"), "", effect, tried))


def _routing(settings: Settings) -> Iterator[Finding]:
    runner = settings.get("moe_runner_backend")
    if runner is None or str(runner) in _STANDARD_ROUTING:
        return
    effect = (
        "experts are summed in another order; some of these kernels choose the experts themselves, "
        "and mlp.expert_ids and mlp.expert_weights are then told as not seen"
    )
    advice = "--moe-runner-backend triton, where routes are to be compared"
    found = settings.say("moe_runner_backend")
    yield Finding(Check("expert kernels", "note", found, advice, effect, tried=False))


def _determinism(settings: Settings) -> Iterator[Finding]:
    name = "deterministic mode"
    field = next(
        (f for f in ("rl_on_policy_target", "enable_deterministic_inference") if settings.get(f)),
        None,
    )
    if field is None:
        effect = (
            "a token's log-prob may change with what else is in its batch; repeats in `scores "
            "collect` measure by how much"
        )
        advice = "--enable-deterministic-inference, and compare"
        yield Finding(Check(name, "note", "off", advice, effect, tried=False))
        return
    effect = (
        "batch-invariant matmuls, norms and log-softmax, attention and sums over ranks in a fixed "
        "order: other last bits than a server without it"
    )
    advice = "capture with what the job runs with"
    if field == "rl_on_policy_target":
        effect += "; logits are rounded to bfloat16 before and after the temperature"
        advice = "the trainer has to compute log-probs the same way"
    yield Finding(Check(name, "note", settings.say(field), advice, effect, tried=False))


def _fusion(settings: Settings) -> Iterator[Finding]:
    given = [
        f
        for f in ("flashinfer_allreduce_fusion_backend", "enable_flashinfer_allreduce_fusion")
        if settings.get(f)
    ]
    if settings.get("enforce_disable_flashinfer_allreduce_fusion"):
        return
    if not given:
        if settings.whole or settings.number("tp_size") == 1 or settings.get("device") == "cpu":
            return
        if settings.get("enable_deterministic_inference") or settings.get("rl_on_policy_target"):
            return
    found = settings.say(given[0]) if given else "on by default for MoE models on H100, H200, B200"
    effect = (
        "FlashInfer sums over ranks, adds to the stream and norms in one kernel: changes last "
        "bits; the stream is read where it is kept, so no layer boundary is hidden"
    )
    advice = "--enforce-disable-flashinfer-allreduce-fusion, and compare"
    yield Finding(Check("fused all-reduce", "note", found, advice, effect, tried=False))


def _overlap(settings: Settings) -> Iterator[Finding]:
    name = "overlap schedule"
    if settings.get("disable_overlap_schedule"):
        yield Finding(Check(name, "ok", "off"))
        return
    effect = "changes no number; captures were tried without it alone"
    advice = "--disable-overlap-schedule while capturing"
    yield Finding(Check(name, "note", "on", advice, effect, tried=False))


def _cpu(settings: Settings, platform: str | None) -> Iterator[Finding]:
    if settings.get("device") != "cpu" or platform in (None, "layerbisect_cpu"):
        return
    effect = "SGLang's own CPU engine needs kernels for AMX, and was not tried"
    advice = "SGLANG_PLATFORM=layerbisect_cpu serves by torch's operators"
    check = Check("CPU", "note", f"SGLANG_PLATFORM={platform}", advice, effect, tried=False)
    yield Finding(check)


def _harmless(settings: Settings) -> Iterator[Finding]:
    if not settings.get("disable_radix_cache"):
        effect = (
            "tokens that are in the cache are not computed again, and have no rows of this request"
        )
        advice = "POST /flush_cache before, as `scores collect` does"
        yield Finding(Check("prefix cache", "ok", "on", advice, effect))
    told = [
        settings.say(f)
        for f in ("chunked_prefill_size", "enable_mixed_chunk", "disable_radix_cache")
        if f in settings.told
    ]
    if told:
        effect = "hides nothing: rows are joined by the tokens before them, however they are cut"
        yield Finding(Check("batching", "ok", ", ".join(told), "", effect))
