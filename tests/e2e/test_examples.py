"""Every example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEED_SERVER = {"chat_openai.py": "network", "structured.py": "inhabitants"}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name: str, server: str) -> None:
    arguments = [f"{server}/v1"] if name in NEED_SERVER else []
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert NEED_SERVER.get(name, "Paris") in done.stdout
