"""The process of a rank with a GPU, in which the CPU is the GPU.

`simulate_gpus` does the same in the process of the leader."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FAILURE_FILE = "EMBERLINE_TEST_FAILURE_FILE"  # environment variable: ranks fail once this file exists
COMMAND = (sys.executable, str(Path(__file__)))


def simulate_gpus(set_attribute: Any) -> None:
    """Let ranks compute on the CPU, as if each had a GPU. `set_attribute`: as MonkeyPatch.setattr."""
    import torch

    from emberline.core.gpu_kernels import GPUKernels
    from emberline.engine.gpu.device import HostDevice
    from emberline.engine.ranks import device_boot, device_draft_model, device_rank_model
    from emberline.kernels import gpu_choice
    from emberline.models.weights import Weights

    def open_weights(checkpoint: Any, dtype: Any, *_: Any, shard: Any, comm: Any, **__: Any) -> Weights:
        return Weights(checkpoint, dtype, shard=shard, comm=comm)  # kernels of a CPU pack weights when they are loaded

    def open_draft_weights(settings: Any, target: Any, device: Any, checkpoint: Any, *, packed: bool) -> Weights:
        return Weights(checkpoint, target.dtype)

    set_attribute(device_rank_model, "CudaDevice", lambda kernels: HostDevice())
    set_attribute(device_rank_model, "measure_memory", lambda device: (8 << 30, 0))
    set_attribute(device_rank_model, "connect_devices", lambda device, config, size, host, senders: host)
    set_attribute(device_rank_model, "open_device_weights", open_weights)
    set_attribute(device_draft_model, "open_draft_weights", open_draft_weights)
    set_attribute(device_boot.gc, "freeze", lambda: None)
    set_attribute(torch.cuda, "device_count", lambda: 4)
    set_attribute(torch.cuda, "get_device_name", lambda *_: "pretended")
    set_attribute(gpu_choice, "_selected", GPUKernels("hopper", "there is no GPU"))


def fail_on_request(file: Path) -> None:
    """Let the runner fail as after an error of CUDA, once the file exists."""
    from emberline.engine.gpu.runner import GPURunner

    launch = GPURunner._launch_step

    def launch_or_fail(self: GPURunner, *args: Any) -> Any:
        if file.exists():
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        return launch(self, *args)

    GPURunner._launch_step = launch_or_fail  # type: ignore[method-assign]


def main() -> int:
    from emberline.engine.ranks import process
    from emberline.kernels import ops

    simulate_gpus(setattr)
    ops.start_backend(threads=1)
    fail_on_request(Path(os.environ[FAILURE_FILE]))
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
