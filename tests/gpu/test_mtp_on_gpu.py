"""Heads for multi-token prediction on a GPU, with experts: tokens equal those without drafts, drafts those of a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_experts
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from engine_runs import run_engine
from gpu_settings import gpu_config
from mixed_sampling import make_submissions
from mtp_head import HeadByDefinition, add_tensors, head_tensors, make_counting_tensors
from recorded_drafts import record_drafts
from tiny_deepseek import LITE_SIZES, write_deepseek
from torch import Tensor

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.drafter.target import TargetStates
from emberline.engine.gpu.boot import BootedGPUEngine, boot_from_checkpoint
from emberline.engine.gpu.draft_boot import measure_draft_model
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.memory import plan_engine_memory
from emberline.engine.speculation.drafter import Drafter
from emberline.kernels import ops
from emberline.models.loader import load_decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F32, BF16 = torch.float32, torch.bfloat16
RUNNING, CONTEXT = 32, 512
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "n_shared_experts": 1}
SIZES: dict[str, Any] = tiny.GPU_SIZES | EXPERTS | {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
SIZES |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "norm_topk_prob": True}
SIZES |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
LATENT = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 64, "rope_scaling": None}
FAMILIES = ("glm", "deepseek")
LIMITS = {"max_running": RUNNING, "max_batch_tokens": 256, "max_context": CONTEXT, "kv_tokens": 16 * 1024}


def write_model(directory: Path, family: str, dtype: torch.dtype = F32, *, reads: str = "") -> Path:
    """Write a model with a head. `reads`: if given, both count, as `make_counting_tensors` describes."""
    if family == "deepseek":  # latents of float32 are small, since their kernels take long to compile
        write_deepseek(directory, "v3", **SIZES | LATENT | (LITE_SIZES if dtype is BF16 else {}))
    else:
        tiny_experts.write(directory, tiny_experts.glm4(**SIZES, attention_bias=True, use_qk_norm=True))
    config = json.loads((directory / "config.json").read_text())
    tensors = make_counting_tensors(directory, config, reads) if reads else head_tensors(config)
    add_tensors(directory, tensors, dtype=dtype)
    tokenizer_file(directory)
    return directory


def start(directory: Path, max_draft: int, dtype: torch.dtype = F32, **settings: Any) -> BootedGPUEngine:
    """Start an engine that always drafts, or never if `max_draft` is 0."""
    chosen = LIMITS | settings | ({"speculate": "mtp", "max_draft": max_draft} if max_draft else {})
    booted = boot_from_checkpoint(
        directory,
        gpu_config(**chosen),
        dtype=dtype,
        make_compiler=lambda folder, config: GrammarCompiler(folder / "tokenizer.json", config.vocab, config.eos),
    )
    if max_draft:
        limits = {"max_rows": RUNNING, "adaptive": False, "uses_draft_model": True, "continues_on_device": True}
        booted.engine.scheduler.drafter = Drafter([], max_draft, **limits)
    return booted


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_never_change_the_tokens(family: str, tmp_path: Path) -> None:
    """Greedy and sampled requests, with grammars and penalties; several requests are preempted with few blocks."""
    directory, submissions = write_model(tmp_path, family), make_submissions(2)
    plain = start(directory, 0, graphs=False, overlap=False, prefix_cache=False, max_running=1).engine
    alone: dict[str, list[int]] = {}
    for submission in submissions:
        alone |= run_engine(plain, [submission])
    for settings in ({}, {"overlap": False, "kv_tokens": 768, "block_size": 16}):
        engine = start(directory, 4, **settings).engine
        assert run_engine(engine, submissions, steps_between=1) == alone, settings
        assert engine.scheduler.drafter is not None and engine.scheduler.drafter.drafted_tokens > 100


@pytest.fixture
def reference() -> Iterator[None]:
    ops.start_backend(native=False)
    yield
    ops.start_backend()


def compute_states(directory: Path, tokens: list[int]) -> Tensor:
    """Return the hidden states of all tokens after the final norm, in float32 on the CPU."""
    model = load_decoder(directory, "float32")
    assert model.head.norm is not None
    states = TargetStates(model, (model.config.layers,), len(tokens))
    ((found, _),) = states.compute([np.array(tokens)], [range(1)])
    return ops.rms_norm(found, model.head.norm, model.config.norm_eps, torch.empty_like(found))


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_the_definition_says(family: str, tmp_path: Path, reference: None) -> None:
    """Prompts of one and of several chunks, and one whose beginning is cached; drafts of full length are captured."""
    directory = write_model(tmp_path, family)
    engine = start(directory, 4, max_batch_tokens=96).engine
    text = "some text that is quite a lot longer than a chunk of a prompt, " * 3
    prompts = {"a": encode("some text"), "b": encode(text), "c": encode(text[:140] + "other")}
    proposed: dict[str, dict[int, list[int]]] = {name: {} for name in prompts}
    record_drafts(engine, proposed)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    outputs = run_engine(engine, [Submission(name, ids, params) for name, ids in prompts.items()], steps_between=3)
    head, wrong, total = HeadByDefinition(directory), 0, 0
    for name, prompt in prompts.items():
        tokens = [*prompt, *outputs[name]]
        states = compute_states(directory, tokens)
        assert len(proposed[name]) > 20
        for known, draft in sorted(proposed[name].items())[::6]:
            if known < len(tokens):
                total += 1
                wrong += draft != head.draft(states[: known - 1], tokens[1:known], len(draft))
    assert wrong <= 0.05 * total  # where two tokens are almost equally likely, or two experts


@pytest.mark.parametrize(
    ("family", "dtype", "reads"),
    [
        ("glm", F32, "token"),
        ("deepseek", F32, "hidden state"),
        ("glm", BF16, "hidden state"),
        ("deepseek", BF16, "token"),
    ],
)
def test_a_head_that_is_right_is_accepted(family: str, dtype: torch.dtype, reads: str, tmp_path: Path) -> None:
    """Greedy and sampled requests. Chains of drafts are captured in idle time, and a request uses only those."""
    booted = start(write_model(tmp_path, family, dtype, reads=reads), 4, dtype)
    engine, runner, drafting = booted.engine, booted.runner, booted.runner._drafting
    while runner.prepare_next():
        pass
    assert drafting is not None and drafting._graphs and not runner._graphs.capture_failed
    captured = set(drafting._replays)
    for count, temperature in ((1, 0.0), (6, 0.0), (6, 0.7)):
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
        prompts = [list(range(3, 20 + 40 * i)) for i in range(count)]
        submissions = [Submission(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
        outputs = run_engine(engine, submissions, steps_between=2)
        for i, prompt in enumerate(prompts):
            assert outputs[f"r{i}"] == [(prompt[-1] + 1 + j) % VOCAB_SIZE for j in range(60)]
        if count == 1:
            assert captured and {key for key in drafting._seen if key[2] == 4} <= captured
    drafter = engine.scheduler.drafter
    assert drafter is not None and drafter.accepted_tokens >= 0.98 * drafter.drafted_tokens > 400


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_plan_counts_the_head(family: str, tmp_path: Path) -> None:
    """Its weights, its KV cache and the scratch memory of its attention, which is allocated as planned."""
    booted = start(write_model(tmp_path, family, BF16), 4, BF16)
    plan, runner, drafting = booted.plan, booted.runner, booted.runner._drafting
    assert drafting is not None
    draft, total = measure_draft_model(runner.draft_model), plan.total
    settings = gpu_config(**LIMITS, speculate="mtp", max_draft=4)
    without = plan_engine_memory(runner.model.config, settings, total, "bfloat16")
    scratch = sum(buffer.nbytes for buffer in drafting._planner.scratch_buffers())
    assert plan.scratch - without.scratch == draft.scratch_bytes(RUNNING, 5)
    assert scratch == draft.scratch_bytes(RUNNING, 5) if family == "deepseek" else scratch > 0
    assert plan.weights - without.weights == draft.weight_bytes > 0
    caches = [runner.cache, drafting.cache]
    assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == plan.kv_bytes
