"""`emberline` whose engine verifies every draft, whether it pays or not. Without a command it is the engine process."""

from __future__ import annotations

import sys
from functools import partial


def engine() -> int:
    from emberline.engine import process
    from emberline.engine.speculation import make_drafter
    from emberline.engine.speculation.drafter import Drafter

    make_drafter.Drafter = partial(Drafter, adaptive=False)  # type: ignore[assignment, misc]
    return process.main()


def main() -> int:
    if not {"serve", "worker"} & set(sys.argv):
        return engine()
    from emberline.cli.__main__ import main as cli
    from emberline.engine import engine_child

    engine_child.ENGINE_COMMAND = (sys.executable, __file__)
    return cli()


if __name__ == "__main__":
    sys.exit(main())
