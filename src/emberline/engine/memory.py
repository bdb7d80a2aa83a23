"""MemoryPlan: where a device's memory goes, by arithmetic from the model's config. Nothing is tried out. Torch-free.

Everything but keys and values is counted first, as if nothing shared its memory; they get what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.config import GPUConfig
from emberline.core.errors import InvalidRequest, ModelError, UnsupportedModel
from emberline.engine.gpu.shape import MAX_CHUNKS, Grid, shapes
from emberline.engine.scheduler import MOST_SCORED
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

FRACTION = 0.95  # of the device's memory, for everything; the rest is for fragmentation and for others
RESERVE = 2 << 30  # the CUDA context, libraries, compiled kernels, workspaces of cuBLAS and of products in parts
GRAPH_BYTES = 8 << 20  # of one: a few hundred nodes and their arguments; activations are shared by all
LOGIT_COPIES = 2  # the logits, and the sampler's working copy
PIECES = 4  # of scratch, for blocks on their way to other tiers: two each way, one filled while the other is emptied
PIECE_BYTES = 64 << 20  # or one block, if that is larger
SLOTS = 4  # each way, for what other engines are sent or send
SLOT_BYTES = 4 << 20  # or a layer of the largest block there is, if that is larger: as kv/transfer/receiver.py cuts
LARGEST_BLOCK = 64  # tokens
PARTIALS = 16  # parts that the keys of one request are cut into at most, on average over a full batch
LEAST_WIDENED = 32_768  # tokens: some prompts with a long beginning in the cache come together
LEAST_BLOCKS = 2
F32 = 4
PACKED_BITS = 12.2  # of a packed weight, at most: 12, and those that are written out once more
PACKED_GRAIN, PACKED_BLOCK = 64, 16  # what rows and columns are multiples of, or stay plain; rows with one header
UNPACKED = 8192 * 4096  # weights of a packed head that are unpacked at a time, as kernels/gpu.py has it
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float8": 1}
READ = {"F32", "F16", "BF16"}  # dtypes of matrices in a file that models/weights.py takes
FIRST = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")  # the first matrix, stacked


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. The parts and `spare` sum up to `total`."""

    total: int
    weights: int
    activations: int
    scratch: int  # partial results; tables of blocks, of angles, of penalties; blocks on their way; float8 keys as bf16
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
    """What an engine with these settings and weights of this dtype does; for those who only want to know, too."""
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
    """As the engine takes it from the first matrix: the widest of its parts. No kernel reads float16: it widens."""
    found = {checkpoint.tensors[name].dtype for name in FIRST if name in checkpoint.tensors}
    if strange := found - READ:
        hint = f"supported: {' '.join(sorted(READ))}"
        raise UnsupportedModel(f"{checkpoint.directory} has weights of the dtype {min(strange)}", hint=hint)
    if asked != "auto":
        return asked
    return "float32" if found & {"F32", "F16"} else "bfloat16"


def packs(checkpoint: Checkpoint, settings: GPUConfig, dtype: str) -> bool:
    """Whether weights of this dtype are kept in 12 bits, and not as they are."""
    if settings.weights in ("packed", "both") and dtype != "bfloat16":
        hint = "serve it with --dtype bfloat16, or --weights plain"
        what = f"weights is {settings.weights}; only bfloat16 can be packed, and these are {dtype}"
        raise InvalidRequest(what, param="weights", hint=hint)
    coded = any(tensor.packed is not None for tensor in checkpoint.tensors.values())
    return settings.weights == "packed" or (settings.weights == "auto" and coded and dtype == "bfloat16")


def refuse_packed(weights: str) -> None:
    """For an engine on a CPU."""
    if weights in ("packed", "both"):
        hint = "serve it with --weights auto, whatever its files are"
        raise InvalidRequest(f"weights is {weights}; the kernels of a CPU read plain ones", param="weights", hint=hint)


def refuse_experts(config: ModelConfig) -> None:
    """For an engine on a GPU."""
    if config.experts is not None:
        what = f"{config.model_type} is a mixture of experts; so far only the CPU computes one"
        raise UnsupportedModel(what, hint="serve it with --device cpu")


def kv_dtype(settings: GPUConfig, dtype: str) -> str:
    """Of keys and values, by name."""
    name = dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    if name not in DTYPE_BYTES:
        raise InvalidRequest(
            f"kv_dtype is {name!r}; it must be one of auto, {', '.join(DTYPE_BYTES)}", param="kv_dtype"
        )
    return name


def context(config: ModelConfig, settings: GPUConfig) -> int:
    """Positions that are served, if keys and values of so many fit."""
    asked = config.max_context if settings.max_context is None else settings.max_context
    if not 1 <= asked <= config.longest_context:
        raise InvalidRequest(
            f"max_context is {asked}; this model allows 1 to {config.longest_context}", param="max_context"
        )
    return asked


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
    """`kv_tokens`: so many and no more; by default as many as fit. Steps of each shape there can be are captured."""
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
    room = int(total_bytes * FRACTION) - sum(fixed.values())
    blocks = max(0, room) // block_bytes
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
    """Of float8 keys and values, those of a layer that chunks of prompts may see as bf16: of the longest prompt and of
    as many short ones as a step has tokens for. Where they would see more, a slower kernel serves the last of them."""
    return -(-max(max_context, LEAST_WIDENED) // block_size) + -(-max_batch_tokens // block_size) + MAX_CHUNKS


def usable(total: int, free: int, ours: int) -> int:
    """Of a device's memory, all but what other processes hold. `ours`: what this one has allocated. Its context cannot
    be told from theirs, but is smaller than what is kept in reserve for it."""
    others = total - free - ours
    return total if others <= RESERVE else total - others


def grid_of(config: ModelConfig, max_batch_tokens: int) -> Grid:
    """Return which steps with chunks of prompts are captured for this model."""
    return Grid.of(sum(n * k for n, k in _layer_matrices(config)), max_batch_tokens)


def _layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    ffn = [matrix for layer in range(config.layers) for matrix in _ffn(config, layer)]
    return config.layers * [(q + 2 * kv, hidden), (hidden, q)] + ffn


def weight_bytes(config: ModelConfig, dtype_bytes: int, *, packed: bool = False, both: bool = False) -> int:
    """Matrices in the dtype they are used in, packed, or both, but for an embedding that is no head; norms and biases
    in float32."""
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
    """The matrices of a layer's feed-forward network."""
    hidden, experts = config.hidden, config.experts
    if experts is None or not experts.layers[layer]:
        return [(2 * config.ffn, hidden), (hidden, config.ffn)]
    return [(experts.count, hidden), *experts.count * [(2 * experts.ffn, hidden), (hidden, experts.ffn)]]


def packed_bytes(n: int, k: int) -> int:
    """Of a matrix, at most, if its weights are spread like those of trained ones; kernels/cuda/uw12.py packs it."""
    if not _packable(n, k):
        return DTYPE_BYTES["bfloat16"] * n * k
    header = 64 + 2 * (k // PACKED_GRAIN + 1) + 2 * 16  # scales, places, and what rounds them and the list up
    return int(n * k * PACKED_BITS / 8) + n // PACKED_BLOCK * header


def _packable(n: int, k: int) -> bool:
    return n % PACKED_GRAIN == k % PACKED_GRAIN == 0


def kv_token_bytes(config: ModelConfig, kv_dtype_bytes: int) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * kv_dtype_bytes


def copied_at_once(block_bytes: int) -> int:
    """Blocks to or from another tier that share a piece of scratch."""
    return max(1, PIECE_BYTES // block_bytes)


def moved_at_once(token_bytes: int) -> int:
    """Of what other engines are sent or send. `token_bytes`: keys and values of one token in one layer."""
    return max(SLOT_BYTES, LARGEST_BLOCK * token_bytes)


def _activations(config: ModelConfig, dtype_bytes: int, tokens: int) -> int:
    """x and its normed copy; q, k and v; what attention gives; gate and up; their product."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return dtype_bytes * tokens * (2 * config.hidden + (q + 2 * kv) + q + 3 * config.ffn)


def _scratch(config: ModelConfig, block_size: int, max_running: int, max_context: int) -> int:
    partials = max_running * PARTIALS * config.heads * (config.head_dim + 2) * F32  # a sum, its maximum, its weight
    tables = 2 * max_running * -(-max_context // block_size) * 4  # of int32; one on its way while the other is used
    angles = max_context * config.rope.dim * F32
    return partials + tables + angles


def _per_vocabulary(config: ModelConfig, max_running: int) -> int:
    """Counts of tokens for penalties, 16 bits each, and masks of grammars on their way, one bit each."""
    return (max_running + 1) * (2 * (config.vocab + 7) + (config.vocab + 31) // 8)


def _unpacked(config: ModelConfig) -> int:
    """For many rows: the largest matrix of a layer as bf16, twice, since the next is unpacked while one is used; and a
    part of the head."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    widest = max(2 * config.ffn, q + 2 * kv, q) * config.hidden
    return DTYPE_BYTES["bfloat16"] * (2 * widest + min(UNPACKED, config.vocab * config.hidden))


def _does_not_fit(fixed: dict[str, int], total: int, needed: int) -> ModelError:
    usable = int(total * FRACTION)
    room = usable - sum(fixed.values())
    parts = ", ".join(f"{name} {gib(size)}" for name, size in fixed.items())
    left = f"leaves {gib(room)} GiB" if room >= 0 else f"is {gib(-room)} GiB too little"
    if fixed["weights"] + RESERVE >= usable:
        hint = "take a smaller model, or a device with more memory"
    else:
        hint = "lower --max-batch-tokens, --max-running or --kv-memory"
    return ModelError(
        f"the model does not fit: {FRACTION:.0%} of {gib(total)} GiB {left}, and keys and values need "
        f"{gib(needed)} GiB (in GiB: {parts})",
        hint=hint,
    )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
