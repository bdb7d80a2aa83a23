"""MemoryPlan: how an engine uses a GPU's memory. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.engine_config import GPUConfig
from emberline.core.errors import ModelError
from emberline.kv.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each use of a GPU's memory. All uses and `spare_bytes` add up to `total`."""

    total: int
    weights: int
    activations: int
    scratch: int  # partial results, block tables, rotary angles, penalty counts, copy buffers, widened float8 keys
    logits: int
    graphs: int
    reserve: int
    kv_bytes: int
    kv_tokens: int  # that fit if all requests are short
    block_size: int
    max_context: int
    groups: LayerGroups  # layers that share block tables
    max_planned_tokens: int  # of a request, in steps whose results are not known
    states: int = 0  # recurrent states, with a slot for padding, and rows of drafted tokens
    state_slots: int = 0  # slots for the states of requests and for snapshots

    @property
    def fixed_bytes(self) -> int:
        return self.weights + self.activations + self.scratch + self.logits + self.graphs + self.reserve + self.states

    @property
    def spare_bytes(self) -> int:
        return self.total - self.fixed_bytes - self.kv_bytes

    @property
    def kv_blocks(self) -> int:
        return self.kv_tokens // self.block_size * len(self.groups.windows)

    @property
    def context_kv_bytes(self) -> int:
        """The bytes of the KV blocks of a request of the maximum length, and of one more block."""
        tokens = self.max_context + self.block_size
        blocks = self.groups.num_prompt_blocks(tokens, self.block_size, self.max_planned_tokens)
        return blocks * (self.kv_bytes // self.kv_blocks)

    @property
    def max_request_tokens(self) -> int:
        """How many tokens a request may have if it uses all blocks of the KV cache."""
        return self.groups.max_tokens(self.kv_blocks, self.block_size, self.max_planned_tokens)

    @property
    def full_contexts(self) -> float:
        """How many requests of the maximum length the KV cache holds at the same time."""
        return self.kv_blocks / self.groups.num_held_blocks(self.max_context, self.block_size)

    def named_sizes(self) -> list[tuple[str, int]]:
        parts = ("weights", "activations", "scratch", "logits", "graphs", "reserve")
        return [
            *((name, getattr(self, name)) for name in parts),
            *([("states", self.states)] if self.states else []),
            ("kv cache", self.kv_bytes),
            ("spare", self.spare_bytes),
        ]

    def __str__(self) -> str:
        lines = [f"{name:<12}{size / 2**30:>9.2f} GiB" for name, size in [*self.named_sizes(), ("total", self.total)]]
        return "\n".join([*lines, f"keys and values: {self.describe_kv_tokens()}"])

    def describe_kv_tokens(self) -> str:
        """Return how many tokens the KV cache holds, in words."""
        contexts = f"{self.full_contexts:.1f} full contexts"
        if len(self.groups.windows) == 1:
            slots = f", {self.state_slots} slots for states" * bool(self.state_slots)
            return f"{self.kv_tokens} tokens, {contexts}{slots}"
        tables = f"{self.kv_blocks} blocks in {len(self.groups.windows)} groups of layers"
        tokens = f"{self.kv_tokens} tokens of short requests or {self.max_request_tokens} of one long request"
        return f"{tables}, {tokens}, {contexts}"


def does_not_fit_error(fixed_bytes: dict[str, int], usable: int, total_bytes: int, needed_kv_bytes: int) -> ModelError:
    """Return the error for a KV cache that does not fit beside the other parts of a GPU's memory."""
    left = usable - sum(fixed_bytes.values())
    parts = ", ".join(f"{name} {format_gib(size)}" for name, size in fixed_bytes.items())
    remainder = (
        f"leaves {format_gib(left)} GiB" if left >= 0 else f"is {format_gib(-left)} GiB too little without a KV cache"
    )
    if fixed_bytes["weights"] + fixed_bytes["reserve"] >= usable:
        hint = "use a smaller model or a device with more memory"
    else:
        hint = "lower --max-batch-tokens, --max-running or --kv-memory"
    if usable < int(GPUConfig().gpu_memory_utilization * total_bytes):
        hint += ", or raise --gpu-memory-utilization"
    return ModelError(
        f"the model does not fit into GPU memory: {format_gib(usable)} of {format_gib(total_bytes)} GiB are usable, "
        f"which {remainder}; "
        f"the KV cache needs {format_gib(needed_kv_bytes)} GiB (other parts in GiB: {parts})",
        hint=hint,
    )


def format_gib(byte_count: int) -> str:
    return f"{byte_count / 2**30:.2f}"
