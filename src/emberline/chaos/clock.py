"""ShiftedClock: shifts `time.time` in one process and its children, not the system's clock.

A `sitecustomize` module on the process's PYTHONPATH adds an offset that a memory-mapped file holds."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

SITECUSTOMIZE_TEMPLATE = """import mmap, struct, time
with open({file!r}, "rb") as _file:
    _ahead = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + struct.unpack("<d", _ahead[:8])[0]
time.time_ns = lambda: _time_ns() + int(1e9 * struct.unpack("<d", _ahead[:8])[0])
"""


class ShiftedClock:
    """Shifts the wall clock that one process and its children see."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.path = directory  # for PYTHONPATH
        file = directory / "ahead"
        file.write_bytes(bytes(8))
        (directory / "sitecustomize.py").write_text(SITECUSTOMIZE_TEMPLATE.format(file=str(file)))
        with file.open("r+b") as opened:
            self._offset = mmap.mmap(opened.fileno(), 8)

    def shift(self, seconds: float) -> None:
        """Set the offset to the real time, positive or negative."""
        self._offset[:8] = struct.pack("<d", seconds)
