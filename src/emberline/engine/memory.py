"""MemoryPlan: how a GPU's memory is used, computed from the model's config in advance.

Everything except the KV cache is counted first, as if nothing shared memory; the cache gets the rest. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.config import GPUConfig
from emberline.core.errors import InvalidRequest, ModelError, UnsupportedModel
from emberline.engine.gpu.shape import MAX_CHUNKS, Grid, shapes
from emberline.engine.scheduler import MOST_SCORED
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

FRACTION = 0.95  # part of the device's memory that is used; the rest is for fragmentation and other processes
RESERVE = 2 << 30  # CUDA context, libraries, compiled kernels, workspaces of cuBLAS and of split products
GRAPH_BYTES = 8 << 20  # one captured graph: a few hundred nodes and their arguments; all share activations
LOGIT_COPIES = 2  # the logits, and the sampler's working copy
PIECES = 4  # scratch buffers for copies to and from other tiers: two for each direction, used in turn
PIECE_BYTES = 64 << 20  # or one block, if that is larger
SLOTS = 4  # buffers for each direction of KV transfers
SLOT_BYTES = 4 << 20  # or one layer of the largest block, if that is larger: what kv/transfer/receiver.py requests
LARGEST_BLOCK = 64
PARTIALS = 16  # parts into which attention splits a request's keys, on average over a full batch
LEAST_WIDENED = 32_768  # so that a few prompts with long cached prefixes can be in one step
LEAST_BLOCKS = 2
F32 = 4
PACKED_BITS = 12.2  # per weight: 12, and the escaped ones in full
PACKED_GRAIN, PACKED_BLOCK = 64, 16  # matrices are packed if rows and columns are multiples of 64; rows per header
UNPACKED = 8192 * 4096  # weights of a packed output head that kernels/gpu.py unpacks at a time
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float8": 1}
READ = {"F32", "F16", "BF16"}  # dtypes of matrices in a file that models/weights.py supports
FIRST = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")  # stacked to the first matrix


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part; the parts and `spare_bytes` add up to `total`."""

    total: int
    weights: int
    activations: int
    scratch: int  # partial results, block tables, rotary angles, penalty counts, copy buffers, widened float8 keys
    logits: int
    graphs: int
    reserve: int
    kv_bytes: int
    kv_tokens: int
    block_size: int
    max_context: int

    @property
    def fixed(self) -> int:
        return self.weights + self.activations + self.scratch + self.logits + self.graphs + self.reserve

    @property
    def spare(self) -> int:
        return self.total - self.fixed - self.kv_bytes

    @property
    def kv_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    def rows(self) -> list[tuple[str, int]]:
        parts = ("weights", "activations", "scratch", "logits", "graphs", "reserve")
        return [*((name, getattr(self, name)) for name in parts), ("kv cache", self.kv_bytes), ("spare", self.spare)]

    def __str__(self) -> str:
        lines = [f"{name:<12}{gib(size):>9} GiB" for name, size in [*self.rows(), ("total", self.total)]]
        contexts = self.kv_tokens / self.max_context
        return "\n".join([*lines, f"{self.kv_tokens} tokens of keys and values: {contexts:.1f} full contexts"])


def plan_for(
    config: ModelConfig, settings: GPUConfig, total_bytes: int, dtype: str, *, packed: bool = False
) -> MemoryPlan:
    """Return the plan of an engine with these settings and weights of this dtype.

    Raises ModelError if the model does not fit, UnsupportedModel if the GPU cannot run it."""
    refuse_experts(config)
    kv_bytes = DTYPE_BYTES[kv_dtype(settings, dtype)]
    tokens = settings.kv_tokens
    if settings.kv_memory is not None:
        tokens = settings.kv_memory // kv_token_bytes(config, kv_bytes)
    return plan(
        config,
        total_bytes,
        dtype_bytes=DTYPE_BYTES[dtype],
        kv_dtype_bytes=kv_bytes,
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        max_context=context(config, settings),
        kv_tokens=tokens,
        packed=packed and dtype == "bfloat16",
        both=settings.weights == "both" and dtype == "bfloat16",
        tiers=settings.tiers,
        transfer=settings.transfer,
    )


def weight_dtype(checkpoint: Checkpoint, asked: str = "auto") -> str:
    """Return the dtype of the weights: the requested one, or that of the checkpoint's first matrix.

    float16 becomes float32, since no kernel reads it. Raises UnsupportedModel for other dtypes."""
    found = {checkpoint.tensors[name].dtype for name in FIRST if name in checkpoint.tensors}
    if unsupported := found - READ:
        hint = f"supported dtypes: {' '.join(sorted(READ))}"
        raise UnsupportedModel(f"{checkpoint.directory} has weights of dtype {min(unsupported)}", hint=hint)
    if asked != "auto":
        return asked
    return "float32" if found & {"F32", "F16"} else "bfloat16"


def packs(checkpoint: Checkpoint, settings: GPUConfig, dtype: str) -> bool:
    """Return whether weights of this dtype are kept in 12 bits.

    Raises InvalidRequest if that is impossible."""
    if settings.weights in ("packed", "both") and dtype != "bfloat16":
        hint = "use --dtype bfloat16 or --weights plain"
        message = f"weights is {settings.weights}; only bfloat16 can be packed, and the model has {dtype}"
        raise InvalidRequest(message, param="weights", hint=hint)
    coded = any(tensor.packed is not None for tensor in checkpoint.tensors.values())
    return settings.weights == "packed" or (settings.weights == "auto" and coded and dtype == "bfloat16")


def refuse_packed(weights: str) -> None:
    """Raise InvalidRequest if packed weights are requested on a CPU."""
    if weights in ("packed", "both"):
        hint = "use --weights auto, which also reads packed files"
        raise InvalidRequest(f"weights is {weights}; on a CPU it must be auto or plain", param="weights", hint=hint)


def refuse_experts(config: ModelConfig) -> None:
    """Raise UnsupportedModel for a mixture of experts, which no GPU kernel supports."""
    if config.experts is not None:
        message = f"{config.model_type} is a mixture of experts, which is only supported on the CPU"
        raise UnsupportedModel(message, hint="use --device cpu")


def kv_dtype(settings: GPUConfig, dtype: str) -> str:
    """Return the name of the KV cache's dtype. Raises InvalidRequest if it is unknown."""
    name = dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    if name not in DTYPE_BYTES:
        raise InvalidRequest(
            f"kv_dtype is {name!r}; it must be one of auto, {', '.join(DTYPE_BYTES)}", param="kv_dtype"
        )
    return name


def context(config: ModelConfig, settings: GPUConfig) -> int:
    """Return the context length to serve. Raises InvalidRequest if the model does not support it."""
    length = config.max_context if settings.max_context is None else settings.max_context
    if not 1 <= length <= config.longest_context:
        raise InvalidRequest(
            f"max_context is {length}; this model allows 1 to {config.longest_context}", param="max_context"
        )
    return length


def plan(
    config: ModelConfig,
    total_bytes: int,
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int,
    block_size: int,
    max_running: int,
    max_batch_tokens: int,
    max_context: int,
    kv_tokens: int | None = None,
    packed: bool = False,
    both: bool = False,
    tiers: bool = False,
    transfer: bool = False,
) -> MemoryPlan:
    """Return the plan; `kv_tokens` is the size of the KV cache, or None for as many as fit.

    Graphs of all step shapes are counted. Raises ModelError if the model does not fit."""
    grid = grid_of(config, max_batch_tokens)
    graphs = len(shapes(max_running, max_batch_tokens, grid))
    block_bytes = kv_token_bytes(config, kv_dtype_bytes) * block_size
    scratch = _scratch(config, block_size, max_running, max_context) + packed * _unpacked(config)
    scratch += _per_vocabulary(config, max_running)
    if kv_dtype_bytes == DTYPE_BYTES["float8"] and dtype_bytes == DTYPE_BYTES["bfloat16"]:
        wide = kv_token_bytes(config, DTYPE_BYTES["bfloat16"]) // config.layers
        scratch += wide * block_size * widened_blocks(block_size, max_context, max_batch_tokens)
    scratch += tiers * PIECES * copied_at_once(block_bytes) * block_bytes
    scratch += transfer * 2 * SLOTS * moved_at_once(kv_token_bytes(config, kv_dtype_bytes) // config.layers)
    fixed = {
        "weights": weight_bytes(config, dtype_bytes, packed=packed, both=both),
        "activations": _activations(config, dtype_bytes, max(max_batch_tokens, max_running)),
        "scratch": scratch,
        "logits": LOGIT_COPIES * F32 * (max_running + MOST_SCORED) * config.vocab,
        "graphs": graphs * GRAPH_BYTES + _activations(config, dtype_bytes, grid.most_tokens + grid.coarse),
        "reserve": RESERVE,
    }
    available = int(total_bytes * FRACTION) - sum(fixed.values())
    blocks = max(0, available) // block_bytes
    wanted = LEAST_BLOCKS if kv_tokens is None else max(LEAST_BLOCKS, -(-kv_tokens // block_size))
    if blocks < wanted:
        raise _does_not_fit(fixed, total_bytes, wanted * block_bytes)
    blocks = blocks if kv_tokens is None else wanted
    return MemoryPlan(
        total=total_bytes,
        **fixed,
        kv_bytes=blocks * block_bytes,
        kv_tokens=blocks * block_size,
        block_size=block_size,
        max_context=max_context,
    )


def widened_blocks(block_size: int, max_context: int, max_batch_tokens: int) -> int:
    """Return how many float8 blocks of a layer are converted to bf16 for the prompt chunks of one step.

    That covers the longest prompt and as many short ones as a step has tokens for. If the chunks need more, the last
    ones run with a slower kernel."""
    return -(-max(max_context, LEAST_WIDENED) // block_size) + -(-max_batch_tokens // block_size) + MAX_CHUNKS


def usable(total: int, free: int, ours: int) -> int:
    """Return a device's memory without that of other processes.

    `allocated`: bytes that this process has allocated. Its CUDA context cannot be distinguished from other processes'
    memory, but is smaller than RESERVE_BYTES, which covers it."""
    others = total - free - ours
    return total if others <= RESERVE else total - others


def grid_of(config: ModelConfig, max_batch_tokens: int) -> Grid:
    """Return the sizes of steps with prompt chunks that are captured for this model."""
    return Grid.of(sum(n * k for n, k in _layer_matrices(config)), max_batch_tokens)


def _layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    ffn = [matrix for layer in range(config.layers) for matrix in _ffn(config, layer)]
    return config.layers * [(q + 2 * kv, hidden), (hidden, q)] + ffn


def weight_bytes(config: ModelConfig, dtype_bytes: int, *, packed: bool = False, both: bool = False) -> int:
    """Return the bytes of all weights on the device.

    Matrices are in their dtype, packed, or both (an embedding that is not also the output head is never both); norms
    and biases are in float32."""
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    head = config.vocab, hidden
    matrices = [*_layer_matrices(config), head]
    vectors = 2 * hidden + 2 * config.head_dim * config.qk_norm
    vectors += (q + 2 * kv) * config.qkv_bias + hidden * config.o_bias
    vectors += (2 * config.ffn + hidden) * config.mlp_bias
    size = sum(packed_bytes(n, k) for n, k in matrices if _packable(n, k)) if both else 0
    for n, k in matrices if config.tie_embeddings else [*matrices, head]:
        size += packed_bytes(n, k) if packed else dtype_bytes * n * k
    return size + F32 * (config.layers * vectors + hidden)


def _ffn(config: ModelConfig, layer: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a layer's feed-forward network."""
    hidden, experts = config.hidden, config.experts
    if experts is None or not experts.layers[layer]:
        return [(2 * config.ffn, hidden), (hidden, config.ffn)]
    return [(experts.count, hidden), *experts.count * [(2 * experts.ffn, hidden), (hidden, experts.ffn)]]


def packed_bytes(n: int, k: int) -> int:
    """Return an upper bound for a packed matrix of trained weights; kernels/cuda/uw12.py packs it."""
    if not _packable(n, k):
        return DTYPE_BYTES["bfloat16"] * n * k
    header = 64 + 2 * (k // PACKED_GRAIN + 1) + 2 * 16  # scales, positions, and padding
    return int(n * k * PACKED_BITS / 8) + n // PACKED_BLOCK * header


def _packable(n: int, k: int) -> bool:
    return n % PACKED_GRAIN == k % PACKED_GRAIN == 0


def kv_token_bytes(config: ModelConfig, kv_dtype_bytes: int) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * kv_dtype_bytes


def copied_at_once(block_bytes: int) -> int:
    """Return how many blocks fit into one scratch buffer for copies to and from other tiers."""
    return max(1, PIECE_BYTES // block_bytes)


def moved_at_once(token_bytes: int) -> int:
    """Return the size of a transfer buffer. `token_bytes`: keys and values of one token in one layer."""
    return max(SLOT_BYTES, LARGEST_BLOCK * token_bytes)


def _activations(config: ModelConfig, dtype_bytes: int, tokens: int) -> int:
    """Return the bytes of activations.

    They are x and its normed copy; q, k and v; attention's output; gate and up; their product."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return dtype_bytes * tokens * (2 * config.hidden + (q + 2 * kv) + q + 3 * config.ffn)


def _scratch(config: ModelConfig, block_size: int, max_running: int, max_context: int) -> int:
    partials = (
        max_running * PARTIALS * config.heads * (config.head_dim + 2) * F32
    )  # a sum, its maximum, its denominator
    tables = 2 * max_running * -(-max_context // block_size) * 4  # int32; one is being copied while the other is used
    angles = max_context * config.rope.dim * F32
    return partials + tables + angles


def _per_vocabulary(config: ModelConfig, max_running: int) -> int:
    """Return the bytes of token counts for penalties (16 bits each) and of grammar masks (one bit each)."""
    return (max_running + 1) * (2 * (config.vocab + 7) + (config.vocab + 31) // 8)


def _unpacked(config: ModelConfig) -> int:
    """Return the bytes of unpacked weights in steps with many rows.

    That is two matrices of a layer and a part of the output head.

    The next matrix is unpacked while the other one is used."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    widest = max(2 * config.ffn, q + 2 * kv, q) * config.hidden
    return DTYPE_BYTES["bfloat16"] * (2 * widest + min(UNPACKED, config.vocab * config.hidden))


def _does_not_fit(fixed: dict[str, int], total: int, needed: int) -> ModelError:
    usable = int(total * FRACTION)
    left = usable - sum(fixed.values())
    parts = ", ".join(f"{name} {gib(size)}" for name, size in fixed.items())
    remainder = f"leaves {gib(left)} GiB" if left >= 0 else f"is {gib(-left)} GiB too little without a KV cache"
    if fixed["weights"] + RESERVE >= usable:
        hint = "use a smaller model or a device with more memory"
    else:
        hint = "lower --max-batch-tokens, --max-running or --kv-memory"
    return ModelError(
        f"the model does not fit into GPU memory: {gib(usable)} of {gib(total)} GiB are usable, which {remainder}; "
        f"the KV cache needs {gib(needed)} GiB (other parts in GiB: {parts})",
        hint=hint,
    )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
