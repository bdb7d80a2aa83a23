"""Models of every family on several ranks, which are threads here: their logits equal those of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_models
import tiny
import torch
from paged_model import Cache, prompts
from rank_models import WRITERS, assert_same, compute_logits, load_rank, run_ranks
from torch import Tensor

from emberline.bench.gpu.rank import RankWeights
from emberline.bench.rank_reads import measure_reads
from emberline.bench.report import BenchReport
from emberline.engine import memory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.comm.thread_group import ThreadCommunicator, ThreadGroup
from emberline.models import attention, direct_io, tensor_sharding, vocabulary
from emberline.models.attention import ProjectionNorms
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.outline import divide_vocabulary
from emberline.models.registry import ARCHITECTURES
from emberline.models.shard import Shard
from emberline.models.tensor_slices import DimensionSlice
from emberline.models.weight_matrices import list_weight_matrices
from emberline.models.weights import Weights


@pytest.mark.parametrize("name", WRITERS)
def test_logits_equal_those_of_one_rank(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    model = load_rank(tmp_path, Shard())
    whole = compute_logits(model)
    for ranks in (2, 4):
        assert_same(run_ranks(tmp_path, ranks), whole)
    if model.config.experts is not None and any(model.config.experts.layers):
        for ranks in (2, 4):
            assert_same(run_ranks(tmp_path, ranks, 2), whole)


@pytest.mark.parametrize("name", ["llama-biased", "olmo2", "gpt-oss", "deepseek_v3", "delta-next"])
def test_logits_do_not_depend_on_chunks(name: str, tmp_path: Path) -> None:
    """A row's result is the same to the bit in any batch, as on one rank."""
    if ops.current_backend().library is None:
        pytest.skip("torch's products depend on the batch")
    WRITERS[name](tmp_path)
    tokens = prompts(17, 9)

    def run(comm: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        model = load_rank(tmp_path, Shard(comm.rank, 2), comm)
        return torch.cat(Cache(model, tokens).run(3)), torch.cat(
            [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
        )

    for chunks, whole in ThreadGroup(2, in_turns=True).run(run):
        assert torch.equal(chunks, whole)


@pytest.mark.parametrize(
    ("name", "fused"), [("llama", 3), ("qwen3-moe", 1), ("mistral", 3), ("gemma2", 0), ("mixtral", 0)]
)
def test_sums_with_the_norms_that_follow(
    name: str, fused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of a layer are fused with the norm of the next product, except the last one, and compute the same."""
    WRITERS[name](tmp_path)
    whole = compute_logits(load_rank(tmp_path, Shard()))
    weights: list[Tensor] = []
    compute = ThreadCommunicator.all_reduce_add_norm

    def record(comm: ThreadCommunicator, x: Tensor, partial: Tensor, weight: Tensor, eps: float) -> Tensor:
        weights.extend([weight] if comm.rank == 0 else [])
        return compute(comm, x, partial, weight, eps)

    monkeypatch.setattr(ThreadCommunicator, "fuses_norm", True)
    monkeypatch.setattr(ThreadCommunicator, "all_reduce_add_norm", record)
    assert_same(run_ranks(tmp_path, 2), whole)
    assert len({id(weight) for weight in weights}) == fused


@pytest.mark.parametrize("name", WRITERS)
def test_sizes_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    """A rank's weights have the size that its config says, and plans of several GPUs divide models in the same way."""
    WRITERS[name](tmp_path)
    whole = load_rank(tmp_path, Shard()).config
    for ranks in (2, 4):
        part = Shard(ranks - 1, ranks)
        loaded = load_rank(tmp_path, part, Unused(ranks - 1, ranks))
        assert loaded.weight_bytes == memory.weight_bytes(loaded.config, 4)
        first, planned = outline_of(Shard(0, ranks).shard_config(whole)), outline_of(whole).divide(ranks)
        matrices = [[p for p in list_weight_matrices(o) if p.kind != "norms"] for o in (first, planned)]
        assert matrices[0] == matrices[1]
        assert (first.kv_heads, first.state, first.latent) == (planned.kv_heads, planned.state, planned.latent)


# Each changes one thing that a family needs.
BREAKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "parts of fused rows": ("phi3", lambda patch: patch.setattr(tensor_sharding, "_join", join_as_one)),
    "columns of gate and up": ("llama4-experts", lambda patch: patch.setattr(tensor_sharding, "_join", join_as_one)),
    "KV heads": ("qwen3", lambda patch: patch.setattr(Shard, "divide", divide_in_turn)),
    "order of latents": ("deepseek-v2", lambda patch: patch.setattr(ThreadCommunicator, "all_gather", gather_reversed)),
    "sum of squares": ("olmo2", lambda patch: patch.setattr(ProjectionNorms, "_apply_to_parts", norm_own_part)),
    "bias of o": ("llama-biased", lambda patch: patch.setattr(attention, "add_output", add_each_bias)),
    "bias of experts": ("gpt-oss", lambda patch: patch.setattr(Shard, "has_expert_bias", True)),
    "first token": ("llama", lambda patch: patch.setattr(Shard, "vocabulary", start_too_late)),
    "sum of outputs": ("llama", lambda patch: patch.setattr(ThreadCommunicator, "all_reduce", lambda _, x: x)),
}


@pytest.mark.parametrize("what", BREAKS)
def test_broken_divisions_are_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, break_ = BREAKS[what]
    WRITERS[name](tmp_path)
    whole = compute_logits(load_rank(tmp_path, Shard()))
    break_(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        assert_same(run_ranks(tmp_path, 4), whole)


def join_as_one(dimension: int, *sections: tensor_sharding.Section) -> DimensionSlice:
    """Cut the sections as if they were one."""
    size = sum(units * width for units, _, width in sections)
    part = sum(len(kept) * width for _, kept, width in sections)
    units, kept, _ = sections[0]
    rank = kept.start * size // units
    return DimensionSlice(dimension, size, ((min(rank, size - part), min(rank, size - part) + part),))


def divide_in_turn(own: Shard, count: int) -> range:
    """Give KV heads to ranks in turn, and not to those that need them."""
    parts = min(count, own.world_size)
    index, each = own.rank % parts, count // parts
    return range(index * each, (index + 1) * each)


def gather_reversed(comm: Any, x: Tensor) -> Tensor:
    return torch.cat(comm._exchange(x, "all_gather")[::-1], dim=-1)


def norm_own_part(norms: ProjectionNorms, qkv: Tensor, comm: object) -> None:
    ProjectionNorms(norms.q, norms.k, norms.eps, norms.is_layer_norm).apply(qkv)


def add_each_bias(inner: Tensor, layer: ops.LinearLayer, x: Tensor, scaling: Any, unpacker: object) -> Tensor:
    """Add the bias of each rank."""
    return x.add_(scaling.comm.all_reduce(ops.linear(inner, layer)))


def start_too_late(own: Shard, size: int) -> range:
    part = vocabulary.divide_vocabulary(size, own.world_size)
    return range(size)[part * own.rank + 1 : part * (own.rank + 1) + 1]


def test_every_family_is_tested(tmp_path: Path) -> None:
    kinds = set()
    for name, write in WRITERS.items():
        write(tmp_path / name)
        kinds.add(json.loads((tmp_path / name / "config.json").read_text())["model_type"])
    assert kinds == set(ARCHITECTURES)


def test_smollm2_sizes_on_three_ranks(tmp_path: Path) -> None:
    """SmolLM2 has 9 heads and 3 KV heads; the vocabulary is not a multiple of 3."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96}
    tiny.write(tmp_path, tiny.config("llama", **heads, vocab_size=400, tie_word_embeddings=True))
    assert_same(run_ranks(tmp_path, 3), compute_logits(load_rank(tmp_path, Shard())))


@pytest.mark.parametrize("kind", [Weights, DeviceWeights])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_only_their_parts(
    ranks: int, kind: type[Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "MAX_READ_GAP_BYTES", 0)  # the matrices of real models are larger
    sizes = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 1}
    config = tiny.config("llama", **tiny.GPU_SIZES | sizes | {"intermediate_size": 1024, "vocab_size": 8192})
    checkpoint = Checkpoint.open(tiny.write(tmp_path, config, dtype=torch.bfloat16))
    options = {"device": "cpu"} if kind is DeviceWeights else {}
    comms = [Unused(rank, ranks) for rank in range(ranks)]
    opened = [kind(checkpoint, shard=Shard(comm.rank, ranks), comm=comm, **options) for comm in comms]
    loaded = [rank_models.finish_load(weights) for weights in opened]
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    assert stored <= sum(weights.read_bytes for weights in opened) <= 1.05 * stored
    assert max(model.weight_bytes for model in loaded) < 1.05 * stored / ranks


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_random_weights_of_a_lone_rank(name: str, tmp_path: Path) -> None:
    """As the benchmark of one rank loads them: they have the size of the plan, and logits of the whole vocabulary."""
    WRITERS[name](tmp_path)
    config = ModelConfig.from_checkpoint(Checkpoint.open(tmp_path))
    for shard in (Shard(1, 2), Shard(3, 4, 2)):
        weights = RankWeights("cpu", shard, None)
        model = DecoderModel.load(own := shard.shard_config(config), weights, rank_models.CONTEXT, "random")
        assert weights.loaded_bytes == memory.weight_bytes(own, 2)
        assert Cache(model, prompts(5)).step([5]).shape == (5, config.vocab)
        calls = weights.recorder.calls_of_step(5, divide_vocabulary(config.vocab, shard.world_size))
        sums = [call["count"] for call in calls if call["name"] == "all_reduce"]
        assert sums == [1 + 2 * config.layers]  # of the embedding, and of two outputs in each layer


def test_bytes_that_ranks_read_are_reported(tmp_path: Path) -> None:
    WRITERS["llama"](tmp_path)
    measure_reads(report := BenchReport("parallel", {}), str(tmp_path), [2, 3])
    (info, *_) = Checkpoint.open(tmp_path).tensors.values()
    read = report.results["read_bytes_ratio"].value * info.file.stat().st_size
    assert info.file.stat().st_size * 0.9 < read < 2 * info.file.stat().st_size
    assert report.results["read_bytes_ratio_tp2"].value == report.results["read_bytes_ratio"].value
    assert report.config["not_divided"] == {"3": "8 attention heads cannot be divided evenly among 3 ranks"}


def test_byte_ranges_are_aligned_and_merged() -> None:
    page = direct_io.DIRECT_IO_ALIGN_BYTES
    gap = direct_io.MAX_READ_GAP_BYTES
    far = 10 * gap
    ranges = [(far + 5, far + 6), (5, page + 1), (2 * page + gap, 3 * page + gap)]
    assert direct_io.merge_ranges(ranges, far + 100) == [(0, 3 * page + gap), (far, far + 100)]


class Unused:
    """A communicator of models that are not run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
