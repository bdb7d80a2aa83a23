"""`emberline pull NAME`: downloads a model into the cache and prints its directory."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

from emberline.cli.interrupt import interrupt_on_termination
from emberline.core.config import cache_dir
from emberline.hub.source import ALIASES, resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ALIASES)
    parser.add_argument(
        "name",
        nargs="?",
        default=ALIASES[0],
        help=f"Model: {known}, a short name such as qwen3-0.6b, hf:org/name[:Q4_K_M], a directory or a .gguf file."
        f" (default: {ALIASES[0]})",
    )
    parser.add_argument(
        "--revision", help="Branch, tag or commit of an hf: model. (default: the repository's default branch)"
    )
    parser.add_argument(
        "--unweight", action="store_true", help="Pack the weights losslessly, and print the packed model's directory."
    )
    parser.add_argument("--quiet", action="store_true", help="Show no progress on stderr.")


def run(args: argparse.Namespace) -> int:
    interrupt_on_termination()
    directory = resolve_model(
        args.name, revision=args.revision, show_progress=not args.quiet, as_safetensors=args.unweight
    )
    if args.unweight:
        from emberline.cli.unweight import pack

        target = _packed_directory(args.name, directory)
        if not target.is_dir():
            print(pack(directory, target, shows_progress=not args.quiet), file=sys.stderr)
        directory = target
    print(directory)
    return 0


def _packed_directory(name: str, model: Path) -> Path:
    """Return the directory for the packed copy of a model.

    Its name depends on the model's files, so a changed model gets a new directory."""
    from emberline.unweight.model import iter_copied_files, list_weight_files

    stats = [(file.resolve(), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in list_weight_files(model)]
    others = [
        (file.relative_to(model), hashlib.sha256(file.read_bytes()).digest()) for file in iter_copied_files(model)
    ]
    key = hashlib.sha256(repr((stats, sorted(others))).encode()).hexdigest()[:12]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name.removeprefix("hf:")).strip("-.")[-80:]
    return cache_dir() / "unweight" / f"{slug}-{key}"
