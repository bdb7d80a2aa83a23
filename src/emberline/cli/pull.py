"""`emberline pull NAME`: bring a model into the cache and print where it is."""

from __future__ import annotations

import argparse

from emberline.hub.source import ALIASES, resolve

HELP = "download a model into the cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ALIASES)
    parser.add_argument("name", nargs="?", default=ALIASES[0], help=f"{known}, hf:org/name, a directory, a .gguf")
    parser.add_argument("--revision", help="a branch, tag or commit, for hf: names")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    print(resolve(args.name, revision=args.revision, progress=not args.quiet))
    return 0
