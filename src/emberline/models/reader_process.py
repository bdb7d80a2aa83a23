"""The child process of a ChildProcessReader: reads chunks, which the parent copies from its memory.

    stdin     a line of JSON settings, an empty line to start reading, then the numbers of buffers given back
    stdout    a line with the address of PROBE_BYTES, for a test read; then a line for each chunk: file number, offset,
              buffer number, buffer address, seconds spent reading and bytes read by direct I/O so far; an error is last

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
from emberline.models.direct_io import DirectIOFile, FileChunk
from emberline.models.reader import FileReader

NO_TIMEOUT_S = 86400.0  # the parent has its own timeouts
PARENT_CHECK_INTERVAL_S = 1.0
INPUT, OUTPUT = 0, 1
PROBE_BYTES = b"Can you see this?"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    lines = _read_lines(os.getppid())
    probe = ctypes.create_string_buffer(PROBE_BYTES)
    _write_line([ctypes.addressof(probe)])
    try:
        settings = json.loads(next(lines))
        next(lines)
    except (ValueError, StopIteration):
        os._exit(1)
    lent: dict[int, tuple[FileReader, FileChunk]] = {}  # chunks that the parent has not given back, by buffer number
    threading.Thread(target=_run_reader, args=(settings, lent), daemon=True).start()
    for line in lines:
        reader, chunk = lent.pop(int(line))
        reader.release_chunk(chunk)
    os._exit(0)


def _run_reader(settings: dict[str, Any], lent_chunks: dict[int, tuple[FileReader, FileChunk]]) -> None:
    try:
        _send_chunks(settings, lent_chunks)
    except ModelError as e:
        _write_line({"file": isinstance(e, ModelFileError), "message": e.message, "hint": e.hint})
    except BaseException as e:
        _write_line({"file": False, "message": f"reading the weights failed: {type(e).__name__}: {e}", "hint": None})


def _send_chunks(settings: dict[str, Any], lent_chunks: dict[int, tuple[FileReader, FileChunk]]) -> None:
    files = [DirectIOFile(Path(path), size=size, max_read_bytes=settings["step"]) for path, size in settings["files"]]
    numbers = {file.path: number for number, file in enumerate(files)}
    reader = FileReader(
        files, threads=settings["threads"], chunk_bytes=settings["piece"], ring=settings["buffers"], read_ahead_bytes=0
    )
    reader.start_threads()
    while (chunk := reader.next_chunk(NO_TIMEOUT_S)) is not None:
        lent_chunks[chunk.buffer.number] = reader, chunk
        stats = reader.stats
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk.buffer.memory))
        location = [numbers[chunk.file], chunk.offset, chunk.buffer.number, address]
        _write_line([*location, round(stats.seconds, 4), stats.direct_bytes])


def _read_lines(parent: int) -> Iterator[bytes]:
    """Yield the lines of stdin until it is closed or the parent process has ended."""
    rest = b""
    while True:
        if not select.select([INPUT], [], [], PARENT_CHECK_INTERVAL_S)[0]:
            if os.getppid() != parent:
                return
            continue
        data = os.read(INPUT, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _write_line(value: object) -> None:
    data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    try:
        while data:
            data = data[os.write(OUTPUT, data) :]
    except OSError:
        os._exit(1)  # the parent is gone
