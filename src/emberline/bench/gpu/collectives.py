"""Measures our collective kernels with ranks that share one GPU, as streams of one process.

No data crosses a link between GPUs, so this shows what the kernels themselves take: launch, flags and copies. On
several GPUs, ranks also wait for NVLink.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from emberline.bench.report import BenchReport
from emberline.kernels.comm.ipc import IpcGroup
from emberline.kernels.comm.stream_ranks import StreamRanks, prepare_process

RANKS = (2, 4, 8)
ELEMENTS = (4096, 32_768, 262_144, 1_048_576)  # of bf16, as in the published table of vLLM's all-reduce
HIDDEN, NORM_ROWS = 8192, (1, 8, 32)
MAX_NORM_BLOCKS = 128  # of all ranks, which wait for each other: they must run on one GPU at the same time
CALLS, REPLAYS = 20, 15  # calls in a graph, and replays of it
NOTE = "the ranks are streams of one process and share one GPU: kernel overhead, not NVLink"


def measure(report: BenchReport) -> None:
    prepare_process()
    report.config["ranks"] = NOTE
    for size in RANKS:
        ranks = StreamRanks(size, message_bytes=2 << 20, senders=range(size))
        for elements in ELEMENTS:
            parts = [_draw(1, elements) for _ in range(size)]
            for name in ("one_shot", "two_shot"):
                us = _time_sums(ranks, parts, is_two_shot=name == "two_shot")
                report.add(f"all_reduce_add_{size}_ranks_{elements}_{name}", us, "us")
            for name, call in _list_calls(parts).items():
                report.add(f"{name}_{size}_ranks_{elements}", _time_call(ranks, call), "us")
        for rows in [rows for rows in NORM_ROWS if size * rows <= MAX_NORM_BLOCKS]:
            report.add(f"all_reduce_add_norm_{size}_ranks_{rows}_rows", _time_norm(ranks, rows), "us")
        ranks.close()


def _time_sums(ranks: StreamRanks, parts: list[Tensor], *, is_two_shot: bool) -> list[float]:
    residuals = [torch.zeros_like(part) for part in parts]
    chosen = ranks.comms[0].prefers_two_shot
    for comm in ranks.comms:
        comm.prefers_two_shot = lambda nbytes, ranks: is_two_shot
    times = _time_call(ranks, lambda comm: comm.all_reduce_add(residuals[comm.rank], parts[comm.rank]))
    for comm in ranks.comms:
        comm.prefers_two_shot = chosen
    return times


def _list_calls(parts: list[Tensor]) -> dict[str, Callable[[IpcGroup], object]]:
    size = len(parts)
    counts = [parts[0].numel() // 128 // size] * size  # of rows that each rank sends to each other
    rows = [part.view(-1, 128)[: sum(counts)] for part in parts]

    def pass_on(comm: IpcGroup) -> None:
        comm.send(parts[comm.rank], (comm.rank + 1) % size)
        comm.receive(parts[comm.rank], (comm.rank - 1) % size)

    return {
        "all_gather": lambda comm: comm.all_gather(parts[comm.rank]),
        "broadcast": lambda comm: comm.broadcast(parts[comm.rank], 0),
        "all_to_all": lambda comm: comm.all_to_all(rows[comm.rank], counts, counts),
        "send_and_receive": pass_on,
    }


def _time_norm(ranks: StreamRanks, rows: int) -> list[float]:
    weight = torch.ones(HIDDEN, device="cuda")
    parts, residuals = ([_draw(rows, HIDDEN) for _ in range(ranks.size)] for _ in range(2))
    return _time_call(
        ranks, lambda comm: comm.all_reduce_add_norm(residuals[comm.rank], parts[comm.rank], weight, 1e-5)
    )


def _time_call(ranks: StreamRanks, call: Callable[[IpcGroup], object]) -> list[float]:
    """Return the microseconds of a call on the slowest rank, in each replay of a captured graph."""

    def repeat(comm: IpcGroup) -> None:
        for _ in range(CALLS):
            call(comm)

    ranks.run(repeat)
    graphs = [graph for graph, _ in ranks.capture(repeat)]

    def replay(comm: IpcGroup) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        comm.broadcast(torch.zeros(1, device="cuda"), 0)  # ranks begin at the same time
        begin.record()
        graphs[comm.rank].replay()
        end.record()
        return begin, end

    replays = [ranks.run(replay) for _ in range(REPLAYS)]
    times = [max(begin.elapsed_time(end) for begin, end in events) * 1e3 / CALLS for events in replays]
    return [median(times[i::3]) for i in range(3)]


def _draw(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").mul_(1e-3).bfloat16()
