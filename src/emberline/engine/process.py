"""The entry point of the engine process. What it does is in process_loop.py.

python -m emberline.engine.process FD"""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()  # until the models are loaded: collections take a tenth of the imports, and free nothing
    from emberline.engine.process_loop import run_engine_process

    return run_engine_process(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
