"""Card: what a worker says of itself when it registers. Beat: how it goes, every second after."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

_PLAIN = re.compile("[ -~]{1,128}")
Role = Literal["both"]  # prefill and decode come with the handoff between them


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # of the place: a worker that is started again has the same
    incarnation: str  # of the process: never used twice
    url: str
    models: tuple[ModelCard, ...]
    role: Role = "both"

    def __post_init__(self) -> None:
        if not _PLAIN.fullmatch(self.name) or not _PLAIN.fullmatch(self.incarnation):  # they travel in headers
            raise ValueError("name and incarnation must be 1 to 128 printable ASCII characters")
        if not self.models:
            raise ValueError("models must not be empty")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError("url must be an http or https URL")


class ModelCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    layout: str = ""  # of its KV blocks: only equal ones can be exchanged
    max_context: int = 0
    max_running: int = 0  # 0: it keeps no batch (an embedder)
    kv_tokens: int = 0
    block_size: int = 0


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gauges of now and counters since the engine's start, of all models together."""

    name: str
    incarnation: str
    ready: bool = True  # False: the engine starts again
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    step: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Welcome(msgspec.Struct, frozen=True):
    """The router's answer to a card."""

    beat_seconds: float
