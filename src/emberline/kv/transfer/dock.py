"""Dock: what a cache needs to exchange blocks with others: a sender with its servers, and a receiver."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
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
from emberline.kv.transfer.region import HostRegion, Region
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import Server
from emberline.kv.transfer.shm import Segment, ShmTransport, serve_shm
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp

log = logging.getLogger("emberline.transfer")

DEVICE_STREAMS = 4  # connections of one pull: a device's pieces take more steps one after the other, on both sides


@dataclass(frozen=True, slots=True)
class Ways:
    """How blocks are to travel."""

    crc: Crc = zlib.crc32
    codec: Codec | None = None  # between hosts, where it measures faster
    always: bool = False  # or wherever it can be used
    mooncake: bool = False  # also by its Transfer Engine
    seal: bool = False  # with a checksum from when they are published


@dataclass(frozen=True, slots=True)
class Near:
    """How processes of the same host reach a cache."""

    transport: Transport
    serve: Callable[[Sender], Server]

    @staticmethod
    def by_memory(segment: Segment) -> Near:
        """They map it."""
        return Near(ShmTransport(segment.region.layout), lambda sender: serve_shm(sender, segment))


@dataclass(frozen=True, slots=True)
class Dock:
    sender: Sender
    receiver: Receiver
    servers: Sequence[Server] = ()
    config: TransferConfig = field(default_factory=lambda: TransferConfig("local"))

    @staticmethod
    def opened(config: TransferConfig, region: Region, near: Near | None = None, ways: Ways | None = None) -> Dock:
        """Others connect to it."""
        ways = ways or Ways()
        sender, layout = Sender(region, config.name, crc=ways.crc, seal=ways.seal), region.layout
        codecs = [ways.codec] if ways.codec else []
        streams = 2 if isinstance(region, HostRegion) else DEVICE_STREAMS
        habits = Habits(streams, crc=ways.crc, codecs=codecs, always=ways.always)
        transports: list[Transport] = [near.transport] if near else []
        servers: list[Server] = [near.serve(sender)] if near else []
        try:
            if ways.mooncake and (engine := _mooncake(config.advertise or config.host, region)) is not None:
                servers.append(serve_mooncake(sender, engine, config.host, advertise=config.advertise))
                transports.append(MooncakeTransport(layout, engine, Habits(streams=1, crc=ways.crc)))
            servers.append(serve_tcp(sender, config.host, config.port, codecs=codecs, advertise=config.advertise))
            transports.append(TcpTransport(layout, habits))
        except BaseException:  # half a dock is none
            for server in servers:
                server.stop()
            raise
        return Dock(sender, Receiver(region, transports, crc=ways.crc), servers, config)

    def close(self) -> None:
        """Nobody gets or sends anything any more."""
        self.sender.stop()
        self.receiver.close()
        for server in self.servers:
            server.stop()


def _mooncake(host: str, region: Region) -> Mooncake | None:
    """None if it is not to be had: blocks have other ways."""
    reason = probe(host, protocol()) if isinstance(region, HostRegion) else "they are in a GPU's memory"
    if reason is None:
        try:
            return Mooncake(host, protocol())
        except PeerUnreachable as error:
            reason = error.message
    log.warning("blocks do not travel by Mooncake: %s", reason)
    return None
