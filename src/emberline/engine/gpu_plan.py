"""plan_gpus: how a model would use the memory of a set of GPUs, from its config.json alone.

engine/memory.py counts the memory of one GPU, for the GPU's part of the model. On several GPUs the plan is a
calculation only: it was not compared with an engine on several GPUs. Context parallelism is planned too, although the
engine does not have it.

This module needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, ModelError
from emberline.engine import memory
from emberline.engine.gpu_set import GPUSet
from emberline.engine.group_choice import choose_groups, max_planned_tokens
from emberline.engine.memory_plan import does_not_fit_error
from emberline.engine.model_support import reject_unpackable_dtype
from emberline.engine.step_peak import choose_step_kernels
from emberline.engine.step_sizes import StepLimits, StepSizes
from emberline.kernels.step_memory import StepKernels
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config_outline import add_mtp_head, read_outline, select_planned_text
from emberline.models.fields import ConfigFields
from emberline.models.kv_groups import KVGroup, group_layers
from emberline.models.outline import ModelOutline
from emberline.models.quantisation_config import WeightFormat
from emberline.models.weight_dtype import check_requested_dtype
from emberline.models.weight_form import check_requested_weights
from emberline.models.weight_formats import QuantisedSize, choose_online_format, is_quantisable, read_weight_formats
from emberline.models.weight_matrices import WeightKind, WeightMatrices, is_head_large, list_weight_matrices

KVSharing = Literal["one GPU", "tensor parallel", "context parallel", "data-parallel attention"]
CONFIG_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}
FORMAT_NAMES = {2: "bf16", 4: "fp32"}  # by bytes of a weight


@dataclass(frozen=True, slots=True)
class WeightShare:
    kind: WeightKind
    format: str
    num_weights: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GPUPlan:
    """The memory of one GPU of a set, and what all KV caches hold, for one way of sharing keys and values."""

    sharing: KVSharing
    gpus: GPUSet
    weights: tuple[WeightShare, ...]  # of one GPU
    fixed: Mapping[str, int]  # bytes on one GPU, of all parts but the KV cache
    groups: tuple[KVGroup, ...]  # groups of layers, with one GPU's part of keys and values
    kv_bytes: int  # of one GPU
    step_kv_bytes: int  # of `kv_bytes`, for tokens that layers with a window drop after the running step
    max_context: int
    tables: LayerGroups | None  # layers that share block tables; None: the model has recurrent states
    max_planned_tokens: int  # of a request, in steps whose results are not known
    expert_groups: int = 1  # groups of GPUs among which whole experts are divided

    @property
    def table_blocks(self) -> int:
        """The number of blocks in the KV cache. A block has keys and values of the layers of one group."""
        assert self.tables is not None
        return self.kv_bytes // _block_bytes(self.groups, self.tables)

    @property
    def caches(self) -> int:
        """The number of KV caches that hold different sequences."""
        return self.gpus.count if self.sharing == "data-parallel attention" else 1

    @property
    def total_kv_bytes(self) -> int:
        return self.kv_bytes * self.gpus.count

    @property
    def kv_tokens(self) -> int:
        """The number of tokens that all KV caches hold if each has a single sequence, as long as fits.

        If every layer keeps only a limited number of tokens, a sequence of any length fits. The result is then the
        number of tokens that the caches keep in all sequences together."""
        if self.tables is not None and not self.tables.is_single:
            size, planned = self.groups[0].block_size, self.max_planned_tokens
            return self.tables.max_tokens(self.table_blocks, size, planned) * self.caches
        unbounded = sum(group.bytes_per_token for group in self.groups if not group.is_bounded)
        if not unbounded or self.tables is not None:
            return self.ungrouped_tokens
        bounded = sum(group.sequence_bytes(self.max_context) for group in self.groups if group.is_bounded)
        left = max(0, self.kv_bytes - self.step_kv_bytes - bounded)
        return self._whole_blocks(left, unbounded)

    @property
    def ungrouped_tokens(self) -> int:
        """The number of tokens that fit if every layer keeps all of them."""
        states = sum(group.bytes_per_sequence for group in self.groups)
        return self._whole_blocks(max(0, self.kv_bytes - states), sum(group.bytes_per_token for group in self.groups))

    def _whole_blocks(self, num_bytes: int, token_bytes: int) -> int:
        size = self.groups[0].block_size
        return num_bytes // (token_bytes * size) * size * self.caches

    def concurrent_sequences(self, num_tokens: int) -> int:
        """Return how many sequences of this many tokens fit at the same time."""
        if self.tables is not None:
            size, planned = self.groups[0].block_size, self.max_planned_tokens
            return self.tables.max_requests(self.table_blocks, num_tokens, size, planned) * self.caches
        each = sum(group.sequence_bytes(num_tokens) for group in self.groups)
        return max(0, self.kv_bytes - self.step_kv_bytes) // each * self.caches


@dataclass(frozen=True, slots=True)
class GPUSetPlan:
    """The plans of a model on a set of GPUs, for each way of sharing keys and values that fits."""

    model_type: str
    weights: tuple[WeightShare, ...]  # of the whole model, once
    groups: tuple[KVGroup, ...]  # of the whole model
    plans: tuple[GPUPlan, ...]
    rejected: Mapping[KVSharing, str]  # why the other ways do not fit
    has_mtp_head: bool = False  # whether a head for multi-token prediction is counted

    @property
    def best(self) -> GPUPlan:
        return max(self.plans, key=lambda plan: plan.kv_tokens)


def plan_gpus(config: Mapping[str, Any], gpus: GPUSet, settings: EngineConfig) -> GPUSetPlan:
    """Return the plans of the model that a config.json describes. `settings`: of an engine on a GPU.

    Raises UnsupportedModel or ModelFileError for a config that cannot be planned, ModelError if nothing fits."""
    outline, text = read_outline(config), select_planned_text(config)
    if settings.speculation.method == "mtp":
        outline = add_mtp_head(outline, config)
    dtype = _choose_dtype(config, text, settings)
    formats = read_weight_formats(text, outline)
    weights = _WeightPolicy(
        formats, dtype, settings.gpu.weights, outline.tie_embeddings, online=settings.gpu.online_format
    )
    kv_dtype = memory.kv_dtype(settings, dtype)
    groups = group_layers(outline, kv_dtype, settings.scheduler.block_size)
    plans: list[GPUPlan] = []
    errors: dict[KVSharing, ModelError] = {}
    for sharing in _ways_to_share(groups, gpus.count):
        try:
            plans.append(_plan_context(outline, groups, gpus, settings, weights, sharing))
        except ModelError as e:
            errors[sharing] = e
    if not plans:
        raise next(iter(errors.values()))
    rejected = {sharing: error.message for sharing, error in errors.items()}
    shares = weights.list_shares(outline)
    return GPUSetPlan(outline.model_type, shares, groups, tuple(plans), rejected, outline.has_mtp_head)


def _ways_to_share(groups: tuple[KVGroup, ...], num_gpus: int) -> tuple[KVSharing, ...]:
    if num_gpus == 1:
        return ("one GPU",)
    is_copied = any(group.kind == "latent" or group.kv_heads % num_gpus for group in groups)
    return ("tensor parallel", "context parallel", "data-parallel attention") if is_copied else ("tensor parallel",)


def _choose_dtype(config: Mapping[str, Any], text: Mapping[str, Any], settings: EngineConfig) -> str:
    """Return the dtype of weights that are not quantised: the requested one or that of config.json."""
    check_requested_dtype(settings.dtype, on_gpu=True)
    check_requested_weights(settings.gpu.weights, on_gpu=True)
    dtype = settings.dtype
    if dtype == "auto":
        sources = [ConfigFields(values, "config.json") for values in (text, config)]
        names = [(f, name) for f in sources for name in ("dtype", "torch_dtype") if f.has_field(name)]
        stored = names[0][0].text(names[0][1]) if names else "bfloat16"
        if stored not in CONFIG_DTYPES:
            raise names[0][0].invalid_error(names[0][1], f"one of {', '.join(CONFIG_DTYPES)}")
        dtype = CONFIG_DTYPES[stored]
    reject_unpackable_dtype(settings, dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class _WeightPolicy:
    formats: Mapping[WeightKind, WeightFormat]
    dtype: str
    setting: str  # plain, packed, both or auto; auto is plain, as config.json does not show packed files
    tie_embeddings: bool
    online: str  # format to which matrices are quantised at load; empty: none

    def list_shares(self, outline: ModelOutline) -> tuple[WeightShare, ...]:
        """Return the weights of a model or of one GPU's part, by kind and format."""
        found: dict[tuple[WeightKind, str], WeightShare] = {}
        copies_head = is_head_large(outline)
        for matrices in list_weight_matrices(outline):
            name, size = self._format_and_bytes(matrices, copies_head=copies_head)
            old = found.get((matrices.kind, name), WeightShare(matrices.kind, name, 0, 0))
            found[matrices.kind, name] = replace(
                old, num_weights=old.num_weights + matrices.num_weights, num_bytes=old.num_bytes + size
            )
        return tuple(found.values())

    def _format_and_bytes(self, matrices: WeightMatrices, *, copies_head: bool) -> tuple[str, int]:
        if (quantised := self._find_quantised(matrices)) is not None:
            return quantised.name, matrices.num_matrices * quantised.kept_bytes(matrices.rows, matrices.columns)
        width = memory.DTYPE_BYTES[self.dtype]
        is_head = matrices.kind == ("embedding" if self.tie_embeddings else "head")
        both = self.setting == "both" and (is_head or matrices.kind != "embedding")
        both = both or (copies_head and is_head and self.setting != "packed" and bool(self.formats or self.online))
        size = memory.weight_matrices_bytes(matrices, width, packed=self.setting == "packed", both=both)
        if matrices.kind == "norms":
            return FORMAT_NAMES[memory.F32_BYTES], size
        stays_plain = self.setting == "packed" and matrices.is_faster_unpacked
        can_pack = memory.is_packable(matrices.rows, matrices.columns) and not stays_plain
        plain = FORMAT_NAMES[width]
        return ("uw12" if self.setting == "packed" else f"{plain}+uw12" if both else plain) if can_pack else plain, size

    def choose_kernels(self, rank_outline: ModelOutline, kernels: str) -> StepKernels:
        """Return the kernels for a GPU's part of the model. `kernels`: those of the GPU, hopper or portable."""
        packed, quantised = self.setting == "packed", self.list_quantised_sizes(rank_outline)
        return choose_step_kernels(
            rank_outline, kernels, memory.DTYPE_BYTES[self.dtype], packed=packed, quantised=quantised
        )

    def list_quantised_sizes(self, outline: ModelOutline) -> list[QuantisedSize]:
        """Return the sizes of the matrices that stay quantised."""
        found = ((matrices, self._find_quantised(matrices)) for matrices in list_weight_matrices(outline))
        return [
            QuantisedSize(
                *(matrices.rows, matrices.columns, matrices.num_matrices),
                *(
                    matrices.num_matrices * kept.kept_bytes(matrices.rows, matrices.columns),
                    kept.name,
                    kept.group_columns,
                ),
            )
            for matrices, kept in found
            if kept is not None
        ]

    def _find_quantised(self, matrices: WeightMatrices) -> WeightFormat | None:
        if not is_quantisable(matrices) or self.dtype != "bfloat16":
            return None
        stored = self.formats.get(matrices.kind)
        return choose_online_format(self.online, matrices.columns) if stored is None and self.online else stored


def _plan_context(
    outline: ModelOutline,
    groups: tuple[KVGroup, ...],
    gpus: GPUSet,
    settings: EngineConfig,
    weights: _WeightPolicy,
    sharing: KVSharing,
) -> GPUPlan:
    """Return a plan for the requested context length; if none is requested, for the longest useful one.

    That is the model's context length. On several GPUs it is at most what one KV cache holds, unless the settings fix
    the size of the cache. Raises InvalidRequest if the model does not support the requested length, ModelError if the
    model does not fit."""
    context = outline.max_context if settings.requested_context is None else settings.requested_context
    if not 1 <= context <= outline.longest_context:
        raise InvalidRequest(
            f"max_context must be from 1 to {outline.longest_context} for this model, not {context}",
            param="max_context",
        )
    attention = weights.formats.get("attention")
    part = outline.divide(
        gpus.count,
        divide_attention=sharing != "data-parallel attention",
        row_unit=1 if attention is None else attention.row_unit,
    )
    planned = _plan_one(outline, part, groups, gpus, settings, weights, sharing, context)
    held = planned.kv_tokens // planned.caches
    is_fixed = settings.requested_context is not None or settings.kv_cache.kv_memory is not None
    if is_fixed or gpus.count == 1 or not 0 < held < context:
        return planned
    # Block tables for more than the cache can hold would take memory from it. On one GPU the engine has them anyway.
    return _plan_one(outline, part, groups, gpus, settings, weights, sharing, held)


def _plan_one(
    outline: ModelOutline,
    rank_outline: ModelOutline,
    groups: tuple[KVGroup, ...],
    gpus: GPUSet,
    settings: EngineConfig,
    weights: _WeightPolicy,
    sharing: KVSharing,
    max_context: int,
) -> GPUPlan:
    local, shares = _local_groups(groups, rank_outline, gpus.count, sharing), weights.list_shares(rank_outline)
    scheduler, width = settings.scheduler, memory.DTYPE_BYTES[groups[0].dtype]
    tables = _choose_tables(local, max_context)
    num_tables = 1 if tables is None else len(tables.windows)
    limits = StepLimits(
        kernels=weights.choose_kernels(rank_outline, settings.gpu.named_kernels or gpus.kernels),
        kv_dtype_bytes=width,
        block_size=scheduler.block_size,
        max_running=scheduler.max_running,
        max_batch_tokens=scheduler.max_batch_tokens,
        max_context=max_context,
        max_new_tokens=settings.speculation.max_new_tokens,
        tiers=settings.tiers.has_tiers,
        transfer=settings.transfer is not None,
        block_tables=num_tables,
        exchanging_ranks=gpus.count if sharing == "data-parallel attention" else 1,
        has_ranks=gpus.count > 1,
    )
    block_bytes = num_tables * _block_bytes(local, tables)  # of all groups
    sizes = StepSizes.from_outline(rank_outline, outline.vocab)
    draft = memory.DraftMemory.of_steps(sizes, 1) if outline.has_mtp_head else memory.NO_DRAFT_MODEL
    fixed = {
        "weights": sum(share.num_bytes for share in shares),
        **memory.step_bytes(sizes, limits, block_bytes // num_tables, draft),
    }
    usable = int(gpus.memory_bytes * settings.gpu.gpu_memory_utilization)
    available = usable - sum(fixed.values())
    step_kv, needed = 0, memory.MIN_KV_BLOCKS * block_bytes
    if tables is None:
        step_kv = scheduler.max_batch_tokens * sum(group.bytes_per_token for group in local if group.kind == "window")
        least = memory.MIN_KV_BLOCKS * scheduler.block_size
        needed = step_kv + sum(group.sequence_bytes(least) for group in local)
    if settings.kv_cache.kv_memory is not None:
        tokens = settings.kv_cache.kv_memory // (block_bytes // scheduler.block_size)
        blocks = tokens // scheduler.block_size if num_tables > 1 else -(-tokens // scheduler.block_size)
        needed = max(needed, blocks * block_bytes)
    if available < needed:
        raise does_not_fit_error(fixed, usable, gpus.memory_bytes, needed)
    kv_bytes = available if settings.kv_cache.kv_memory is None else needed
    if tables is not None:
        kv_bytes = kv_bytes // block_bytes * block_bytes
    planned = max_planned_tokens(scheduler.max_batch_tokens, plans=2)
    groups_of_experts = gpus.count if rank_outline.experts is not None and rank_outline.experts.num_local else 1
    return GPUPlan(
        sharing, gpus, shares, fixed, local, kv_bytes, step_kv, max_context, tables, planned, groups_of_experts
    )


def _choose_tables(groups: tuple[KVGroup, ...], max_context: int) -> LayerGroups | None:
    """Return which layers share block tables; None for a model with recurrent states."""
    if any(group.kind == "state" for group in groups):
        return None
    spans = {layer: group.span for group in groups for layer in group.layers}
    return choose_groups([spans[layer] for layer in sorted(spans)], max_context)


def _block_bytes(groups: tuple[KVGroup, ...], tables: LayerGroups | None) -> int:
    """Return the bytes of a KV block with the layers of one group of `tables`; None: with all layers."""
    token_bytes = sum(group.bytes_per_token for group in groups)
    if tables is not None and not tables.is_single:
        token_bytes = token_bytes * tables.block_layers // len(tables.layer_positions)
    return token_bytes * groups[0].block_size


def _local_groups(
    groups: tuple[KVGroup, ...], rank_outline: ModelOutline, num_gpus: int, sharing: KVSharing
) -> tuple[KVGroup, ...]:
    """Return the groups with one GPU's part of their keys, values and states.

    Tensor parallelism divides KV heads and copies what it cannot divide: latents, and KV heads that are fewer than the
    GPUs. Context parallelism divides the blocks of a sequence. With data-parallel attention, a GPU has all of its own
    sequences. Recurrent states are divided by heads, except with data-parallel attention."""
    if sharing == "data-parallel attention":
        return groups
    divided = group_layers(rank_outline, groups[0].dtype, groups[0].block_size)
    if sharing != "context parallel":
        return divided
    return tuple(
        replace(local, bytes_per_token=-(-whole.bytes_per_token // num_gpus))
        for local, whole in zip(divided, groups, strict=True)
    )
