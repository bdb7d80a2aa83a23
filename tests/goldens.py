"""Golden files: bytes on the wire as someone last looked at them. To renew one, delete it and run its test twice."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "wire" / "goldens"


def check(name: str, got: bytes) -> None:
    path = FOLDER / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(got)
        raise AssertionError(f"{path} was missing and has been written: look at it, then run again")
    assert got.decode() == path.read_text(encoding="utf-8")
