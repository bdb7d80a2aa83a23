"""SecretFile: a small file that only its owner may read.

The file is created or replaced atomically. A crash leaves the old content, the new content or no file. If two processes
create the file at the same time, both use the content of the process that was first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from emberline.gateway.core.errors import StoreFailed


class SecretFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read_or_create(self, make_content: Callable[[], str]) -> str:
        """Return the content. If the file does not exist, create it with the result of `make_content`.

        Raise StoreFailed if the file cannot be read, or if other users may read it.
        """
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return self._create(make_content)
        except OSError as e:
            raise StoreFailed(
                f"secret file {self._path} cannot be read: {e}", hint="check the file's owner and mode"
            ) from e
        if self._path.stat().st_mode & 0o077:
            raise StoreFailed(
                f"secret file {self._path} can be read by other users", hint=f"run chmod 600 {self._path}"
            )
        return text

    def write(self, text: str) -> None:
        """Replace the content and keep the file's owner.

        The command that rotates keys may run as root, and the owner must still be able to read the file.
        """
        self._write_temporary(text, self._find_other_owner()).replace(self._path)
        self._sync_directory()

    def _find_other_owner(self) -> tuple[int, int] | None:
        """Return the file's user and group, or None if the file is missing or belongs to this process's user."""
        try:
            owner = self._path.lstat()
        except FileNotFoundError:
            return None
        return None if owner.st_uid == os.geteuid() else (owner.st_uid, owner.st_gid)

    def _create(self, make_content: Callable[[], str]) -> str:
        text = make_content()
        temporary = self._write_temporary(text)
        try:
            os.link(temporary, self._path)  # fails if another process was first: then its secret is used
        except FileExistsError:
            return self.read_or_create(make_content)
        finally:
            temporary.unlink()
        self._sync_directory()
        return text

    def _write_temporary(self, text: str, owner: tuple[int, int] | None = None) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".secret-")  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            if owner is not None:  # not by its name, which the owner of the directory may have given to another file
                os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())
        return Path(name)

    def _sync_directory(self) -> None:
        """Write the directory entry to disk, so that a power failure cannot lose the file."""
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
