"""A wall clock that can be moved: what `time.time` says in a process that was started with this in its path. Clocks of
the system, which others look at, are left alone."""

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
    """Of one process and its children."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True)
        self.path = home  # for PYTHONPATH
        file = home / "ahead"
        file.write_bytes(bytes(8))
        (home / "sitecustomize.py").write_text(PATCH.format(file=str(file)))
        with file.open("r+b") as opened:
            self._ahead = mmap.mmap(opened.fileno(), 8)

    def move(self, seconds: float) -> None:
        """Ahead of what it would be, or behind."""
        self._ahead[:8] = struct.pack("<d", seconds)
