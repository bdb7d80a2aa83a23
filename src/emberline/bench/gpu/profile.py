"""`python -m emberline.bench.gpu.profile`: prints the GPU time of each kernel in an engine step.

A kernel may start while the previous kernel still runs, and then waits for it. So two times are printed for each
kernel: "added" is the time from the previous kernel's end to its own end, and "whole" is the time from its own start to
its own end. The added times of all kernels sum up to the time of the step.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from emberline.bench import workload
from emberline.bench.gpu import speculation
from emberline.bench.gpu.__main__ import parse_setting
from emberline.bench.gpu.engine import PROMPT_TOKENS, SETTINGS, boot_engine
from emberline.bench.gpu.job_run import make_submission
from emberline.bench.gpu.shapes import shape_of
from emberline.engine.engine import Engine

PROFILED_STEPS = 20
PRINTED_KERNELS = 24


def profile_decode(engine: Engine, batch: int, vocab: int) -> None:
    """Print the kernel times of decode steps with `batch` requests, after a warm-up."""
    max_tokens = 4 * PROFILED_STEPS * (1 + speculation.MAX_DRAFT if engine.scheduler.drafter else 1)
    job = workload.make_job([(PROMPT_TOKENS, max_tokens)] * batch, vocab - max_tokens)
    for i, prompt in enumerate(job.prompts):
        engine.add(make_submission(f"decode-{batch}-{i}", prompt, max_tokens))
    for _ in range(2 * PROFILED_STEPS):  # prefill, and the capture of CUDA graphs
        engine.step()
    _print_profile(
        f"decode b={batch}, per step", lambda: [engine.step() for _ in range(PROFILED_STEPS)], PROFILED_STEPS
    )
    while not engine.idle:
        engine.step()


def profile_prefill(engine: Engine, tokens: int, vocab: int) -> None:
    def run_once(name: str) -> None:
        prompt = workload.make_job([(tokens, 1)], vocab).prompts[0]
        engine.add(make_submission(name, prompt, 1))
        while not engine.idle:
            engine.step()

    run_once(f"warm-{tokens}")
    _print_profile(f"prefill {tokens}", lambda: run_once(f"prefill-{tokens}"), 1)


def _print_profile(title: str, step: Callable[[], object], repeats: int) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    spans = [
        (float(event.time_range.end), float(event.time_range.start), event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    first = before = min(start for _, start, _ in spans)
    for end, start, name in sorted(spans):
        for i, value in enumerate((end - before, end - start, 1)):
            total[name][i] += value
        before = end
    print(f"{title}: {(before - first) / repeats:.0f} us from first to last")
    for name, (added, whole, count) in sorted(total.items(), key=lambda item: -item[1][0])[:PRINTED_KERNELS]:
        times = f"{added / count:8.2f} us added {whole / count:8.2f} us whole"
        print(f"  {added / repeats:9.1f} us = {count / repeats:7.1f} x {times}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.gpu.profile", description=__doc__)
    parser.add_argument("--batches", default="1,32,64,256", help="decode batch sizes, separated by commas")
    parser.add_argument("--prompts", default="2048,8192", help="prompt lengths in tokens, separated by commas")
    parser.add_argument(
        "--set", type=parse_setting, action="append", default=[], metavar="NAME=VALUE", help="as of the benchmarks"
    )
    parser.add_argument("--draft-with", choices=("plain", "packed", "both"), help="with drafts, and these weights")
    args = parser.parse_args()
    if args.draft_with is None:
        settings = SETTINGS | dict(args.set)
        engine = boot_engine(settings).engine
    else:
        settings = speculation.BENCH_SETTINGS | {"weights": args.draft_with}
        engine = speculation.boot_engine(settings).engine
        engine.scheduler.drafter = speculation.make_drafter(settings)
    vocab = shape_of(settings).prompt_vocab
    for batch in (int(b) for b in args.batches.split(",") if b):
        profile_decode(engine, batch, vocab)
    for tokens in (int(t) for t in args.prompts.split(",") if t):
        profile_prefill(engine, tokens, vocab)


if __name__ == "__main__":
    main()
