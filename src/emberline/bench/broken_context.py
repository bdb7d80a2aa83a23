"""Lets a benchmark break the CUDA context of engine and rank processes, as a fault in a kernel would.

While `breaking_contexts_on_signal` is active, every Python process that is started breaks its own context when it gets
SIGUSR1: it uses an index out of bounds, for which a kernel of torch fails an assertion. After that, each CUDA call of
the process fails."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType


def install_handler() -> None:
    signal.signal(signal.SIGUSR1, _break_context)


def _break_context(number: int, frame: FrameType | None) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.zeros(1, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]


@contextmanager
def breaking_contexts_on_signal() -> Iterator[None]:
    """Make all Python processes that this process starts install the handler, by a `sitecustomize` module."""
    before = os.environ.get("PYTHONPATH")
    with TemporaryDirectory() as folder:
        code = "from emberline.bench.broken_context import install_handler\ninstall_handler()\n"
        (Path(folder) / "sitecustomize.py").write_text(code, "utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
