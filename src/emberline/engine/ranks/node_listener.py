"""NodeListener: on node 0, the port at which the other nodes of an engine join its group."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from emberline import __version__
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, EngineFailed, InvalidRequest, NodeRankTaken, WrongClusterKey
from emberline.core.log_throttle import LogThrottle
from emberline.core.pending_connections import PendingConnections
from emberline.engine.messages import Rejection
from emberline.engine.ranks.cluster_key import authenticate_node, read_node_keys
from emberline.engine.ranks.control import DEFAULT_SETTING, list_shared_settings
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.node_address import bind_master, check_node_address
from emberline.engine.ranks.node_messages import (
    NodeHello,
    NodeJoined,
    NodeMessage,
    NodeSocket,
    StartNode,
)
from emberline.kernels.comm.rendezvous import Rendezvous

log = logging.getLogger("emberline.ranks")

ACCEPT_POLL_S = 0.25
FIRST_LOG_DELAY_S, WAIT_LOG_INTERVAL_S = 5.0, 30.0
MAX_PENDING_NODES = 16  # connections that have not joined yet
STORE_TIMEOUT_S = 30.0


@dataclass(slots=True)
class NodeLink:
    """A node that has joined, as node 0 sees it."""

    node: int
    socket: NodeSocket
    host: str
    free_bytes: int  # of its main memory, when it joined
    silent_s: float = 0.0  # time without a message

    def send_if_open(self, message: NodeMessage) -> None:
        """Send a message. If the connection has ended, the thread that reads from it notices."""
        with contextlib.suppress(OSError):
            self.socket.send(message)


class NodeLauncher(Protocol):
    """Starts the other nodes. RayLauncher implements this protocol."""

    cluster_key: str

    def check(self) -> None:
        """Raise EmberlineError if a node could not be started, or has ended."""
        ...

    def close(self) -> None:
        """End the nodes."""
        ...


class NodeListener:
    def __init__(self, config: EngineConfig, layout: Layout, launcher: NodeLauncher | None = None) -> None:
        """Listen at the master address. The caller must call `close`. Raises InvalidRequest.

        `launcher`: what starts the other nodes; None: the user does."""
        self._config, self._layout, self._launcher = config, layout, launcher
        self._keys = read_node_keys(config) if launcher is None else (launcher.cluster_key,)
        self._lock = threading.Condition()
        self._joined: dict[int, NodeLink] = {}
        self._error: EmberlineError | None = None  # of a node that cannot join
        self._is_complete = False  # whether all nodes have joined; a node that comes back joins the next group
        self._refused = ""  # last connection that was refused
        self._is_closing = threading.Event()
        self._pending = PendingConnections(MAX_PENDING_NODES)
        self._failure_log = LogThrottle(log)
        host, port = config.parallel.parse_master()
        check_node_address(config.parallel)
        self._listener = bind_master(host, port)
        try:
            with bind_master(host, port + 1) as store_listener:
                self.rendezvous = self._open_store(store_listener)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept_nodes, name="nodes", daemon=True)
        self._thread.start()

    def _open_store(self, listener: socket.socket) -> Rendezvous:
        from torch import distributed

        host, port = listener.getsockname()[:2]
        self._store: Any = distributed.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return Rendezvous(-1, host, port, self._config.parallel.node_address or host)

    def wait_for_nodes(self) -> list[NodeLink]:
        """Return the links to all other nodes. Raises EmberlineError if one does not join in time or is refused."""
        timeout_s, address = self._config.parallel.node_timeout, self._config.parallel.master
        deadline, next_log = time.monotonic() + timeout_s, time.monotonic() + FIRST_LOG_DELAY_S
        with self._lock:
            while (missing := self._missing_nodes()) and self._error is None:
                if (left := deadline - time.monotonic()) <= 0:
                    names = " and ".join(map(self._layout.describe_node, missing))
                    refused = f"; {self._refused}" if self._refused else ""
                    hint = f"start the same command there with --node-rank {missing[0]}, and check the network"
                    raise EngineFailed(f"{names} did not join at {address} within {timeout_s:g} s{refused}", hint=hint)
                if self._launcher is not None:
                    self._launcher.check()
                if time.monotonic() > next_log:
                    next_log += WAIT_LOG_INTERVAL_S
                    log.warning("Waiting for nodes: address=%s missing=%s timeout_s=%g", address, missing, timeout_s)
                self._lock.wait(min(left, 1.0))
            if self._error is not None:
                raise self._error
            self._is_complete = True
            return [self._joined[node] for node in sorted(self._joined)]

    @property
    def links(self) -> list[NodeLink]:
        """The nodes that have joined so far."""
        return list(self._joined.values())

    @property
    def start_message(self) -> StartNode:
        return StartNode(self._config, self._layout, self.rendezvous.store_port)

    def stop(self) -> None:
        """Let the listening thread end soon. The links stay open."""
        self._is_closing.set()

    def close(self) -> None:
        """Stop listening. The links stay open."""
        self.stop()
        self._thread.join()
        self._store = None  # ends its threads

    def _missing_nodes(self) -> list[int]:
        return [node for node in range(1, self._layout.nodes) if node not in self._joined]

    def _accept_nodes(self) -> None:
        self._listener.settimeout(ACCEPT_POLL_S)
        with self._listener:
            self._accept_until_closed()

    def _accept_until_closed(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # for example no file descriptor is left
                self._is_closing.wait(ACCEPT_POLL_S)
                continue
            if self._is_closing.is_set():
                connection.close()
                continue
            node = NodeSocket(connection, self._config.parallel.rank_timeout)
            self._pending.add(node, address[0], node.shut_down)
            threading.Thread(target=self._admit_node, args=(node, address[0]), name="node", daemon=True).start()

    def _admit_node(self, node: NodeSocket, host: str) -> None:
        """Let a node join, or refuse it."""
        try:
            authenticate_node(node, self._keys)
            self._pending.remove(node)
            hello = node.receive(NodeHello)
            self._check_node(hello)
            self._add_node(NodeLink(hello.node_rank, node, host, hello.free_bytes))
            return
        except EmberlineError as error:
            self._failure_log.write(logging.WARNING, "Node refused: address=%s reason=%s", host, error)
            self._note_refusal(error, host)
            with contextlib.suppress(OSError):
                node.send(Rejection.from_error("", error))
        except OSError as error:
            self._failure_log.write(logging.WARNING, "Connection of a node failed: address=%s reason=%s", host, error)
        finally:
            self._pending.remove(node)
        node.close()

    def _note_refusal(self, error: EmberlineError, host: str) -> None:
        """Note why a node was refused. The start fails, unless the node has another key or a number that is taken.

        A process without the key must not be able to end the start, and a node whose number is taken tries again."""
        with self._lock:
            self._refused = f"a node at {host} was refused: {error.message}"
            if not isinstance(error, WrongClusterKey | NodeRankTaken):
                self._error = error
            self._lock.notify_all()

    def _add_node(self, link: NodeLink) -> None:
        with self._lock:
            before = self._joined.get(link.node)
            if before is not None and (self._is_complete or not before.socket.has_ended()):
                raise NodeRankTaken(
                    f"{self._layout.describe_node(link.node)} has joined already, from {before.host}",
                    hint="give each node a different --node-rank",
                )
            link.socket.send(NodeJoined())
            if before is not None:
                before.socket.close()
            self._joined[link.node] = link
            log.info("Node joined: node=%d address=%s", link.node, link.host)
            self._lock.notify_all()

    def _check_node(self, hello: NodeHello) -> None:
        """Raise InvalidRequest if a node cannot be part of this group."""
        name, layout = f"node {hello.node_rank}", self._layout
        if hello.version != __version__:
            hint = "install the same version of Emberline on all nodes"
            message = f"{name} has version {hello.version} of Emberline, and node 0 has {__version__}"
            raise InvalidRequest(message, param="node_rank", hint=hint)
        ours = list_shared_settings(self._config)
        for setting in sorted(ours.keys() | hello.settings.keys()):
            own, other = ours.get(setting), hello.settings.get(setting)
            is_chosen_by_node_0 = other == DEFAULT_SETTING or (setting, other) == ("device", "auto")
            if own != other and not is_chosen_by_node_0:
                hint = f"set --{setting.replace('_', '-')} to the same value on all nodes"
                message = f"{name} has other settings than node 0: {setting} is {other}, and on node 0 it is {own}"
                raise InvalidRequest(message, param=setting, hint=hint)
        if not 0 < hello.node_rank < layout.nodes:
            raise InvalidRequest(f"node_rank is {hello.node_rank}; it must be from 1 to {layout.nodes - 1}")
        if self._config.device != "cuda" and hello.max_ranks < layout.ranks_per_node:
            needed, cores = layout.ranks_per_node, hello.max_ranks
            raise InvalidRequest(
                f"{layout.describe_node(hello.node_rank)} needs {needed} cores, and its process may use {cores}",
                param="nodes",
                hint="use more nodes, or set --threads 1 to let ranks share cores",
            )
