"""run_node: what a node other than node 0 does. It starts its ranks and connects them to node 0.

If the group ends because a rank or a node was lost, the node ends its ranks and joins the next group. This module does
not import torch."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from dataclasses import replace

from emberline import __version__
from emberline.core.config import kernel_dir
from emberline.core.cpus import core_count
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed, EngineUnavailable, NodeRankTaken
from emberline.core.freememory import free_memory
from emberline.core.parallel_config import MAX_RANKS
from emberline.engine.messages import Rejection
from emberline.engine.ranks.cluster_key import authenticate_master
from emberline.engine.ranks.control import StartRank, list_shared_settings
from emberline.engine.ranks.group_memory import HEARTBEAT, PROGRESS
from emberline.engine.ranks.node_address import check_node_address
from emberline.engine.ranks.node_messages import (
    BEAT_INTERVAL_S,
    FromRank,
    GroupEnded,
    MasterBeat,
    NodeBeat,
    NodeGoodbye,
    NodeHello,
    NodeJoined,
    NodePlan,
    NodeSocket,
    RankEnded,
    StartNode,
    ToRanks,
)
from emberline.engine.ranks.plan_ring import PlanWriter
from emberline.engine.ranks.rank_processes import RANK_COMMAND, RankChild, RankProcesses
from emberline.kernels.comm.rank_lost import RankLost
from emberline.kernels.comm.rendezvous import Rendezvous
from emberline.kernels.cpu.build import NativeBuildError, build_library

log = logging.getLogger("emberline.ranks")

CONNECT_TIMEOUT_S = 5.0  # of one attempt
RETRY_PAUSE_S = 0.5  # between two attempts
TAKEN_PAUSE_S = 2.0  # between two attempts while node 0 has another node with this number
RETRY_LOG_INTERVAL_S = 30.0
START_TIMEOUT_S = 60.0  # without a message of node 0 while the ranks start: imports may block it for long
PLAN_TIMEOUT_S = 900.0  # for a rank to read plans; node 0 notices earlier if it hangs


def run_node(
    config: EngineConfig, cluster_keys: tuple[str, ...], stop: threading.Event, command: tuple[str, ...] = RANK_COMMAND
) -> None:
    """Run the ranks of a node until node 0 shuts down or `stop` is set.

    `config`: the settings of this node, with its own path of the checkpoint. `command`: starts a rank's process. These
    processes end with the thread that calls this function. Raises EmberlineError if the node cannot join the group of
    node 0, or if node 0 cannot be reached for `node_timeout`."""
    check_node_address(config.parallel)
    if config.device != "cuda":
        with contextlib.suppress(NativeBuildError):  # the ranks then use torch
            build_library(kernel_dir())  # once, so that the ranks find it
    while not stop.is_set():
        master = join_master(config, cluster_keys, stop)
        if master is None:
            return
        with contextlib.closing(master):
            try:
                run = NodeRun(config, master, command)
                if not run.wait_for_start(stop):
                    continue
                if run.run(stop):
                    log.info("Node ends, because node 0 has shut down: node=%d", config.parallel.node_rank)
                    return
            except ConnectionError as error:
                log.warning("Group ended, joining the next one: node=%d reason=%s", config.parallel.node_rank, error)


def join_master(config: EngineConfig, cluster_keys: tuple[str, ...], stop: threading.Event) -> NodeSocket | None:
    """Connect to node 0 and join its group; return None once `stop` is set.

    Attempts are repeated for up to `node_timeout` while node 0 cannot be reached. Raises EmberlineError after that, or
    if node 0 refuses this node."""
    parallel, began, logged = config.parallel, time.monotonic(), -RETRY_LOG_INTERVAL_S
    while not stop.is_set():
        seconds, pause_s = time.monotonic() - began, RETRY_PAUSE_S
        try:
            return _try_to_join(config, cluster_keys)
        except NodeRankTaken as error:
            # The group that this node belonged to may not have noticed yet that it was lost.
            if seconds > 2 * parallel.rank_timeout + START_TIMEOUT_S:
                raise
            reason, pause_s = str(error), TAKEN_PAUSE_S
        except OSError as error:
            reason = error.strerror or str(error)
            if seconds > parallel.node_timeout:
                message = f"node 0 cannot be reached at {parallel.master} for {parallel.node_timeout:g} s: {reason}"
                hint = "start node 0 with the same --master, and check the network between the nodes"
                raise EngineUnavailable(message, hint=hint) from error
        if seconds - logged > RETRY_LOG_INTERVAL_S:
            logged = seconds
            log.info("Waiting for node 0: address=%s reason=%s", parallel.master, reason)
        stop.wait(pause_s)
    return None


def _try_to_join(config: EngineConfig, cluster_keys: tuple[str, ...]) -> NodeSocket:
    parallel = config.parallel
    connection = socket.create_connection(parallel.parse_master(), CONNECT_TIMEOUT_S)
    master = NodeSocket(connection, parallel.rank_timeout)
    try:
        authenticate_master(master, cluster_keys)
        max_ranks = MAX_RANKS if config.threads else core_count()
        settings = list_shared_settings(config)
        master.send(NodeHello(__version__, parallel.node_rank, settings, max_ranks, free_memory()))
        master.receive(NodeJoined)
    except BaseException:
        master.close()
        raise
    log.info("Joined node 0: node=%d address=%s", parallel.node_rank, parallel.master)
    return master


def with_settings_of_node(config: EngineConfig, node_config: EngineConfig) -> EngineConfig:
    """Return the config of node 0, with this node's values of the settings that may differ between nodes.

    `node_config`: the config of this node."""
    node = {name: getattr(node_config.parallel, name) for name in ("node_rank", "node_address", "master")}
    return replace(
        config, model=node_config.model, threads=node_config.threads, parallel=replace(config.parallel, **node)
    )


class NodeZeroTimer:
    """Measures how long node 0 has sent nothing.

    The clock also advances while the machine or this process is stopped. So the time between two checks counts as at
    most two intervals between heartbeats."""

    def __init__(self) -> None:
        self.limit_s = START_TIMEOUT_S
        self._seconds, self._checked_at = 0.0, time.monotonic()

    def reset(self) -> None:
        self._seconds = 0.0

    def check(self) -> None:
        """Raise ConnectionError if node 0 has sent nothing for longer than the limit."""
        now = time.monotonic()
        self._seconds += min(now - self._checked_at, 2 * BEAT_INTERVAL_S)
        self._checked_at = now
        if self._seconds > self.limit_s:
            raise ConnectionError(f"node 0 sent nothing for {self.limit_s:g} s")


class NodeRun:
    """The ranks of this node in one group, from joining it to its end."""

    def __init__(self, config: EngineConfig, master: NodeSocket, command: tuple[str, ...]) -> None:
        self._config, self._master, self._command = config, master, command
        self._is_over = threading.Event()
        self._node_zero_timer = NodeZeroTimer()
        self._unread_bytes = -1  # of the connection to node 0, at the last check

    def wait_for_start(self, stop: threading.Event) -> bool:
        """Wait until all nodes have joined; return False if `stop` was set before. Raises ConnectionError."""
        deadline = time.monotonic() + self._config.parallel.node_timeout
        while not stop.is_set():
            if (message := self._master.poll(BEAT_INTERVAL_S)) is not None:
                if isinstance(message, StartNode):
                    self._start, self._config = message, with_settings_of_node(message.config, self._config)
                    return True
                self._handle_message(message)
            if time.monotonic() > deadline:
                raise ConnectionError("node 0 has not started the group in time")
        return False

    def run(self, stop: threading.Event) -> bool:
        """Start the ranks and serve node 0. Return True when node 0 has shut down, False when `stop` is set.

        Raises ConnectionError if node 0 or a rank is lost."""
        layout = self._start.layout
        self._processes = RankProcesses(layout.num_ranks, self._command)
        self._writer: PlanWriter | None = None
        beats = threading.Thread(target=self._send_beats, name="beats", daemon=True)
        try:
            self._spawn()
            beats.start()
            return self._serve(stop)
        except (RankLost, OSError) as error:  # a rank has ended, or the connection has
            raise ConnectionError(str(error)) from error
        finally:
            self._is_over.set()
            self._processes.kill_all()
            if self._writer is not None:
                self._writer.close()
            self._processes.close()
            if beats.ident is not None:
                beats.join()

    def _spawn(self) -> None:
        host, address = self._config.parallel.parse_master()[0], self._config.parallel.node_address
        address = address or str(self._master.connection.getsockname()[0])
        rendezvous = Rendezvous(-1, host, self._start.store_port, address)
        try:
            for rank in self._start.layout.ranks_of(self._config.parallel.node_rank):
                self._processes.spawn(StartRank(self._config, self._start.layout, rank, rendezvous))
        except OSError as error:
            failure = EngineFailed(f"node {self._config.parallel.node_rank} cannot start a rank's process: {error}")
            self._master.send(Rejection.from_error("", failure))
            raise
        finally:  # the writer closes the pipes, also those of ranks that had started when another one failed to start
            self._writer = PlanWriter(
                self._processes.memory, self._processes.notice_fds, timeout_s=PLAN_TIMEOUT_S, check=self._check
            )

    def _serve(self, stop: threading.Event) -> bool:
        timer = self._node_zero_timer
        timer.limit_s = max(START_TIMEOUT_S, self._config.parallel.rank_timeout)
        with selectors.DefaultSelector() as selector:
            selector.register(self._master, selectors.EVENT_READ)
            for child in self._processes.children.values():
                selector.register(child.control.connection, selectors.EVENT_READ, child)
            while not stop.is_set():
                for key, _ in selector.select(BEAT_INTERVAL_S):
                    if isinstance(key.data, RankChild):
                        self._forward_messages(key.data, selector)
                        continue
                    timer.reset()
                    is_open = self._master.read_available()
                    while (message := self._master.take_message()) is not None:
                        if isinstance(message, NodeGoodbye):
                            return True
                        if isinstance(message, NodePlan) or (isinstance(message, MasterBeat) and message.is_ready):
                            timer.limit_s = self._config.parallel.rank_timeout
                        self._handle_message(message)
                    if not is_open:
                        raise ConnectionError("node 0 closed the connection")
                timer.check()
        name = self._start.layout.describe_node(self._config.parallel.node_rank)
        failure = EngineFailed(f"{name} was stopped by a signal")
        self._master.try_send(Rejection.from_error("", failure))
        return False

    def _handle_message(self, message: object) -> None:
        match message:
            case NodePlan(plan):
                assert self._writer is not None
                self._writer.publish(plan)
            case ToRanks(body):
                for child in self._processes.children.values():
                    with contextlib.suppress(OSError):  # it has ended, which is reported
                        child.control.send_encoded(body)
            case Rejection():
                raise message.to_error()
            case GroupEnded(reason):
                raise ConnectionError(f"the group has ended: {reason}")
            case MasterBeat():
                pass
            case _:
                raise AssertionError(f"a node received a message that only it sends: {type(message).__name__}")

    def _forward_messages(self, child: RankChild, selector: selectors.BaseSelector) -> None:
        is_open = child.control.read_available()
        while (body := child.control.take_encoded()) is not None:
            self._master.send(FromRank(child.rank, body))
        if not is_open:
            selector.unregister(child.control.connection)
            self._master.send(RankEnded(child.rank, child.wait_for_status()))

    def _check(self) -> None:
        """Raise an error if a rank has ended or node 0 is lost. PlanWriter calls this while its ring is full.

        Messages of node 0 are not read meanwhile, but the number of unread bytes shows whether any arrive."""
        if self._is_over.is_set() or any(c.process.poll() is not None for c in self._processes.children.values()):
            raise RankLost("a rank of this node has ended")
        if self._master.is_closed_by_peer():
            raise ConnectionError("node 0 closed the connection")
        if (unread := self._master.count_unread_bytes()) != self._unread_bytes:
            self._unread_bytes = unread
            self._node_zero_timer.reset()
        self._node_zero_timer.check()

    def _send_beats(self) -> None:
        memory, ranks, num_sent = self._processes.memory, self._processes.children, 0
        while not self._is_over.wait(BEAT_INTERVAL_S):
            num_sent += 1
            memory.set(self._start.layout.leader, HEARTBEAT, num_sent)  # shows the ranks that this process runs
            counts = {rank: (memory.get(rank, HEARTBEAT), memory.get(rank, PROGRESS)) for rank in ranks}
            self._master.try_send(NodeBeat(counts))
