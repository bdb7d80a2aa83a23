"""boot: an EngineConfig becomes a running Engine. Memory is planned from arithmetic, not from a trial."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emberline.core.config import EngineConfig, SchedulerConfig, cache_dir, core_count
from emberline.core.errors import InvalidRequest
from emberline.engine.engine import Engine
from emberline.engine.runner import TorchRunner, plan_cache
from emberline.kernels import ops
from emberline.models.loader import DTYPES, load

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

CONTEXTS_KEPT = 8  # by default the cache has room for so many full contexts, memory permitting


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came up, and how long each phase took."""

    engine: Engine
    max_context: int
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int
    kernels: str
    seconds: dict[str, float]


def boot(config: EngineConfig) -> Loaded:
    began = time.perf_counter()
    threads = config.threads or core_count()
    backend = ops.start(threads=threads, cache=cache_dir() / "kernels")
    # torch's threads spin for a while after each of its ops, on the cores our kernels want next: one is enough for it.
    torch.set_num_threads(1 if backend.library else threads)
    kernels = time.perf_counter()
    model = load(Path(config.model), config.dtype, config.max_context)
    loaded = time.perf_counter()
    if config.kv_dtype not in DTYPES:
        raise InvalidRequest(
            f"kv_dtype is {config.kv_dtype!r}; it must be one of {', '.join(DTYPES)}", param="kv_dtype"
        )
    cache = plan_cache(
        model,
        dtype=DTYPES[config.kv_dtype] or model.dtype,
        block_size=config.block_size,
        memory=config.kv_memory or _free_memory() // 2,
        max_tokens=_most_tokens(config, model.context),
    )
    eos = frozenset(model.config.eos)
    tokenizer = Path(config.model) / "tokenizer.json"

    def grammars() -> GrammarCompiler:
        from emberline.engine.grammar import GrammarCompiler

        return GrammarCompiler(tokenizer, model.config.vocab, sorted(eos))

    runner = TorchRunner(model, cache, eos, grammars)
    scheduler = SchedulerConfig(
        block_size=config.block_size,
        max_batch_tokens=max(config.max_batch_tokens, config.max_running),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_context=model.context,
        prefix_cache=config.prefix_cache,
    )
    engine = Engine(scheduler, runner)
    planned = time.perf_counter()
    return Loaded(
        engine=engine,
        max_context=engine.max_context,
        kv_tokens=cache.num_blocks * config.block_size,
        weight_bytes=model.weight_bytes,
        kv_bytes=cache.num_blocks * cache.shape.block_bytes,
        kernels=str(backend),
        seconds={"kernels": kernels - began, "weights": loaded - kernels, "cache": planned - loaded},
    )


def _most_tokens(config: EngineConfig, context: int) -> int:
    if config.kv_memory is not None:
        return 1 << 40  # the user said how much: use it all
    return min(CONTEXTS_KEPT, config.max_running) * context


def _free_memory() -> int:
    """What the system can still give without swapping, or as much as a container allows."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
