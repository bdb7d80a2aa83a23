"""WorkerRegistration and Heartbeat: the messages that a worker sends to its router.

The receiver ignores unknown fields and uses defaults for missing fields. Workers and routers of different releases can
therefore work together, and a cluster can be upgraded one process at a time."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from emberline.cluster.address import is_unspecified_address
from emberline.core.config import Role
from emberline.core.events import TransferStats
from emberline.core.numerics import Numerics

DialectName = Literal["native", "vllm", "sglang"]

_HEADER_SAFE = re.compile("[ -~]{1,128}")


class WorkerRegistration(msgspec.Struct, frozen=True):
    name: str  # stays the same when the worker is restarted
    incarnation: str  # unique to the process
    url: str
    models: tuple[ModelRegistration, ...]
    role: Role = "both"
    dialect: DialectName = "native"  # kind of server

    def __post_init__(self) -> None:
        # They are sent in headers.
        if not _HEADER_SAFE.fullmatch(self.name) or not _HEADER_SAFE.fullmatch(self.incarnation):
            raise ValueError("name and incarnation of a worker must each have 1 to 128 printable ASCII characters")
        if not self.models:
            raise ValueError("models must not be empty: a worker serves at least one model")
        parts = urlsplit(self.url)  # raises ValueError itself, as `parts.port` does
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0:
            raise ValueError(f"url must be an http or https URL with a host, not {self.url[:200]!r}")
        if is_unspecified_address(parts.hostname):
            raise ValueError(
                f"url must not be {self.url}, the address of all interfaces, to which no client can connect"
            )


class ModelRegistration(msgspec.Struct, frozen=True):
    name: str
    layout: str = ""  # layout of its KV blocks: only workers with equal layouts exchange blocks
    max_context: int = 0
    max_running: int = 0  # requests in one batch; 0: an embedder
    kv_tokens: int = 0
    block_size: int = 0
    peer: dict[str, Any] | None = None  # how other engines connect to this one; None: it offers no blocks
    sampling: dict[str, float] = {}  # defaults of the sampling parameters
    numerics: Numerics | None = None  # None: an embedder, a foreign server, or an earlier release
    ranks: int = 1  # processes among which it is divided


class RouterReport(msgspec.Struct, frozen=True):
    """The requests that one router has open at a worker.

    The router sends it to the worker with its replies, and the worker passes it on to its other routers. So each router
    knows the load that the others cause, and where the conversations that they routed are cached."""

    router: str  # random id of the router's process
    open_requests: int = 0
    prefill_tokens: float = 0.0  # prompt tokens that the worker still has to compute
    decode_tokens: float = 0.0  # tokens that it still has to generate, estimated
    uncached_tokens: float = 0.0  # prompt tokens, computed by this worker or by others, that are not in its cache yet
    # Prompts that the router has sent since its last report: hash in hexadecimal digits, and number of bytes.
    prompts: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for digest, _ in self.prompts:
            bytes.fromhex(digest)  # raises ValueError


class Heartbeat(msgspec.Struct, frozen=True):
    """A worker's state, summed over its models.

    A field is either a current value or a count since the engine's start."""

    name: str
    incarnation: str
    ready: bool = True  # False: the engine is starting
    running: int = 0
    waiting: int = 0
    loading: int = 0  # running requests that wait for blocks from a tier or peer and need no step
    kv_usage: float = 0.0
    step: int = 0
    step_seconds: float = 0.0  # duration of the last step
    busy_seconds: float = 0.0  # duration of all steps
    prompt_tokens: int = 0  # computed prompt tokens
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    paired: tuple[str, ...] = ()  # incarnations of engines from which it can fetch blocks
    refused: dict[str, str] = {}  # incarnations of engines from which it cannot, with the reason
    transfer: TransferStats | None = None
    asleep: bool = False  # all its models sleep; a request wakes them
    routers: int = 1  # number of routers with which the worker registers
    reports: tuple[RouterReport, ...] = ()  # last reports of the other routers that answer


class RegistrationReply(msgspec.Struct, frozen=True):
    """The router's reply to a registration or a heartbeat."""

    beat_seconds: float  # interval between heartbeats
    peers: dict[str, list[dict[str, Any]]] = {}  # all engines to pair with, by model
    report: RouterReport | None = None  # None: the worker has no other router, or the router has an earlier release
