"""Builds the H200's cost tables of the simulator from result files: python -m emberline.bench.cost_tables.

It prints the content of sim/cost_tables.json. A test compares that file with the result files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from emberline.core.step_costs import MeasuredStep, StepCostData, count_prompt_pairs

DECODE_CONTEXT = 640  # mean context of a decode measurement: 512 prompt tokens, and half of 256 output tokens
LLAMA_8B_LAYERS = 32
KERNELS = "h200-kernels.json"
# Batch size at which the attention kernel's time per token of context is read: large enough for its full speed.
KERNEL_ROWS = 256
KERNEL_PROMPT = 8192  # prompt length at which the attention kernel's time per pair of tokens is read


@dataclass(frozen=True, slots=True)
class ShapeAttention:
    """The bytes that the attention of a model's shape reads, and the operations that it computes."""

    kv_bytes: int  # of one token
    pair_flops: float  # of one query with one key, in all layers and heads


# FLOPs: 2 for each multiplication and addition of query with key and of weight with value, all heads and layers.
ATTENTION = {
    "llama-8b": ShapeAttention(131_072, 4 * 128 * 32 * 32),
    "qwen3-30b-a3b": ShapeAttention(98_304, 4 * 128 * 32 * 48),
    "deepseek-v2-lite": ShapeAttention(31_104, 2 * (192 + 128) * 16 * 27),
}


@dataclass(frozen=True, slots=True)
class TableSource:
    """The source of one cost table: a result file, and the prefixes of the results' names in this file."""

    shape: str
    weights: str
    file: str
    decode: str  # before _b1_ms
    prefill: str  # before _2048_ms
    memory: tuple[str, ...]  # keys of the memory plan in the file's config; empty: it has none
    notes: str = ""
    outdated: tuple[str, ...] = ()  # results of steps that today's engine computes in another way: left out


ENGINE = ("parts", "engine", "memory")
SOURCES = (
    TableSource("llama-8b", "plain", "h200-engine.json", "decode", "prefill", ENGINE),
    TableSource("llama-8b", "both", "h200-engine-both.json", "decode", "prefill", ENGINE),
    TableSource("llama-8b", "fp8", "h200-fp8.json", "fp8", "fp8_prefill", ENGINE),
    TableSource(
        "qwen3-30b-a3b",
        "plain",
        "h200-moe.json",
        "moe_bf16",
        "moe_bf16_prefill",
        (),
        "balanced routing of experts",
    ),
    TableSource(
        "qwen3-30b-a3b",
        "packed",
        "h200-moe.json",
        "moe_uw12",
        "moe_uw12_prefill",
        ("parts", "uw12", "engine", "memory"),
        "balanced routing of experts",
    ),
    TableSource(
        "deepseek-v2-lite",
        "plain",
        "h200-mla.json",
        "mla_balanced_decode",
        "mla_balanced_prefill",
        ("balanced", "engine", "memory"),
        "balanced routing of experts",
        outdated=("mla_balanced_prefill_2048_ms",),  # measured before such steps were captured
    ),
)


def build_h200_tables(results_dir: Path) -> list[StepCostData]:
    kernels = _read_results(results_dir / KERNELS)["results"]
    read = 1e-6 * kernels[f"decode b={KERNEL_ROWS}"]["value"] * LLAMA_8B_LAYERS / (KERNEL_ROWS * DECODE_CONTEXT)
    pair = 1e-3 * kernels[f"prefill_{KERNEL_PROMPT}"]["value"] * LLAMA_8B_LAYERS / count_prompt_pairs(0, KERNEL_PROMPT)
    return [_build_table(source, results_dir, read, pair) for source in SOURCES]


def _build_table(source: TableSource, results_dir: Path, read: float, pair: float) -> StepCostData:
    """Build one cost table.

    `read`, `pair`: the seconds that a step of Llama 3.1 8B takes for each token of context whose keys and values it
    reads, and for each pair of a prompt token and a token that it attends to."""
    document = _read_results(results_dir / source.file)
    measured = _measured_steps(source, document["results"])
    attention, base = ATTENTION[source.shape], ATTENTION["llama-8b"]
    memory: Mapping[str, Any] = document["config"]
    for key in source.memory:
        memory = memory[key]
    notes = source.notes
    if source.outdated:
        notes += f"; without {', '.join(source.outdated)}, which an earlier engine computed in another way"
    if source.shape != "llama-8b":
        notes += "; attention is projected from Llama 3.1 8B's by its bytes and FLOPs"
    return StepCostData(
        gpu="h200",
        shape=source.shape,
        weights=source.weights,
        sources=[source.file, KERNELS],
        measured=measured,
        context_seconds=_round(read * attention.kv_bytes / base.kv_bytes),
        pair_seconds=_round(pair * attention.pair_flops / base.pair_flops),
        kv_bytes_per_token=attention.kv_bytes,
        kv_tokens=memory["kv_tokens"] if source.memory else 0,
        plans_ahead=True,
        notes=notes,
    )


def _measured_steps(source: TableSource, results: Mapping[str, Any]) -> list[MeasuredStep]:
    found = []
    for name, result in results.items():
        if name in source.outdated:
            continue
        if match := re.fullmatch(rf"{source.decode}_b(\d+)_ms", name):
            found.append(MeasuredStep(_ms(result), rows=int(match[1]), context=DECODE_CONTEXT, result=name))
        elif match := re.fullmatch(rf"{source.prefill}_(\d+)_ms", name):
            found.append(MeasuredStep(_ms(result), prompt=int(match[1]), result=name))
    return found


def _ms(result: Mapping[str, Any]) -> float:
    return _round(1e-3 * result["value"])


def _round(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def _read_results(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


def encode_tables(tables: list[StepCostData]) -> str:
    return json.dumps([asdict(table) for table in tables], indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the H200's cost tables of the simulator as JSON.")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="directory of the result files"
    )
    sys.stdout.write(encode_tables(build_h200_tables(parser.parse_args().results)))


if __name__ == "__main__":
    main()
