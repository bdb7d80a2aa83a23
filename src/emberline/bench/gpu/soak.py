"""`python -m emberline.bench.gpu.soak`: sends random requests for minutes and checks for leaks and lost requests."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any

from emberline.bench import report as reports
from emberline.bench.gpu.engine import SETTINGS, boot_engine
from emberline.bench.gpu.job_run import VOCAB
from emberline.bench.report import BenchReport
from emberline.core.errors import EmberlineError, Overloaded
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Submission
from emberline.engine.engine import Engine

REQUESTS_PER_SECOND = 20.0  # on average
ABORTED_SHARE = 0.2  # share of requests that are aborted
CHECK_INTERVAL_STEPS = 50  # steps between two checks of the block counts
# So small that requests wait.
TIGHT_SETTINGS = {"kv_tokens": 200_000, "max_running": 256, "max_batch_tokens": 4096, "prefix_cache": True}


def run_soak(engine: Engine, duration_s: float, requests_per_second: float = REQUESTS_PER_SECOND) -> dict[str, int]:
    """Send random requests to the engine and return counts of what happened.

    Raises EmberlineError if a request fails, does not end, or ends twice.
    """
    rng = random.Random(0)
    opened: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    shared = [rng.randrange(1, VOCAB) for _ in range(2048)]
    end, next_arrival, steps, refused = time.perf_counter() + duration_s, 0.0, 0, 0
    began = time.perf_counter()
    while (now := time.perf_counter()) < end or not engine.idle:
        while now < end and now - began >= next_arrival:
            next_arrival += rng.expovariate(requests_per_second)
            submission = _draw_request(rng, f"r{len(opened) + refused}", shared)
            try:
                engine.add(submission)
            except Overloaded:  # a rejected request is over at once
                refused += 1
                continue
            opened[submission.id] = submission.params.n
            if rng.random() < ABORTED_SHARE:
                engine.abort(rng.choice(list(opened)[-50:]))
        for output in engine.step():
            if output.error is not None:
                raise EmberlineError(f"request {output.id} failed: {output.error}")
            if output.finish is not None:
                ended[output.id] += 1
        steps += 1
        if steps % CHECK_INTERVAL_STEPS == 0:
            engine.kv.check_invariants()
    engine.kv.check_invariants()
    if ended != opened:
        raise EmberlineError(
            f"requests and their completions do not match: {len(opened)} requests opened, {len(ended)} ended"
        )
    leaked = engine.kv.num_blocks - engine.kv.num_free_blocks - engine.kv.num_cached_blocks
    completions = sum(ended.values())
    return {"requests": len(opened), "refused": refused, "completions": completions, "steps": steps, "leaked": leaked}


def _draw_request(rng: random.Random, request_id: str, shared_prefix: list[int]) -> Submission:
    prompt = shared_prefix[: rng.choice((0, 0, 64, 500, 1500))] + [
        rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 1200))
    ]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 300),
        n=rng.choice((1, 1, 1, 2, 4)),
        temperature=rng.choice((0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 50)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        logprobs=rng.choice((None, None, 3)),
        seed=rng.randrange(1 << 40),
        ignore_eos=True,
    )
    return Submission(request_id, prompt, params, rng.choice(list(Priority)), timeout=1e9)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.gpu.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds during which requests arrive")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    settings: dict[str, Any] = SETTINGS | TIGHT_SETTINGS
    engine = boot_engine(settings).engine
    report = BenchReport(
        "gpu-soak",
        {"settings": settings, "seconds": args.seconds, "rate": REQUESTS_PER_SECOND, "aborted": ABORTED_SHARE},
    )
    for name, count in run_soak(engine, args.seconds).items():
        report.add(name, count, "")
    report.add("preemptions", engine.scheduler.preemptions, "times")
    report.print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
