"""Kinds of attention that Llama does not have, compared with transformers in float32 on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from engine_runs import run_engine
from paged_model import Cache, assert_close, oracle, prompts
from sink_model import SinkModel
from tiny_deepseek import DEEPSEEK, MLA, write_deepseek
from torch import Tensor

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import UnsupportedModel
from emberline.core.params import SamplingParams
from emberline.core.plan import BlockCopy
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.kv_shape import make_kv_shape
from emberline.kernels import ops
from emberline.kernels.arguments import AttentionInputs
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kv.cache import KVCache
from emberline.kv.tiers.copier import HostBlockCopier
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import StagingBuffer, copy_piece
from emberline.kv.transfer.shm import SharedSegment
from emberline.models.attention_parts import AttentionParts
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.loader import compute_fingerprint, load_decoder
from emberline.models.tensor_names import load_model
from emberline.models.weights import Weights

CONTEXT = 64


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.current_backend()
    if request.param == "native" and before.library is None:
        pytest.skip("no native kernels")
    ops.start_backend(native=request.param == "native")
    yield request.param
    ops.start_backend(native=before.library is not None)


def check_model(model: DecoderModel, tokens: list[list[int]], theirs: list[Tensor]) -> None:
    """Check the logits, and on the native backend that their bits depend on neither chunks nor the batch."""
    mixed = Cache(model, tokens, 1).run(1)
    assert_close(mixed, theirs)
    if ops.current_backend().library is not None:
        whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
        assert all(map(torch.equal, mixed, whole)), "depends on chunks or batch"


def test_sinks_equal_transformers(backend: str, tmp_path: Path) -> None:
    case, tokens = SinkModel(tmp_path), prompts(37, 20)
    weights = Weights(case.checkpoint, None)
    model = load_model(case.config, weights, CONTEXT)
    weights.finish("")
    assert model.stack is None
    check_model(model, tokens, case.compute_gpt_oss_logits(tokens))


def test_kinds_of_attention_change_the_fingerprint_only_where_a_model_has_them(tmp_path: Path) -> None:
    case = SinkModel(tmp_path)
    plain = replace(case.config, parts=replace(case.config.parts, attention=AttentionParts()))
    assert repr(plain) == repr(case.config) and repr(plain.parts) == repr(case.config.parts)
    with_sinks, without = (compute_fingerprint(case.checkpoint, c, "float32", 64) for c in (case.config, plain))
    assert with_sinks != without


def test_chunks_must_be_whole_blocks() -> None:
    plain = ModelConfig.from_hf(tiny.config("llama"))
    parts = replace(plain.parts, attention=AttentionParts(chunked_windows=True))
    chunked = replace(plain, windows=(48, 0, 48), parts=parts)
    assert make_kv_shape(chunked, 16, torch.float32) == make_kv_shape(plain, 16, torch.float32)
    with pytest.raises(UnsupportedModel, match=r"attention_chunk_size is 48.*block size of 32"):
        make_kv_shape(chunked, 32, torch.float32)
    assert make_kv_shape(replace(chunked, parts=plain.parts), 32, torch.float32).block_size == 32, "a sliding window"


@pytest.mark.parametrize("name", DEEPSEEK)
def test_latent_attention_equals_transformers(backend: str, name: str, tmp_path: Path) -> None:
    directory, tokens = write_deepseek(tmp_path, name), prompts(37, 20)
    model = load_decoder(directory)
    assert (model.config.kv_heads, model.config.head_dim) == (1, 28) and model.stack is None
    check_model(model, tokens, oracle(directory, tokens))


def test_the_cache_holds_latents_once() -> None:
    config = ModelConfig.from_hf({**tiny.BASE, **MLA, **DEEPSEEK["v2"], "architectures": ["DeepseekV2ForCausalLM"]})
    shape = make_kv_shape(config, 16, torch.float32)
    assert shape.block_bytes == 3 * 28 * 16 * 4 == shape.layout("m").block_bytes and shape.layout("m").parts == 1
    cache = KVCache(shape, 4)
    assert cache.keys.shape == (3, 4, 1, 16, 28) and cache.values.shape == (3, 4, 1, 16, 0)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    buffer, before = memoryview(bytearray(shape.block_bytes)), cache.keys.clone()
    copier = HostBlockCopier(cache)
    copier.save([BlockCopy(2, b"", buffer)])
    copier.load([BlockCopy(1, b"", buffer)])
    assert torch.equal(cache.keys[:, 1], before[:, 2]) and torch.equal(cache.keys[:, 2:], before[:, 2:])


def test_latents_move_between_caches_of_other_block_sizes() -> None:
    """As between a prefill and a decode worker, in shared memory; on a CPU a block stores its keys transposed."""
    config = ModelConfig.from_hf({**tiny.BASE, **MLA, **DEEPSEEK["v2"], "architectures": ["DeepseekV2ForCausalLM"]})
    caches = []
    for block_size, blocks in ((8, 6), (16, 3)):
        shape = make_kv_shape(config, block_size, torch.float32)
        caches.append(KVCache(shape, blocks, segment=SharedSegment(shape.layout("m"), blocks)))
    source, target = caches
    source.keys.copy_(torch.randn(source.keys.shape))
    regions = [cache.segment.region for cache in caches if cache.segment is not None]
    piece, blocks = TransferPiece(0, 3, 0, 4), np.array([5, 0, 3, 2])
    copy_piece(piece, regions[0], blocks, regions[1], np.array([2, 0]), StagingBuffer())
    sent = source.keys.view(3, 6, 28, 8)[:, blocks].permute(0, 1, 3, 2).reshape(3, 32, 28)
    assert torch.equal(target.keys.view(3, 3, 28, 16)[:, [2, 0]].permute(0, 1, 3, 2).reshape(3, 32, 28), sent)


def test_latent_attention_in_an_engine_with_a_disk(tmp_path: Path) -> None:
    directory, prompt = write_deepseek(tmp_path / "model", "v3"), prompts(41)[0]
    settings = {"device": "cpu", "block_size": 8, "kv_memory": 1 << 16, "max_batch_tokens": 16, "threads": 1}
    config = EngineConfig.build(str(directory), **settings, kv_disk=str(tmp_path / "disk"), kv_disk_size=1 << 22)
    model = load_decoder(directory)
    expected = list(prompt)
    for _ in range(6):
        expected.append(int(Cache(model, [expected]).step([len(expected)])[-1].argmax()))
    for hits in (0, 40):
        engine = boot(config).engine
        tokens = run_engine(engine, [Submission("r", prompt, SamplingParams(max_tokens=6, temperature=0.0))])
        assert tokens["r"] == expected[len(prompt) :]
        engine.close()
        assert engine.stats().tiers["disk"].hit_tokens == hits


def test_kernels_for_hopper_refuse_latent_attention() -> None:
    pytest.importorskip("triton")
    from emberline.kernels.cuda.hopper_backend import HopperBackend

    empty = torch.zeros(0, dtype=torch.int32)
    layer = ops.AttentionLayer(2, 1, 16, scale=1.0, cos_sin=torch.zeros(0), latent_dim=8)
    inputs = AttentionInputs(
        torch.zeros(1, 64), layer, empty, empty, ops.AttentionMetadata(empty, empty, empty, empty, empty)
    )
    with pytest.raises(NotImplementedError, match="use latent_attention"):
        HopperBackend.paged_attention(object.__new__(HopperBackend), inputs, AttentionPlan(0, prefill_tiles=empty))
