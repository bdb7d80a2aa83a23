"""Handoff between GPU engines, with the CPU as the device: same tokens, no race between streams, no lost block."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from gpu_settings import gpu_config
from host_engine import simulate_gpu
from race_detector import RaceDetector
from torch import Tensor

from emberline.core.engine_config import EngineConfig, SchedulerConfig, TimeSharingConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output, TransferStats
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine import engine_group_boot, memory
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu import region as regions
from emberline.engine.gpu.boot import make_region
from emberline.engine.gpu.device import Device, HostDevice
from emberline.engine.gpu.region import DeviceRegion, StagingSlot
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.kv.transfer.errors import BadTransfer, IncompatibleCaches
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.local import LocalTransport, advertise_local
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.sender import Sender
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK, LENGTH, OUT = 8, 41, 6
FULL = LENGTH // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_decoder(tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIGS["llama"]), "bfloat16")


class GpuEngineFixture:
    """An engine on a device that other engines can pull from."""

    def __init__(
        self, model: DecoderModel, name: str, *, device: Device | None = None, local: Sender | None = None
    ) -> None:
        """`local`: an engine of this process to pull from synchronously, without threads."""
        c = model.config
        self.device = device or HostDevice()
        self.cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, BLOCK, torch.bfloat16), 16)
        settings = gpu_config(max_running=4, max_batch_tokens=16, transfer=TransferConfig("peer"))
        rows = SamplingStateFactory(frozenset(), None)
        self.runner = GPURunner(model, self.cache, frozenset(), rows, settings, self.device, 64)
        self.region = make_region(self.runner, self.device)
        transfer = TransferConfig(name)
        if local is not None or device is not None:
            sender = Sender(self.region, name)
            advertise_local(sender, name)
            receiver = Receiver(self.region, [LocalTransport([local] if local is not None else [])])
            dock = TransferEndpoint(sender, receiver, config=transfer)
        else:
            dock = TransferEndpoint.open(transfer, self.region)
        self.sender = dock.sender
        config = SchedulerConfig(block_size=BLOCK, max_batch_tokens=16, max_running=4, max_context=64)
        self.engine = Engine(config, self.runner, transfer_endpoint=dock)

    @property
    def stats(self) -> TransferStats:
        found = self.engine.stats().transfer
        assert found is not None
        return found

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        self.engine.kv.check_invariants()
        return outputs

    def ticket(self, submission: Submission) -> dict[str, Any]:
        """Return the ticket as soon as it exists, when most of the prompt is not computed."""
        self.engine.add(replace(submission, publish=True))
        while not (outputs := self.step()):
            pass
        assert outputs[0].ticket is not None and outputs[0].finish is None
        return outputs[0].ticket

    def finish(self, beside: GpuEngineFixture | None = None) -> list[int]:
        tokens, ends = [], time.monotonic() + 60
        while not self.engine.idle:
            assert time.monotonic() < ends
            for output in self.step():
                assert output.error is None
                tokens += output.tokens
            if beside is not None:
                beside.step()
        return tokens


def has_settled(engine: Engine) -> bool:
    return engine.idle and engine.kv.num_free_blocks + engine.kv.num_cached_blocks == engine.kv.num_blocks


def run_until_settled(*houses: GpuEngineFixture) -> None:
    """Run until no block is held and no step is running."""
    ends = time.monotonic() + 60
    while not all(has_settled(house.engine) for house in houses):
        assert time.monotonic() < ends, "blocks are still held, or a step is still running"
        for gpu_engine in houses:
            gpu_engine.step()
        time.sleep(0.002)


def make_submission(seed: int = 1, name: str = "r") -> Submission:
    prompt = torch.randint(3, 131, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Submission(name, prompt, SamplingParams(max_tokens=OUT, temperature=0.0), timeout=60.0)


@pytest.fixture(scope="module")
def run_alone(model: DecoderModel) -> Callable[[int], list[int]]:
    def run(seed: int) -> list[int]:
        gpu_engine = GpuEngineFixture(model, "alone", device=HostDevice())
        gpu_engine.engine.add(make_submission(seed))
        return gpu_engine.finish()

    return run


@pytest.fixture
def pair(model: DecoderModel) -> Iterator[tuple[GpuEngineFixture, GpuEngineFixture]]:
    houses = GpuEngineFixture(model, "p"), GpuEngineFixture(model, "d")
    yield houses
    for gpu_engine in houses:
        gpu_engine.engine.close()


def test_prefill_and_decode_on_two_engines(
    pair: tuple[GpuEngineFixture, GpuEngineFixture], run_alone: Callable[[int], list[int]]
) -> None:
    p, d = pair
    d.engine.add(replace(make_submission(), source=p.ticket(make_submission())))
    assert d.finish(beside=p) == run_alone(1)
    assert d.stats.hit_tokens == FULL and d.engine.stats().prompt_tokens == LENGTH - FULL
    assert p.finish() == [] and d.stats.pull_failures == {}
    run_until_settled(p, d)
    assert p.stats.ended == {"acknowledged": 1} and p.stats.sent_bytes == d.stats.pulled_bytes > 0


@pytest.mark.parametrize("steps", range(5))
def test_abort_at_every_stage(
    pair: tuple[GpuEngineFixture, GpuEngineFixture], run_alone: Callable[[int], list[int]], steps: int
) -> None:
    p, d = pair
    for gone, other in ((d, p), (p, d)):
        ticket = p.ticket(make_submission(steps))
        d.engine.add(replace(make_submission(steps), source=ticket))
        for _ in range(steps):
            d.step()
            p.step()
        gone.engine.abort("r")
        ended = [output.finish for output in gone.step() if output.finish is not None]
        assert ended in ([], [FinishReason.ABORT])
        other.finish(beside=gone)
        run_until_settled(p, d)
    d.engine.add(make_submission(steps))
    assert d.finish() == run_alone(steps), "the remaining output is right"


def test_pull_waits_for_a_free_staging_slot(
    pair: tuple[GpuEngineFixture, GpuEngineFixture],
    run_alone: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d = pair
    monkeypatch.setattr(regions, "SLOT_TIMEOUT_S", 0.05)
    for seed, slots in ((1, p.region._out_slots), (2, d.region._in_slots)):
        taken = [slots.get() for _ in range(memory.TRANSFER_SLOTS)]
        d.engine.add(replace(make_submission(seed), source=p.ticket(make_submission(seed))))
        assert d.finish(beside=p) == run_alone(seed)
        for slot in taken:
            slots.put(slot)
        run_until_settled(p, d)
    assert d.stats.pull_failures == {"transfer_timeout": 2} and d.stats.recomputed == 2
    d.engine.add(replace(make_submission(3), source=p.ticket(make_submission(3))))
    assert d.finish(beside=p) == run_alone(3) and d.stats.hit_tokens == FULL


def test_damaged_block_is_recomputed(
    pair: tuple[GpuEngineFixture, GpuEngineFixture], run_alone: Callable[[int], list[int]]
) -> None:
    p, d = pair
    p.sender.crc = lambda data, start: zlib.crc32(data, start) ^ 1  # as if bytes had changed in transit
    d.engine.add(replace(make_submission(), source=p.ticket(make_submission())))
    assert d.finish(beside=p) == run_alone(1)
    assert d.stats.pull_failures == {"corrupted": 1}
    run_until_settled(p, d)


@pytest.fixture
def racing(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[DecoderModel, str, Sender | None], tuple[GpuEngineFixture, RaceDetector]]:
    def make(model: DecoderModel, name: str, local: Sender | None) -> tuple[GpuEngineFixture, RaceDetector]:
        device = RaceDetector()
        gpu_engine = GpuEngineFixture(model, name, device=device, local=local)
        slots = [
            slots.get()
            for slots in (gpu_engine.region._out_slots, gpu_engine.region._in_slots)
            for _ in range(memory.TRANSFER_SLOTS)
        ]
        for i, slot in enumerate(slots):
            (gpu_engine.region._out_slots if i < memory.TRANSFER_SLOTS else gpu_engine.region._in_slots).put(slot)
        device.watch(kept=gpu_engine.runner.device_buffers(), scratch=[slot.scratch for slot in slots])
        forward = gpu_engine.runner._run_model

        def record_and_call(*inputs: Any) -> Tensor:
            device.note("the model", gpu_engine.cache.keys, gpu_engine.cache.values, writes=True)
            return forward(*inputs)

        gpu_engine.runner._run_model = record_and_call  # type: ignore[method-assign]
        pulls = gpu_engine.engine.kv.pulls
        assert pulls is not None
        pulls._start_thread = lambda work: (
            None if work == pulls._renew_while_waiting else work()
        )  # run pulls synchronously, and skip lease renewal
        return gpu_engine, device

    def note_access(
        act: Callable[[StagingSlot, memoryview], None], *, writes: bool
    ) -> Callable[[StagingSlot, memoryview], None]:
        def record_and_call(slot: StagingSlot, data: memoryview) -> None:
            device = slot.stream.device  # type: ignore[attr-defined]
            device.note("a thread", slot.pinned, writes=writes)
            act(slot, data)

        return record_and_call

    monkeypatch.setattr(StagingSlot, "read", note_access(StagingSlot.read, writes=False))
    monkeypatch.setattr(StagingSlot, "write", note_access(StagingSlot.write, writes=True))
    return make


def test_steps_and_pulls_do_not_race(
    model: DecoderModel,
    run_alone: Callable[[int], list[int]],
    racing: Callable[[DecoderModel, str, Sender | None], tuple[GpuEngineFixture, RaceDetector]],
) -> None:
    """A step that uses the blocks' earlier content runs when a pull starts; the next step reads the pulled content."""
    p, sending = racing(model, "p", None)
    with sending:
        p.engine.add(replace(make_submission(), publish=True))
        (_, *_, last) = [output for _ in range(10) for output in p.step()]
        assert last.ticket is not None and last.finish is FinishReason.HANDOFF
    d, receiving = racing(model, "d", p.sender)
    with sending, receiving:
        d.engine.add(make_submission(7, "before"))
        d.engine.add(make_submission(8, "beside"))
        tokens: dict[str, list[int]] = {"before": [], "beside": [], "r": []}
        for step in range(60):
            if step == 5:
                d.engine.abort("before")  # its next step is running; its blocks are free
                d.engine.add(replace(make_submission(), source=last.ticket))
            assert d.engine._in_flight or step in (0, *range(10, 60))
            for output in d.step():
                tokens[output.id] += output.tokens
    assert d.engine.idle and d.stats.hit_tokens == FULL
    assert tokens["r"] == run_alone(1) and tokens["beside"] == run_alone(8)
    assert sending.races == [] and receiving.races == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("tokens", "values_in_keys"), [(BLOCK, False), (4 * BLOCK, False), (BLOCK // 4, False), (BLOCK // 4, True)]
)
def test_pieces_equal_those_of_host_region(
    dtype: torch.dtype, tokens: int, values_in_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any block size of the peer; large pieces are split."""
    rng = random.Random(5)
    shape = KVShape(5, 2, 16, BLOCK, dtype, values_in_keys)
    layout = shape.layout("m", transposed_keys=False)
    wire = replace(layout, tokens=tokens)
    monkeypatch.setattr(memory, "TRANSFER_SLOT_BYTES", 2 * layout.layer_bytes)
    cache = KVCache(shape, 24)
    parts = [part.view(torch.uint8).numpy() for part in cache.tensors]
    device, host = DeviceRegion(layout, cache, HostDevice()), HostRegion(layout, [part.copy() for part in parts])
    for _ in range(20):
        into = np.asarray(rng.sample(range(24), 24))
        most = 24 * BLOCK // tokens
        first = rng.randrange(most)
        wide = max(1, min(device.slot_bytes // wire.layer_bytes, most - first))
        last, top = first + rng.randint(1, wide), rng.randrange(5)
        piece = TransferPiece(top, rng.randint(top + 1, 5), first, last)
        data = memoryview(bytearray(rng.randbytes(piece.num_bytes(wire))))
        for region in (device, host):
            region.scatter(piece, into, wire, data)
        for part, other in zip(parts, host.parts, strict=True):
            assert part.tobytes() == other.tobytes()
        found = memoryview(bytearray(len(data)))
        device.gather(piece, into, wire, found)
        assert found == data
    with pytest.raises(BadTransfer, match="the limit is"):
        device.gather(TransferPiece(0, 1, 0, 24), np.arange(24), layout, memoryview(bytearray(24 * layout.layer_bytes)))


def test_cpu_and_gpu_caches_are_incompatible() -> None:
    shape = KVShape(2, 2, 16, BLOCK, torch.bfloat16)
    gpu, cpu = shape.layout("m", transposed_keys=False), shape.layout("m")
    with pytest.raises(IncompatibleCaches, match="not transposed here, transposed at the peer") as refused:
        gpu.check_compatible(cpu)
    assert "between two CPU workers" in str(refused.value.hint) and gpu.layout_hash != cpu.layout_hash
    narrow = KVShape(2, 2, 16, BLOCK, torch.float8_e4m3fn).layout("m", transposed_keys=False)
    with pytest.raises(IncompatibleCaches):
        gpu.check_compatible(narrow)
    replace(gpu, tokens=4 * BLOCK).check_compatible(gpu)
    assert isinstance(gpu, KVLayout)


def test_memory_plan_includes_staging(model: DecoderModel) -> None:
    def scratch(**settings: object) -> int:
        chosen = gpu_config(max_running=4, max_batch_tokens=64, block_size=16, **settings)
        return memory.plan_engine_memory(model.config, chosen, 8 << 30, "bfloat16").scratch

    c = model.config
    shape = KVShape(c.layers, c.kv_heads, c.head_dim, 16, torch.bfloat16)
    region = DeviceRegion(shape.layout("m", transposed_keys=False), KVCache(shape, 2), HostDevice())
    slots = [slots.get() for slots in (region._out_slots, region._in_slots) for _ in range(slots.qsize())]
    assert scratch(transfer=TransferConfig("peer")) - scratch() == sum(slot.scratch.nbytes for slot in slots)


def test_settings_configure_the_transfer_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot an engine completely on a fake GPU."""
    home = tiny.write(tmp_path / "model", tiny.CONFIGS["llama"])
    simulate_gpu(monkeypatch)
    config = EngineConfig.build(
        str(home), device="cuda", block_size=16, kv_memory=1 << 18, transfer=TransferConfig("p"), kv_mooncake=True
    )
    engines = [boot(config).engine, boot(replace(config, transfer=TransferConfig("d"))).engine]
    p, d = engines
    p.add(replace(make_submission(), publish=True))
    outputs = [output for _ in range(20) for output in p.step()]
    ticket = outputs[-1].ticket
    assert ticket is not None and set(ticket["peer"]["endpoints"]) == {"tcp", "mooncake"}
    d.add(replace(make_submission(), source=ticket))
    while not d.idle:
        d.step()
    stats = d.stats().transfer
    assert stats is not None and stats.hit_tokens == 32
    assert d.transfer_endpoint is not None
    assert d.transfer_endpoint.receiver.connected_transports == {"mooncake": 1}
    for engine in engines:
        engine.close()
    with pytest.raises(InvalidRequest, match="share a GPU"):
        engine_group_boot.boot_engine_group({"a": config, "b": config}, TimeSharingConfig())
