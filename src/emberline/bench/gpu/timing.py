"""time_graph_replay: measures kernels in a CUDA graph, with inputs that do not fit into the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")

ROTATED_INPUT_BYTES = 400 << 20  # other inputs between two uses of one: several times the size of any L2
REPLAYS = 11
MIN_REPLAY_US = 1000.0


def time_graph_replay(calls: Sequence[Callable[[], object]], *, replays: int = REPLAYS) -> float:
    """Return the median microseconds of one call.

    `calls` compute the same operation on different inputs. They are captured one after the other in a CUDA graph,
    several times each, until a replay of the graph takes MIN_REPLAY_US.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles kernels and creates handles
            call()
        once = _time_on_gpu_us(lambda: [call() for call in calls])
        rounds = max(1, round(MIN_REPLAY_US / once))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        times = [_time_on_gpu_us(graph.replay) for _ in range(replays)]
    torch.cuda.current_stream().wait_stream(stream)
    return median(times) / (rounds * len(calls))


def count_input_sets(bytes_per_set: int) -> int:
    """Return how many sets of inputs are needed so that none is still in the L2 cache when it is used again."""
    return max(1, -(-ROTATED_INPUT_BYTES // bytes_per_set))


def _time_on_gpu_us(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def bind_arguments(function: Callable[..., T], *arguments: object, **options: object) -> Callable[[], T]:
    return lambda: function(*arguments, **options)
