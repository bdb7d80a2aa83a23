"""Task: a named job, the rate it is judged by, and the limit of that rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from emberline.bench import workload
from emberline.bench.ceiling import Ceiling, Cost
from emberline.bench.job import Job, Timeline
from emberline.core.errors import InvalidRequest


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIX = "mix"


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    size: int  # tokens of the prompt, requests of the batch or of the mix
    job: Job

    @staticmethod
    def make(name: str, vocab: int) -> Task:
        """`prefill_512`, `decode_8`, `mix_64`."""
        kind, _, size = name.partition("_")
        draws: dict[Kind, Callable[[int, int], Job]] = {
            Kind.PREFILL: workload.prefill,
            Kind.DECODE: workload.decode,
            Kind.MIX: workload.mix,
        }
        if kind not in {known.value for known in Kind} or not size.isdecimal() or int(size) < 1:
            raise InvalidRequest(f"no task {name!r}", param="--tasks", hint="such as prefill_512, decode_8 or mix_64")
        return Task(Kind(kind), int(size), draws[Kind(kind)](int(size), vocab))

    @property
    def name(self) -> str:
        return f"{self.kind.value}_{self.size}"

    def rate(self, timeline: Timeline) -> float:
        match self.kind:
            case Kind.PREFILL:
                return timeline.prefill_rate(self.job)
            case Kind.DECODE:
                return timeline.decode_rate()
            case Kind.MIX:
                return timeline.output_rate()

    def limit(self, cost: Cost, top: Ceiling) -> float:
        match self.kind:
            case Kind.PREFILL:
                return cost.prefill_limit(top, self.size)
            case Kind.DECODE:
                return cost.decode_limit(top, self.size, workload.CONTEXT + workload.STEPS // 2)
            case Kind.MIX:
                return cost.output_limit(top, self.job)
