"""`emberline` on a simulated GPU with memory for one model at a time. Without a command it is the engine process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from emberline.core.engine_config import EngineConfig, TimeSharingConfig


def engine() -> int:
    import host_engine

    from emberline.core.gpu_kernels import GPUKernels
    from emberline.engine import boot, engine_group_boot, process
    from emberline.engine.engine_group import EngineGroup
    from emberline.engine.gpu.boot import BootedGPUEngine
    from emberline.engine.gpu.swap import SwappedEngine
    from emberline.engine.loaded_engine import LoadedEngine
    from emberline.kernels.gpu_choice import select_gpu_kernels

    def boot_fleet(
        configs: Mapping[str, EngineConfig], rules: TimeSharingConfig, reader: object
    ) -> tuple[EngineGroup, dict[str, LoadedEngine]]:
        host_engine.plain_arithmetic()
        loaded: dict[str, LoadedEngine] = {}

        def load(name: str) -> BootedGPUEngine:
            booted = host_engine.booted(Path(configs[name].model))
            loaded[name] = boot.to_loaded_engine(booted)
            return booted

        members = {
            name: SwappedEngine(host_engine.planned(Path(config.model)), partial(load, name))
            for name, config in configs.items()
        }
        broken = members.get("broken")
        if broken is not None:  # after it was loaded once, waking it fails
            wake, first = broken.wake, [True]

            def once() -> int:
                if first:
                    first.clear()
                    return wake()
                raise RuntimeError("out of memory")

            broken.wake = once  # type: ignore[method-assign]
        return EngineGroup(members, max(member.nbytes for member in members.values()), rules), loaded

    boot.torch.cuda.get_device_name = lambda: "none"  # type: ignore[assignment, misc]
    select_gpu_kernels(GPUKernels("hopper", "simulated"))
    engine_group_boot.boot_engine_group = boot_fleet  # type: ignore[assignment]
    return process.main()


def main() -> int:
    if "serve" not in sys.argv:
        return engine()
    from emberline.cli.__main__ import main as cli
    from emberline.engine import engine_child

    engine_child.ENGINE_COMMAND = (sys.executable, __file__)
    return cli()


if __name__ == "__main__":
    sys.exit(main())
