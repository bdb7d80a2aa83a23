"""Measures speculative decoding as clients see it: a new `emberline serve` for each method, and requests over HTTP.

The first pass is reported as cold, since it begins with the first request after the start, and the last pass as warm.
Every pass has other prompts of the set, so that no answer can be drafted from an earlier answer to the same prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import EmberlineServer
from emberline.bench.speculation import GRAMMARS, PROMPT_SETS, SpeculationPlan
from emberline.core.errors import EmberlineError, InvalidRequest

SERVED_NAME = "model"
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class HTTPPass:
    """One pass: a part of the requests of a prompt set, sent to one server."""

    seconds: float
    traces: list[RequestTrace]

    @property
    def tokens_per_second(self) -> float:
        return sum(trace.tokens for trace in self.traces) / self.seconds

    @property
    def ttft_ms(self) -> float:
        """The median time to the first token."""
        first = sorted(trace.event_times[0] - trace.sent for trace in self.traces if trace.event_times)
        return 1e3 * first[len(first) // 2]


def bench(model: str, plan: SpeculationPlan, device: str) -> BenchReport:
    """Run the benchmark for every set, concurrency and method, with the prompts divided among `plan.rounds` passes."""
    if constrained := set(plan.sets) & set(GRAMMARS):
        raise InvalidRequest(f"sets has {min(constrained)}, which is not measured over HTTP", param="--sets")
    report = BenchReport("speculation-http")
    report.config = {"model": model, "device": device, "prompts": plan.prompts, "max_tokens": plan.max_tokens}
    report.config |= {"max_draft": plan.max_draft, "rounds": plan.rounds}
    sets = {name: PROMPT_SETS[name](plan.prompts) for name in plan.sets}  # before any server is started
    ready: dict[str, float] = {}
    with TemporaryDirectory() as directory:
        for name, texts in sets.items():
            passes = [texts[i :: plan.rounds] for i in range(plan.rounds)]
            for streams in plan.streams:
                measured = {}
                for method in ("off", *(method for method in plan.methods if method != "off")):
                    options = [model, "--served-name", SERVED_NAME, "--device", device]
                    options += ["--speculate", method, "--max-draft", str(plan.max_draft)]
                    with EmberlineServer(options, Path(directory) / "server.log") as server:
                        ready[method] = server.ready_seconds
                        measured[method] = [_run_pass(server.url, prompts, streams, plan) for prompts in passes]
                _add_results(report, f"{name}_{streams}", measured)
    report.config["ready_s"] = ready
    return report


def _run_pass(url: str, prompts: Sequence[str], streams: int, plan: SpeculationPlan) -> HTTPPass:
    return asyncio.run(_send(url, prompts, streams, plan.max_tokens))


async def _send(url: str, prompts: Sequence[str], streams: int, max_tokens: int) -> HTTPPass:
    client, todo = CompletionClient(url, SERVED_NAME, chat=True), iter(prompts)

    async def run_client() -> list[RequestTrace]:
        return [await asyncio.wait_for(client.complete(text, max_tokens), REQUEST_TIMEOUT_S) for text in todo]

    began = time.perf_counter()
    done = await asyncio.gather(*(run_client() for _ in range(streams)))
    seconds = time.perf_counter() - began
    client.close()
    traces = [trace for part in done for trace in part]
    if failed := [trace.error for trace in traces if trace.error is not None]:
        raise EmberlineError(f"{len(failed)} of {len(traces)} requests of the benchmark failed: {failed[0]}")
    return HTTPPass(seconds, traces)


def _add_results(report: BenchReport, prefix: str, measured: dict[str, list[HTTPPass]]) -> None:
    plain = measured["off"]
    for key, passes in measured.items():
        method = key.partition(":")[0]
        for name, position in (("cold", 0), ("warm", -1)):
            rate, base = passes[position].tokens_per_second, plain[position].tokens_per_second
            report.add(f"http_{prefix}_{method}_{name}", rate, "tok/s")
            report.add(f"http_{prefix}_{method}_{name}_ttft", passes[position].ttft_ms, "ms")
            if method != "off":
                report.add(f"http_{prefix}_{method}_{name}_speedup", rate / base, "x")
