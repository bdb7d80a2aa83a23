"""Measures speculative decoding of an 8B model with an EAGLE-3 head, both with random weights, on one GPU.

The target model always generates a known next token (SuccessorWeights). The head computes its drafted tokens like a
trained head, but then they are replaced by the right tokens with given probabilities. So the acceptance length is
fixed, everything else is as in production, and every output is checked.

The probabilities depend on the position of a token in its draft. By default they are those of vLLM's
`synthetic_acceptance_length`: as many of the first tokens as possible are always accepted, and the last ones never.
With `--set acceptance=geometric`, they are equal at all positions, so that requests need different numbers of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emberline.bench import workload
from emberline.bench.gpu.engine import MAX_WAITING, SETTINGS
from emberline.bench.gpu.job_run import CONFIG, VOCAB, make_submission
from emberline.bench.gpu.limits import H200 as LIMITS
from emberline.bench.gpu.limits import compute_token_cost
from emberline.bench.gpu.model import LLAMA_8B, HeadWeights, SuccessorWeights
from emberline.bench.machine_limits import TokenCost
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.engine.speculation.drafter import Drafter
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.eagle3 import Eagle3Head
from emberline.models.eagle3_config import Eagle3Config, default_captured_layers
from emberline.models.forward import ForwardBatch

if TYPE_CHECKING:
    from emberline.engine.engine import Engine
    from emberline.engine.gpu.boot import BootedGPUEngine

BATCHES = (1, 8, 32, 64)
MAX_DRAFT, ACCEPTANCE_LENGTH = 4, 3.08  # what the same measurement of vLLM uses
# For each position in a draft, the probability that its token is right if all tokens before it are right. The
# acceptance length is 1 + p1 + p1 * p2 + p1 * p2 * p3 + ..
ACCEPTANCE = {"first": (1.0, 1.0, 0.08, 0.0), "geometric": (0.755, 0.755, 0.755, 0.755)}
DRAFT_VOCAB = 32_000
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 129
ROUNDS = 3
BENCH_SETTINGS = SETTINGS | {"max_running": 512, "max_batch_tokens": 16_384, "max_context": 16_384}
TIMEOUT_S = 60.0
# vLLM 0.26.0 on the same machine, with the same acceptance length
VLLM_MS = {1: 2.26, 8: 2.54, 32: 3.15, 64: 4.57}


class KnownAcceptance:
    """A draft model that computes tokens as usual, but then replaces them by right ones with given probabilities."""

    def __init__(self, head: Eagle3Head, probabilities: Sequence[float]) -> None:
        """`probabilities`: how likely the token at each position is right if all before it are right."""
        self._head = head
        self._probabilities = probabilities
        self._place = 0  # of the next token in its draft
        generator = torch.Generator(device="cuda").manual_seed(3)
        self._random = torch.rand(head.config.vocab, generator=generator, device="cuda")  # of each token

    @property
    def config(self) -> ModelConfig:
        return self._head.config

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return self._head.captured_layers

    @property
    def weight_bytes(self) -> int:
        return self._head.weight_bytes

    def combine(self, captured: Tensor) -> Tensor:
        self._place = 0  # every draft begins with this call
        return self._head.combine(captured)

    def forward(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        tokens, states = self._head.forward(batch, hidden)
        inputs = batch.tokens if batch.logit_rows is None else batch.tokens[batch.logit_rows]
        is_right = self._random[inputs] < self._probabilities[self._place]
        self._place += 1
        following = (inputs + 1) % self.config.vocab
        # A wrong token is the one that the head computed, or a different one if that happens to be right.
        wrong = torch.where(tokens == following, (tokens + 1) % self.config.vocab, tokens)
        return torch.where(is_right, following, wrong), states


def make_head(target: DecoderModel, *, packed: bool = False, acceptance: str = "first") -> KnownAcceptance:
    """Return a draft head of which a known share of drafted tokens is accepted.

    `packed`: whether to compress its weights. `acceptance`: the key in ACCEPTANCE of the probabilities with which the
    first, second, third and fourth token of a draft are accepted."""
    config = Eagle3Config(
        ModelConfig.from_hf({**LLAMA_8B, "num_hidden_layers": 1}),
        DRAFT_VOCAB,
        default_captured_layers(target.config.layers),
        norm_before_residual=False,
    )
    weights = HeadWeights("cuda", torch.bfloat16, seed=7, packed=packed)
    head = Eagle3Head.load(config, weights, target.context, target.embedding)
    return KnownAcceptance(replace(head, weight_bytes=weights.loaded_bytes), ACCEPTANCE[acceptance])


def boot_engine(settings: dict[str, Any], acceptance: str = "first") -> BootedGPUEngine:
    from emberline.engine.gpu.boot import boot_gpu

    weights = SuccessorWeights("cuda", torch.bfloat16, packed=settings.get("weights") == "packed")
    chosen = {"max_waiting": MAX_WAITING, "max_draft": MAX_DRAFT, "speculate": "eagle3:random", **settings}
    config = EngineConfig.build("", **chosen).with_gpu_defaults()
    load_draft = partial(make_head, packed=weights.packed, acceptance=acceptance)
    return boot_gpu(CONFIG, weights, context=settings["max_context"], settings=config, load_draft=load_draft)


def make_drafter(settings: dict[str, Any], *, adaptive: bool = False) -> Drafter:
    """Return a drafter with which all drafted tokens are verified, or if `adaptive` only as many as save time."""
    max_draft = settings.get("max_draft", MAX_DRAFT)
    return Drafter(
        *([], max_draft),
        max_rows=settings["max_running"],
        adaptive=adaptive,
        uses_draft_model=True,
        continues_on_device=True,
    )


def measure(
    report: BenchReport, settings: dict[str, Any] | None = None, batches: Sequence[int] = BATCHES, rounds: int = 0
) -> None:
    """Measure the milliseconds per token at several batch sizes, and add them to the report.

    Names of results begin with `off_` (without drafts), `fixed_` (every step verifies all drafted tokens, as in vLLM)
    or `spec_` (a step verifies as many drafted tokens as save time, as the engine does in production)."""
    chosen = BENCH_SETTINGS | (settings or {})
    acceptance, rounds = str(chosen.pop("acceptance", "first")), rounds or ROUNDS
    booted = boot_engine(chosen, acceptance)
    name = {"packed": "packed", "both": "both"}.get(str(chosen.get("weights")), "plain")
    engine, cost = booted.engine, compute_token_cost(chosen)
    drafters = {"off": None, "fixed": make_drafter(chosen), "spec": make_drafter(chosen, adaptive=True)}
    assert booted.runner.draft_model is not None
    report.config |= {
        "settings": chosen,
        "max_draft": chosen.get("max_draft", MAX_DRAFT),
        "acceptance": ACCEPTANCE[acceptance],
        "head_bytes": booted.runner.draft_model.weight_bytes,
        "rounds": rounds,
    }
    for batch in batches:
        for kind, drafter in drafters.items():
            engine.scheduler.drafter = drafter
            times, steps = [], 0
            for tokens in (1, OUTPUT_TOKENS, OUTPUT_TOKENS):  # the same steps twice, until all are captured
                run_batch(engine, batch, tokens)
            for _ in range(rounds):
                short, _ = run_batch(engine, batch, 1)
                long, steps = run_batch(engine, batch, OUTPUT_TOKENS)
                times.append(1e3 * (long - short) / (OUTPUT_TOKENS - 1))
            if drafter is None:
                report.add(f"{kind}_{name}_b{batch}_ms", times, "ms a token")
                continue
            limit = min_token_ms(batch, cost, report.config["head_bytes"])
            report.add(f"{kind}_{name}_b{batch}_ms", times, "ms a token", peer=VLLM_MS.get(batch), limit=limit)
            report.add(f"{kind}_{name}_b{batch}_tokens_per_step", (OUTPUT_TOKENS - 1) / (steps - 1), "tokens")


def min_token_ms(batch: int, cost: TokenCost, head_bytes: int) -> float:
    """Return the shortest possible time per token in milliseconds, with drafts and the given acceptance length.

    The limit of a step is the time to read all weights, keys and values once, and the head's weights once for each
    drafted token, or the time of the arithmetic for all verified tokens, whichever is longer."""
    context = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    read = cost.weight_bytes + batch * context * cost.kv_bytes + MAX_DRAFT * head_bytes
    rows = batch * (1 + MAX_DRAFT)
    arithmetic = rows / cost.max_prefill_rate(LIMITS, max(rows, PROMPT_TOKENS))
    return 1e3 * max(read / LIMITS.bandwidth, arithmetic) / ACCEPTANCE_LENGTH


def run_batch(engine: Engine, batch: int, max_tokens: int, seed: int = 0) -> tuple[float, int]:
    """Complete `batch` prompts at the same time and check the outputs. Return the seconds and the number of steps."""
    job = workload.make_job([(PROMPT_TOKENS, max_tokens)] * batch, VOCAB - PROMPT_TOKENS, seed)
    submissions = [make_submission(f"{time.perf_counter_ns()}-{i}", p, max_tokens) for i, p in enumerate(job.prompts)]
    outputs: dict[str, list[int]] = {s.id: [] for s in submissions}
    steps, began = engine.stats().step, time.perf_counter()
    for submission in submissions:
        engine.add(submission)
    while not engine.idle:
        for output in engine.step():
            outputs[output.id].extend(output.tokens)
        if time.perf_counter() - began > TIMEOUT_S:
            raise EmberlineError(f"the batch took more than {TIMEOUT_S:g} s", hint="use fewer requests")
    seconds = time.perf_counter() - began
    for submission in submissions:
        last = submission.prompt[-1]
        expected = [(last + 1 + i) % CONFIG.vocab for i in range(max_tokens)]
        if outputs[submission.id] != expected:
            wrong = next(i for i, (a, b) in enumerate(zip(outputs[submission.id], expected, strict=False)) if a != b)
            raise EmberlineError(f"the output of a request is wrong from token {wrong} on", hint="report this as a bug")
    return seconds, engine.stats().step - steps
