"""Arguments and run of `emberline bench churn`."""

from __future__ import annotations

import argparse

from emberline.cli.bench_options import add_logs_option, add_model_argument, choose_log_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--minutes", type=float, default=30.0, help="Duration in minutes.")
    parser.add_argument(
        "--load",
        type=float,
        default=0.8,
        help="Request rate as a share, 0 to 1, of the measured maximum of the cluster.",
    )
    parser.add_argument("--calibration", type=float, default=60.0, help="Seconds to measure that maximum.")
    parser.add_argument(
        "--pause", type=float, nargs=2, default=[20.0, 40.0], help="Minimum and maximum seconds between two restarts."
    )
    parser.add_argument("--cases", type=int, default=48, help="Number of different requests with a known answer.")
    parser.add_argument("--prefill", type=int, default=1, help="Number of workers that compute prompts for others.")
    parser.add_argument("--decode", type=int, default=3, help="Number of decode workers; the first is never restarted.")
    parser.add_argument("--deadline", type=float, default=120.0, help="Time limit of a request in seconds.")
    parser.add_argument("--kv-memory", default="96M", help="KV cache of each worker in bytes.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")
    add_logs_option(parser)


def run(args: argparse.Namespace) -> int:
    from emberline.chaos import churn

    names = ("load", "calibration", "pause", "cases", "prefill", "decode", "deadline", "kv_memory", "seed")
    plan = churn.ChurnPlan(60 * args.minutes, *(getattr(args, name) for name in names))
    report = churn.run_churn_bench(args.model, plan, choose_log_dir(args), lambda what: print(what, flush=True))
    report.print_and_save(args.json, args.commit)
    failure_counts = ("errors_during_a_restart", "errors_unexplained", "wrong", "hung", "unrecovered", "leaked")
    return 1 if any(report.results[name].value for name in failure_counts) else 0
