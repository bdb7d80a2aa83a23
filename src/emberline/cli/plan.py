"""`emberline plan`: how many GPUs serve a model within latency targets, and in which topology."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from emberline.cli.options import parse_comma_list
from emberline.core.output_file import check_output_file
from emberline.engine.gpu_set import GPU_MODELS
from emberline.planner.measured_figures import START_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help="The model: the path of a config.json, a directory or a name. Weights are not needed.",
    )
    parser.add_argument(
        "--gpu", required=True, help=f"The GPU: {', '.join(map(str.lower, GPU_MODELS))}. All but h200 are computed."
    )
    parser.add_argument(
        "--traffic",
        required=True,
        metavar="FILE|FIELDS",
        help="Requests per second and mean tokens, such as rate=8,in=4096,out=256. Further fields: spread (sigma of"
        " log-normal lengths), prefix (share of a prompt that other prompts begin with too). Or the path of a trace.",
    )
    parser.add_argument("--slo", required=True, help="Limits of latencies, such as ttft_p90=500ms,itl_p90=50ms.")
    parser.add_argument("--max-gpus", type=int, help="Most GPUs to use. (default: no limit)")
    parser.add_argument(
        "--weights",
        type=_parse_weight_names,
        default=(),
        metavar="NAME,...",
        help="Weight formats to consider, such as plain,packed. (default: all that fit)",
    )
    parser.add_argument(
        "--link",
        default="tcp",
        help="Link between prefill and decode workers: tcp or cuda (one machine), as measured, or a number of GB/s.",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=float,
        help="Also consider speculative decoding with an EAGLE-3 head that gives a request this many tokens per step, 1"
        " to 5. (default: speculative decoding is not considered)",
    )
    parser.add_argument(
        "--gpu-price", type=float, help="Price of one GPU for an hour. (default: GPU-hours are shown instead of costs)"
    )
    parser.add_argument(
        "--start-seconds",
        type=float,
        help=f"Seconds that a worker takes to start. (default: {START_S:.1f}, measured with Llama-3.1-8B)",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the simulated requests.")
    parser.add_argument(
        "--accuracy",
        type=Path,
        metavar="FILE",
        help="Measured errors of the simulator, from `emberline bench sim-accuracy --json FILE`. (default:"
        " benchmarks/results/sim-accuracy.json)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the plan as JSON.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write the plan as a page with plots.")


def _parse_weight_names(text: str) -> tuple[str, ...]:
    names = parse_comma_list(text)
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no weight format (hint: write plain,packed)")
    return names


def run(args: argparse.Namespace) -> int:
    from emberline.cli.doctor_plan import read_model_config
    from emberline.core.slo import LatencyTargets
    from emberline.planner.accuracy import SimulationError
    from emberline.planner.fleet_plan import PlanSettings, plan_fleet
    from emberline.planner.gpu_speeds import find_gpu_speed
    from emberline.planner.kv_handoff import HandoffLink
    from emberline.planner.plan_page import write_page
    from emberline.planner.plan_report import report_plan
    from emberline.planner.plan_table import format_plan
    from emberline.planner.topology import PlanningTask
    from emberline.planner.traffic import Traffic

    check_output_file(args.json, "--json")
    check_output_file(args.html, "--html")
    settings = PlanSettings(
        model=args.model,
        gpu=find_gpu_speed(args.gpu),
        weights=args.weights,
        tokens_per_step=args.tokens_per_step,
        gpu_price=args.gpu_price,
        start_seconds=args.start_seconds,
        seed=args.seed,
    )
    task = PlanningTask(
        Traffic.parse(args.traffic, args.seed),
        LatencyTargets.parse(args.slo),
        HandoffLink.parse(args.link),
        args.max_gpus,
    )
    accuracy = SimulationError.read(args.accuracy)
    report = report_plan(plan_fleet(read_model_config(args.model), settings, task, accuracy))
    print("\n".join(format_plan(report)))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if args.html is not None:
        write_page(report, args.html)
    return 0
