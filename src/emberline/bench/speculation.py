"""Measures speculative decoding: tokens per second and per step, with each method and without drafts.

The prompts run in alternating rounds with and without drafts, and the outputs of both are compared: on a CPU they must
be equal; on a GPU logits may differ in their last bits, and the number of completions that differ is reported."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.bench import speculation_prompts
from emberline.bench.report import BenchReport
from emberline.core.engine_config import SpeculationConfig
from emberline.core.errors import EmberlineError, UnsupportedModel
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import Submission
from emberline.engine.llm import LLM
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.kernels.cpu.library import find_library

PROMPT_SETS = {
    "edits": speculation_prompts.make_edits,
    "chat": speculation_prompts.make_questions,
    "calls": speculation_prompts.make_tool_requests,
}
ENGINE_SETTINGS = {"prefix_cache": False, "kv_memory": 4 << 30}  # several engines share the memory of a device
GRAMMARS = {"calls": GrammarSpec("json_schema", json.dumps(speculation_prompts.TOOL_CALL_SCHEMA))}  # of the output


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    sets: Sequence[str]  # keys of PROMPT_SETS
    methods: Sequence[str]  # values of --speculate; "off" is always measured
    streams: Sequence[int]  # requests at the same time
    prompts: int
    max_tokens: int
    max_draft: int
    rounds: int


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """The measurements of completing all prompts of a set once with one method."""

    seconds: float
    steps: int
    drafted: int
    accepted: int
    outputs: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


def bench(model: str, plan: SpeculationPlan, **settings: object) -> BenchReport:
    """Run the benchmark. `settings`: further settings of the engine.

    All methods without a draft model use the same engine; each method with a draft model has an engine of its own. Each
    engine alternates between rounds with its methods and rounds without drafts."""
    report = BenchReport("speculation")
    report.config = {"model": model, "prompts": plan.prompts, "max_tokens": plan.max_tokens, **settings}
    report.config |= {"max_draft": plan.max_draft, "rounds": plan.rounds}
    shared = [method for method in plan.methods if ":" not in method and method != "off"]
    for methods in filter(None, [shared, *([method] for method in plan.methods if ":" in method)]):
        chosen = {"speculate": methods[0], "max_draft": plan.max_draft, **ENGINE_SETTINGS, **settings}
        with LLM(model, **chosen) as llm:
            report.config["kernels"] = llm.loaded.kernels
            for name in plan.sets:
                prompts = [encode_prompt(llm, text) for text in PROMPT_SETS[name](plan.prompts)]
                for streams in plan.streams:
                    rounds = _measure(llm, prompts, streams, plan, methods, GRAMMARS.get(name))
                    _add_results(report, f"{name}_{streams}", rounds)
    return report


def encode_prompt(llm: LLM, text: str) -> list[int]:
    if llm.template is None:
        raise UnsupportedModel("the model has no chat template", hint="measure a model with one")
    return llm.tokenizer.encode(llm.template.render([{"role": "user", "content": text}]), add_special=False)


def _measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    streams: int,
    plan: SpeculationPlan,
    methods: Sequence[str],
    grammar: GrammarSpec | None,
) -> dict[str, list[SpeculationRound]]:
    rounds: dict[str, list[SpeculationRound]] = {method: [] for method in ("off", *methods)}
    for method in rounds:  # the first steps compile and capture kernels
        _run_round(llm, prompts[: 2 * streams], method, streams, plan, grammar)
    for _ in range(plan.rounds):
        for method, measured in rounds.items():
            measured.append(_run_round(llm, prompts, method, streams, plan, grammar))
    return rounds


def _run_round(
    llm: LLM,
    prompts: Sequence[list[int]],
    method: str,
    streams: int,
    plan: SpeculationPlan,
    grammar: GrammarSpec | None,
) -> SpeculationRound:
    """Complete all prompts with one method. Its drafter is new, so it cannot draft from outputs of earlier rounds."""
    engine = llm.engine
    config = SpeculationConfig(method, plan.max_draft)
    on_gpu = llm.loaded.device == "cuda"
    max_rows = engine.config.max_running if on_gpu else None
    drafter = make_drafter(config, find_library, max_rows, continues_on_device=on_gpu)
    engine.scheduler.drafter = drafter
    outputs: dict[str, list[int]] = {}
    waiting = [(f"{method}-{i}-{time.monotonic_ns()}", prompt) for i, prompt in enumerate(prompts)]
    names = [name for name, _ in waiting]
    open_ids: set[str] = set()
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=0.0, grammar=grammar)
    steps, began = engine.stats().step, time.perf_counter()
    while waiting or open_ids:
        while waiting and len(open_ids) < streams:
            name, prompt = waiting.pop(0)
            engine.add(Submission(name, prompt, params, timeout=math.inf))
            open_ids.add(name)
        for output in engine.step():
            if output.error is not None:
                raise EmberlineError(f"a request of the benchmark failed: {output.error}")
            outputs.setdefault(output.id, []).extend(output.tokens)
            if output.finish is not None:
                open_ids.discard(output.id)
    seconds = time.perf_counter() - began
    counts = (drafter.drafted_tokens, drafter.accepted_tokens) if drafter is not None else (0, 0)
    return SpeculationRound(seconds, engine.stats().step - steps, *counts, [outputs[name] for name in names])


def _add_results(report: BenchReport, prefix: str, rounds: dict[str, list[SpeculationRound]]) -> None:
    expected = rounds["off"][0].outputs
    plain = [one.num_tokens / one.seconds for one in rounds["off"]]
    for key, measured in rounds.items():
        if key == "off":
            continue
        method = key.partition(":")[0]
        rates = [one.num_tokens / one.seconds for one in measured]
        report.add(f"{prefix}_{method}", rates, "tok/s", peer=sum(plain) / len(plain))
        ratios = [rate / base for rate, base in zip(rates, plain, strict=True)]
        report.add(f"{prefix}_{method}_speedup", ratios, "x")
        last = measured[-1]
        report.add(f"{prefix}_{method}_tokens_per_step", last.num_tokens / last.steps, "tokens")
        report.add(f"{prefix}_{method}_accepted", 100 * last.accepted / max(last.drafted, 1), "%")
        differing = sum(a != b for a, b in zip(last.outputs, expected, strict=True))
        report.add(f"{prefix}_{method}_differing", differing, "completions")
    if f"{prefix}_off" in report.results:
        return
    report.add(f"{prefix}_off", plain, "tok/s")
    again = rounds["off"][-1].outputs
    report.add(f"{prefix}_off_differing", sum(a != b for a, b in zip(again, expected, strict=True)), "completions")
