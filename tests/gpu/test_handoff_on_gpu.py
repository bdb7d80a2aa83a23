"""A request moves between two engine processes on a GPU, through main memory and by CUDA IPC.

The tokens equal those of one engine alone, and a killed peer costs only time."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.events import TransferStats
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.engine import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = tiny.config("llama", **tiny.GPU_SIZES)
LENGTH, OUT, BLOCK = 1504, 40, 16
# The last bits of logits depend on the batch, which in float32 rarely changes a token. In other dtypes only steps of
# the same shape are compared: the prompt consists of full blocks, so that no part of it is left to compute.
assert LENGTH % BLOCK == 0
FLOAT32, FLOAT8 = ("float32", "float32"), ("bfloat16", "float8")  # dtypes of weights and of KV cache


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.write(tmp_path_factory.mktemp("model"), CONFIG))


def start_engine(checkpoint: Path, name: str, dtypes: tuple[str, str]) -> Engine:
    from emberline.engine.boot import boot

    config = EngineConfig.build(
        str(checkpoint),
        device="cuda",
        dtype=dtypes[0],
        kv_dtype=dtypes[1],
        kv_memory=64 << 20,
        max_running=8,
        max_batch_tokens=256,
        max_context=2048,
        block_size=BLOCK,
        transfer=TransferConfig(name),
    )
    return boot(config).engine


def prefill(pipe: Connection, checkpoint: Path, dtypes: tuple[str, str]) -> None:
    """Run in another process: compute received prompts and send back their tickets."""
    engine = start_engine(checkpoint, "p", dtypes)
    pipe.send(("ready", None))
    while True:
        if pipe.poll(0.0 if not engine.idle else 0.005):
            message = pipe.recv()
            if message is None:
                return engine.close()
            if isinstance(message, Submission):
                engine.add(replace(message, publish=True))
            else:
                whole = engine.kv.num_free_blocks + engine.kv.num_cached_blocks == engine.kv.num_blocks
                pipe.send(("stats", (engine.stats().transfer, whole)))
        for output in engine.step():
            if output.ticket is not None:
                pipe.send((output.id, output.ticket))
        engine.kv.check_invariants()


@dataclass
class Pair:
    pipe: Connection
    process: BaseProcess
    decode: Engine

    def run(self, submission: Submission, ticket: dict[str, Any] | None = None) -> list[int]:
        self.decode.add(replace(submission, source=ticket))
        tokens, ends = [], time.monotonic() + 30
        while not self.decode.idle:
            assert time.monotonic() < ends
            for output in self.decode.step():
                assert output.error is None
                tokens += output.tokens
        self.decode.kv.check_invariants()
        return tokens

    def ticket(self, submission: Submission, *transports: str) -> dict[str, Any]:
        """Return the first ticket, while most of the prompt is not computed yet, limited to these transports."""
        self.pipe.send(submission)
        receive = self.receive(submission.id)
        endpoints = {transport: receive["peer"]["endpoints"][transport] for transport in transports}
        return {**receive, "peer": {**receive["peer"], "endpoints": endpoints}}

    def disconnect(self) -> None:
        """Disconnect, so that the next pull chooses a transport again."""
        assert self.decode.transfer_endpoint is not None
        self.decode.transfer_endpoint.receiver.close()
        self.decode.transfer_endpoint.receiver.connected_transports.clear()

    def receive(self, what: str) -> Any:
        while self.pipe.poll(60):
            found, value = self.pipe.recv()
            if found == what:
                return value
        raise AssertionError("the other process does not answer")

    def stats(self) -> TransferStats:
        found = self.decode.stats().transfer
        assert found is not None
        return found


def start_pair(checkpoint: Path, dtypes: tuple[str, str]) -> Iterator[Pair]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, checkpoint, dtypes), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed
    decode = start_engine(checkpoint, "d", dtypes)
    pair = Pair(ours, process, decode)
    pair.receive("ready")
    yield pair
    decode.close()
    if process.is_alive():
        ours.send(None)
    process.join(20)
    assert not process.is_alive()


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Pair]:
    yield from start_pair(checkpoint, FLOAT32)


def make_submission(seed: int) -> Submission:
    prompt = [random.Random(seed).randrange(3, 1000) for _ in range(LENGTH)]
    params = SamplingParams(max_tokens=OUT, temperature=0.0, ignore_eos=True)
    return Submission(f"r{time.monotonic_ns()}", prompt, params, timeout=60.0)


def wait_until_freed(pair: Pair) -> TransferStats:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        pair.decode.step()
        pair.pipe.send("stats")
        (theirs, whole), kv = pair.receive("stats"), pair.decode.kv
        if whole and kv.num_free_blocks + kv.num_cached_blocks == kv.num_blocks:
            assert isinstance(theirs, TransferStats)
            return theirs
        time.sleep(0.01)
    raise AssertionError("blocks are still in use")


def check_handoff(pair: Pair, transport: str) -> None:
    pair.disconnect()
    for seed in range(3):
        submission = replace(make_submission(seed), salt=transport)
        expected = pair.run(replace(submission, salt=f"{transport} alone"))
        before, computed = pair.stats(), pair.decode.stats().prompt_tokens
        assert pair.run(with_new_id(submission), pair.ticket(submission, transport)) == expected
        after = pair.stats()
        assert after.hit_tokens - before.hit_tokens == LENGTH and after.pull_failures == {}
        assert pair.decode.stats().prompt_tokens == computed
    theirs = wait_until_freed(pair)
    assert theirs.sent_bytes >= pair.stats().pulled_bytes and set(theirs.ended) == {"acknowledged"}
    assert pair.stats().reached == {transport: 1} and pair.stats().passed_over == {}


@pytest.mark.parametrize("transport", ["tcp", "cuda"])
def test_prefill_and_decode_in_two_processes_give_the_same_tokens(pair: Pair, transport: str) -> None:
    check_handoff(pair, transport)


def test_float8_blocks_are_transferred(checkpoint: Path) -> None:
    for pair in start_pair(checkpoint, FLOAT8):
        for transport in ("tcp", "cuda"):
            check_handoff(pair, transport)


def with_new_id(submission: Submission) -> Submission:
    return replace(submission, id=f"{submission.id} again")


@pytest.mark.parametrize("transport", ["tcp", "cuda"])
def test_many_transfers_run_beside_other_requests(pair: Pair, transport: str) -> None:
    """Blocks arrive while steps that used them before are running and new shapes are captured."""
    pair.disconnect()
    expected = {seed: pair.run(replace(make_submission(seed), salt="many alone")) for seed in range(20, 26)}
    submissions = {seed: replace(make_submission(seed), salt=f"many {transport}") for seed in expected}
    tickets = {seed: pair.ticket(one, transport) for seed, one in submissions.items() if seed % 3}
    for seed, one in submissions.items():
        pair.decode.add(replace(one, source=tickets.get(seed)))
    tokens: dict[str, list[int]] = {}
    for _ in range(20_000):
        for output in pair.decode.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
        if pair.decode.idle:
            break
    assert {seed: tokens[one.id] for seed, one in submissions.items()} == expected
    assert pair.stats().pull_failures == {} and set(pair.stats().reached) == {transport}
    wait_until_freed(pair)


@pytest.mark.parametrize("transport", ["tcp", "cuda"])
def test_abort_during_a_transfer_frees_all_blocks(pair: Pair, transport: str) -> None:
    pair.disconnect()
    for steps in range(4):
        submission = replace(make_submission(40 + steps), salt=f"aborted {transport}")
        pair.decode.add(replace(submission, source=pair.ticket(submission, transport)))
        for _ in range(steps):
            pair.decode.step()
        pair.decode.abort(submission.id)
        wait_until_freed(pair)
        again = replace(make_submission(40 + steps), salt=f"aborted {transport}")
        assert pair.run(again) == pair.run(replace(make_submission(40 + steps), salt="other"))
    assert pair.stats().reached == {transport: 1}


def test_unmappable_memory_falls_back_to_another_transport(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from emberline.engine.gpu import ipc
    from emberline.kernels.cuda.driver import CudaDriverError

    def raise_error(*_: object) -> None:
        raise CudaDriverError("peer access is not supported")

    monkeypatch.setattr(ipc, "OpenedMemory", raise_error)
    pair.disconnect()
    submission = replace(make_submission(60), salt="passed over")
    expected = pair.run(replace(submission, salt="passed over alone"))
    assert pair.run(with_new_id(submission), pair.ticket(submission, "cuda", "tcp")) == expected
    assert pair.stats().reached == {"tcp": 1} and pair.stats().passed_over == {"cuda": 1}
    assert pair.stats().pull_failures == {}
    wait_until_freed(pair)


def test_killed_peer_makes_blocks_recomputed(pair: Pair) -> None:
    """The peer's memory was mapped and just read: our device still works, and the memory is freed.

    This test is the last one, since no peer answers afterwards."""
    assert pair.decode.transfer_endpoint is not None
    receiver = pair.decode.transfer_endpoint.receiver

    pair.disconnect()
    submission = replace(make_submission(80), salt="killed")
    expected = pair.run(replace(submission, salt="killed alone"))
    pair.decode.add(replace(with_new_id(submission), source=pair.ticket(submission, "cuda")))
    request = next(iter(pair.decode.scheduler.requests.values()))
    ends, tokens = time.monotonic() + 20, []
    while request.num_computed < BLOCK and time.monotonic() < ends:
        tokens += [token for output in pair.decode.step() for token in output.tokens]
    assert pair.stats().reached == {"cuda": 1}
    (link,) = receiver._links.values()
    pair.process.kill()
    while not pair.decode.idle:
        tokens += [token for output in pair.decode.step() for token in output.tokens]
    assert tokens == expected
    ends = time.monotonic() + 20
    while link._memory._users and time.monotonic() < ends:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert link._memory._users == 0  # type: ignore[attr-defined]
    assert torch.ones(8, device="cuda").sum().item() == 8.0
    assert pair.run(replace(make_submission(81), salt="after")) == pair.run(
        replace(make_submission(81), salt="once more")
    )
