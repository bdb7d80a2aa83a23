"""`emberline rm NAME`: deletes a model from the cache."""

from __future__ import annotations

import argparse

from emberline.cli.list import format_size
from emberline.core.config import cache_dir
from emberline.hub.cached_models import remove_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="Model, as emberline list or emberline pull names it.")


def run(args: argparse.Namespace) -> int:
    for name in args.names:
        model = remove_model(name, cache_dir())
        print(f"Removed {model.name}: {format_size(model.num_bytes)}")
    return 0
