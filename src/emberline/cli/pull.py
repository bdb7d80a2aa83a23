"""`emberline pull NAME`: bring a model into the cache and print where it is."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

from emberline.cli.interrupt import interruptible
from emberline.core.config import cache_dir
from emberline.hub.source import ALIASES, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ALIASES)
    parser.add_argument("name", nargs="?", default=ALIASES[0], help=f"{known}, hf:org/name, a directory, a .gguf")
    parser.add_argument("--revision", help="a branch, tag or commit, for hf: names")
    parser.add_argument("--unweight", action="store_true", help="then pack it losslessly, and print where that is")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    interruptible()
    place = resolve(args.name, revision=args.revision, progress=not args.quiet)
    if args.unweight:
        from emberline.cli.unweight import pack

        target = _packed_place(args.name, place)
        if not target.is_dir():
            print(pack(place, target, progress=not args.quiet), file=sys.stderr)
        place = target
    print(place)
    return 0


def _packed_place(name: str, model: Path) -> Path:
    """Beside the checkpoints; another one when the model's files change."""
    from emberline.unweight.model import copied_files, weight_files

    stats = [(file.resolve(), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in weight_files(model)]
    others = [(file.relative_to(model), hashlib.sha256(file.read_bytes()).digest()) for file in copied_files(model)]
    key = hashlib.sha256(repr((stats, sorted(others))).encode()).hexdigest()[:12]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name.removeprefix("hf:")).strip("-.")[-80:]
    return cache_dir() / "unweight" / f"{slug}-{key}"
