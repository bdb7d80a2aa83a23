"""The model of most GPU benchmarks: Llama 3.1 8B with random weights, in memory or as a checkpoint on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.core.cpus import core_count
from emberline.hub.checkpoint import INDEX_FILE
from emberline.hub.tensorfile import write_tensors
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.models.config import ModelConfig
from emberline.models.pending_weights import quantise_rows
from emberline.models.quantised_plan import describe_quantised, split_experts
from emberline.models.weight_formats import QuantisedSize, choose_online_format
from emberline.models.weights import StackSource, Weights
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.pack import pack_file

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
WEIGHT_STD = 0.02  # standard deviation of every matrix
EMBEDDING_SEED, EMBEDDING_STD = 1, 100.0  # of SuccessorWeights
SHARDS = 4
PIECE_BYTES = 64 << 20  # copied through pinned memory at a time

Shapes = dict[str, tuple[int, ...]]


class RandomWeights(Weights):
    """Random weights in place of a checkpoint. Every requested tensor exists and is drawn on its device."""

    stacks_experts = True

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        *,
        packed: bool = False,
        online: str = "",
    ) -> None:
        """`online`: the format to which matrices of layers are quantised, as `--weights` does; empty: none."""
        self.device = torch.device(device)
        self.packed = packed
        self.quantised_sizes: list[QuantisedSize] = []
        self._online = online
        self._blocks = None
        self.dtype = dtype
        self.loaded_bytes = 0
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    def has_tensor(self, name: str) -> bool:
        return not name.endswith(".bias")

    def stack_experts(
        self, shape: tuple[int, ...], sources: Sequence[StackSource], dtype: torch.dtype | None = None
    ) -> Tensor:
        drawn = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return self._add_to_loaded_bytes(drawn.normal_(0.0, WEIGHT_STD, generator=self._generator))

    def load_experts(
        self,
        shape: tuple[int, int, int],
        sources: Sequence[StackSource],
        *,
        gated: bool = False,
        packable: bool = False,
        full_precision: bool = False,
    ) -> Tensor | ops.PackedExperts:
        count, n, k = shape
        quantised = None if full_precision else self._describe_quantised(count * n, k, count)
        drawn, taken = self.stack_experts(shape, sources), self.loaded_bytes
        if quantised is None and self.packed and packable:
            experts = ops.empty_experts(*shape, gated=gated)
            self.loaded_bytes = taken - drawn.nbytes + ops.fill_experts(experts, drawn)
            return experts
        if quantised is None:
            return drawn
        experts = ops.PackedExperts(count, n, k, WeightLayout.QUANTISED, quantised, quantised.nbytes, gated)
        kept = ops.count_quantised_bytes(self.device, quantised)
        self.quantised_sizes.append(QuantisedSize.from_matrix(quantised, count, kept))
        matrices = quantise_rows(drawn, quantised)
        self.loaded_bytes = taken - drawn.nbytes + ops.fill_quantised_experts(experts, matrices)
        return experts

    def _describe_quantised(self, rows: int, columns: int, num_experts: int = 0) -> QuantisedMatrix | None:
        found = choose_online_format(self._online, columns) if self._online else None
        if found is None:
            return None
        shape = describe_quantised(found, rows, columns)
        shape = split_experts(shape, num_experts) if num_experts else shape
        return shape if ops.keeps_quantised(self.device, shape) else None

    def load_vector(self, name: str, *shape: int, offset: float = 0.0) -> Tensor:
        return self._add_to_loaded_bytes(torch.ones(shape, device=self.device))

    def load_integers(self, name: str, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def load_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        drawn = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return self._add_to_loaded_bytes(drawn.normal_(0.0, WEIGHT_STD, generator=self._generator))

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
        """Return one random matrix with the rows of all parts. The order of the rows does not matter."""
        return self.load_matrix(parts[0][0], sum(rows for _, rows in parts), columns)

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        *,
        gated: bool = False,
        full_precision: bool = False,
        packable: bool = True,
    ) -> ops.PackedWeight:
        rows = sum(count for _, count in parts)
        if not full_precision and (shape := self._describe_quantised(rows, columns)) is not None:
            weight = ops.empty_quantised_weight(shape, self.device, gated=gated)
            drawn, taken = self.stack(parts, columns), self.loaded_bytes
            kept = ops.count_quantised_bytes(self.device, shape)
            self.quantised_sizes.append(QuantisedSize.from_matrix(shape, 1, kept))
            matrix = quantise_rows(drawn, shape)
            self.loaded_bytes = taken - drawn.nbytes + ops.fill_quantised_weight(weight, matrix)
            return weight
        if not self.packed or not packable:
            return super().linear(parts, columns, gated=gated)
        drawn, taken = self.stack(parts, columns, gated=gated), self.loaded_bytes
        weight = ops.empty_weight(rows, columns, drawn.dtype, drawn.device, gated=gated)
        self.loaded_bytes = taken - drawn.nbytes + ops.fill_weight(weight, drawn)
        return weight

    def stack_vectors(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        return self.load_vector(parts[0][0], sum(size for _, size in parts))

    def load_embedding_table(self, name: str, rows: int, columns: int) -> Tensor | ops.PackedWeight:
        if self.packed:
            return self.linear([(name, rows)], columns, full_precision=True)
        return self.load_matrix(name, rows, columns)

    def drop_duplicate(self, name: str, original: str, rows: int, columns: int) -> bool:
        return True

    def finish(self, ignorable: str = "") -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _add_to_loaded_bytes(self, tensor: Tensor) -> Tensor:
        self.loaded_bytes += tensor.nbytes
        return tensor


class SuccessorWeights(RandomWeights):
    """Random weights with which the next token is the one with the next higher id, so the output is known.

    A token's embedding is so large that the layers, which compute as usual, hardly change its direction. The output
    head finds the token whose row is that direction."""

    def load_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        if "embed_tokens" not in name and "lm_head" not in name:
            return super().load_matrix(name, rows, columns)
        same = torch.Generator(device=self.device).manual_seed(EMBEDDING_SEED)
        drawn = torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(generator=same)
        if "embed_tokens" in name:
            return self._add_to_loaded_bytes(drawn.mul_(EMBEDDING_STD))
        return self._add_to_loaded_bytes(drawn.roll(1, 0).mul_(WEIGHT_STD))


class HeadWeights(RandomWeights):
    """Random weights of an EAGLE-3 head, which uses the embedding of the target model."""

    def has_tensor(self, name: str) -> bool:
        return "embed_tokens" not in name and super().has_tensor(name)


def list_tensor_shapes(config: ModelConfig) -> Shapes:
    """Return the names and shapes of the tensors of a published checkpoint, in the checkpoint's order."""
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.mlp.down_proj.weight": (hidden, config.ffn),
            f"{prefix}.mlp.gate_proj.weight": (config.ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (config.ffn, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.self_attn.q_proj.weight": (q, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab, hidden)}


def split_shapes(shapes: Shapes, shards: int) -> list[Shapes]:
    """Split the shapes, in order, into `shards` parts of about the same number of bytes."""
    total, before = sum(map(prod, shapes.values())), 0
    parts: list[Shapes] = [{} for _ in range(shards)]
    for name, shape in shapes.items():
        parts[before * shards // total][name] = shape
        before += prod(shape)
    return [part for part in parts if part]


def write_checkpoint(
    directory: Path, hf_config: Mapping[str, Any] = LLAMA_8B, *, device: str = "cuda", shards: int = SHARDS
) -> None:
    """Write a checkpoint of random weights.

    The shards are written in parallel, to keep the disk busy. The index file is written last, so that a checkpoint with
    an index is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX_FILE).unlink(missing_ok=True)
    parts = split_shapes(list_tensor_shapes(ModelConfig.from_hf(hf_config)), shards)
    files = [directory / f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        seeds = range(len(parts))
        list(pool.map(lambda file, part, seed: _write_shard(file, part, device, seed), files, parts, seeds))
    write_config(directory, hf_config)
    weight_map = {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    total = 2 * sum(prod(shape) for part in parts for shape in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1), "utf-8")


def pack_checkpoint(source: Path, target: Path) -> str:
    """Write a compressed copy of a checkpoint and return the name of the codec.

    Several files are compressed in parallel, because each file is hashed and written by a single thread.
    """
    codec, index = select_weight_codec(find_library()), json.loads((source / INDEX_FILE).read_text("utf-8"))
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX_FILE).unlink(missing_ok=True)
    files = sorted(set(index["weight_map"].values()))
    with ThreadPoolExecutor(core_count()) as coders, ThreadPoolExecutor(len(files)) as pool:

        def pack_one(name: str) -> None:
            (target / name).unlink(missing_ok=True)
            pack_file(source / name, target / name, codec, coders, lambda _: None)

        list(pool.map(pack_one, files))
    for name in ("config.json", INDEX_FILE):
        shutil.copyfile(source / name, target / name)
    return codec.name


def write_config(directory: Path, hf_config: Mapping[str, Any] = LLAMA_8B) -> None:
    (directory / "config.json").write_text(json.dumps(hf_config, indent=1), "utf-8")


def _write_shard(file: Path, shapes: Shapes, device: str, seed: int) -> None:
    file.unlink(missing_ok=True)
    write_tensors(
        file, {name: ("BF16", shape) for name, shape in shapes.items()}, _random_tensor_bytes(shapes, device, seed)
    )


def _random_tensor_bytes(shapes: Shapes, device: str, seed: int) -> Iterator[memoryview]:
    """Yield the bytes of all tensors in pieces. All pieces share one buffer: use each piece before taking the next."""
    source = RandomWeights(device, torch.bfloat16, seed)
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=source.device.type == "cuda")
    view = memoryview(buffer.numpy().data)
    for name, shape in shapes.items():
        matrix = len(shape) == 2
        drawn = source.load_matrix(name, *shape) if matrix else source.load_vector(name, *shape).to(torch.bfloat16)
        raw = drawn.view(torch.uint8).flatten()
        for at in range(0, len(raw), PIECE_BYTES):
            piece = raw[at : at + PIECE_BYTES]
            buffer[: len(piece)].copy_(piece)
            yield view[: len(piece)]
