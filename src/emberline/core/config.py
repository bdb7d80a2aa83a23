"""Settings and their defaults: frozen, validated when built. The only place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.errors import InvalidRequest

DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDER = "minilm"


def cache_dir() -> Path:
    """Where pulled models and built kernels are kept: EMBERLINE_CACHE, or ~/.cache/emberline."""
    return Path(os.environ.get("EMBERLINE_CACHE") or Path.home() / ".cache" / "emberline")


def core_count() -> int:
    """Cores this process may use, which a container may have cut down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_size: int = 16
    max_batch_tokens: int = 512  # computed in one step, all requests together
    max_running: int = 64
    max_waiting: int = 1024
    max_context: int = 8192
    prefix_cache: bool = True
    ageing_seconds: float = 10.0  # a batch request that waited this long counts as interactive
    itl_target: float | None = None  # seconds between two tokens of a stream, which chunks of prompts must not delay

    def __post_init__(self) -> None:
        if self.block_size < 8 or self.block_size % 8:
            raise InvalidRequest(f"block_size is {self.block_size}; it must be a multiple of 8", param="block_size")
        for name in ("max_batch_tokens", "max_running", "max_waiting", "max_context"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1", param=name)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine process is started with, on whatever device."""

    model: str  # a checkpoint directory, already resolved
    device: str = "auto"  # cpu, cuda, or auto: a GPU if there is one that our kernels are made for
    dtype: str = "auto"  # auto: as the checkpoint has it
    kv_dtype: str = "auto"  # auto: as dtype
    kv_memory: int | None = None  # bytes; None: planned from what the machine has free
    threads: int = 0  # 0: all cores
    max_context: int | None = None  # None: the model's own
    max_batch_tokens: int | None = None  # None, here and below: what suits the device
    max_running: int | None = None
    max_waiting: int = 1024
    block_size: int | None = None
    prefix_cache: bool = True
    itl_target_ms: float | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"device is {self.device!r}; it must be auto, cpu or cuda", param="device")


@dataclass(frozen=True, slots=True)
class GPUConfig:
    """What an engine on a GPU is started with besides its model."""

    max_running: int = 256
    max_waiting: int = 4096
    max_batch_tokens: int = 8192
    max_context: int | None = None  # None: the model's own
    block_size: int = 64
    prefix_cache: bool = True
    weights: str = "auto"  # plain; or packed: about 12 bits instead of 16, to the bit; auto: packed if the files are
    kv_dtype: str = "auto"  # auto: as the model; or float8
    kv_tokens: int | None = None  # None: what the memory holds
    kv_memory: int | None = None  # the same in bytes
    memory_fraction: float = 0.95  # of the device's, for everything
    graphs: bool = True  # steps of single tokens run as captured graphs
    overlap: bool = True  # a step is planned while the one before it runs
    itl_target_ms: float | None = None  # chunks of prompts are cut so that other streams get their next token in time
    decode_sms: int = 0  # multiprocessors on which streams go on beside chunks of prompts; 0: both share all

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64):
            raise InvalidRequest(f"block_size is {self.block_size}; on a GPU it is 16, 32 or 64", param="block_size")
        if self.weights not in ("auto", "plain", "packed"):
            raise InvalidRequest(f"weights is {self.weights!r}; it is auto, plain or packed", param="weights")
        if not 0 < self.memory_fraction <= 1:
            raise InvalidRequest("memory_fraction must be in (0, 1]", param="memory_fraction")
        if self.itl_target_ms is not None and self.itl_target_ms <= 0:
            raise InvalidRequest("itl_target_ms must be above 0", param="itl_target_ms")
        if self.decode_sms < 0 or (self.decode_sms and not self.graphs):
            raise InvalidRequest("decode_sms must not be below 0, and needs graphs", param="decode_sms")
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise InvalidRequest("kv_tokens and kv_memory say the same thing: give one", param="kv_tokens")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How models that do not fit together take turns."""

    turn: float = 5.0  # seconds a model may keep taking requests while another waits for its memory
    wait: float = 60.0  # seconds until a request is refused whose model could not be woken
    max_waiting: int = 1024  # for one model

    def __post_init__(self) -> None:
        for name in ("turn", "wait", "max_waiting"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be above 0", param=name)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    models: dict[str, str] = field(default_factory=lambda: {DEFAULT_MODEL: DEFAULT_MODEL})  # name in the API: source
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body: int = 32 << 20
    request_timeout: float = 600.0
    stall_timeout: float = 120.0  # an engine with open requests and no sign of life for so long is restarted
    embedder: str | None = DEFAULT_EMBEDDER
    chat_template: str | None = None
    tool_style: str = "auto"  # auto: as the chat template shows

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidRequest("there is no model to serve", param="models")
        if self.embedder in self.models:
            raise InvalidRequest(
                f"{self.embedder!r} names a model and the embedder", param="models", hint="write ALIAS=MODEL"
            )
        if len(self.models) > 1:
            for name, given in (("chat_template", self.chat_template), ("tool_style", self.tool_style != "auto")):
                if given:
                    raise InvalidRequest(f"{name} is one model's: there are {len(self.models)}", param=name)
