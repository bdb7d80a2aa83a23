"""TransferConfig: the settings of KV transfer between engines."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.core.tls_config import TLSConfig


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Settings of an engine that exchanges KV blocks with other engines."""

    engine_name: str  # this engine's name for its peers
    listen_host: str = "127.0.0.1"
    listen_port: int = 0  # 0: any free port
    advertised_host: str | None = None  # address at which peers reach this engine; None: same as `listen_host`
    tls: TLSConfig | None = None  # None: blocks are sent over TCP without encryption
    lease_seconds: float = 10.0  # time for which published blocks are kept without a renewal from a reader
    peer_timeout: float = 30.0  # seconds a request waits for a live peer that sends nothing, then recomputes the blocks
    required: bool = True  # True: without transfers the engine refuses to start; False: it starts without them

    def __post_init__(self) -> None:
        for name in ("lease_seconds", "peer_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
