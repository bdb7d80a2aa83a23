"""`emberline list`: shows the models in the cache, and with --all those that have a short name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import datetime

from emberline.core.config import cache_dir
from emberline.hub.cached_models import list_cached_models
from emberline.hub.catalogue import load_catalogue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="Also show the models with a short name that are not in the cache."
    )


def run(args: argparse.Namespace) -> int:
    cached = list_cached_models(cache_dir())
    rows = [
        (model.name, format_size(model.num_bytes), f"{datetime.fromtimestamp(model.changed_at):%Y-%m-%d}")
        for model in cached
    ]
    print_table(("NAME", "SIZE", "CHANGED"), rows)
    if not rows:
        print(f"No models in {cache_dir()}. emberline pull NAME downloads one; emberline list --all shows names.")
    if args.all:
        print()
        print_table(("SHORT NAME", "DOWNLOAD", "ON A GPU", "CONTEXT", "LICENCE", "MODEL"), list(_list_entries()))
        print("\nSizes are approximate. NAME:safetensors is the model for a GPU.")
    return 0


def _list_entries() -> Iterator[tuple[str, ...]]:
    for entry in load_catalogue().values():
        sizes = (f"{entry.download_gb:.1f} GB", f"{entry.full_gb:.1f} GB")
        yield (entry.name, *sizes, f"{entry.context}", entry.licence, entry.source)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def format_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
