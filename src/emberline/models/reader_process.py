"""The child process of a ChildProcessReader, which reads chunks for the parent to copy from its memory.

    stdin     a line of JSON settings, an empty line to start reading, then the numbers of buffers given back
    stdout    a line with the address of PROBE_BYTES, for a test read; then a line for each chunk: file number, offset,
              buffer number, buffer address, seconds spent reading and bytes read directly so far; an error comes last

The process exits when its parent does: when stdin is closed or its parent process changes.
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

DAY = 86400.0  # the parent has its own timeouts
LOOK = 1.0
INPUT, OUTPUT = 0, 1
HELLO = b"Can you see this?"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    lines = _lines(os.getppid())
    probe = ctypes.create_string_buffer(HELLO)
    _say([ctypes.addressof(probe)])
    try:
        settings = json.loads(next(lines))
        next(lines)
    except (ValueError, StopIteration):
        os._exit(1)
    lent: dict[int, tuple[Reader, Piece]] = {}  # chunks that the parent has not given back, by buffer number
    threading.Thread(target=_serve, args=(settings, lent), daemon=True).start()
    for line in lines:
        reader, chunk = lent.pop(int(line))
        reader.give_back(chunk)
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
    while (chunk := reader.take(DAY)) is not None:
        out[chunk.buffer.number] = reader, chunk
        stats = reader.stats
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk.buffer.memory))
        location = [numbers[chunk.file], chunk.offset, chunk.buffer.number, address]
        _say([*location, round(stats.seconds, 4), stats.direct_bytes])


def _lines(parent: int) -> Iterator[bytes]:
    """Yield the lines of stdin until it is closed or the parent process has ended."""
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
        os._exit(1)  # the parent is gone
