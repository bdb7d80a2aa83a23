"""The start of an engine on several GPUs and the processes of its ranks. The CPU is their GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file
from host_rank_process import COMMAND, FAILURE_FILE, simulate_gpus
from test_nodes import KEY, node_settings, running_node

from emberline import LLM, SamplingParams
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed, InvalidRequest
from emberline.core.transfer_config import TransferConfig
from emberline.engine import llm as llm_module
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.ranks import device_boot
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.group import RankGroup
from emberline.kv.transfer.piece import TransferPiece

SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory": 1 << 20, "block_size": 16, "max_batch_tokens": 16}
SETTINGS |= {"max_running": 3, "max_context": 64}
BLOCK_BYTES = 2 * 3 * 16 * 8 * 4  # of a rank: keys and values of 3 layers, with one head of 8 numbers
WHOLE_BLOCKS = -(-(1 << 20) // (2 * BLOCK_BYTES))  # of a rank with both KV heads
PROMPTS = ["one", "a prefix of several blocks, two", "a prefix of several blocks, three"]
PARAMS = [SamplingParams(max_tokens=8, temperature=t, seed=3) for t in (0.0, 0.9, 0.0)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, num_attention_heads=8)
    tokenizer_file(tiny.write(made, config))
    return made


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """The tokens of one rank."""
    with LLM(directory, **SETTINGS, device="cpu", threads=1) as whole:
        return [each.tokens for each in whole.generate(PROMPTS, PARAMS, progress=False)]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let LLM start an engine on simulated GPUs."""
    with monkeypatch.context() as patch:
        simulate_gpus(patch.setattr)
        patch.setattr(device_boot, "RankGroup", partial(RankGroup, command=COMMAND))
        patch.setattr(llm_module, "boot", boot_on_gpus)
        yield patch


def boot_on_gpus(config: Any) -> LoadedEngine:
    return device_boot.boot_device_ranks(config.with_gpu_defaults())


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def pids_of(llm: LLM) -> dict[int, int]:
    runner = llm.engine.runner
    assert isinstance(runner, DeviceLeaderRunner) and isinstance(runner._group, RankGroup)
    return runner._group.pids


def assert_all_ranks_copy_a_block(llm: LLM) -> None:
    """Read a block as another engine would: every layer and head has keys and values."""
    assert llm.engine.transfer_endpoint is not None
    region = llm.engine.transfer_endpoint.sender.region
    data = bytearray(region.layout.block_bytes)
    region.gather(TransferPiece(0, 3, 0, 1), np.array([0]), region.layout, memoryview(data))
    assert np.frombuffer(data, np.float32).reshape(3, 2, 2, -1).any(axis=3).all()


def test_same_tokens_as_one_rank_until_a_gpu_fails(
    expected: list[list[int]], directory: Path, gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus.setenv(FAILURE_FILE, str(tmp_path / "failure"))
    gpus.setenv("CUDA_VISIBLE_DEVICES", "4,7,1,2")
    small = SETTINGS | {"kv_memory": 5 * BLOCK_BYTES, "kv_host_memory": 1 << 20}  # blocks come back from host memory
    with LLM(directory, **small, tp=2, rank_timeout=2.0, transfer=TransferConfig("p")) as llm:
        for _ in range(2):
            assert [each.tokens for each in llm.generate(PROMPTS, PARAMS, progress=False)] == expected
            llm.generate(["another prompt that takes all blocks of the cache"], PARAMS[0], progress=False)
        assert llm.engine.stats().tiers["host"].loaded_blocks > 0
        assert [(each.stage, each.tensor_rank) for each in llm.loaded.ranks] == [(0, 0), (0, 1)]
        assert all(each.weight_bytes > 0 and each.kv_bytes > 0 for each in llm.loaded.ranks)
        numerics = llm.loaded.numerics
        assert (llm.loaded.device, numerics.device, numerics.ranks) == ("cuda", "cuda", "tp2")
        assert_all_ranks_copy_a_block(llm)
        pids = pids_of(llm)
        (tmp_path / "failure").touch()
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 .*: GPU 7 failed: RuntimeError: CUDA error: an illegal"):
            llm.generate(PROMPTS, PARAMS, progress=False)
    assert len(pids) == 1 and not any(map(is_running, pids.values()))


def test_ranks_on_two_nodes(
    expected: list[list[int]], directory: Path, gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With data-parallel attention, for which node 0 sends a layout that only GPUs have."""
    gpus.setenv(FAILURE_FILE, str(tmp_path / "failure"))
    gpus.setenv("EMBERLINE_CLUSTER_KEY", KEY)
    settings = SETTINGS | {"tp": 2, "dp_attention": True, "nodes": 2, "master": node_settings()["master"]}
    with running_node(EngineConfig.build(str(directory), **settings), command=COMMAND) as node:
        with LLM(directory, **settings) as llm:
            assert [each.tokens for each in llm.generate(PROMPTS, PARAMS, progress=False)] == expected
            assert not pids_of(llm), "the other rank is on node 1"
            assert (llm.loaded.numerics.ranks, llm.loaded.kv_tokens) == ("tp2-dp-attention", 2 * 16 * WHOLE_BLOCKS)
        node.result(timeout=5)  # it ends with node 0


@pytest.mark.usefixtures("gpus")
def test_more_ranks_than_gpus_are_refused(directory: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"8 ranks \(tp 8, pp 1\) need 8 GPUs, and this machine has 4"):
        LLM(directory, **SETTINGS, tp=8)
