"""EngineConfig: the settings of an engine process in nested groups, with defaults and help texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.gpu_kernels import KERNEL_CHOICES
from emberline.core.options import COMPUTED_FIELD, option, update_config
from emberline.core.parallel_config import ParallelConfig
from emberline.core.transfer_config import TransferConfig

ITL_TAIL = 3.0  # default of itl_tail
# Ports reserved for one engine from kv_port on: TCP, Mooncake's leases, its engine (2), its store (2), 2 spare.
KV_PORT_COUNT = 8
DEVICES = ("auto", "cpu", "cuda")
WEIGHT_FORMATS = ("auto", "plain", "packed", "both", "fp8", "int4", "q4", "q8")  # formats of weights in memory
ONLINE_FORMATS = ("fp8", "int4")  # of these, the ones to which a GPU quantises bf16 weights at load
KV_CODECS = ("auto", "none", "uw")
GPU_BLOCK_SIZES = (16, 32, 64)
SPECULATION_METHODS = ("off", "auto", "ngram", "suffix", "mtp")
DRAFT_MODEL_METHODS = ("draft", "eagle3")  # these need a model, as in draft:MODEL
MAX_DRAFT_TOKENS = 31  # with the known token, as many as the attention of a step computes together
DEFAULT_DRAFT_TOKENS, DEFAULT_MODEL_DRAFT_TOKENS = 8, 4  # each token of a draft model takes a pass of that model
# Scheduler settings whose default on a GPU differs from SchedulerConfig's, which is the CPU's.
GPU_SCHEDULER_DEFAULTS = {"block_size": 64, "max_batch_tokens": 8192, "max_running": 256, "prompt_bursts": True}
# Scheduler settings whose default depends on the device or the model.
DEPENDENT_SETTINGS = frozenset({*GPU_SCHEDULER_DEFAULTS, "max_context"})


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_context: int = option(8192, "Maximum context in tokens.", default_text="the model's")
    max_batch_tokens: int = option(512, "Maximum tokens computed in one step.", default_text="512; 8192 on a GPU")
    max_running: int = option(64, "Maximum requests in one batch.", default_text="64; 256 on a GPU")
    max_waiting: int = option(1024, "Maximum waiting requests; further ones get a 429.")
    block_size: int = option(16, "Tokens of a KV block.", default_text="16; 64 on a GPU")
    itl_target_ms: float | None = option(
        None,
        "Target inter-token latency on a GPU in milliseconds. Prompt chunks are sized so that 90%% of tokens meet it.",
        default_text="no target",
    )
    itl_tail: float = option(
        ITL_TAIL, "Limit of the other 10%% of tokens while prompts wait, as a multiple of --itl-target-ms."
    )
    prompt_bursts: bool = False  # without itl_target_ms: prompts run in bursts, in which decoding requests wait
    prefix_cache: bool = option(
        True, "Do not reuse KV blocks of earlier prompts.", flag="--no-prefix-cache", default_text="they are reused"
    )
    ageing_seconds: float = 10.0  # seconds after which a waiting batch request counts as interactive
    load_timeout: float = 5.0  # seconds a request waits for KV blocks of a lower tier, then recomputes missing ones

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "block_size", "max_batch_tokens", "max_running", "max_waiting", "max_context")
        if self.block_size % 8:
            raise InvalidRequest(f"block_size is {self.block_size}; it must be a multiple of 8", param="block_size")
        if self.itl_target_ms is not None and not self.itl_target_ms > 0:
            raise InvalidRequest(f"itl_target_ms is {self.itl_target_ms}; it must be above 0", param="itl_target_ms")
        if not 1.0 <= self.itl_tail <= 100.0:
            raise InvalidRequest(f"itl_tail is {self.itl_tail}; it must be from 1 to 100", param="itl_tail")
        if self.itl_tail != ITL_TAIL and self.itl_target_ms is None:
            message = f"itl_tail is {self.itl_tail}, a multiple of itl_target_ms, but itl_target_ms is not set"
            raise InvalidRequest(message, param="itl_tail", hint="add --itl-target-ms")

    def for_model(self, max_context: int) -> SchedulerConfig:
        """Return these settings for a model with a context of `max_context` tokens.

        `max_batch_tokens` is raised to `max_running` if it is lower, so that one step can compute a token of every
        running request."""
        return replace(self, max_context=max_context, max_batch_tokens=max(self.max_batch_tokens, self.max_running))


@dataclass(frozen=True, slots=True)
class GPUConfig:
    """Settings of an engine on a GPU. `weights` also applies to an engine on a CPU."""

    weights: str = option(
        "auto",
        "Format of the weights in memory. auto: as in the files, except that GGUF files become bfloat16 on a GPU, and"
        " packed and other quantised files on a CPU. plain: neither packed nor quantised. On a GPU only: packed: 12"
        " bits instead of 16, lossless; both: packed for small batches and plain for large ones; fp8, int4: bfloat16"
        " matrices of layers are quantised when they are loaded, with a scale for each row (fp8) or for each 128"
        " weights of a row (int4). On a CPU only: q4, q8: matrices are quantised when they are loaded, to 4.5 and 8.5"
        " bits.",
        choices=WEIGHT_FORMATS,
    )
    kernels: str = option(
        "auto",
        "Kernels on a GPU. hopper: the fastest ones, for compute capability 9.0; portable: for 8.0 and later; auto:"
        " by the GPU's compute capability.",
        choices=KERNEL_CHOICES,
    )
    exact: bool = option(
        False,
        "On a GPU, compute the same bits for a token whatever else is in the batch, so that --speculate never changes"
        " the output; slower. Excepted: output that is computed again as a prompt. On a CPU this always holds.",
    )
    gpu_memory_utilization: float = option(
        0.98,
        "Fraction of a GPU's memory that the engine may use, above 0 and at most 1. What other processes use when it"
        " starts is never planned.",
    )
    graphs: bool = True  # run steps as captured CUDA graphs where possible
    overlap: bool = True  # plan and launch a step while the one before it runs

    @property
    def named_kernels(self) -> str:
        """The setting `kernels`, or an empty string if it is auto: the GPU then determines the kernels."""
        return "" if self.kernels == "auto" else self.kernels

    @property
    def online_format(self) -> str:
        """The format to which bf16 weights are quantised at load; empty if they are not quantised."""
        return self.weights if self.weights in ONLINE_FORMATS else ""

    def __post_init__(self) -> None:
        _check_choice(self, "weights", WEIGHT_FORMATS)
        _check_choice(self, "kernels", KERNEL_CHOICES)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidRequest(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1",
                param="gpu_memory_utilization",
            )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Settings of speculative decoding: drafted tokens are computed in one step, and the accepted ones are kept."""

    speculate: str = option(
        "off",
        "How to draft tokens, which changes only the speed. ngram: from the request; suffix: also from"
        " earlier outputs of the same tenant; auto: suffix if there is a C++ compiler, otherwise ngram; draft:MODEL:"
        " with a smaller model that has the same tokens; eagle3:DIR: with an EAGLE-3 head of the model; mtp: with the"
        " head for multi-token prediction in the model's own checkpoint.",
        metavar="METHOD",
    )
    max_draft: int | None = option(
        None,
        "Maximum drafted tokens of a request in one step; fewer are used where more do not pay.",
        default_text=f"{DEFAULT_DRAFT_TOKENS}; {DEFAULT_MODEL_DRAFT_TOKENS} with a draft model",
    )

    @property
    def method(self) -> str:
        """The method without its model, such as `draft`."""
        return self.speculate.partition(":")[0]

    @property
    def uses_draft_model(self) -> bool:
        """Whether drafts come from a draft model, which may be a head in the target model's checkpoint."""
        return self.method == "mtp" or self.method in DRAFT_MODEL_METHODS

    @property
    def draft_source(self) -> str | None:
        """The name or directory of the draft model; None if there is none, or the target's checkpoint contains it."""
        return self.speculate.partition(":")[2] if self.method in DRAFT_MODEL_METHODS else None

    @property
    def max_draft_tokens(self) -> int:
        """`max_draft`, or its default for the method."""
        default = DEFAULT_MODEL_DRAFT_TOKENS if self.uses_draft_model else DEFAULT_DRAFT_TOKENS
        return self.max_draft or default

    @property
    def max_new_tokens(self) -> int:
        """The most tokens of a decoding request that one step computes: one known token and the draft."""
        return 1 if self.speculate == "off" else 1 + self.max_draft_tokens

    def __post_init__(self) -> None:
        if self.speculate not in SPECULATION_METHODS and not self.draft_source:
            choices = ", ".join([*SPECULATION_METHODS, "draft:MODEL or eagle3:DIR"])
            raise InvalidRequest(f"speculate is {self.speculate!r}; it must be one of {choices}", param="speculate")
        if self.max_draft is not None and not 1 <= self.max_draft <= MAX_DRAFT_TOKENS:
            message = f"max_draft is {self.max_draft}; it must be from 1 to {MAX_DRAFT_TOKENS}"
            raise InvalidRequest(message, param="max_draft")


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Settings of the KV cache in the device's memory."""

    kv_dtype: str = option(
        "auto",
        "Data type of the KV cache; auto: that of the weights.",
        choices=("auto", "bfloat16", "float32", "float8"),
    )
    kv_memory: int | None = option(
        None,
        "Size of the KV cache in bytes, such as 2G.",
        unit="bytes",
        default_text="planned from the free memory",
    )
    kv_tokens: int | None = None  # size of the KV cache in tokens, on a GPU; None: as many as fit in memory

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "kv_memory", "kv_tokens")
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise InvalidRequest("kv_tokens and kv_memory are both set; set only one of them", param="kv_tokens")


@dataclass(frozen=True, slots=True)
class KVTierConfig:
    """Settings of the KV tiers: main memory, disk and store, which keep blocks evicted from the KV cache."""

    kv_host_memory: int = option(
        0,
        "Main memory for KV blocks evicted from the KV cache, in bytes per model.",
        unit="bytes",
    )
    kv_disk: str | None = option(None, "Directory for evicted KV blocks, also used after a restart.", metavar="DIR")
    kv_disk_size: int | None = option(
        None, "Maximum size of --kv-disk in bytes per model, such as 100G; needed with --kv-disk.", unit="bytes"
    )
    kv_store: str | None = option(
        None, "Address of the mooncake_master of a KV store that all workers share.", metavar="HOST:PORT"
    )
    kv_store_memory: int = option(
        1 << 30, "Main memory that each model contributes to --kv-store, in bytes.", unit="bytes"
    )
    kv_policy: str = option("lru", "Eviction policy of main memory and disk.", choices=("lru", "arc"))

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "kv_host_memory")
        _check_at_least(self, 1, "kv_disk_size")
        if (self.kv_disk is None) != (self.kv_disk_size is None):
            message = "only one of kv_disk and kv_disk_size is set"
            raise InvalidRequest(message, param="kv_disk", hint="set both --kv-disk and --kv-disk-size, or neither")

    @property
    def has_tiers(self) -> bool:
        return self.kv_host_memory > 0 or self.kv_disk is not None or self.kv_store is not None


@dataclass(frozen=True, slots=True)
class KVNetworkConfig:
    """Settings for KV blocks that are sent to other engines, to the KV store or to disk."""

    kv_mooncake: bool = option(
        False, "Also transfer KV blocks with Mooncake's Transfer Engine, over RDMA where available."
    )
    kv_mooncake_host: str | None = option(
        None,
        "IPv4 address of this host for Mooncake, which does not authenticate peers: use it only in a trusted network.",
        metavar="ADDRESS",
        default_text="127.0.0.1",
    )
    kv_port: int = option(
        0,
        f"First port for KV transfers; each model uses {KV_PORT_COUNT} ports, TCP first, then Mooncake.",
        metavar="PORT",
        default_text="any free ports",
    )
    kv_checksums: bool | None = option(
        None,
        "Send a checksum with each KV block, which the receiving worker verifies.",
        default_text="only with --kv-mooncake",
    )
    kv_codec: str = option(
        "auto",
        "Lossless compression of KV blocks on disk and between hosts; auto: where it measures faster.",
        choices=KV_CODECS,
    )

    def __post_init__(self) -> None:
        if not 0 <= self.kv_port <= 65536 - KV_PORT_COUNT:
            raise InvalidRequest(f"kv_port is {self.kv_port}; it must be 0 to {65536 - KV_PORT_COUNT}", param="kv_port")
        _check_choice(self, "kv_codec", KV_CODECS)

    @property
    def uses_checksums(self) -> bool:
        """Return whether KV blocks carry a checksum when other engines copy them.

        By default, checksums are used only with the Mooncake transport, where other processes can overwrite blocks."""
        return self.kv_mooncake if self.kv_checksums is None else self.kv_checksums


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine process on any device. `EngineConfig.build` accepts all settings by name."""

    model: str  # a checkpoint directory, already resolved
    device: str = option(
        "auto", "Device that computes; auto: a GPU that can be used, otherwise the CPU.", choices=DEVICES
    )
    threads: int = option(0, "CPU threads, of each rank; 0: one per core, or fewer with a CPU quota of a container.")
    dtype: str = option(
        "auto",
        "Data type of the weights; auto: that of the checkpoint, but bfloat16 for float16. float16: on a CPU only.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    step_costs: str | None = option(
        None, "Cost table: each step takes at least as long as in it, to test a cluster; on a CPU only.", metavar="FILE"
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gpu: GPUConfig = field(default_factory=GPUConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    tiers: KVTierConfig = field(default_factory=KVTierConfig)
    network: KVNetworkConfig = field(default_factory=KVNetworkConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    transfer: TransferConfig | None = None  # None: no blocks are exchanged with other engines
    # Scheduler settings that get the default of the device or the model.
    unset: frozenset[str] = field(default=frozenset(), metadata=COMPUTED_FIELD)

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "threads")
        _check_choice(self, "device", DEVICES)
        if self.network.kv_mooncake_host is not None and not self.network.kv_mooncake and self.tiers.kv_store is None:
            message = "kv_mooncake_host is set, but neither kv_mooncake nor kv_store is"
            raise InvalidRequest(message, param="kv_mooncake_host", hint="add --kv-mooncake or --kv-store")
        if self.tiers.has_tiers and not self.scheduler.prefix_cache:
            message = "KV tiers (kv_host_memory, kv_disk or kv_store) need the prefix cache, and prefix_cache is off"
            raise InvalidRequest(message, param="prefix_cache", hint="drop --no-prefix-cache or the KV tiers")

    @staticmethod
    def build(model: str, **settings: Any) -> EngineConfig:
        """Return the config of a model. `settings`: fields of EngineConfig and of its nested configs, by name.

        A setting that is None gets its default. Raises InvalidRequest for unknown settings and invalid values."""
        return EngineConfig(model, unset=DEPENDENT_SETTINGS).with_settings(**settings)

    def with_settings(self, **settings: Any) -> EngineConfig:
        """Return the config with changed settings, by the same names as in `build`."""
        given = {name: value for name, value in settings.items() if value is not None}
        return replace(update_config(self, given), unset=self.unset.difference(given))

    def with_gpu_defaults(self) -> EngineConfig:
        """Return these settings with the GPU's default for each scheduler setting that the user left out.

        Raises InvalidRequest for settings that a GPU does not support."""
        for name in ("threads", "step_costs"):
            if value := getattr(self, name):
                message = f"{name} is {value}, but only an engine on the CPU uses it"
                raise InvalidRequest(message, param=name, hint=f"drop --{name.replace('_', '-')}")
        defaults = {name: value for name, value in GPU_SCHEDULER_DEFAULTS.items() if name in self.unset}
        config = self.with_settings(**defaults)
        if config.scheduler.block_size not in GPU_BLOCK_SIZES:
            message = f"block_size is {config.scheduler.block_size}; on a GPU it must be 16, 32 or 64"
            raise InvalidRequest(message, param="block_size")
        if config.gpu.exact and config.kv_cache.kv_dtype not in ("auto", "bfloat16"):
            message = f"exact is set and kv_dtype is {config.kv_cache.kv_dtype}; on a GPU, exact needs bfloat16"
            raise InvalidRequest(message, param="kv_dtype", hint="drop --exact or --kv-dtype")
        return config

    def with_kv_ports(self, engine_index: int) -> EngineConfig:
        """Return these settings with a range of ports for engine number `engine_index` of this server.

        The range of engine 0 begins at `kv_port`. Nothing is changed if `kv_port` is 0."""
        if not (first_port := self.network.kv_port):
            return self
        port, transfer = first_port + engine_index * KV_PORT_COUNT, self.transfer
        if transfer is not None:  # a configured port that is in use is an error
            transfer = replace(transfer, listen_port=port, required=True)
        return replace(self, network=replace(self.network, kv_port=port), transfer=transfer)

    @property
    def requested_context(self) -> int | None:
        """Return the maximum context that the user set; None if the model's own context applies."""
        return None if "max_context" in self.unset else self.scheduler.max_context


@dataclass(frozen=True, slots=True)
class TimeSharingConfig:
    """Settings of models that take turns on their GPUs because they do not fit into the memory together."""

    model_turn: float = option(
        5.0, "Seconds that a model accepts requests while another model's requests wait.", unit="s"
    )
    model_wait: float = option(
        60.0, "Seconds after which a request whose model could not be loaded gets a 429.", unit="s"
    )
    models_can_sleep: bool = False  # models can be put to sleep by a message, also if they have the device alone

    def __post_init__(self) -> None:
        for name in ("model_turn", "model_wait"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)


def _check_at_least(config: Any, minimum: int, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and value < minimum:
            raise InvalidRequest(f"{name} is {value}; it must be at least {minimum}", param=name)


def _check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    if (value := getattr(config, name)) not in choices:
        raise InvalidRequest(f"{name} is {value!r}; it must be one of {', '.join(choices)}", param=name)
