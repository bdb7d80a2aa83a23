"""ShiftedClock: makes `time.time` wrong in one process and its children, without changing the system's clock.

A `sitecustomize` module on the PYTHONPATH of that process adds an offset to `time.time`. The module reads the offset
from a memory-mapped file, so that it can change while the process runs."""

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

    def set_offset(self, offset_s: float) -> None:
        """Set the seconds, positive or negative, by which the process's clock differs from the real time."""
        self._offset[:8] = struct.pack("<d", offset_s)
