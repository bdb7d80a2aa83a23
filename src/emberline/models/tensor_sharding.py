"""shard_checkpoint: the tensors of a checkpoint, each cut to the part that one rank loads.

The matrices q, k, v, gate, up, embedding and LM head are cut by rows, and the products of the ranks are concatenated.
The matrices o and down are cut by columns, and the products of the ranks are summed. Vectors with a number for each
head or column are cut too. Norms, routers and the biases of o and down are replicated.

This module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import EMBEDDING_NAME, HEAD_NAME, ModelConfig
from emberline.models.experts_spec import ExpertsSpec, ExpertTensors
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.registry import ARCHITECTURES
from emberline.models.shard import Shard
from emberline.models.tensor_slices import DimensionSlice, slice_tensor

LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.*)")
NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


class Section(NamedTuple):
    """Consecutive equal units of a dimension, such as heads, of which a rank has the units `kept`."""

    units: int
    kept: range
    width: int = 1  # number of rows or columns of a unit


def shard_checkpoint(checkpoint: Checkpoint, shard: Shard) -> Checkpoint:
    """Return the checkpoint with the tensors of this rank. `checkpoint`: what `select_model_tensors` returns.

    Raises UnsupportedModel if the model, or a quantised tensor, cannot be divided among the ranks."""
    if shard.is_whole:
        return checkpoint
    rules = ShardingRules(ModelConfig.from_hf(checkpoint.config), shard)
    sharded = {}
    for name, info in checkpoint.tensors.items():
        if rules.has_part(name):
            slices = rules.find(name, len(info.shape))
            sharded[name] = slice_tensor(name, info, slices) if slices else info
    return replace(checkpoint, tensors=sharded)


class ShardingRules:
    """Finds a rank's part of each tensor of a model, by the tensor's name."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self._config, self._shard = config, shard
        self._own = shard.shard_config(config)  # raises an error if the model cannot be divided
        self._rules: dict[str, list[DimensionSlice]] = {}
        if shard.divides_attention:
            self._add_attention()
            self._add_recurrent_layers()
        self._add_feed_forward()
        self._spec = ARCHITECTURES[config.model_type].experts
        if self._spec is not None and config.experts is not None:
            self._add_experts(self._spec, config.experts)

    def has_part(self, name: str) -> bool:
        """Return whether the rank has a part of the tensor. Only tensors of other ranks' experts are left out."""
        experts, found = self._config.experts, LAYER_TENSOR.fullmatch(name)
        if experts is None or self._spec is None or found is None:
            return True
        number = NUMBER.search(found[2])
        if number is None or not any(_stem(found[2]) in _list_per_expert_stems(t) for t in self._spec.tensors):
            return True
        return int(number[1]) in self._shard.experts(experts.count)

    def find(self, name: str, num_dimensions: int) -> list[DimensionSlice]:
        """Return how a tensor is sliced for this rank; an empty list if each rank has the whole tensor."""
        if name in (EMBEDDING_NAME, HEAD_NAME):
            size = self._config.vocab
            return [_join(0, Section(size, self._shard.vocabulary(size)))]
        found = LAYER_TENSOR.fullmatch(name)
        if found is None or int(found[1]) >= self._config.layers:
            return []
        slices = self._rules.get(_stem(found[2]), [])
        return [each for each in slices if each.dimension < num_dimensions]  # the biases of o and down are replicated

    def _add(self, name: str, *slices: DimensionSlice) -> None:
        self._rules[name] = list(slices)

    def _add_attention(self) -> None:
        config, parts, attention = self._config, self._config.parts, self._config.parts.attention
        dim, gate = config.head_dim, 1 + attention.has_output_gate
        heads, kv_heads = self._shard.divide(config.heads), self._shard.divide(config.kv_heads)
        if (latent := attention.latent) is not None:
            query, pair = latent.plain_dim + latent.rotary_dim, latent.plain_dim + latent.value_dim
            for name in ("q_proj", "q_b_proj"):
                self._add(f"self_attn.{name}", _join(0, Section(config.heads, heads, query)))
            own = self._own.parts.attention.latent
            if own is not None and own.down_parts > 1:
                for name, rows in (("q_a_proj", latent.q_rank), ("kv_a_proj_with_mqa", latent.cached_dim)):
                    if rows:
                        self._add(f"self_attn.{name}", _join(0, Section(rows, self._shard.divide(rows))))
            self._add("self_attn.kv_b_proj", _join(0, Section(config.heads, heads, pair)))
            self._add("self_attn.o_proj", _join(1, Section(config.heads, heads, latent.value_dim)))
            return
        q, kv = Section(config.heads, heads, dim), Section(config.kv_heads, kv_heads, dim)
        self._add("self_attn.q_proj", _join(0, q._replace(width=gate * dim)))
        for name in ("k_proj", "v_proj"):
            self._add(f"self_attn.{name}", _join(0, kv))
        self._add("self_attn.o_proj", _join(1, q))
        self._add("self_attn.sinks", _join(0, q._replace(width=1)))
        if parts.qkv_tensor:
            self._add(parts.qkv_tensor, _join(0, q, kv, kv))
        if parts.qk_norm_kind != "head":
            width = dim if parts.qk_norm_kind == "projection" else 1  # or [heads, dim]
            self._add("self_attn.q_norm", _join(0, q._replace(width=width)))
            self._add("self_attn.k_norm", _join(0, kv._replace(width=width)))

    def _add_recurrent_layers(self) -> None:
        if (state := self._config.parts.attention.state) is None:
            return
        keys, values = self._shard.divide(state.key_heads), self._shard.divide(state.value_heads)
        key = Section(state.key_heads, keys, state.key_dim)
        value = Section(state.value_heads, values, state.value_dim)
        per_key = state.value_heads // state.key_heads
        each = _join(0, value._replace(width=1))
        for name in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
            self._add(f"linear_attn.{name}", each)
        for name in ("in_proj_qkv", "conv1d"):
            self._add(f"linear_attn.{name}", _join(0, key, key, value))
        self._add("linear_attn.in_proj_z", _join(0, value))
        grouped = 2 * (state.key_dim + per_key * state.value_dim)
        self._add("linear_attn.in_proj_qkvz", _join(0, key._replace(width=grouped)))
        self._add("linear_attn.in_proj_ba", _join(0, key._replace(width=2 * per_key)))
        self._add("linear_attn.out_proj", _join(1, value))

    def _add_feed_forward(self) -> None:
        config, parts = self._config, self._config.parts
        columns = Section(config.ffn, self._shard.divide(config.ffn))
        module = parts.down_tensor.rpartition(".")[0]
        for name in ("gate_proj", "up_proj"):
            self._add(f"{module}.{name}", _join(0, columns))
        if parts.gate_up_tensor:
            self._add(parts.gate_up_tensor, _join(0, columns, columns))
        self._add(parts.down_tensor, _join(1, columns))

    def _add_experts(self, spec: ExpertsSpec, experts: ExpertsConfig) -> None:
        columns = Section(experts.ffn, self._shard.expert_columns(experts.ffn))
        for tensors in spec.tensors:
            if "{}" in tensors.down:
                self._add_per_expert_tensors(tensors.gate_up, tensors.down, columns)
            else:
                numbers = _join(0, Section(experts.count, self._shard.experts(experts.count)))
                self._add_stacked_experts(tensors, columns, numbers)
        if spec.shared is not None and experts.options.shared_ffn:
            width = experts.options.shared_ffn
            shared = Section(width, self._shard.shared_columns(width))
            self._add_per_expert_tensors(spec.shared.gate_up, spec.shared.down, shared)

    def _add_per_expert_tensors(self, gate_up: tuple[str, ...], down: str, columns: Section) -> None:
        for name in gate_up:
            self._add(_stem(name), _join(0, *[columns] * (2 // len(gate_up))))
        self._add(_stem(down), _join(1, columns))

    def _add_stacked_experts(self, tensors: ExpertTensors, columns: Section, numbers: DimensionSlice) -> None:
        both = [columns._replace(width=2)] if tensors.order == "interleaved_columns" else [columns, columns]
        rows = tensors.order == "rows"
        self._add(_stem(tensors.gate_up[0]), numbers, _join(1 if rows else 2, *both))
        self._add(_stem(tensors.down), numbers, _join(2 if rows else 1, columns))
        if tensors.gate_up_bias:
            self._add(_stem(tensors.gate_up_bias), numbers, _join(1, *both))
        if tensors.down_bias:
            self._add(_stem(tensors.down_bias), numbers)


def _stem(name: str) -> str:
    """Return a tensor's name without .weight or .bias, and with {} in place of the number of an expert."""
    return NUMBER.sub("{}", name.removesuffix(".weight").removesuffix(".bias"))


def _list_per_expert_stems(tensors: ExpertTensors) -> set[str]:
    return {_stem(name) for name in (*tensors.gate_up, tensors.down) if "{}" in name}


def _join(dimension: int, *sections: Section) -> DimensionSlice:
    """Return the slice of a dimension that consists of these sections, in this order."""
    starts = [0]
    for units, _, width in sections:
        starts.append(starts[-1] + units * width)
    ranges = tuple(
        (start + kept.start * width, start + kept.stop * width)
        for start, (_, kept, width) in zip(starts, sections, strict=False)
    )
    return DimensionSlice(dimension, starts[-1], ranges)
