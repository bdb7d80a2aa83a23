"""Checks of the files that a command will write, before it computes what to write."""

from __future__ import annotations

import os
from pathlib import Path

from emberline.core.errors import InvalidRequest


def check_output_file(path: Path | None, option: str, *, creates_directory: bool = False) -> None:
    """Raise InvalidRequest, which names the option, if the file cannot be written. This writes nothing.

    A `path` of None passes. `creates_directory`: the command creates the file's directory if it is missing."""
    if path is None:
        return
    try:
        obstacle = _find_obstacle(path, creates_directory)
    except OSError as e:  # a directory of the path may not be searched, or a name is too long
        obstacle = f"which cannot be used: {e.strerror or e}", "choose another path"
    if obstacle is not None:
        reason, hint = obstacle
        raise InvalidRequest(f"{option} is {str(path)!r}, {reason}", param=option.lstrip("-"), hint=hint)


def _find_obstacle(path: Path, creates_directory: bool) -> tuple[str, str] | None:
    """Return why the file cannot be written, and a hint; None if it can."""
    if path.is_dir():
        return "which is a directory", "name a file in it"
    if path.exists():
        return None if os.access(path, os.W_OK) else ("a file that may not be written", "choose another file")
    directory = _first_existing_parent(path) if creates_directory else path.parent
    if not directory.exists():
        return f"but the directory {directory} is missing", "create it, or correct the path"
    if not directory.is_dir():
        return f"but {directory} is not a directory", "correct the path"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"but the directory {directory} may not be written", "choose another one"
    return None


def _first_existing_parent(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.exists()), path.parent)
