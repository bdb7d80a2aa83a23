"""Greedy tokens and log-probabilities are the same to the bit after a round trip through host memory or a disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from emberline.core.clock import ManualClock
from emberline.core.engine_config import EngineConfig, SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output, TierStats
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, RequestStatus, Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.runner import TorchRunner
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK = 8
OUT = 6
Folded = dict[tuple[str, int], tuple[list[int], list[float], int]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_decoder(tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIGS[request.param]), "bfloat16")


class TieredEngine:
    """An engine with tiers, whose files are read and written by threads or by explicit calls."""

    def __init__(
        self,
        model: DecoderModel,
        disk: Path | None = None,
        *,
        host: int = 64,
        blocks: int = 12,
        running: int = 4,
        threads: bool = False,
        clock: ManualClock | None = None,
    ) -> None:
        c = model.config
        shape = KVShape(c.layers, c.kv_heads, c.head_dim, BLOCK, torch.bfloat16)
        runner = TorchRunner(model, KVCache(shape, blocks), frozenset())
        below = [DiskTier(disk, runner.layout, shape.block_bytes, 1 << 24, clock=clock)] if disk is not None else []
        self.host = HostTier(shape.block_bytes, host * 4096 * -(-shape.block_bytes // 4096))
        self.tiers = TierStack(self.host, below, clock=clock, threads=threads)
        self.threads = threads
        config = SchedulerConfig(block_size=BLOCK, max_batch_tokens=64, max_running=running, max_context=64)
        self.engine = Engine(config, runner, clock, self.tiers)

    def run(self, *submissions: Submission) -> Folded:
        for submission in submissions:
            self.engine.add(submission)
        return fold_outputs(self.finish())

    def finish(self) -> list[Output]:
        outputs: list[Output] = []
        for _ in range(10_000):
            outputs += self.engine.step()
            self.engine.kv.check_invariants()
            if not self.threads:
                self.tiers.load_next_block()
            if self.engine.idle:
                break
        assert self.engine.idle
        self.flush()
        self.host.check_invariants()
        assert self.host.num_pinned == 0
        return outputs

    def flush(self) -> None:
        if self.threads:
            assert self.tiers.wait_until_written(10.0)
        while not self.threads and self.tiers.write_next_block():
            pass

    def stats(self) -> dict[str, TierStats]:
        return self.engine.stats().tiers


def fold_outputs(outputs: list[Output]) -> Folded:
    folded: Folded = {}
    for o in outputs:
        tokens, logprobs, cached = folded.get((o.id, o.index), ([], [], 0))
        logprobs = logprobs + [p.logprob for p in o.logprobs]
        folded[o.id, o.index] = (tokens + o.tokens, logprobs, cached + o.cached_tokens)
    return folded


def prompt(seed: int, length: int = 41) -> list[int]:
    return torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_submission(seed: int, name: str = "r", /, **params: object) -> Submission:
    wishes = {"max_tokens": OUT, "temperature": 0.0, "logprobs": 0, **params}
    return Submission(name, prompt(seed), SamplingParams(**wishes))  # type: ignore[arg-type]


def evict_main_cache(tiered: TieredEngine) -> None:
    """Run requests that evict everything else from the main cache."""
    for seed in (100, 101, 102):
        tiered.run(make_submission(seed))
    tiered.engine.kv.check_invariants()


def assert_same_output(got: Folded, expected: Folded, cached: int) -> None:
    assert {key: value[:2] for key, value in got.items()} == {key: value[:2] for key, value in expected.items()}
    assert {value[2] for value in got.values()} == {cached}


@pytest.fixture
def compute_without_tiers(model: DecoderModel) -> Folded:
    """Return the output of an engine with an empty cache."""
    return TieredEngine(model).run(make_submission(1))


def test_prefix_loads_from_host_memory(model: DecoderModel, compute_without_tiers: Folded) -> None:
    tiered = TieredEngine(model)
    assert_same_output(tiered.run(make_submission(1)), compute_without_tiers, cached=0)
    evict_main_cache(tiered)
    assert_same_output(tiered.run(make_submission(1)), compute_without_tiers, cached=40)
    assert tiered.stats()["host"].hit_tokens == 40
    assert tiered.engine.kv.hit_tokens == 0, "the main cache had evicted it"


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("host", [2, 3, 64])
def test_prefix_loads_from_disk_after_restart(
    model: DecoderModel, compute_without_tiers: Folded, tmp_path: Path, threads: bool, host: int
) -> None:
    before = TieredEngine(model, tmp_path, threads=threads)
    before.run(make_submission(1))
    before.tiers.close()
    after = TieredEngine(model, tmp_path, host=host, threads=threads)  # few host buffers are enough
    assert_same_output(after.run(make_submission(1)), compute_without_tiers, cached=40)
    assert after.stats()["disk"].hit_tokens == 40
    if host == 64:
        evict_main_cache(after)
        assert_same_output(after.run(make_submission(1)), compute_without_tiers, cached=40)
        assert after.stats()["host"].hit_tokens == 40, "promoted"
        assert after.stats()["disk"].loaded_blocks == 5
    after.tiers.close()


@pytest.mark.parametrize("position", [0, 10, 30, 66, 4095, 4096, 5000, -1])
def test_corrupted_block_is_recomputed(
    model: DecoderModel, compute_without_tiers: Folded, tmp_path: Path, position: int
) -> None:
    before = TieredEngine(model, tmp_path)
    before.run(make_submission(1))
    tiered = TieredEngine(model, tmp_path)
    request_hashes = hashes(tiered, make_submission(1))
    victim = next(tmp_path.glob(f"*/*/{request_hashes[2].hex()}"))
    data = bytearray(victim.read_bytes())
    data[position] ^= 0x10
    victim.write_bytes(data)
    harmless = 68 <= position < 4096  # the rest of the header page is unused
    assert_same_output(tiered.run(make_submission(1)), compute_without_tiers, cached=40 if harmless else 16)
    assert tiered.stats()["disk"].damaged_blocks == (not harmless)
    again = TieredEngine(model, tmp_path)
    assert_same_output(again.run(make_submission(1)), compute_without_tiers, cached=40)  # the block was written again


def hashes(tiered: TieredEngine, submission: Submission) -> list[bytes]:
    """Return the block hashes of a prompt, as an engine computes them."""
    tiered.engine.add(submission)
    request = tiered.engine.scheduler.requests[f"{submission.id}#0"]
    found = tiered.engine.kv._shareable_hashes(request)
    tiered.engine.abort(submission.id)
    tiered.run()
    return found


def test_tenants_and_models_do_not_share_blocks(model: DecoderModel, tmp_path: Path) -> None:
    TieredEngine(model, tmp_path).run(make_submission(1))
    tiered = TieredEngine(model, tmp_path)
    submission = make_submission(1)
    stranger = Submission("r", submission.prompt, submission.params, salt="other")
    assert {cached for *_, cached in tiered.run(stranger).values()} == {0}
    other = load_decoder(tiny.write(tmp_path / "model", "llama", seed=7), "bfloat16")
    assert {cached for *_, cached in TieredEngine(other, tmp_path).run(make_submission(1)).values()} == {0}


def test_several_completions_share_one_load(model: DecoderModel, tmp_path: Path) -> None:
    wish = {"n": 3, "temperature": 1.0, "seed": 5}
    expected = TieredEngine(model, blocks=40).run(make_submission(1, **wish))
    TieredEngine(model, tmp_path).run(make_submission(1))
    tiered = TieredEngine(model, tmp_path, blocks=40)
    got = tiered.run(make_submission(1, **wish))
    assert_same_output(got, expected, cached=40)
    assert tiered.stats()["disk"].loaded_blocks == 5


def test_preempted_request_reloads_from_tiers(model: DecoderModel, tmp_path: Path) -> None:
    expected: Folded = {}
    for seed in range(4):
        expected |= TieredEngine(model, blocks=40).run(make_submission(seed, f"r{seed}", max_tokens=20))
    tiered = TieredEngine(model, tmp_path, blocks=14)
    first, *rest = (make_submission(seed, f"r{seed}", max_tokens=20) for seed in range(4))
    tiered.engine.add(replace(first, priority=Priority.BATCH))
    outputs = [o for _ in range(4) for o in tiered.engine.step()]
    for submission in rest:  # these run first and need all blocks
        tiered.engine.add(submission)
    got = fold_outputs([*outputs, *tiered.finish()])
    assert tiered.engine.scheduler.preemptions > 0
    assert {key: value[:2] for key, value in got.items()} == {key: value[:2] for key, value in expected.items()}
    assert tiered.stats()["host"].hit_tokens > 0


def test_abort_while_loading(model: DecoderModel, compute_without_tiers: Folded, tmp_path: Path) -> None:
    TieredEngine(model, tmp_path).run(make_submission(1))
    tiered = TieredEngine(model, tmp_path)
    tiered.engine.add(make_submission(1))
    tiered.engine.step()
    assert tiered.engine.scheduler.num_loading == 1
    tiered.tiers.load_next_block()
    tiered.tiers.load_next_block()
    tiered.engine.abort("r")
    assert tiered.engine.scheduler.num_loading == 0 and tiered.engine.kv.num_free_blocks == tiered.engine.kv.num_blocks
    assert not tiered.tiers.load_next_block()
    tiered.run()
    assert_same_output(tiered.run(make_submission(1)), compute_without_tiers, cached=40)


def test_slow_load_times_out_and_others_run(model: DecoderModel, compute_without_tiers: Folded, tmp_path: Path) -> None:
    TieredEngine(model, tmp_path).run(make_submission(1))
    clock = ManualClock()
    tiered = TieredEngine(model, tmp_path, blocks=24, clock=clock)
    tiered.engine.add(make_submission(1))
    tiered.engine.add(make_submission(2, "quick"))
    outputs: list[Output] = []
    for _ in range(20):  # the disk returns only the first block
        outputs += tiered.engine.step()
        if tiered.tiers.stats()["disk"].loaded_blocks == 0:
            tiered.tiers.load_next_block()
    assert {o.id for o in outputs} == {"quick"} and outputs[-1].finish is not None
    assert tiered.engine.scheduler.requests["r#0"].status is RequestStatus.LOADING
    clock.advance(5.0)
    for _ in range(20):
        outputs += tiered.engine.step()
    assert tiered.engine.idle
    tiered.flush()
    assert tiered.host.num_pinned == 0
    assert_same_output({k: v for k, v in fold_outputs(outputs).items() if k[0] == "r"}, compute_without_tiers, cached=8)


def test_prompt_logprobs_are_computed(model: DecoderModel, tmp_path: Path) -> None:
    TieredEngine(model, tmp_path).run(make_submission(1))
    tiered = TieredEngine(model, tmp_path)
    assert {cached for *_, cached in tiered.run(make_submission(1, prompt_logprobs=1)).values()} == {0}
    assert tiered.stats()["disk"].hit_tokens == 0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    yield tiny.write(tmp_path / "checkpoint", "llama")


def test_settings_configure_tiers(checkpoint: Path, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    config = EngineConfig.build(
        str(checkpoint), device="cpu", block_size=8, kv_memory=1 << 16, kv_disk=str(disk), kv_disk_size=1 << 22
    )
    first = boot(config).engine
    first.add(make_submission(1))
    while not first.idle:
        first.step()
    first.close()
    second = boot(config).engine
    second.add(make_submission(1))
    outputs: list[Output] = []
    while not second.idle:
        outputs += second.step()
    second.close()
    assert sum(o.cached_tokens for o in outputs) == 40
    assert second.stats().tiers["disk"].hit_tokens == 40


def test_gpu_memory_plan_includes_tiers() -> None:
    assert EngineConfig.build("", kv_host_memory=1 << 20).with_gpu_defaults().tiers.has_tiers
    assert not EngineConfig.build("").with_gpu_defaults().tiers.has_tiers


def test_invalid_tier_settings_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="only one of kv_disk and kv_disk_size is set"):
        EngineConfig.build("", kv_disk="/x")
    with pytest.raises(InvalidRequest, match="prefix cache"):
        EngineConfig.build("", kv_host_memory=1 << 20, prefix_cache=False)
    (tmp_path / "file").write_text("")
    for wrong in ({"kv_host_memory": 10}, {"kv_disk": str(tmp_path / "file"), "kv_disk_size": 1 << 22}):
        with pytest.raises(InvalidRequest, match=r"at least 2|cannot be used"):
            boot(EngineConfig.build(str(checkpoint), device="cpu", kv_memory=1 << 20, **wrong))  # type: ignore[arg-type]
