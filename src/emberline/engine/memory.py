"""plan_memory: how a GPU's memory is used, computed in advance from the model's config.

Everything except the KV cache is counted first. For a step's buffers, this is the most memory that they take at the
same time with the kernels in use (`step_peak.py`). The KV cache gets the rest. This module needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emberline.core.engine_config import EngineConfig, GPUConfig
from emberline.core.errors import InvalidRequest
from emberline.engine.expert_limits import reject_unsupported_experts
from emberline.engine.gpu.shape import MAX_CHUNKS, ShapeGrid, captured_shapes, max_draft_rows, max_step_rows
from emberline.engine.group_choice import choose_groups, max_planned_tokens
from emberline.engine.memory_plan import MemoryPlan, does_not_fit_error
from emberline.engine.model_support import reject_unpackable_dtype, reject_unsupported_on_gpu
from emberline.engine.state_plan import StatePlanner
from emberline.engine.step_peak import LogitMemory, choose_step_kernels, exchange_bytes, layer_bytes, unpacked_bytes
from emberline.engine.step_sizes import StepLimits, StepSizes
from emberline.hub.checkpoint import Checkpoint
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.weight_dtype import default_kv_dtype
from emberline.models.weight_formats import QuantisedSize
from emberline.models.weight_matrices import WeightMatrices, is_head_large, list_weight_matrices

DEFAULT_UTILIZATION = GPUConfig().gpu_memory_utilization
RESERVE_BYTES = 2 << 30  # CUDA context, libraries, compiled kernels, workspaces of cuBLAS and of split products
GRAPH_BYTES = 8 << 20  # one captured graph: a few hundred nodes and their arguments; all share activations
COPY_PIECES = 4  # scratch buffers for copies to and from other tiers: two for each direction, used in turn
COPY_PIECE_BYTES = 64 << 20  # or one block, if that is larger
TRANSFER_SLOTS = 4  # buffers for each direction of KV transfers
# Or one layer of the largest block, if that is larger: what kv/transfer/receiver.py requests.
TRANSFER_SLOT_BYTES = 4 << 20
MAX_BLOCK_TOKENS = 64
MIN_WIDENED_TOKENS = 32_768  # so that a few prompts with long cached prefixes can be in one step
DRAFT_INPUT_COPIES = 4  # of a draft model's hidden states: a token's embedding, its state, and both side by side
MIN_KV_BLOCKS = 2
F32_BYTES = 4
MAX_PACKED_BITS = 12.2  # per weight: 12, and the escaped ones in full
PACKED_GRAIN, PACKED_BLOCK_ROWS = 64, 16  # matrices are packed if rows and columns are multiples of 64; rows per header
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float8": 1}


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a draft model adds to the memory of an engine."""

    weight_bytes: int = 0
    kv_token_values: int = 0  # numbers that its KV cache stores for each token
    # Numbers per token: the target model's hidden states that the draft model reads, and the state it makes of them.
    state_values: int = 0
    sizes: StepSizes | None = None  # None: there is no draft model

    @staticmethod
    def for_model(weight_bytes: int, config: ModelConfig, num_captured_layers: int) -> DraftMemory:
        of_steps = DraftMemory.of_steps(StepSizes.from_outline(outline_of(config), config.vocab), num_captured_layers)
        return replace(of_steps, weight_bytes=weight_bytes, kv_token_values=kv_token_bytes(config, 1))

    @staticmethod
    def of_steps(sizes: StepSizes, num_captured_layers: int) -> DraftMemory:
        """Return the memory of a draft model, without its weights and KV cache.

        `sizes`: of its steps. `num_captured_layers`: number of the target model's layers whose hidden states the draft
        model reads."""
        states = num_captured_layers + 1 if num_captured_layers else 0
        return DraftMemory(state_values=states * sizes.hidden, sizes=sizes)

    def scratch_bytes(self, running: int, max_new_tokens: int) -> int:
        """Return the bytes of partial attention results, for which a draft model has memory of its own."""
        if self.sizes is None:
            return 0
        rows = max_draft_rows(running, reads_states=self.state_values > 0)
        return self.sizes.partial_result_bytes(running, max_new_tokens, rows)


NO_DRAFT_MODEL = DraftMemory()


def plan_engine_memory(
    config: ModelConfig,
    settings: EngineConfig,
    total_bytes: int,
    dtype: str,
    *,
    packed: bool = False,
    quantised: Sequence[QuantisedSize] = (),
    draft: DraftMemory = NO_DRAFT_MODEL,
    other_bytes: int = 0,
    groups: LayerGroups | None = None,
    kernels: str = "",
) -> MemoryPlan:
    """Return the plan of an engine with these settings and weights of this dtype.

    `draft`: memory of its draft model. `quantised`: matrices that are kept quantised. `other_bytes`: GPU memory that
    other processes use. `groups`: which layers of a rank share block tables; None: chosen for all layers of `config`.
    `kernels`: those of the GPU, hopper or portable; empty: those that the settings name, or if they name none, the plan
    has room for either. Raises ModelError if the model does not fit, UnsupportedModel if it cannot run."""
    reject_unsupported_on_gpu(config, settings)
    reject_unsupported_experts(config, settings)
    kv_bytes, context = DTYPE_BYTES[kv_dtype(settings, dtype)], choose_max_context(config, settings)
    groups = groups or choose_groups(config.windows, context, config.parts.attention.state_layers)
    size, tokens, state_slots = settings.scheduler.block_size, settings.kv_cache.kv_tokens, None
    new_tokens = settings.speculation.max_new_tokens
    if (memory := settings.kv_cache.kv_memory) is not None:
        planner = StatePlanner.from_config(config, settings.scheduler.max_running, new_tokens, DTYPE_BYTES[dtype])
        state_slots = planner.count_slots(memory)
        memory -= planner.num_bytes(state_slots)
        tokens = memory // kv_token_bytes(config, kv_bytes, groups.num_layer_positions)
        tokens = tokens if groups.is_single else tokens // size * size
    return plan_memory(
        config,
        total_bytes,
        dtype_bytes=DTYPE_BYTES[dtype],
        kv_dtype_bytes=kv_bytes,
        block_size=size,
        max_running=settings.scheduler.max_running,
        max_batch_tokens=settings.scheduler.max_batch_tokens,
        max_context=context,
        groups=groups,
        kv_tokens=tokens,
        state_slots=state_slots,
        packed=packed and dtype == "bfloat16",
        both=settings.gpu.weights == "both" and dtype == "bfloat16",
        quantised=quantised,
        tiers=settings.tiers.has_tiers,
        transfer=settings.transfer is not None,
        draft=draft,
        max_new_tokens=new_tokens,
        exchanging_ranks=settings.parallel.exchanging_ranks,
        has_ranks=settings.parallel.num_ranks > 1,
        kernels=kernels or settings.gpu.named_kernels,
        utilization=settings.gpu.gpu_memory_utilization,
        other_bytes=other_bytes,
    )


def uses_packed_weights(
    checkpoint: Checkpoint, settings: EngineConfig, dtype: str, model: ModelConfig | None = None
) -> bool:
    """Return whether weights of this dtype are kept packed, in 12 bits each.

    With `weights` auto, they are if the files are packed and the model has no experts with biases.

    Raises InvalidRequest if the settings require packed weights and the dtype cannot be packed."""
    reject_unpackable_dtype(settings, dtype)
    coded = any(tensor.packing is not None for tensor in checkpoint.tensors.values())
    has_biases = model is not None and model.experts is not None and model.experts.options.has_biases
    is_useful = coded and dtype == "bfloat16" and not has_biases
    return settings.gpu.weights == "packed" or (settings.gpu.weights == "auto" and is_useful)


def kv_dtype(settings: EngineConfig, dtype: str) -> str:
    """Return the name of the KV cache's dtype. Raises InvalidRequest if it is unknown."""
    name = default_kv_dtype(dtype) if settings.kv_cache.kv_dtype == "auto" else settings.kv_cache.kv_dtype
    if name not in DTYPE_BYTES:
        raise InvalidRequest(
            f"kv_dtype is {name!r}; it must be one of auto, {', '.join(DTYPE_BYTES)}", param="kv_dtype"
        )
    return name


def choose_max_context(config: ModelConfig, settings: EngineConfig) -> int:
    """Return the context length to serve. Raises InvalidRequest if the model does not support it."""
    length = config.max_context if settings.requested_context is None else settings.requested_context
    if not 1 <= length <= config.longest_context:
        raise InvalidRequest(
            f"max_context must be from 1 to {config.longest_context} for this model, not {length}", param="max_context"
        )
    return length


def plan_memory(
    config: ModelConfig,
    total_bytes: int,
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int,
    block_size: int,
    max_running: int,
    max_batch_tokens: int,
    max_context: int,
    groups: LayerGroups | None = None,
    kv_tokens: int | None = None,
    state_slots: int | None = None,
    packed: bool = False,
    both: bool = False,
    quantised: Sequence[QuantisedSize] = (),
    tiers: bool = False,
    transfer: bool = False,
    draft: DraftMemory = NO_DRAFT_MODEL,
    max_new_tokens: int = 1,
    exchanging_ranks: int = 1,
    has_ranks: bool = False,
    kernels: str = "",
    utilization: float = DEFAULT_UTILIZATION,
    other_bytes: int = 0,
) -> MemoryPlan:
    """Return how an engine uses `total_bytes` of GPU memory. Raises ModelError if the model does not fit.

    `groups`: layers that share block tables; None: all share one. `kv_tokens`, `state_slots`: size of the KV cache, and
    slots for recurrent states; None: as many as are useful and fit. `tiers`, `transfer`: reserve buffers for copies to
    tiers and other engines. See `weight_bytes`, `StepKernels.for_weights`, `usable_bytes` and StepLimits for others."""
    groups = groups or LayerGroups.single(config.layers)
    tables, running = len(groups.windows), (max_running, max_batch_tokens, max_context, max_new_tokens)
    used = choose_step_kernels(outline_of(config), kernels, dtype_bytes, packed=packed, quantised=quantised)
    sizes = used, kv_dtype_bytes, block_size, *running, tiers, transfer, tables, exchanging_ranks, has_ranks
    block_bytes = block_size * kv_dtype_bytes * (kv_token_bytes(config, 1, groups.block_layers) + draft.kv_token_values)
    weights = weight_bytes(config, dtype_bytes, packed=packed, both=both, quantised=quantised)
    steps = StepSizes.from_outline(outline_of(config), config.vocab)
    fixed = {"weights": draft.weight_bytes + weights, **step_bytes(steps, StepLimits(*sizes), block_bytes, draft)}
    needed = MIN_KV_BLOCKS if kv_tokens is None else max(MIN_KV_BLOCKS, -(-kv_tokens // block_size))
    usable, needed_bytes = usable_bytes(total_bytes, utilization, other_bytes), needed * tables * block_bytes
    if (available := usable - sum(fixed.values())) < needed_bytes:
        raise does_not_fit_error(fixed, usable, total_bytes, needed_bytes)
    planner = StatePlanner.from_config(config, max_running, max_new_tokens, dtype_bytes)
    slots = state_slots or planner.count_slots(available, None if kv_tokens is None else needed_bytes)
    fixed["states"] = states = planner.num_bytes(slots)
    blocks = max(0, available - states) // (block_bytes * tables)  # of each group, if requests are short
    if blocks < needed:
        raise does_not_fit_error(fixed, usable, total_bytes, needed_bytes)
    return MemoryPlan(
        total=total_bytes - other_bytes,
        **fixed,
        kv_bytes=(kept := blocks if kv_tokens is None else needed) * tables * block_bytes,
        kv_tokens=kept * block_size,
        block_size=block_size,
        max_context=max_context,
        groups=groups,
        max_planned_tokens=max_planned_tokens(max_batch_tokens, plans=2),
        state_slots=slots,
    )


def step_bytes(
    sizes: StepSizes, limits: StepLimits, block_bytes: int, draft: DraftMemory = NO_DRAFT_MODEL
) -> dict[str, int]:
    """Return the bytes of everything on a GPU but weights and KV cache. `block_bytes`: of a KV block."""
    tokens, running, kernels = limits.max_batch_tokens, limits.max_running, limits.kernels
    ranks = limits.exchanging_ranks
    grid = ShapeGrid.for_model(sizes.layer_weights, tokens, has_experts=sizes.has_experts, exchanging_ranks=ranks)
    shapes = captured_shapes(running, tokens, grid, queries=sizes.list_row_queries(limits.max_new_tokens))
    largest = max(shape.singles + shape.tokens for shape in shapes)
    chains = sum(not shape.chunks for shape in shapes) if limits.max_new_tokens > 1 else 0  # of a draft model
    layers = _peak_bytes(sizes, limits, draft, max(tokens, running), largest)
    logits = LogitMemory.for_model(
        sizes.vocab, running, has_draft_model=draft.sizes is not None, has_ranks=limits.has_ranks
    )
    return {
        "activations": layers
        + draft.state_values * kernels.dtype_bytes * (grid.pad_token_count(tokens) + max_step_rows(running))
        + exchange_bytes(sizes, kernels, ranks, tokens, tokens + ranks - 1, largest),
        "scratch": _scratch_bytes(sizes, limits, block_bytes, draft),
        "logits": logits.kept + max(0, logits.of_step - layers),  # both phases of a step use the same memory
        "graphs": (len(shapes) + chains) * GRAPH_BYTES
        + max(logits.of_captured, _peak_bytes(sizes, limits, draft, largest, largest))
        + exchange_bytes(sizes, kernels, ranks, largest, ranks * largest, largest),
        "reserve": RESERVE_BYTES,
    }


def max_widened_blocks(block_size: int, max_context: int, max_batch_tokens: int) -> int:
    """Return how many float8 KV blocks of a layer one step can convert to bf16 for its prompt chunks.

    This is enough for one prompt of the maximum length together with a full step of short prompts. If a step needs
    more, its last chunks run with a slower kernel."""
    return -(-max(max_context, MIN_WIDENED_TOKENS) // block_size) + -(-max_batch_tokens // block_size) + MAX_CHUNKS


def usable_bytes(total_bytes: int, utilization: float, other_bytes: int = 0) -> int:
    """Return the memory for an engine: `utilization` times the total, or what other processes leave if less."""
    return min(int(total_bytes * utilization), total_bytes - other_bytes)


def bytes_used_by_other_processes(total_bytes: int, free_bytes: int, allocated_bytes: int) -> int:
    """Return how many bytes of a device's memory other processes use.

    `allocated_bytes`: bytes that this process has allocated. Up to RESERVE_BYTES of other use are ignored, because
    this process's own CUDA context looks like memory of another process. The reserve already includes it."""
    others = total_bytes - free_bytes - allocated_bytes
    return others if others > RESERVE_BYTES else 0


def shape_grid_for(config: ModelConfig, max_batch_tokens: int, exchanging_ranks: int = 1) -> ShapeGrid:
    """Return the sizes of steps with prompt chunks that are captured for this model."""
    sizes = StepSizes.from_outline(outline_of(config), config.vocab)
    return ShapeGrid.for_model(
        sizes.layer_weights, max_batch_tokens, has_experts=sizes.has_experts, exchanging_ranks=exchanging_ranks
    )


def weight_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    *,
    packed: bool = False,
    both: bool = False,
    quantised: Sequence[QuantisedSize] = (),
) -> int:
    """Return the bytes of all weights on the device.

    A matrix is stored plain, packed, or in both formats (`both`); those in `quantised` are quantised instead. If any
    are quantised, a large output head that would be stored plain is stored in both formats. An embedding that is not
    also the output head is never stored in both."""
    size, outline = 0, outline_of(config)
    copies_head = bool(quantised) and not packed and is_head_large(outline)
    for matrices in list_weight_matrices(outline):
        is_head = matrices.kind == ("embedding" if config.tie_embeddings else "head")
        twice = (both and (is_head or matrices.kind != "embedding")) or (copies_head and is_head)
        size += weight_matrices_bytes(matrices, dtype_bytes, packed=packed, both=twice)
    by_shape = {(each.rows, each.columns, each.num_matrices): each for each in list_weight_matrices(outline)}
    for kept in quantised:
        shape = kept.rows, kept.columns, kept.num_matrices
        plain = by_shape.get(shape, WeightMatrices("attention", *shape))
        size += kept.num_bytes - weight_matrices_bytes(plain, dtype_bytes, packed=packed, both=both)
    return size


def weight_matrices_bytes(
    matrices: WeightMatrices, dtype_bytes: int, *, packed: bool = False, both: bool = False
) -> int:
    """Return the bytes of matrices that are stored plain, packed or in both formats. Norms and biases are float32."""
    if matrices.kind == "norms":
        return F32_BYTES * matrices.num_weights
    if matrices.is_never_packed:
        return dtype_bytes * matrices.num_weights
    size = dtype_bytes * matrices.rows * matrices.columns
    if packed and not matrices.is_faster_unpacked:
        size = max_packed_bytes(matrices.rows, matrices.columns)
    if both and is_packable(matrices.rows, matrices.columns):
        size += max_packed_bytes(matrices.rows, matrices.columns)
    return size * matrices.num_matrices


def max_packed_bytes(rows: int, columns: int) -> int:
    """Return the maximum bytes of a matrix of trained weights that kernels/cuda/uw12.py has packed."""
    if not is_packable(rows, columns):
        return DTYPE_BYTES["bfloat16"] * rows * columns
    header = 64 + 2 * (columns // PACKED_GRAIN + 1) + 2 * 16  # scales, positions, and padding
    return int(rows * columns * MAX_PACKED_BITS / 8) + rows // PACKED_BLOCK_ROWS * header


def is_packable(rows: int, columns: int) -> bool:
    return rows % PACKED_GRAIN == columns % PACKED_GRAIN == 0


def kv_token_bytes(config: ModelConfig, kv_dtype_bytes: int, layers: int | None = None) -> int:
    """Return the bytes of a token in the KV cache. `layers`: number of layers; None: all but recurrent ones."""
    parts = 2 if config.parts.attention.latent is None else 1  # keys and values, or one latent for both
    layers = layers or config.layers - len(config.parts.attention.state_layers)
    return parts * layers * config.kv_heads * config.head_dim * kv_dtype_bytes


def blocks_per_scratch_buffer(block_bytes: int) -> int:
    """Return how many KV blocks fit into a scratch buffer for copies to and from other KV tiers."""
    return max(1, COPY_PIECE_BYTES // block_bytes)


def transfer_slot_bytes(token_bytes: int) -> int:
    """Return the bytes of a buffer for KV transfers.

    `token_bytes`: bytes of the keys and values of one token in one layer."""
    return max(TRANSFER_SLOT_BYTES, MAX_BLOCK_TOKENS * token_bytes)


def _peak_bytes(sizes: StepSizes, limits: StepLimits, draft: DraftMemory, rows: int, max_tuned_rows: int) -> int:
    """Return the peak bytes that the layers of the model or of its draft model allocate in a step.

    The draft model runs after the model, so this is the larger of the two peaks."""
    found = layer_bytes(sizes, limits.kernels, rows, max_tuned_rows, has_ranks=limits.has_ranks)
    if draft.sizes is None:
        return found
    inputs = DRAFT_INPUT_COPIES * limits.kernels.dtype_bytes * rows * draft.sizes.hidden
    return max(found, inputs + layer_bytes(draft.sizes, limits.kernels, rows, max_tuned_rows))


def _scratch_bytes(sizes: StepSizes, limits: StepLimits, block_bytes: int, draft: DraftMemory) -> int:
    tokens, running, context = limits.max_batch_tokens, limits.max_running, limits.max_context
    size = sizes.partial_result_bytes(running, limits.max_new_tokens, max_step_rows(running)) + sizes.expanded_bytes
    size += draft.scratch_bytes(running, limits.max_new_tokens)
    # Two sets of block tables in int32: one is copied while the other is used.
    size += 2 * running * limits.block_tables * -(-context // limits.block_size) * 4
    size += context * sizes.rope_values * F32_BYTES
    size += _vocab_table_bytes(sizes.vocab, running) + unpacked_bytes(sizes, limits.kernels)
    has_widened = not sizes.has_latents and limits.kv_dtype_bytes == DTYPE_BYTES["float8"]
    if has_widened and limits.kernels.dtype_bytes == DTYPE_BYTES["bfloat16"]:
        wide = sizes.cached_values * DTYPE_BYTES["bfloat16"]
        size += wide * limits.block_size * max_widened_blocks(limits.block_size, context, tokens)
    size += limits.tiers * COPY_PIECES * blocks_per_scratch_buffer(block_bytes) * block_bytes
    slot_bytes = transfer_slot_bytes(sizes.cached_values * limits.kv_dtype_bytes)
    return size + limits.transfer * 2 * TRANSFER_SLOTS * slot_bytes


def _vocab_table_bytes(vocab: int, max_running: int) -> int:
    """Return the bytes of token counts for penalties (16 bits each) and of grammar masks (one bit each)."""
    return (max_running + 1) * (2 * (vocab + 7) + (vocab + 31) // 8)
