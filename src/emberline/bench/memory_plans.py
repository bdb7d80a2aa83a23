"""`python -m emberline.bench.memory_plans`: plans large models on several GPUs, from config files.

The results are what `emberline doctor --gpus` calculates. The error of such plans is taken from result files of
`python -m emberline.bench.gpu engine`, which compare the plan of one GPU with the memory that is used."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberline.bench import report as reports
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelError
from emberline.core.jsonfile import read_object
from emberline.engine.gpu_plan import plan_gpus
from emberline.engine.gpu_set import GPUSet

GIB = 1 << 30
SMALL_STEPS: dict[str, Any] = {"max_running": 64, "max_batch_tokens": 2048}


@dataclass(frozen=True, slots=True)
class PlanCase:
    name: str
    config_file: str
    gpus: str
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, where they are not the defaults


CASES = (
    PlanCase("scout_2xh200", "llama-4-scout-17b-16e.json", "2xH200"),
    PlanCase("scout_2xh200_packed", "llama-4-scout-17b-16e.json", "2xH200", {"weights": "packed"}),
    PlanCase("kimi_8xh100_large_steps", "kimi-k2.5.json", "8xH100"),
    PlanCase("kimi_8xh100", "kimi-k2.5.json", "8xH100", SMALL_STEPS),
    PlanCase("kimi_8xh100_packed", "kimi-k2.5.json", "8xH100", {**SMALL_STEPS, "weights": "packed"}),
)


def add_case(report: reports.BenchReport, case: PlanCase, configs: Path) -> None:
    """Add the results of a case. If the model does not fit, its KV cache is reported as 0 GiB."""
    settings = EngineConfig.build("", **case.settings).with_gpu_defaults()
    gpus = GPUSet.parse(case.gpus)
    report.config[case.name] = {"config": case.config_file, "gpus": case.gpus, "settings": case.settings}
    unplanned = gpus.count * gpus.memory_bytes * (1 - settings.gpu.gpu_memory_utilization) / GIB
    report.add(f"{case.name}_margin_gib", unplanned, "GiB")
    try:
        plan = plan_gpus(read_object(configs / case.config_file), gpus, settings)
    except ModelError as e:
        report.config[case.name]["error"] = e.message
        report.add(f"{case.name}_kv_gib", 0, "GiB")
        return
    best = plan.best
    report.config[case.name]["kv_sharing"] = best.sharing
    report.add(f"{case.name}_weights_gib", sum(share.num_bytes for share in plan.weights) / GIB, "GiB")
    report.add(f"{case.name}_kv_gib", best.total_kv_bytes / GIB, "GiB")
    report.add(f"{case.name}_kv_tokens", best.kv_tokens, "tokens")
    report.add(f"{case.name}_ungrouped_tokens", best.ungrouped_tokens, "tokens")
    for other in plan.plans:
        if other is not best:
            name = other.sharing.replace(" ", "_").replace("-", "_")
            report.add(f"{case.name}_kv_tokens_{name}", other.kv_tokens, "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=Path("benchmarks/configs"), help="directory of config files")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="result files with a plan_error")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    report = reports.BenchReport("memory-plans", {"measured": [file.name for file in args.measured]})
    if args.measured:
        errors = [float(read_object(file)["results"]["plan_error"]["value"]) for file in args.measured]
        report.add("plan_error_max", max(errors), "%")
    for case in CASES:
        add_case(report, case, args.configs)
    report.print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
