"""TransferEndpoint: the transfer side of a cache: a sender with its servers, and a receiver."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.core.config import TransferConfig
from emberline.kv.checksum import Crc
from emberline.kv.codec import Codec
from emberline.kv.confine import is_loopback
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

# Ports of Mooncake, counted from the TCP transport's; its engine and its store listen at two consecutive ports each.
LEASES_PORT, ENGINE_PORT, STORE_PORT = 1, 2, 4
# The engines of this process, by address. All models share one, because Mooncake reads its ports only once.
_engines: dict[str, Mooncake] = {}
DEVICE_STREAMS = 4  # more than for a CPU: each piece also passes through staging buffers on both sides


@dataclass(frozen=True, slots=True)
class Ways:
    """How blocks are transferred."""

    crc: Crc = zlib.crc32
    codec: Codec | None = None  # used between hosts if it measures faster
    always: bool = False  # whether to use the codec without measuring
    mooncake: str | None = None  # IPv4 address of this host for Mooncake's Transfer Engine; None: not used
    seal: bool = False  # whether tickets carry a checksum of each block


@dataclass(frozen=True, slots=True)
class Near:
    """How processes on the same host access a cache."""

    transport: Transport
    serve: Callable[[Sender], Server]

    @staticmethod
    def by_memory(segment: Segment) -> Near:
        """Let processes on this host map the segment."""
        return Near(ShmTransport(segment.region.layout), lambda sender: serve_shm(sender, segment))


@dataclass(frozen=True, slots=True)
class Dock:
    sender: Sender
    receiver: Receiver
    servers: Sequence[Server] = ()
    config: TransferConfig = field(default_factory=lambda: TransferConfig("local"))

    @staticmethod
    def opened(config: TransferConfig, region: Region, near: Near | None = None, ways: Ways | None = None) -> Dock:
        """Start the servers of a region and the receiver. Stops the servers again if one cannot start."""
        ways = ways or Ways()
        sender, layout = Sender(region, config.name, crc=ways.crc, seal=ways.seal), region.layout
        codecs = [ways.codec] if ways.codec else []
        streams = 2 if isinstance(region, HostRegion) else DEVICE_STREAMS
        habits = Habits(streams, crc=ways.crc, codecs=codecs, always=ways.always)
        transports: list[Transport] = [near.transport] if near else []
        servers: list[Server] = [near.serve(sender)] if near else []
        try:
            if ways.mooncake and (engine := _mooncake(ways.mooncake, config, region)) is not None:
                servers.append(serve_mooncake(sender, engine, port_at(config.port, LEASES_PORT)))
                transports.append(MooncakeTransport(layout, engine, Habits(streams=1, crc=ways.crc)))
            servers.append(serve_tcp(sender, config.host, config.port, codecs=codecs, advertise=config.advertise))
            transports.append(TcpTransport(layout, habits))
        except BaseException:
            for server in servers:
                server.stop()
            raise
        return Dock(sender, Receiver(region, transports, crc=ways.crc), servers, config)

    def close(self) -> None:
        """End all leases, connections and servers."""
        self.sender.stop()
        self.receiver.close()
        for server in self.servers:
            server.stop()


def port_at(base: int, offset: int) -> int:
    """Return the port of a listener, counted from `--kv-port`; 0 (any free port) stays 0."""
    return base + offset if base else 0


def _mooncake(host: str, config: TransferConfig, region: Region) -> Mooncake | None:
    """Return Mooncake's engine, or None if it cannot be used: the other transports then carry the blocks."""
    reason: str | None = "the KV cache is in GPU memory"
    if isinstance(region, HostRegion):
        reason = None if host in _engines else probe(host, protocol())
    if reason is None:
        try:
            if host not in _engines:
                _engines[host] = Mooncake(host, protocol(), port_at(config.port, ENGINE_PORT))
        except PeerUnreachable as error:
            reason = error.message
        else:
            _warn_of_exposure(host, config)
            return _engines[host]
    log.warning("Mooncake is not used for KV transfer: reason=%s", reason)
    return None


def _warn_of_exposure(host: str, config: TransferConfig) -> None:
    if not is_loopback(host):
        log.warning(
            "KV cache open to the network: host=%s; Mooncake authenticates no peer, so any process that reaches its "
            "ports can read and overwrite the cache (hint: use a network of the workers' own, or a firewall)",
            host,
        )
    elif not is_loopback(config.advertise or config.host):
        log.warning(
            "Mooncake serves this machine only: host=%s; workers on other machines fetch blocks by TCP "
            "(hint: --kv-mooncake-host ADDRESS opens it to a network that you trust)",
            host,
        )
