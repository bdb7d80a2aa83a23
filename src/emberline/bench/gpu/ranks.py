"""`python -m emberline.bench.gpu.ranks`: checks that engines on several ranks, which share one GPU, generate the same
tokens as an engine on one rank.

The model is a small Llama with random weights, computed in float32, so that rounding is smaller than the differences
between logits. Ranks of one GPU take turns: their times say nothing about several GPUs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from emberline.bench import report as reports
from emberline.bench.gpu.model import LLAMA_8B, write_checkpoint
from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.loaded_engine import LoadedEngine

MODEL = LLAMA_8B | {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16}
MODEL |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768}
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cuda", "kv_tokens": 32768, "max_context": 2048}
SETTINGS |= {"max_running": 32, "max_batch_tokens": 512}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_gloo": {"tp": 2, "collectives": "gloo"},
}


def make_requests(count: int, max_tokens: int, seed: int) -> list[Submission]:
    """Return requests. Half of them share a prefix, and half of them are sampled randomly instead of greedily."""
    rng = random.Random(seed)
    shared = [rng.randrange(MODEL["vocab_size"]) for _ in range(200)]
    requests = []
    for i in range(count):
        own = [rng.randrange(MODEL["vocab_size"]) for _ in range(rng.randrange(1, 700))]
        temperature = float(i // 2 % 2)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True)
        requests.append(Submission(f"r{i}", shared + own if i % 2 else own, params))
    return requests


def generate(engine: Engine, requests: list[Submission]) -> tuple[dict[str, list[int]], float]:
    """Return the tokens of each request, and the median seconds of a step."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    seconds = []
    while not engine.idle:
        began = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - began)
        for output in outputs:
            tokens[output.id] += output.tokens
    return tokens, median(seconds)


def measure(report: reports.BenchReport, requests: list[Submission], names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_checkpoint(directory, MODEL, shards=1)
        one = boot(EngineConfig.build(folder, **SETTINGS)).engine
        expected, seconds = generate(one, requests)
        one.close()
        report.add("one_rank_step_ms", 1e3 * seconds, "ms")
        for name in names:
            _compare(report, name, _boot_ranks(folder, LAYOUTS[name]), requests, expected)


def _boot_ranks(folder: str, layout: dict[str, Any]) -> LoadedEngine:
    config = EngineConfig.build(folder, **SETTINGS | layout)
    return boot(config.with_settings(ranks_per_gpu=config.parallel.num_ranks))


def _compare(
    report: reports.BenchReport,
    name: str,
    loaded: LoadedEngine,
    requests: list[Submission],
    expected: dict[str, list[int]],
) -> None:
    """Run the requests twice, the second time with cached prefixes, and count those with unexpected tokens.

    Requests with random sampling are counted separately, since rounding can change which token is sampled."""
    print(f"layout started: name={name}", file=sys.stderr, flush=True)
    try:
        runs = [generate(loaded.engine, requests) for _ in range(2)]
    finally:
        loaded.engine.close()
    for counted, is_drawn in (("mismatches", False), ("drawn_mismatches", True)):
        compared = [each.id for each in requests if bool(each.params.temperature) == is_drawn]
        wrong = sum(tokens[request] != expected[request] for tokens, _ in runs for request in compared)
        report.add(f"{name}_{counted}", float(wrong), "count")
    report.add(f"{name}_tokens", float(sum(map(len, expected.values())) * len(runs)), "count")
    report.add(f"{name}_step_ms", 1e3 * runs[1][1], "ms")
    report.add(f"{name}_start_s", sum(loaded.seconds.values()), "s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="(default: all)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    described = {"model": MODEL, "settings": SETTINGS, "layouts": {name: LAYOUTS[name] for name in args.layouts}}
    described |= {"requests": args.requests, "max_tokens": args.max_tokens, "seed": args.seed}
    report = reports.BenchReport("gpu-ranks", described)
    measure(report, make_requests(args.requests, args.max_tokens, args.seed), args.layouts)
    report.print_and_save(args.json, args.commit)
    return 1 if any(report.results[f"{name}_mismatches"].value for name in args.layouts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
