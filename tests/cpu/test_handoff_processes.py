"""Two engine processes: one computes a prompt, the other continues. One of them may die in between."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.async_engine import AsyncEngine, EngineState

PROMPT = [(31 * i) % 120 + 3 for i in range(2000)]
TIMEOUT_S = 60.0


def engine(checkpoint: Path, name: str, block: int) -> AsyncEngine:
    config = EngineConfig.build(
        str(checkpoint),
        device="cpu",
        threads=1,
        block_size=block,
        kv_memory=16 << 20,
        max_batch_tokens=32,
        max_running=16,
        transfer=TransferConfig(name, lease_seconds=3.0),
    )
    return AsyncEngine({"m": config}, TimeSharingConfig())


async def until(done: Any) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not done():
            await asyncio.sleep(0.01)


async def reply(e: AsyncEngine, submission: Submission) -> list[int]:
    async with asyncio.timeout(TIMEOUT_S):
        outputs = [output async for output in e.submit(submission)]
    assert outputs[-1].finish is FinishReason.LENGTH
    return [token for output in outputs for token in output.tokens]


def make_submission(name: str, salt: str) -> Submission:
    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    return Submission(name, PROMPT, params, salt=salt, timeout=TIMEOUT_S, model="m")


async def ticket_of(outputs: AsyncIterator[Output]) -> dict[str, Any]:
    """Return the first ticket, long before the prompt is computed."""
    async with asyncio.timeout(TIMEOUT_S):
        first = await anext(outputs)
    assert first.ticket is not None and not first.ticket["complete"] and first.finish is None
    return first.ticket


async def wait_until_paired(p: AsyncEngine, d: AsyncEngine) -> None:
    peer = p.model_info["m"].peer
    assert peer is not None and peer["endpoints"].keys() >= {"shm", "tcp"}
    d.set_peers("m", [peer])
    await until(lambda: "m" in d.pairing_states and d.pairing_states["m"].paired == [peer["incarnation"]])


async def run_both(p: AsyncEngine, d: AsyncEngine) -> None:
    await asyncio.gather(p.start(), d.start())
    await wait_until_paired(p, d)
    expected = await reply(d, make_submission("alone", "alone"))

    submission = make_submission("moves", "moves")
    stream = p.submit(replace(submission, publish=True))
    source = await ticket_of(stream)
    moved = asyncio.create_task(reply(d, replace(submission, source=source)))
    last = [output async for output in stream][-1]
    assert last.finish is FinishReason.HANDOFF and last.tokens == expected[:1] and last.ticket is not None
    assert await moved == expected
    stats = d.stats["m"].transfer
    assert stats is not None and stats.hit_tokens == 1984 and stats.pull_failures == {}
    await until(lambda: p.stats["m"].transfer.ended == {"acknowledged": 1})  # type: ignore[union-attr]
    assert p.stats["m"].blocks_free + p.stats["m"].blocks_cached == p.stats["m"].blocks_total

    abandoned = p.submit(replace(make_submission("gone", "gone"), publish=True))
    source = await ticket_of(abandoned)
    await abandoned.aclose()  # its client disconnected: the lease ends at once
    assert await reply(d, replace(make_submission("gone", "gone"), source=source)) == expected
    await until(lambda: p.stats["m"].transfer.ended.get("closed") == 1)  # type: ignore[union-attr]

    dies = p.submit(replace(make_submission("dies", "dies"), publish=True))
    source = await ticket_of(dies)
    orphan = asyncio.create_task(reply(d, replace(make_submission("dies", "dies"), source=source)))
    await asyncio.sleep(0)  # the peer's blocks were sent
    assert p.pid is not None
    os.kill(p.pid, signal.SIGKILL)
    assert await orphan == expected
    failures = d.stats["m"].transfer.pull_failures  # type: ignore[union-attr]
    assert failures.pop("ticket_over") == 1 and sum(failures.values()) == 1
    await until(lambda: p.state is EngineState.READY and p.restarts == 1)
    await wait_until_paired(p, d)  # restarted, with another incarnation
    d.set_peers("m", [])
    await until(lambda: d.pairing_states["m"].paired == [])


@pytest.mark.parametrize(("theirs", "ours"), [(32, 16)])
def test_request_moves_between_two_processes(tmp_path: Path, theirs: int, ours: int) -> None:
    checkpoint = tiny.write(tmp_path, tiny.config("llama", max_position_embeddings=2048, hidden_size=64))

    async def main() -> None:
        p, d = engine(checkpoint, "p", theirs), engine(checkpoint, "d", ours)
        try:
            await run_both(p, d)
        finally:
            await asyncio.gather(p.stop(), d.stop())

    asyncio.run(main())
