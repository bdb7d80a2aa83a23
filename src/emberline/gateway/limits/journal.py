"""CounterJournal: changes of counters that the store does not have yet, in a local file. Each change is written to the
file at once, which costs microseconds and outlives a kill; the store gets them in batches. A batch is one file, and its
name is its identity: the store applies a name once, so that a file that is read again after a crash counts once."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from emberline.gateway.store.base import Counter

log = logging.getLogger("emberline.gateway.limits")

_reader = msgspec.json.Decoder(Counter)


class CounterJournal:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._has_failed = False
        self._path, self._file = self._open()

    def abandoned(self) -> Iterator[tuple[str, list[Counter]]]:
        """Name and changes of each file that a process left behind; `discard` it when the store has them."""
        for path in sorted(self._directory.glob("limits-*.journal")):
            if path == self._path:
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

    def write(self, lines: bytes) -> None:
        """`lines`: each a Counter as JSON. A disk that takes nothing is reported once: limits go on without it."""
        try:
            os.write(self._file, lines)
            self._has_failed = False
        except OSError as e:
            if not self._has_failed:
                log.warning("changes of limits are not kept for a crash: file=%s reason=%s", self._path, e)
            self._has_failed = True

    def rotate(self) -> str:
        """Begin a new file and return the name of the one before, which holds all changes until now."""
        before, file = self._path, self._file
        self._path, self._file = self._open()
        os.close(file)
        return before.stem

    def discard(self, name: str) -> None:
        (self._directory / f"{name}.journal").unlink(missing_ok=True)

    def close(self) -> str:
        """Return the name of the last file."""
        os.close(self._file)
        return self._path.stem

    def _open(self) -> tuple[Path, int]:
        path = self._directory / f"limits-{os.urandom(12).hex()}.journal"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        return path, file


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
