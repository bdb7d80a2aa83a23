"""CounterJournal: a local file with changes of counters that have not been written to the store yet.

Each change is written to the file at once, so it survives a kill of the process. The store gets the changes in batches.
A batch is one file, identified by the file's name. The store applies each name only once, so a file that is read again
after a crash is not counted twice.

The file is memory-mapped: a write only copies bytes, and the kernel keeps them when the process is killed. A system
call for each change would cost more: it releases the GIL, and a thread that then takes the GIL can delay the event loop
for milliseconds. After the last line the file is filled with zero bytes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from emberline.gateway.store.base import LimitCounter

log = logging.getLogger("emberline.gateway.limits")

GROWTH_BYTES = 1 << 16  # added to a full file

_decoder = msgspec.json.Decoder(LimitCounter)


class CounterJournal:
    def __init__(self, directory: Path) -> None:
        """Create a journal with a new file in `directory`. Raise OSError if the file cannot be created."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._has_failed = False
        self._file = _JournalFile(directory)

    def read_abandoned_batches(self) -> Iterator[tuple[str, list[LimitCounter]]]:
        """Yield (name, changes) for each journal file that a dead process left behind.

        The caller deletes the file after the store has applied its changes.
        """
        for path in sorted(self._directory.glob("limits-*.journal")):
            if path == self._file.path:
                continue
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process has imported it
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path.stem, _read_changes(path)
            except BlockingIOError:  # the process that writes it is alive
                continue
            finally:
                os.close(file)

    def append_line(self, line: bytes) -> None:
        """Append a line, which is a LimitCounter as JSON. A write error is logged once and not raised."""
        file = self._file
        end = file.end + len(line)
        try:
            if end > file.size:
                file.extend(end)
                self._has_failed = False
            file.mapped[file.end : end] = line
            file.end = end
        except (OSError, ValueError) as e:  # ValueError: a call ended after the journal was closed
            if not self._has_failed:
                log.warning(
                    "Writing the limits journal failed, a crash would lose usage: file=%s reason=%s", file.path, e
                )
            self._has_failed = True

    def start_new_file(self) -> str:
        """Start a new file. Return the name of the previous file, which holds all changes until now.

        If OSError is raised, the previous file stays in use.
        """
        previous, self._file = self._file, _JournalFile(self._directory)
        previous.close()
        return previous.path.stem

    def delete_file(self, file_name: str) -> None:
        (self._directory / f"{file_name}.journal").unlink(missing_ok=True)

    def close(self) -> str:
        """Close the journal and return the name of its last file."""
        self._file.close()
        return self._file.path.stem


class _JournalFile:
    """A journal file that only this process writes. The file's lock shows that the process is alive."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"limits-{os.urandom(12).hex()}.journal"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.end = self.size = 0  # bytes of the lines, and of the file
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.extend(GROWTH_BYTES)
        except OSError:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        self.mapped.close()
        os.close(self._file)

    def extend(self, min_size_bytes: int) -> None:
        """Extend the file to at least `min_size_bytes`. Raise OSError if the disk is full.

        Zeros are written instead of leaving a hole in the file: if the disk is full, a write to a mapped page without
        disk space would kill the process.
        """
        while self.size < min_size_bytes:
            if (written := os.pwrite(self._file, bytes(GROWTH_BYTES), self.size)) < GROWTH_BYTES:
                raise OSError(f"the disk is full: only {written} of {GROWTH_BYTES} bytes were written")
            self.mapped = mmap.mmap(self._file, self.size + GROWTH_BYTES)
            self.size += GROWTH_BYTES


def _read_changes(path: Path) -> list[LimitCounter]:
    """Return the changes in a journal file. A last line that a crash cut short is ignored."""
    changes: list[LimitCounter] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                changes.append(_decoder.decode(line))
            except msgspec.DecodeError:
                log.warning("Limits journal has a damaged line, which is not counted: file=%s", path)
    return changes
