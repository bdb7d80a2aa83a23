"""The process of a rank with a GPU whose CUDA context a test can break, by an assertion that fails in a kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FAILURE_FILE = "EMBERLINE_TEST_FAILURE_FILE"  # environment variable: the context is broken once this file exists
COMMAND = (sys.executable, str(Path(__file__)))


def break_context_on_request(file: Path) -> None:
    import torch

    from emberline.engine.gpu.runner import GPURunner

    launch = GPURunner._launch_step

    def break_and_launch(self: GPURunner, *args: Any) -> Any:
        if file.exists():
            torch.zeros(1, device="cuda")[torch.tensor([1 << 20], device="cuda")]
        return launch(self, *args)

    GPURunner._launch_step = break_and_launch  # type: ignore[method-assign]


def main() -> int:
    from emberline.engine.ranks import process

    break_context_on_request(Path(os.environ[FAILURE_FILE]))
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
