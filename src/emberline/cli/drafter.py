"""`emberline drafter train MODEL --out DIR`: trains a drafter for speculative decoding from the model's own output."""

from __future__ import annotations

import argparse
from pathlib import Path

from emberline.cli.interrupt import interrupt_on_termination
from emberline.cli.options import add_options, explicit_options
from emberline.core.engine_config import DEVICES
from emberline.drafter.settings import TrainingSettings
from emberline.hub.source import resolve_model

DEFAULT_SAVE_STEPS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    help_ = "Train an EAGLE-3 head from the model's own output. A run that was interrupted is continued."
    train = kinds.add_parser("train", help=help_, description=help_)
    train.add_argument(
        "model", metavar="MODEL", help="Model: smollm2, hf:org/name[:Q4_K_M], a directory or a .gguf file."
    )
    train.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="Directory for the drafter, its data and its state."
    )
    add_options(train, TrainingSettings())
    train.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="Device that computes; auto: a GPU that can be used, otherwise the CPU.",
    )
    train.add_argument(
        "--save-steps", type=int, default=DEFAULT_SAVE_STEPS, metavar="N", help="Steps between two saves of the state."
    )
    train.add_argument("--dry-run", action="store_true", help="Print the plan, and train nothing.")
    train.add_argument("--quiet", action="store_true", help="Show no progress on stderr.")


def run(args: argparse.Namespace) -> int:
    from emberline.core.engine_config import EngineConfig
    from emberline.core.errors import InvalidRequest
    from emberline.drafter.plan import TrainingPlan
    from emberline.drafter.run_directory import RunDirectory
    from emberline.engine.boot import runs_on_gpu

    interrupt_on_termination()
    if args.save_steps < 1:
        raise InvalidRequest(f"save_steps is {args.save_steps}; it must be at least 1", param="save_steps")
    run_directory = RunDirectory(args.out)
    model = resolve_model(args.model, show_progress=not args.quiet)
    on_gpu = runs_on_gpu(EngineConfig.build(str(model), device=args.device))
    plan = TrainingPlan.make(model, run_directory, explicit_options(args, TrainingSettings), on_gpu=on_gpu)
    if args.dry_run:
        print(plan.describe())
        return 0
    from emberline.drafter.progress import TrainingProgress
    from emberline.drafter.report import format_report
    from emberline.drafter.training import train_drafter

    progress = TrainingProgress(enabled=not args.quiet)
    report = train_drafter(args.model, plan, run_directory, progress, args.save_steps)
    print(format_report(report))
    print(args.out)
    return 0
