"""`emberline bench tiers`: loading KV blocks from main memory, disk and a shared store, compared with computing them.

The first part measures copies alone in GB/s: a block between the KV cache and a buffer, and a buffer to and from a file
or the store, with checksums, uncompressed and compressed (`_uw`). They are compared with plain copies of the same bytes
in memory and on the file system.

The second part measures the time to the first token of a request. The KV blocks of its prompt are computed, or loaded
from main memory, from disk or from the store. Files are read without the page cache where the file system allows it.
The store's master process runs on this machine; if it is not installed, the store is not measured.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from emberline.bench.mooncake_master import MooncakeMaster
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import BlockCopy
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.hub.source import resolve_model
from emberline.kernels import ops
from emberline.kv.checksum import select_crc
from emberline.kv.codec import select_kv_codec
from emberline.kv.mooncake import installed_distribution
from emberline.kv.tiers.copier import HostBlockCopier
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.remote import RemoteTier

COUNT = 64  # blocks moved for one figure
OTHERS = 3  # prompts that evict the measured one from the cache


def measure_speeds(call: Callable[[], object], num_bytes: int, rounds: int) -> list[float]:
    """Run `call`, which moves `num_bytes` bytes, `rounds` times, and return the GB/s of each run."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        found.append(num_bytes / 1e9 / (time.perf_counter() - began))
    return found


def measure_best_speed(call: Callable[[], object], num_bytes: int, rounds: int) -> float:
    return max(measure_speeds(call, num_bytes, rounds))


def add_copy_speeds(report: BenchReport, engine: Engine, rounds: int) -> None:
    cache = engine.runner.cache  # type: ignore[attr-defined]
    many = min(COUNT, cache.num_blocks)
    host = HostTier(cache.shape.block_bytes, many * 2 * cache.shape.block_bytes + (1 << 20))
    size, copier = many * host.buffer_bytes, HostBlockCopier(cache)
    buffers = [host.memory[i * host.buffer_bytes : (i + 1) * host.buffer_bytes] for i in range(many)]
    copies = [BlockCopy(i, b"", buffer) for i, buffer in enumerate(buffers)]
    target = memoryview(mmap.mmap(-1, size))
    copier.save(copies)

    def copy_plain() -> None:
        target[:] = host.memory[:size]

    copy_plain()
    memcpy = measure_best_speed(copy_plain, size, rounds)
    report.add("host_save", measure_speeds(lambda: copier.save(copies), size, rounds), "GB/s", limit=memcpy)
    report.add("host_load", measure_speeds(lambda: copier.load(copies), size, rounds), "GB/s", limit=memcpy)


def add_tier_speeds(
    report: BenchReport, block_bytes: int, work_dir: Path, master_address: str | None, rounds: int
) -> None:
    """Add the GB/s of the disk tier and of the shared store to the report.

    For comparison, the same bytes are written in order to one large file and read from it in random order.
    """
    host = HostTier(block_bytes, (COUNT + 2) * 2 * block_bytes)
    buffers = [host.memory[i * host.buffer_bytes : (i + 1) * host.buffer_bytes] for i in range(COUNT)]
    for i, buffer in enumerate(buffers):  # normally distributed, like keys and values
        values = np.random.default_rng(i).standard_normal(len(buffer) // 2, np.float32)
        buffer[:] = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    size = COUNT * host.buffer_bytes
    library = ops.start_backend().library
    crc, codec = select_crc(library), select_kv_codec("auto", library, "bfloat16")
    order = random.Random(0).sample(range(COUNT), COUNT)
    direct = DiskTier(work_dir / "probe", "bench", block_bytes, size).uses_direct_io
    report.config["direct_io"] = direct
    peers = measure_single_file(work_dir / "segment", buffers, order, rounds, use_direct_io=direct)
    for coding, end in (("none", ""), *([("uw", "_uw")] if codec is not None else [])):
        full = DiskTier(work_dir / f"full{end}", "bench", block_bytes, size, crc=crc, codec=codec, codec_choice=coding)
        store_blocks(full, buffers)
        report.add(
            f"disk_store_evicting{end}", measure_speeds(partial(store_blocks, full, buffers), size, rounds), "GB/s"
        )
        free = DiskTier(
            work_dir / f"free{end}", "bench", block_bytes, 4 * rounds * size, crc=crc, codec=codec, codec_choice=coding
        )
        add_tier_speed(report, free, end, buffers, order, rounds, peers)
        if master_address is not None:
            memory = 4 * rounds * size
            far = RemoteTier(
                master_address, f"bench{end}", block_bytes, memory, crc=crc, codec=codec, codec_choice=coding
            )
            add_tier_speed(report, far, end, buffers, order, rounds, (None, None))
            far.close()


def add_tier_speed(
    report: BenchReport,
    tier: DiskTier | RemoteTier,
    name_suffix: str,
    buffers: list[memoryview],
    read_order: list[int],
    rounds: int,
    peer_speeds: tuple[float | None, float | None],
) -> None:
    size = sum(map(len, buffers))
    names: list[bytes] = []

    def store_all() -> None:
        names[:] = store_blocks(tier, buffers)

    def load_all() -> None:
        if tier.load([names[i] for i in read_order], [buffers[i] for i in read_order]) != len(read_order):
            raise RuntimeError(f"tier {tier.name} could not load a block that it had stored")

    report.add(f"{tier.name}_store{name_suffix}", measure_speeds(store_all, size, rounds), "GB/s", peer=peer_speeds[0])
    report.add(f"{tier.name}_load{name_suffix}", measure_speeds(load_all, size, rounds), "GB/s", peer=peer_speeds[1])


def store_blocks(tier: DiskTier | RemoteTier, buffers: list[memoryview]) -> list[bytes]:
    """Store the buffers under new random hashes and return the hashes."""
    names = [os.urandom(16) for _ in buffers]
    if tier.store(names, buffers) != len(buffers):
        raise RuntimeError(f"tier {tier.name} could not store a block (hint: see its warning in the log)")
    return names


def measure_single_file(
    path: Path, buffers: list[memoryview], read_order: list[int], rounds: int, *, use_direct_io: bool
) -> tuple[float, float]:
    """Return the best GB/s of writing and of reading one large file without checksums."""
    size = len(buffers[0])
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | (os.O_DIRECT if use_direct_io else 0))

    def write_all() -> None:
        for i, buffer in enumerate(buffers):
            os.pwrite(handle, buffer, i * size)

    def read_all() -> None:
        for i in read_order:
            os.preadv(handle, [buffers[i]], i * size)

    writes, reads = (measure_best_speed(call, size * len(buffers), rounds) for call in (write_all, read_all))
    os.close(handle)
    path.unlink()
    return writes, reads


def measure_first_token(engine: Engine, request_id: str, prompt: list[int]) -> tuple[float, int]:
    """Run a request and return the seconds to its first token and the number of its cached tokens."""
    engine.add(Submission(request_id, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    began, seconds, cached = time.perf_counter(), 0.0, 0
    while not engine.idle:
        for output in engine.step():
            seconds, cached = time.perf_counter() - began, output.cached_tokens
    return seconds, cached


def add_first_token_times(report: BenchReport, tier_name: str, engine: Engine, tokens: int, rounds: int) -> None:
    """Add the time to the first token of prompts that are loaded from the tier, and of prompts that are computed.

    Each prompt is requested twice. Before the second request, other prompts evict it from the main cache.
    """
    tiers, rng = engine.kv.tiers, random.Random(tier_name)
    assert tiers is not None
    computed, loaded = [], []
    prompts = [[rng.randrange(engine.runner.vocab_size) for _ in range(tokens)] for _ in range(rounds)]
    for i, prompt in enumerate(prompts):
        computed.append(measure_first_token(engine, f"first-{i}", prompt)[0])
        for other in range(OTHERS):
            measure_first_token(
                engine, f"other-{i}-{other}", [rng.randrange(engine.runner.vocab_size) for _ in range(tokens)]
            )
        tiers.wait_until_written(60.0)
        seconds, cached = measure_first_token(engine, f"again-{i}", prompt)
        if cached < tokens - engine.config.block_size:
            raise RuntimeError(f"only {cached} of {tokens} prompt tokens were loaded from tier {tier_name}")
        loaded.append(seconds)
    report.add(f"ttft_{tier_name}_{tokens}", loaded, "s", peer=sorted(computed)[len(computed) // 2])
    report.add(f"ttft_computed_{tokens}/{tier_name}", computed, "s")
    report.config[f"hit_tokens_{tier_name}_{tokens}"] = tiers.stats()[tier_name].hit_tokens
    engine.close()


def bench(model_name: str, directory: Path | None, prompt_lengths: list[int], rounds: int) -> BenchReport:
    """Run the benchmark. `directory` selects the disk to measure; None is the system's directory of temporary files."""
    report = BenchReport("kv-tiers", {"model": model_name, "rounds": rounds, "tokens": prompt_lengths})
    where, master = Path(tempfile.mkdtemp(prefix="emberline-tiers-", dir=directory)), MooncakeMaster()
    try:
        address = master.start().address
        report.config["store"] = installed_distribution()
    except OSError as error:
        address, report.config["store"] = None, str(error)
    try:
        measure_all(report, str(resolve_model(model_name)), where, address, prompt_lengths, rounds)
    finally:
        master.kill()
        shutil.rmtree(where)
    return report


def measure_all(
    report: BenchReport,
    model_dir: str,
    work_dir: Path,
    master_address: str | None,
    prompt_lengths: list[int],
    rounds: int,
) -> None:
    for tokens in prompt_lengths:
        probe = boot(EngineConfig.build(model_dir, device="cpu"))
        block = probe.kv_bytes * probe.engine.config.block_size // probe.kv_tokens
        if tokens == prompt_lengths[0]:
            report.config |= {"block_bytes": block, "kernels": probe.kernels}
            add_copy_speeds(report, probe.engine, rounds)
            add_tier_speeds(report, block, work_dir, master_address, rounds)
        blocks = -(-(tokens + 1) // probe.engine.config.block_size)
        near = EngineConfig.build(
            model_dir,
            device="cpu",
            kv_memory=(blocks + 2) * block,
            max_context=tokens + 64,
            kv_host_memory=8 * blocks * block,
        )
        add_first_token_times(report, "host", boot(near).engine, tokens, rounds)
        far = near.with_settings(
            kv_host_memory=2 * blocks * block, kv_disk=str(work_dir / "kv"), kv_disk_size=64 * blocks * block
        )
        add_first_token_times(report, "disk", boot(far).engine, tokens, rounds)
        if master_address is not None:
            far = near.with_settings(
                kv_host_memory=2 * blocks * block, kv_store=master_address, kv_store_memory=64 * blocks * block
            )
            add_first_token_times(report, "store", boot(far).engine, tokens, rounds)
