"""BenchTask: a set of requests, the throughput they reached, and the highest possible throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from emberline.bench import workload
from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.machine_limits import MachineLimits, TokenCost
from emberline.core.errors import InvalidRequest


class TaskKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIX = "mix"


@dataclass(frozen=True, slots=True)
class BenchTask:
    kind: TaskKind
    size: int  # tokens of the prompt, requests of the batch or of the mix
    job: BenchJob

    @staticmethod
    def from_name(task_name: str, vocab_size: int) -> BenchTask:
        """Return the task for a name such as `prefill_512`, `decode_8` or `mix_64`.

        The number is the length of the prompt in tokens for prefill, and the number of requests for decode and mix.
        Raises InvalidRequest for any other name.
        """
        kind, _, size = task_name.partition("_")
        draws: dict[TaskKind, Callable[[int, int], BenchJob]] = {
            TaskKind.PREFILL: workload.make_prefill_job,
            TaskKind.DECODE: workload.make_decode_job,
            TaskKind.MIX: workload.make_mixed_job,
        }
        if kind not in {known.value for known in TaskKind} or not size.isdecimal() or int(size) < 1:
            raise InvalidRequest(
                f"unknown benchmark task {task_name!r}",
                param="--tasks",
                hint="use names such as prefill_512, decode_8 or mix_64",
            )
        return BenchTask(TaskKind(kind), int(size), draws[TaskKind(kind)](int(size), vocab_size))

    @property
    def name(self) -> str:
        return f"{self.kind.value}_{self.size}"

    def token_rate(self, timeline: TokenTimeline) -> float:
        match self.kind:
            case TaskKind.PREFILL:
                return timeline.prefill_rate(self.job)
            case TaskKind.DECODE:
                return timeline.decode_rate()
            case TaskKind.MIX:
                return timeline.output_rate()

    def max_token_rate(self, cost: TokenCost, limits: MachineLimits) -> float:
        match self.kind:
            case TaskKind.PREFILL:
                return cost.max_prefill_rate(limits, self.size)
            case TaskKind.DECODE:
                return cost.max_decode_rate(limits, self.size, workload.CONTEXT + workload.STEPS // 2)
            case TaskKind.MIX:
                return cost.max_output_rate(limits, self.job)
