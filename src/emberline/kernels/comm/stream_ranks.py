"""StreamRanks: the ranks of a group as streams of one process, on one GPU. It is for tests and benchmarks.

Call `prepare_process` before anything uses the GPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from emberline.kernels.comm.ipc import IpcGroup
from emberline.kernels.comm.thread_group import ThreadGroup

Result = TypeVar("Result")
MAX_SLEEP_CYCLES = 100_000  # of a random delay: about 50 us
RESERVED_BYTES = 32 << 20  # for the tensors of each stream
MAX_BLOCKS = 12  # CTAs of each kernel: the kernels of 8 ranks must run at the same time


def prepare_process() -> None:
    """Set the CUDA options that let the kernels of several ranks run at the same time in one process.

    A kernel waits for the kernels of other ranks. Those could not start if their streams shared a hardware queue with
    the waiting kernel, or if they still had to be loaded."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


class StreamRanks:
    def __init__(
        self, size: int, *, timeout_s: float = 20.0, delays: random.Random | None = None, **options: Any
    ) -> None:
        """`delays`: draws random delays and the order in which ranks start calls; None: no delays, ranks in order.

        `options`: further arguments of IpcGroup."""
        device = torch.device("cuda", 0)
        options = {"max_blocks": MAX_BLOCKS} | options
        self.size, self._delays = size, delays
        threads = ThreadGroup(size, in_turns=True)
        self.comms = threads.run(lambda host: IpcGroup(host, device, timeout_s=timeout_s, **options))
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.reserve_memory()

    def reserve_memory(self) -> None:
        """Let torch's allocator cache memory for later tensors.

        Otherwise it would call the driver, which might wait for a running kernel that waits for another rank."""
        for stream in self.streams:
            with torch.cuda.stream(stream):
                _ = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (RESERVED_BYTES, 1000)]
        torch.cuda.synchronize()

    def start(self, call: Callable[[IpcGroup], Result]) -> list[Result]:
        """Start a call on all ranks, and return their results without waiting for the GPU."""
        results: dict[int, Result] = {}
        for rank in self._delays.sample(range(self.size), self.size) if self._delays else range(self.size):
            with torch.cuda.stream(self.streams[rank]):
                if self._delays and self._delays.random() < 0.3:
                    torch.cuda._sleep(self._delays.randrange(MAX_SLEEP_CYCLES))
                results[rank] = call(self.comms[rank])
        return [results[rank] for rank in range(self.size)]

    def run(self, call: Callable[[IpcGroup], Result]) -> list[Result]:
        """Like `start`, but wait for the results. Raises RankLost."""
        torch.cuda.synchronize()
        results = self.start(call)
        torch.cuda.synchronize()
        for comm in self.comms:
            comm.check()
        return results

    def capture(self, call: Callable[[IpcGroup], Result]) -> list[tuple[torch.cuda.CUDAGraph, Result]]:
        """Return a CUDA graph of the call for each rank, with the rank's result. The call must have run before."""
        captured = []
        for stream, comm in zip(self.streams, self.comms, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                result = call(comm)
            captured.append((graph, result))
        self.reserve_memory()  # a capture releases unused memory
        return captured

    def close(self) -> None:
        for comm in self.comms:
            comm.abort()
        torch.cuda.synchronize()
        for comm in self.comms:
            comm.close()
