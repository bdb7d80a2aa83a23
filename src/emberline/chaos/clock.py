"""ShiftedClock: shifts `time.time` in one process and its children, not the system's clock.

A `sitecustomize` module on the process's PYTHONPATH adds an offset that a memory-mapped file holds."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

PATCH = """import mmap, struct, time
with open({file!r}, "rb") as _file:
    _ahead = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + struct.unpack("<d", _ahead[:8])[0]
time.time_ns = lambda: _time_ns() + int(1e9 * struct.unpack("<d", _ahead[:8])[0])
"""


class MovedClock:
    """The clock of one process and its children."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True)
        self.path = home  # for PYTHONPATH
        file = home / "ahead"
        file.write_bytes(bytes(8))
        (home / "sitecustomize.py").write_text(PATCH.format(file=str(file)))
        with file.open("r+b") as opened:
            self._ahead = mmap.mmap(opened.fileno(), 8)

    def move(self, seconds: float) -> None:
        """Set the offset to the real time, positive or negative."""
        self._ahead[:8] = struct.pack("<d", seconds)
