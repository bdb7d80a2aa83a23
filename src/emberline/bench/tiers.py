"""`python -m emberline.bench.tiers`: blocks that come back from main memory and from disk, beside computing them anew.

First the ways themselves, in GB/s: a block between the cache and a buffer, a buffer to a file and back with its checks;
beside them what the memory and the file system do with the same bytes. Then a request: the time to its first token when
its prompt has to be computed, is in main memory, or is on disk. Files are read around the page cache, so the disk is
asked each time where it allows that.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from emberline.bench import report as reports
from emberline.bench.report import Report
from emberline.core.config import DEFAULT_MODEL, EngineConfig, cache_dir, core_count
from emberline.core.params import SamplingParams
from emberline.core.plan import Copy
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.hub.source import resolve
from emberline.kernels import ops
from emberline.kv.checksum import crc_of
from emberline.kv.tiers.copier import Copier
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier

COUNT = 64  # blocks moved for one figure
OTHERS = 3  # prompts that push the one measured out of the cache


def speeds(call: Callable[[], object], size: int, rounds: int) -> list[float]:
    """GB/s of each round."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        found.append(size / 1e9 / (time.perf_counter() - began))
    return found


def best(call: Callable[[], object], size: int, rounds: int) -> float:
    return max(speeds(call, size, rounds))


def add_copies(report: Report, engine: Engine, rounds: int) -> None:
    cache = engine.runner.cache  # type: ignore[attr-defined]
    many = min(COUNT, cache.num_blocks)
    host = HostTier(cache.shape.block_bytes, many * 2 * cache.shape.block_bytes + (1 << 20))
    size, copier = many * host.buffer_bytes, Copier(cache)
    buffers = [host.area[i * host.buffer_bytes : (i + 1) * host.buffer_bytes] for i in range(many)]
    copies = [Copy(i, b"", buffer) for i, buffer in enumerate(buffers)]
    target = memoryview(mmap.mmap(-1, size))
    copier.save(copies)

    def plain() -> None:
        target[:] = host.area[:size]

    plain()
    memcpy = best(plain, size, rounds)
    report.add("host_save", speeds(lambda: copier.save(copies), size, rounds), "GB/s", limit=memcpy)
    report.add("host_load", speeds(lambda: copier.load(copies), size, rounds), "GB/s", limit=memcpy)


def add_files(report: Report, block_bytes: int, where: Path, rounds: int) -> None:
    """Peers are the same bytes in one large file, written at its end and read at random."""
    host = HostTier(block_bytes, (COUNT + 2) * 2 * block_bytes)
    buffers = [host.area[i * host.buffer_bytes : (i + 1) * host.buffer_bytes] for i in range(COUNT)]
    for buffer in buffers:
        buffer[:] = os.urandom(len(buffer))
    size = COUNT * host.buffer_bytes
    backend = ops.start(threads=core_count(), cache=cache_dir() / "kernels")
    crc, seeds = crc_of(backend.library), count()
    disk = DiskTier(where / "free", "bench", block_bytes, 4 * rounds * size, crc=crc)
    full = DiskTier(where / "full", "bench", block_bytes, size, crc=crc)
    order = random.Random(0).sample(range(COUNT), COUNT)
    names: list[bytes] = []

    def store(tier: DiskTier) -> None:
        """Blocks that it has not seen."""
        names[:] = [random.Random(next(seeds)).randbytes(16) for _ in buffers]
        if tier.store(names, buffers) != COUNT:
            raise RuntimeError("a block could not be stored; the log says why")

    def load() -> None:
        if disk.load([names[i] for i in order], [buffers[i] for i in order]) != COUNT:
            raise RuntimeError("a block that was stored could not be loaded")

    writes, reads = segment(where / "segment", buffers, order, rounds, direct=disk.direct)
    store(full)
    report.add("disk_store_evicting", speeds(lambda: store(full), size, rounds), "GB/s")
    report.add("disk_store", speeds(lambda: store(disk), size, rounds), "GB/s", peer=writes)
    report.add("disk_load", speeds(load, size, rounds), "GB/s", peer=reads)
    report.config["direct_io"] = disk.direct


def segment(
    path: Path, buffers: list[memoryview], order: list[int], rounds: int, *, direct: bool
) -> tuple[float, float]:
    """The best GB/s of writing and reading a packed file without checks, by the same kind of I/O."""
    size = len(buffers[0])
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | (os.O_DIRECT if direct else 0))

    def write() -> None:
        for i, buffer in enumerate(buffers):
            os.pwrite(handle, buffer, i * size)

    def read() -> None:
        for i in order:
            os.preadv(handle, [buffers[i]], i * size)

    writes, reads = (best(call, size * len(buffers), rounds) for call in (write, read))
    os.close(handle)
    path.unlink()
    return writes, reads


def first_token(engine: Engine, name: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to it, and how many tokens were not computed."""
    engine.add(Submission(name, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    began, seconds, cached = time.perf_counter(), 0.0, 0
    while not engine.idle:
        for output in engine.step():
            seconds, cached = time.perf_counter() - began, output.cached_tokens
    return seconds, cached


def add_requests(report: Report, tier: str, engine: Engine, tokens: int, rounds: int) -> list[float]:
    """The prompt is asked for, pushed out of the cache by others, and asked for again. Gives what computing took."""
    tiers, rng = engine.kv.tiers, random.Random(tier)
    assert tiers is not None
    computed, loaded = [], []
    prompts = [[rng.randrange(engine.runner.vocab_size) for _ in range(tokens)] for _ in range(rounds)]
    for i, prompt in enumerate(prompts):
        computed.append(first_token(engine, f"first-{i}", prompt)[0])
        for other in range(OTHERS):
            first_token(engine, f"other-{i}-{other}", [rng.randrange(engine.runner.vocab_size) for _ in range(tokens)])
        tiers.flush(60.0)
        seconds, cached = first_token(engine, f"again-{i}", prompt)
        if cached < tokens - engine.config.block_size:
            raise RuntimeError(f"only {cached} of {tokens} tokens came from {tier}")
        loaded.append(seconds)
    report.add(f"ttft_{tier}_{tokens}", loaded, "s", peer=sorted(computed)[len(computed) // 2])
    report.add(f"ttft_computed_{tokens}/{tier}", computed, "s")
    report.config[f"hit_tokens_{tier}_{tokens}"] = tiers.stats()[tier].hit_tokens
    return computed


def bench(name: str, where: Path, lengths: list[int], rounds: int, config: dict[str, Any]) -> Report:
    model = str(resolve(name))
    report = Report("kv-tiers", {"model": name, "rounds": rounds, "tokens": lengths, **config})
    for tokens in lengths:
        probe = boot(EngineConfig(model, device="cpu"))
        block = probe.kv_bytes * probe.engine.config.block_size // probe.kv_tokens
        if tokens == lengths[0]:
            report.config |= {"block_bytes": block, "kernels": probe.kernels}
            add_copies(report, probe.engine, rounds)
            add_files(report, block, where, rounds)
        blocks = -(-(tokens + 1) // probe.engine.config.block_size)
        near = EngineConfig(
            model,
            device="cpu",
            kv_memory=(blocks + 2) * block,
            max_context=tokens + 64,
            kv_host_memory=8 * blocks * block,
        )
        add_requests(report, "host", boot(near).engine, tokens, rounds)
        far = replace(
            near, kv_host_memory=2 * blocks * block, kv_disk=str(where / "kv"), kv_disk_size=64 * blocks * block
        )
        engine = boot(far).engine
        add_requests(report, "disk", engine, tokens, rounds)
        engine.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.tiers", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant (default: where temporary files are)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    reports.add_arguments(parser)
    args = parser.parse_args()
    where = Path(tempfile.mkdtemp(prefix="emberline-tiers-", dir=args.directory))
    try:
        bench(args.model, where, args.tokens, args.rounds, {}).emit(args.json, args.commit)
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
