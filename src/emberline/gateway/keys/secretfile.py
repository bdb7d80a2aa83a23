"""SecretFile: a small file that only its owner may read. It is made or replaced whole: a crash leaves the old one, the
new one or none, and of two processes that make it at once, one does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from emberline.gateway.errors import StoreFailed


class SecretFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, make: Callable[[], str]) -> str:
        """What is in it; what `make` gives, if it is not there yet."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return self._made(make)
        except OSError as e:
            raise StoreFailed(f"{self._path} cannot be read: {e}", hint="check its owner and mode") from e
        if self._path.stat().st_mode & 0o077:
            raise StoreFailed(f"others may read {self._path}", hint=f"chmod 600 {self._path}")
        return text

    def write(self, text: str) -> None:
        self._written(text).replace(self._path)
        self._settle()

    def _made(self, make: Callable[[], str]) -> str:
        text = make()
        temporary = self._written(text)
        try:
            os.link(temporary, self._path)  # fails if another process was first: then its secret counts
        except FileExistsError:
            return self.read(make)
        finally:
            temporary.unlink()
        self._settle()
        return text

    def _written(self, text: str) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".secret-")  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return Path(name)

    def _settle(self) -> None:
        """So that a power cut does not take the name away."""
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
