"""Dock: what a cache needs to exchange blocks with others: a sender with its servers, and a receiver."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from emberline.core.config import TransferConfig
from emberline.kv.checksum import Crc
from emberline.kv.codec import Codec
from emberline.kv.mooncake import probe, protocol
from emberline.kv.transfer.base import Transport
from emberline.kv.transfer.errors import PeerUnreachable
from emberline.kv.transfer.link import Habits
from emberline.kv.transfer.mooncake import Mooncake, MooncakeTransport, serve_mooncake
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import Server
from emberline.kv.transfer.shm import Segment, ShmTransport, serve_shm
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp

log = logging.getLogger("emberline.transfer")


@dataclass(frozen=True, slots=True)
class Ways:
    """How blocks are to travel."""

    crc: Crc = zlib.crc32
    codec: Codec | None = None  # between hosts, where it measures faster
    always: bool = False  # or wherever it can be used
    mooncake: bool = False  # also by its Transfer Engine


@dataclass(frozen=True, slots=True)
class Dock:
    sender: Sender
    receiver: Receiver
    servers: Sequence[Server] = ()
    config: TransferConfig = field(default_factory=lambda: TransferConfig("local"))

    @staticmethod
    def opened(config: TransferConfig, segment: Segment, ways: Ways | None = None) -> Dock:
        """For a cache that lies in the segment: its own host maps it, others connect."""
        ways = ways or Ways()
        sender, layout = Sender(segment.region, config.name, crc=ways.crc), segment.region.layout
        codecs = [ways.codec] if ways.codec else []
        habits = Habits(crc=ways.crc, codecs=codecs, always=ways.always)
        transports: list[Transport] = [ShmTransport(layout), TcpTransport(layout, habits)]
        servers: list[Server] = [serve_shm(sender, segment)]
        try:
            servers.append(serve_tcp(sender, config.host, config.port, codecs=codecs, advertise=config.advertise))
            if ways.mooncake and (engine := _mooncake(config.advertise or config.host)) is not None:
                servers.append(serve_mooncake(sender, engine, config.host, advertise=config.advertise))
                transports.insert(1, MooncakeTransport(layout, engine, Habits(streams=1, crc=ways.crc)))
        except BaseException:  # half a dock is none
            for server in servers:
                server.stop()
            raise
        return Dock(sender, Receiver(segment.region, transports, crc=ways.crc), servers, config)

    def close(self) -> None:
        """Nobody gets or sends anything any more."""
        self.sender.stop()
        self.receiver.close()
        for server in self.servers:
            server.stop()


def _mooncake(host: str) -> Mooncake | None:
    """None if it is not to be had: blocks have other ways."""
    reason = probe(host, protocol())
    if reason is None:
        try:
            return Mooncake(host, protocol())
        except PeerUnreachable as error:
            reason = error.message
    log.warning("blocks do not travel by Mooncake: %s", reason)
    return None
