"""`emberline unweight WHAT`: stores weights in fewer bytes, and restores them bit for bit."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.cli.interrupt import interrupt_on_termination
from emberline.core.output_file import check_output_file
from emberline.hub.progress import DownloadProgress
from emberline.hub.source import ALIASES, resolve_model

if TYPE_CHECKING:
    from emberline.unweight.codec import WeightCodec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    source = f"{', '.join(ALIASES)}, hf:org/name[:Q4_K_M], a directory or a .gguf file"
    for name, help_ in (
        ("pack", "Write a packed copy of a model."),
        ("unpack", "Restore the original, byte for byte."),
    ):
        sub = kinds.add_parser(name, help=help_, description=help_)
        packed = "Directory of a packed model."
        sub.add_argument("source", metavar="SRC", help=f"Model: {source}." if name == "pack" else packed)
        sub.add_argument("target", metavar="DST", type=Path, help="Directory to create.")
        _add_quiet_option(sub)
    verify = kinds.add_parser("verify", help="Check a packed model against its hashes, and optionally the original.")
    verify.add_argument("source", metavar="SRC", nargs="?", help=f"Original to compare bit by bit: {source}.")
    verify.add_argument("packed", metavar="DST", help="Directory of a packed model.")
    _add_quiet_option(verify)
    info = kinds.add_parser("info", help="Show what packing saved for each tensor, compared with the entropy bound.")
    info.add_argument("packed", metavar="DST", help="Directory of a packed model.")
    info.add_argument("--svg", type=Path, metavar="FILE", help="Write the plot to this SVG file.")
    info.add_argument("--json", type=Path, metavar="FILE", help="Write the figures to this JSON file.")


def run(args: argparse.Namespace) -> int:
    interrupt_on_termination()
    return {"pack": _run_pack, "unpack": _run_unpack, "verify": _run_verify, "info": _run_info}[args.what](args)


def pack(source: Path, target: Path, shows_progress: bool) -> str:
    """Pack a model and return a summary for the user."""
    from emberline.unweight import model

    with _progress_bar_and_codec(f"pack {target.name}", source, shows_progress) as (advance, codec):
        started_at = time.perf_counter()
        left_out = model.pack_model(source, target, codec, advance)
        seconds = time.perf_counter() - started_at
    for path in left_out:
        print(f"not copied: {path}", file=sys.stderr)
    before, after = (sum(file.stat().st_size for file in model.list_weight_files(d)) for d in (source, target))
    return f"{_format_size(before)} -> {_format_size(after)} ({1 - after / before:.1%} smaller), {seconds:.1f} s"


def _run_pack(args: argparse.Namespace) -> int:
    source = resolve_model(args.source, show_progress=not args.quiet, as_safetensors=True)
    print(pack(source, args.target, not args.quiet))
    return 0


def _run_unpack(args: argparse.Namespace) -> int:
    from emberline.unweight import model

    source, started_at = resolve_model(args.source), time.perf_counter()
    with _progress_bar_and_codec(f"unpack {args.target.name}", source, not args.quiet) as (advance, codec):
        model.unpack_model(source, args.target, codec, advance)
    size = sum(file.stat().st_size for file in model.list_weight_files(args.target))
    print(f"{_format_size(size)}, {time.perf_counter() - started_at:.1f} s")
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    from emberline.unweight import model

    packed, started_at = resolve_model(args.packed), time.perf_counter()
    original = (
        None if args.source is None else resolve_model(args.source, show_progress=not args.quiet, as_safetensors=True)
    )
    with _progress_bar_and_codec("verify", packed, not args.quiet) as (advance, codec):
        problems = model.verify_model(packed, original, codec, advance)
    for problem in problems:
        print(problem, file=sys.stderr)
    result = "all tensors match their hashes" + ("" if original is None else f" and equal those of {original}")
    print(f"problems found: {len(problems)}" if problems else f"{result}, {time.perf_counter() - started_at:.1f} s")
    return 1 if problems else 0


def _run_info(args: argparse.Namespace) -> int:
    from emberline.unweight import model, savings

    check_output_file(args.svg, "--svg")
    check_output_file(args.json, "--json")
    packed = resolve_model(args.packed)
    tensor_figures = savings.measure_savings(packed)
    summary = savings.savings_as_dict(
        tensor_figures, sum(file.stat().st_size for file in model.list_weight_files(packed))
    )
    total = summary["totals"]
    print(savings.format_table(tensor_figures))
    print()
    print(savings.format_plot(tensor_figures))
    print()
    print(
        f"{total['coded']} of {total['tensors']} tensors coded, in {total['bits']:.3f} bits per weight (bound "
        f"{total['bound']:.3f}); {_format_size(total['bytes'])} -> {_format_size(total['packed_bytes'])}, "
        f"{total['saved']:.1%} saved"
    )
    if args.svg is not None:
        args.svg.write_text(savings.format_svg(tensor_figures), "utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    return 0


@contextmanager
def _progress_bar_and_codec(
    label: str, directory: Path, is_shown: bool
) -> Iterator[tuple[Callable[[int], None], WeightCodec]]:
    """Show a progress bar while weights are converted; yield its update function and the codec.

    Call the function after each converted tensor, with the tensor's unpacked size in bytes."""
    from emberline.hub.checkpoint import Checkpoint
    from emberline.kernels.cpu.library import find_library
    from emberline.unweight.codec import select_weight_codec

    total = sum(info.logical_bytes for info in Checkpoint.open(directory).tensors.values())
    codec = select_weight_codec(find_library())
    if is_shown and codec.name != "native":
        print("the native codec could not be built, so this is slow (hint: run emberline doctor)", file=sys.stderr)
    shown = DownloadProgress(label, total, is_shown)
    try:
        yield shown.add_bytes, codec
    finally:
        shown.close()


def _add_quiet_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="Show no progress on stderr.")


def _format_size(byte_count: int) -> str:
    return f"{byte_count / 1e9:.2f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:.1f} MB"
