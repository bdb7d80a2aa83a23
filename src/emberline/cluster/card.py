"""Card: what a worker says of itself when it registers. Beat: how it goes, every second after.

What a newer worker says besides is ignored, and what an older one leaves out has a default: so a cluster is upgraded
part by part.
"""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from emberline.cluster.address import is_unspecified
from emberline.core.config import Role
from emberline.core.events import TransferStats
from emberline.core.numerics import Numerics

Dialect = Literal["native", "vllm", "sglang"]

_PLAIN = re.compile("[ -~]{1,128}")


class Card(msgspec.Struct, frozen=True):
    name: str  # of the place: a worker that is started again has the same
    incarnation: str  # of the process: never used twice
    url: str
    models: tuple[ModelCard, ...]
    role: Role = "both"
    dialect: Dialect = "native"  # what it understands

    def __post_init__(self) -> None:
        if not _PLAIN.fullmatch(self.name) or not _PLAIN.fullmatch(self.incarnation):  # they travel in headers
            raise ValueError("name and incarnation must be 1 to 128 printable ASCII characters")
        if not self.models:
            raise ValueError("models must not be empty")
        parts = urlsplit(self.url)  # which raises ValueError itself, as its port does
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0:
            raise ValueError("url must be an http or https URL of a host")
        if is_unspecified(parts.hostname):
            raise ValueError(f"url is {self.url}: that address means all interfaces and reaches no worker")


class ModelCard(msgspec.Struct, frozen=True):
    name: str
    layout: str = ""  # of its KV blocks: only equal ones can be exchanged
    max_context: int = 0
    max_running: int = 0  # 0: it keeps no batch (an embedder)
    kv_tokens: int = 0
    block_size: int = 0
    peer: dict[str, Any] | None = None  # its engine, as others' engines know it; None: it hands nothing on
    sampling: dict[str, float] = {}  # settings of a request that leaves them out
    numerics: Numerics | None = None  # None: an embedder, another kind of server, or an earlier release


class Beat(msgspec.Struct, frozen=True):
    """Gauges of now and counters since the engine's start, of all models together."""

    name: str
    incarnation: str
    ready: bool = True  # False: the engine starts again
    running: int = 0
    waiting: int = 0
    loading: int = 0  # of those that run: their blocks come from elsewhere, and they need no step
    kv_usage: float = 0.0
    step: int = 0
    step_seconds: float = 0.0  # of the last step
    busy_seconds: float = 0.0  # of all steps
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    paired: tuple[str, ...] = ()  # incarnations of engines it can take blocks from
    refused: dict[str, str] = {}  # those it cannot, and why
    transfer: TransferStats | None = None


class Welcome(msgspec.Struct, frozen=True):
    """The router's answer to a card."""

    beat_seconds: float
    peers: dict[str, list[dict[str, Any]]] = {}  # by model: engines to be paired with, all of them
