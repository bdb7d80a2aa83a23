"""CounterJournal: changes of counters that the store does not have yet, in a local file. Each change is written to the
file at once and outlives a kill; the store gets them in batches. A batch is one file, and its name is its identity: the
store applies a name once, so that a file that is read again after a crash counts once.

The file is mapped into memory: a write is a copy of bytes, which the kernel keeps when the process is killed. A system
call for each change would cost more, as it lets go of the interpreter's lock, and a thread that takes it can keep the
event loop waiting for milliseconds. Behind the last line the file is filled with zero bytes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from emberline.gateway.store.base import Counter

log = logging.getLogger("emberline.gateway.limits")

GROWTH_BYTES = 1 << 16  # by which a file that is full grows

_reader = msgspec.json.Decoder(Counter)


class CounterJournal:
    def __init__(self, directory: Path) -> None:
        """Raises OSError where no file can be made."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._has_failed = False
        self._file = _JournalFile(directory)

    def abandoned(self) -> Iterator[tuple[str, list[Counter]]]:
        """Name and changes of each file that a process left behind; `discard` it when the store has them."""
        for path in sorted(self._directory.glob("limits-*.journal")):
            if path == self._file.path:
                continue
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process took it
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path.stem, _read(path)
            except BlockingIOError:  # the process that writes it is alive
                continue
            finally:
                os.close(file)

    def write(self, line: bytes) -> None:
        """`line`: a Counter as JSON. A disk that takes nothing is reported once: limits go on without it."""
        file = self._file
        end = file.end + len(line)
        try:
            if end > file.size:
                file.grow(end)
                self._has_failed = False
            file.mapped[file.end : end] = line
            file.end = end
        except (OSError, ValueError) as e:  # ValueError: it is closed, and a call ended after that
            if not self._has_failed:
                log.warning("changes of limits are not kept for a crash: file=%s reason=%s", self._file.path, e)
            self._has_failed = True

    def rotate(self) -> str:
        """Begin a new file and return the name of the one before, which holds all changes until now. Raises OSError,
        and then nothing has changed."""
        before, self._file = self._file, _JournalFile(self._directory)
        before.close()
        return before.path.stem

    def discard(self, name: str) -> None:
        (self._directory / f"{name}.journal").unlink(missing_ok=True)

    def close(self) -> str:
        """Return the name of the last file."""
        self._file.close()
        return self._file.path.stem


class _JournalFile:
    """A file of lines that only this process writes: its lock shows that the process lives."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"limits-{os.urandom(12).hex()}.journal"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.end = self.size = 0  # of its lines; of the file
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.grow(GROWTH_BYTES)
        except OSError:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        self.mapped.close()
        os.close(self._file)

    def grow(self, size: int) -> None:
        """Make it at least as large. Zeros are written, not only counted: a page without space on the disk would end
        the process when it is written to in memory."""
        while self.size < size:
            if (written := os.pwrite(self._file, bytes(GROWTH_BYTES), self.size)) < GROWTH_BYTES:
                raise OSError(f"only {written} of {GROWTH_BYTES} bytes were written")
            self.mapped = mmap.mmap(self._file, self.size + GROWTH_BYTES)
            self.size += GROWTH_BYTES


def _read(path: Path) -> list[Counter]:
    """A line that the crash cut short is left out."""
    found: list[Counter] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                found.append(_reader.decode(line))
            except msgspec.DecodeError:
                log.warning("a line of %s is damaged and not counted", path)
    return found
