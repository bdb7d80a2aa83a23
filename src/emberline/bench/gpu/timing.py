"""replay: what a kernel takes in a CUDA graph, with inputs rotated past the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

L2_BYTES = 400 << 20  # of different inputs between two uses of one: several times any L2
REPLAYS = 11
LEAST_US = 1000.0  # of a replay


def replay(calls: Sequence[Callable[[], object]], *, replays: int = REPLAYS) -> float:
    """Microseconds of one call: `calls` do the same on different inputs, and are captured in turn, over and over until
    a replay takes LEAST_US."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and sets handles up
            call()
        once = _time(lambda: [call() for call in calls])
        rounds = max(1, round(LEAST_US / once))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        times = [_time(graph.replay) for _ in range(replays)]
    torch.cuda.current_stream().wait_stream(stream)
    return median(times) / (rounds * len(calls))


def copies_for(bytes_each: int) -> int:
    """How many sets of inputs of a size there must be, that none is found in the cache."""
    return max(1, -(-L2_BYTES // bytes_each))


def _time(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
