"""TransferEndpoint: everything that one KV cache needs for transfers: a sender with its servers, and a receiver."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.core.tls import open_identity
from emberline.core.transfer_config import TransferConfig
from emberline.kv.checksum import Crc
from emberline.kv.codec import KVCodec
from emberline.kv.confine import is_loopback
from emberline.kv.mooncake import check_mooncake_usable, detect_fastest_protocol
from emberline.kv.transfer.base import Transport
from emberline.kv.transfer.errors import PeerUnreachable
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.mooncake import MooncakeEngine, MooncakeTransport
from emberline.kv.transfer.mooncake_server import serve_mooncake
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion, Region
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import TransferServer
from emberline.kv.transfer.shm import SharedSegment, ShmTransport, serve_shm
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp

log = logging.getLogger("emberline.transfer")

# Ports of Mooncake, counted from the TCP transport's; its engine and its store listen at two consecutive ports each.
LEASE_PORT_OFFSET, ENGINE_PORT_OFFSET, STORE_PORT_OFFSET = 1, 2, 4
# The engines of this process, by address. All models share one, because Mooncake reads its ports only once.
_mooncake_engines: dict[str, MooncakeEngine] = {}
STAGED_PULL_CONNECTIONS = 4  # for a GPU or several ranks, whose pieces also pass through staging buffers


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of a TransferEndpoint."""

    crc: Crc = zlib.crc32
    codec: KVCodec | None = None  # used between hosts if it measures faster
    always_encode: bool = False  # whether to use the codec without measuring
    mooncake_host: str | None = None  # IPv4 address of this host for Mooncake's Transfer Engine; None: not used
    publish_checksums: bool = False  # whether tickets carry a checksum of each block


@dataclass(frozen=True, slots=True)
class SameHostAccess:
    """How processes on the same host access a KV cache: the transport that they use and the server for it."""

    transport: Transport
    serve: Callable[[Sender], TransferServer]

    @staticmethod
    def via_shared_memory(segment: SharedSegment) -> SameHostAccess:
        """Return the access by shared memory: processes on this host map the segment."""
        return SameHostAccess(ShmTransport(segment.region.layout), lambda sender: serve_shm(sender, segment))


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    sender: Sender
    receiver: Receiver
    servers: Sequence[TransferServer] = ()
    config: TransferConfig = field(default_factory=lambda: TransferConfig("local"))

    @staticmethod
    def open(
        config: TransferConfig,
        region: Region,
        same_host: SameHostAccess | None = None,
        options: TransferOptions | None = None,
    ) -> TransferEndpoint:
        """Start the servers of a cache and the receiver.

        If a server cannot start, the servers that were already started are stopped.
        """
        options = options or TransferOptions()
        sender, layout = (
            Sender(region, config.engine_name, crc=options.crc, publish_checksums=options.publish_checksums),
            region.layout,
        )
        codecs = [options.codec] if options.codec else []
        streams = 2 if isinstance(region, HostRegion) else STAGED_PULL_CONNECTIONS
        habits = LinkOptions(streams, crc=options.crc, codecs=codecs, always_encode=options.always_encode)
        tls = open_identity(config.tls)
        transports: list[Transport] = [same_host.transport] if same_host else []
        servers: list[TransferServer] = [same_host.serve(sender)] if same_host else []
        try:
            if options.mooncake_host and (engine := _start_mooncake(options.mooncake_host, config)) is not None:
                servers.append(serve_mooncake(sender, engine, port_at_offset(config.listen_port, LEASE_PORT_OFFSET)))
                transports.append(MooncakeTransport(layout, engine, LinkOptions(connections=1, crc=options.crc)))
            servers.append(
                serve_tcp(
                    sender,
                    config.listen_host,
                    config.listen_port,
                    codecs=codecs,
                    advertised_host=config.advertised_host,
                    tls=tls.peer_listener_context() if tls is not None else None,
                )
            )
            transports.append(TcpTransport(layout, habits, tls.peer_client_context() if tls is not None else None))
        except BaseException:
            for server in servers:
                server.stop()
            raise
        return TransferEndpoint(sender, Receiver(region, transports, crc=options.crc), servers, config)

    def close(self) -> None:
        """End all leases, connections and servers."""
        self.sender.stop()
        self.receiver.close()
        for server in self.servers:
            server.stop()


def port_at_offset(base_port: int, offset: int) -> int:
    """Return the port of a listener: `base_port`, the setting `--kv-port`, plus the listener's offset.

    Return 0 (any free port) if `base_port` is 0.
    """
    return base_port + offset if base_port else 0


def _start_mooncake(host: str, config: TransferConfig) -> MooncakeEngine | None:
    """Return Mooncake's engine, or None if it cannot be used. Blocks are then transferred by the other transports."""
    reason = None if host in _mooncake_engines else check_mooncake_usable(host, detect_fastest_protocol())
    if reason is None:
        try:
            if host not in _mooncake_engines:
                _mooncake_engines[host] = MooncakeEngine(
                    host, detect_fastest_protocol(), port_at_offset(config.listen_port, ENGINE_PORT_OFFSET)
                )
        except PeerUnreachable as error:
            reason = error.message
        else:
            _warn_of_exposure(host, config)
            return _mooncake_engines[host]
    log.warning("Mooncake cannot be used for KV transfer, using other transports: reason=%s", reason)
    return None


def _warn_of_exposure(host: str, config: TransferConfig) -> None:
    if not is_loopback(host):
        log.warning(
            "KV cache open to the network: host=%s; Mooncake authenticates no peer, so any process that reaches its "
            "ports can read and overwrite the cache (hint: use a network of the workers' own, or a firewall)",
            host,
        )
    elif not is_loopback(config.advertised_host or config.listen_host):
        log.warning(
            "Mooncake serves this machine only: host=%s; workers on other machines fetch blocks by TCP "
            "(hint: --kv-mooncake-host ADDRESS opens it to a network that you trust)",
            host,
        )
