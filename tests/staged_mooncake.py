"""The Mooncake transport with slots for a cache in host memory, whose blocks it would read directly otherwise."""

from __future__ import annotations

from emberline.kv.transfer.channel import IO_TIMEOUT_S
from emberline.kv.transfer.mooncake import MooncakeEngine, MooncakeTransport
from emberline.kv.transfer.mooncake_server import StagedPiecesServer
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tcp import create_tcp_listener


class StagedTransport(MooncakeTransport):
    kind = "staged"


def serve_staged(sender: Sender, engine: MooncakeEngine, *, io_timeout_s: float = IO_TIMEOUT_S) -> StagedPiecesServer:
    listener = create_tcp_listener(engine.host, 0)
    sender.endpoints["staged"] = f"{engine.host}:{listener.getsockname()[1]}"
    return StagedPiecesServer(sender, engine, listener, io_timeout_s)
