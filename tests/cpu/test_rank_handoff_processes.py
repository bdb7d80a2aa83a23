"""KV blocks move between engines whose ranks are processes, and a rank of either engine is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from emberline.core.engine_config import EngineConfig, TimeSharingConfig, TransferConfig
from emberline.core.errors import EngineFailed
from emberline.core.events import Output, TransferStats
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.engine.async_engine import AsyncEngine, EngineState

PROMPT = [(31 * i) % 120 + 3 for i in range(1000)]
TIMEOUT_S = 60.0


def start(checkpoint: Path, name: str, **layout: int) -> AsyncEngine:
    config = EngineConfig.build(
        str(checkpoint),
        device="cpu",
        threads=1,
        dtype="float32",
        kv_memory=16 << 20,
        max_batch_tokens=32,
        max_running=4,
        kv_checksums=True,
        transfer=TransferConfig(name, lease_seconds=2.0),
        **layout,
    )
    return AsyncEngine({"m": config}, TimeSharingConfig())


async def until(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_done():
            await asyncio.sleep(0.01)


async def generate(engine: AsyncEngine, submission: Submission) -> list[int]:
    async with asyncio.timeout(TIMEOUT_S):
        outputs = [output async for output in engine.submit(submission)]
    assert outputs[-1].finish is FinishReason.LENGTH
    return [token for output in outputs for token in output.tokens]


def ask(name: str) -> Submission:
    """Return a request whose prompt no engine has cached."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return Submission(name, PROMPT, params, salt=name, timeout=TIMEOUT_S, model="m")


async def first_ticket(outputs: AsyncIterator[Output]) -> dict[str, Any]:
    """Return the first ticket, long before the prompt is computed."""
    async with asyncio.timeout(TIMEOUT_S):
        first = await anext(outputs)
    assert first.ticket is not None and not first.ticket["complete"]
    return first.ticket


async def pair(p: AsyncEngine, d: AsyncEngine) -> None:
    peer = p.model_info["m"].peer
    assert peer is not None
    d.set_peers("m", [peer])
    await until(lambda: "m" in d.pairing_states and d.pairing_states["m"].paired == [peer["incarnation"]])


def transfers(engine: AsyncEngine) -> TransferStats:
    stats = engine.stats["m"].transfer
    assert stats is not None
    return stats


def children(engine: AsyncEngine) -> list[int]:
    files = Path(f"/proc/{engine.pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def all_blocks_are_free(engine: AsyncEngine) -> bool:
    stats = engine.stats["m"]
    return stats.blocks_free + stats.blocks_cached == stats.blocks_total and not transfers(engine).leases


async def move_request(p: AsyncEngine, d: AsyncEngine, expected: list[int]) -> None:
    computed = d.stats["m"].prompt_tokens
    stream = p.submit(replace(ask("moves"), publish=True))
    moved = asyncio.create_task(generate(d, replace(ask("moves"), source=await first_ticket(stream))))
    last = [output async for output in stream][-1]
    assert last.finish is FinishReason.HANDOFF and last.tokens == expected[:1]
    assert await moved == expected
    await until(lambda: transfers(d).hit_tokens == 992)
    assert transfers(d).pull_failures == {} and transfers(d).verified_blocks == 992 // 16
    assert d.stats["m"].prompt_tokens - computed == 8
    await until(lambda: transfers(p).ended == {"acknowledged": 1} and all_blocks_are_free(p))


async def kill_rank_of_sender(p: AsyncEngine, d: AsyncEngine, expected: list[int]) -> None:
    stream = p.submit(replace(ask("sender dies"), publish=True))
    moved = asyncio.create_task(generate(d, replace(ask("sender dies"), source=await first_ticket(stream))))
    os.kill(children(p)[0], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="rank 1 of 2"):
        _ = [output async for output in stream]
    assert await moved == expected  # the rest of the prompt is computed
    await until(lambda: p.state is EngineState.READY and p.restarts == 1)


async def kill_rank_of_receiver(p: AsyncEngine, d: AsyncEngine) -> None:
    stream = p.submit(replace(ask("receiver dies"), publish=True))
    moved = asyncio.create_task(generate(d, replace(ask("receiver dies"), source=await first_ticket(stream))))
    await asyncio.sleep(0.05)
    os.kill(children(d)[0], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="rank 0 of 2"):
        await moved
    assert [output async for output in stream][-1].finish is FinishReason.HANDOFF
    await until(lambda: all_blocks_are_free(p))  # the lease ends with the receiver or expires
    await until(lambda: d.state is EngineState.READY and d.restarts == 1)


def test_ranks_exchange_blocks_and_survive_deaths(tmp_path: Path) -> None:
    """The sender has 2 tensor ranks, the receiver 2 stages."""
    checkpoint = tiny.write(tmp_path, tiny.config("llama", max_position_embeddings=1024, hidden_size=64))

    async def main() -> None:
        p, d = start(checkpoint, "p", tp=2), start(checkpoint, "d", pp=2)
        try:
            await asyncio.gather(p.start(), d.start())
            await pair(p, d)
            expected = await generate(d, ask("alone"))
            await move_request(p, d, expected)
            await kill_rank_of_sender(p, d, expected)
            await pair(p, d)
            await kill_rank_of_receiver(p, d)
            processes = [p.pid, d.pid, *children(p), *children(d)]
        finally:
            await asyncio.gather(p.stop(), d.stop())
        assert not any(Path(f"/proc/{pid}").exists() for pid in processes)

    asyncio.run(main())
