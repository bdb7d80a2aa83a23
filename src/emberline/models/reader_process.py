"""The process that reads for a ChildReader: an ordinary Reader, whose pieces our parent copies out of our memory.

    our input    a line of orders, an empty line when it is time, then the numbers of buffers given back
    our output   a line with the address of HELLO, to try; then one for each piece: which file, offset, buffer, the
                 buffer's address, seconds spent and bytes read directly by then; an error is the last line

It ends with its parent: when its input does, or when another process has become its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelError, ModelFileError
from emberline.models.reader import File, Piece, Reader

DAY = 86400.0  # our parent has the deadlines
LOOK = 1.0  # seconds between looks whether it is still there
INPUT, OUTPUT = 0, 1
HELLO = b"Can you see this?"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for our parent
    lines = _lines(os.getppid())
    hello = ctypes.create_string_buffer(HELLO)
    _say([ctypes.addressof(hello)])
    try:
        orders = json.loads(next(lines))
        next(lines)
    except (ValueError, StopIteration):
        os._exit(1)
    out: dict[int, tuple[Reader, Piece]] = {}
    threading.Thread(target=_serve, args=(orders, out), daemon=True).start()
    for line in lines:
        reader, piece = out.pop(int(line))
        reader.give_back(piece)
    os._exit(0)


def _serve(orders: dict[str, Any], out: dict[int, tuple[Reader, Piece]]) -> None:
    try:
        _read(orders, out)
    except ModelError as e:
        _say({"file": isinstance(e, ModelFileError), "message": e.message, "hint": e.hint})
    except BaseException as e:
        _say({"file": False, "message": f"reading the weights failed: {type(e).__name__}: {e}", "hint": None})


def _read(orders: dict[str, Any], out: dict[int, tuple[Reader, Piece]]) -> None:
    files = [File(Path(path), size=size, step=orders["step"]) for path, size in orders["files"]]
    numbers = {file.path: number for number, file in enumerate(files)}
    reader = Reader(files, threads=orders["threads"], piece=orders["piece"], ring=orders["buffers"], ahead=0)
    reader.begin()
    while (piece := reader.take(DAY)) is not None:
        out[piece.buffer.number] = reader, piece
        stats = reader.stats
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece.buffer.memory))
        where = [numbers[piece.file], piece.offset, piece.buffer.number, address]
        _say([*where, round(stats.seconds, 4), stats.direct_bytes])


def _lines(parent: int) -> Iterator[bytes]:
    """Of our input, until it ends or our parent has."""
    rest = b""
    while True:
        if not select.select([INPUT], [], [], LOOK)[0]:
            if os.getppid() != parent:
                return
            continue
        data = os.read(INPUT, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _say(what: object) -> None:
    data = json.dumps(what, separators=(",", ":")).encode() + b"\n"
    try:
        while data:
            data = data[os.write(OUTPUT, data) :]
    except OSError:
        os._exit(1)  # nobody listens
