"""choose_layout: the settings with which a model should be served on a set of GPUs, and why.

This module needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from emberline.engine.gpu_plan import GPUPlan, GPUSetPlan

MIN_GAIN = 1.25  # data-parallel attention must hold so many times the tokens, since it slows down single requests
GIB = 1 << 30


class LayoutChoice(NamedTuple):
    settings: str  # options of `emberline serve`
    reason: str  # a sentence


def choose_layout(plan: GPUSetPlan) -> LayoutChoice | None:
    """Return the settings with which to serve the model; None on one GPU, or if no choice fits.

    The choices are tensor parallelism and data-parallel attention: the engine does not have context parallelism."""
    plans = {each.sharing: each for each in plan.plans}
    divided, own = plans.get("tensor parallel"), plans.get("data-parallel attention")
    if plan.plans[0].gpus.count == 1 or (divided is None and own is None):
        return None
    if divided is None:
        assert own is not None
        return LayoutChoice(
            _settings(own), f"tensor parallelism alone does not fit: {plan.rejected['tensor parallel']}"
        )
    if own is not None and own.kv_tokens >= MIN_GAIN * divided.kv_tokens:
        times = own.kv_tokens / max(1, divided.kv_tokens)
        reason = f"the KV caches hold {own.kv_tokens} tokens, {times:.1f} times as many as with {_settings(divided)}"
        return LayoutChoice(_settings(own), f"{reason}, which keeps {_name_copies(plan)} on every GPU")
    return LayoutChoice(_settings(divided), _why_divided(plan, divided, own))


def _why_divided(plan: GPUSetPlan, divided: GPUPlan, own: GPUPlan | None) -> str:
    attention = sum(share.num_bytes for share in plan.weights if share.kind == "attention") / GIB
    if own is not None:
        gain = f"{own.kv_tokens / divided.kv_tokens:.2f} times as many tokens"
        return f"with --dp-attention the KV caches would hold {gain}, and a single request would be slower"
    if "data-parallel attention" in plan.rejected:
        needs = (
            f"--dp-attention needs the attention of all heads, {attention:.1f} GiB, on every GPU, which does not fit"
        )
        return f"{needs}; so {_name_copies(plan)} are kept {divided.gpus.count} times"
    return "the GPUs divide the KV heads evenly, so --dp-attention would hold no more tokens"


def _name_copies(plan: GPUSetPlan) -> str:
    return (
        "the latents of all requests" if any(group.kind == "latent" for group in plan.groups) else "copies of KV heads"
    )


def _settings(plan: GPUPlan) -> str:
    experts = f" --ep {plan.expert_groups}" if plan.expert_groups > 1 else ""
    return f"--tp {plan.gpus.count}{experts}" + (" --dp-attention" if plan.sharing == "data-parallel attention" else "")
