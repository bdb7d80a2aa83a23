"""Reads JSON files of a model up to a size limit. Every failure is raised as ModelFileError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError

MAX_FILE_BYTES = 64 << 20


def parse_object(data: bytes | str, description: str) -> dict[str, Any]:
    value = _parse_json(data, description)
    if not isinstance(value, dict):
        raise ModelFileError(f"{description} must contain a JSON object, but contains a {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    return parse_object(_read_content(path), str(path))


def read_object_if_exists(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the file's list of JSON objects; [] if the file does not exist."""
    value = _parse_json(_read_content(path), str(path)) if path.exists() else []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ModelFileError(f"{path} must contain a list of JSON objects")
    return value


def _parse_json(data: bytes | str, description: str) -> Any:
    try:
        text = data.decode() if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as e:  # includes invalid UTF-8, duplicate keys and integers that are too long
        raise ModelFileError(f"{description} is not valid JSON: {e}") from e


def _read_content(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelFileError(f"{path} is larger than the limit of {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as e:
        raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e


def _reject_duplicate_keys(keys_and_values: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(keys_and_values)
    if len(out) != len(keys_and_values):
        raise ValueError("a JSON object contains the same key twice")
    return out
