"""RankGroup: the processes of an engine's other ranks, and a thread of the leader that watches them.

If a rank dies, hangs or reports an error, all these processes are killed. A collective in which the leader is waiting
then fails at once, because its connections close."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, EngineFailed
from emberline.engine.messages import Rejection
from emberline.engine.ranks.control import RankLoaded, RankMessage, StartRank, decode_rank_message
from emberline.engine.ranks.group_memory import HEARTBEAT, NUM_COPIED, PROGRESS, GroupMemory
from emberline.engine.ranks.heartbeat import LOST_PEER_STATUS
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.node_listener import NodeLauncher, NodeLink
from emberline.engine.ranks.node_messages import FromRank, NodeBeat, RankEnded
from emberline.engine.ranks.plan_ring import PlanWriter
from emberline.engine.ranks.rank_model import connect_processes
from emberline.engine.ranks.rank_processes import (
    RANK_COMMAND,
    REAP_TIMEOUT_S,
    RankChild,
    RankProcesses,
    describe_status,
    hint_at_cause,
)
from emberline.engine.ranks.remote_nodes import RemoteNodes
from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.comm.rendezvous import Rendezvous

BOOT_TIMEOUT_S = 900.0  # for imports, kernels and weights of a rank; the same as for an engine on one rank
START_TIMEOUT_S = 60.0  # without a heartbeat while a rank starts: imports may block it for long
STALL_TIMEOUT_S = 120.0  # without progress of any rank in a step; the same as for an engine on one rank
EXPLAIN_TIMEOUT_S = 2.0  # for finding the rank that was lost after a collective failed
COPY_POLL_S = 0.00005

MessageT = TypeVar("MessageT", bound=RankMessage)


@dataclass(slots=True)
class Follower:
    """Another rank, as the leader sees it."""

    rank: int
    inbox: queue.SimpleQueue[RankMessage] = field(default_factory=queue.SimpleQueue)
    last_beat: int = 0
    silent_s: float = 0.0  # time without a heartbeat


class RankGroup:
    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        command: tuple[str, ...] = RANK_COMMAND,
        launcher: NodeLauncher | None = None,
    ) -> None:
        """Start the processes. The caller must call `close`.

        With several nodes, first wait until all others have joined. Raises EmberlineError if one does not. `launcher`:
        has started the other nodes; `close` closes it too."""
        self.layout, self._launcher = layout, launcher
        self._timeout_s = config.parallel.rank_timeout
        self._nodes = RemoteNodes(config, layout, launcher) if layout.nodes > 1 else None
        self._store_fd = os.memfd_create("emberline-rendezvous", os.MFD_CLOEXEC)
        self.rendezvous = Rendezvous(self._store_fd) if self._nodes is None else self._nodes.rendezvous
        self._processes = RankProcesses(layout.num_ranks, command)
        self._memory = self._processes.memory
        self._followers = {rank: Follower(rank) for rank in layout.followers}
        self._communicators: list[Communicator] = []
        self._device_communicators: list[Communicator] = []
        self._failure: EmberlineError | None = None
        self._is_lost, self._is_closing, self._has_spawned = (threading.Event() for _ in range(3))
        self.is_ready = False  # whether all ranks wait for plans
        self._lost_peer: str | None = None  # a rank that ended because it lost another
        self._num_running = 0  # steps and copies that were published and are not finished
        self._num_copies = 0  # messages with copies that are finished
        self._stalled_s, self._last_counts = 0.0, dict[int, int]()  # time without progress in these steps
        # The operating system kills the processes when the thread that started them ends. So the watching thread starts
        # them, which runs as long as the group exists.
        self._watcher = threading.Thread(target=self._watch, args=(config,), name="ranks", daemon=True)
        self._watcher.start()
        self._has_spawned.wait()
        notice_fds = self._processes.notice_fds
        self._writer_lock = threading.Lock()  # threads of KV transfers send messages too
        self._writer = PlanWriter(self._memory, notice_fds, timeout_s=BOOT_TIMEOUT_S, check=self.check)

    # -- for the leader's thread --------------------------------------------------------------------------------------

    def send(self, message: RankMessage) -> None:
        """Send a message to all other ranks."""
        for child in self._processes.children.values():
            with contextlib.suppress(OSError):  # it has ended, which the watching thread notices
                child.control.send(message)
        if self._nodes is not None:
            self._nodes.send(message)
        self.check()

    def wait_for(self, kind: type[MessageT], timeout_s: float = BOOT_TIMEOUT_S) -> dict[int, MessageT]:
        """Return the next message of each other rank, by rank. Raises an error if a rank is lost or too slow."""
        messages: dict[int, MessageT] = {}
        deadline = time.monotonic() + timeout_s
        while len(messages) < len(self._followers):
            for rank in self._followers.keys() - messages.keys():
                with contextlib.suppress(queue.Empty):
                    message = self._followers[rank].inbox.get(timeout=0.05)
                    assert isinstance(message, kind), f"{self.layout.describe(rank)} sent {type(message).__name__}"
                    messages[rank] = message
            self.check()
            if time.monotonic() > deadline:
                late = self._followers.keys() - messages.keys()
                self._fail(f"{self.layout.describe(min(late))} did not send {kind.__name__} within {timeout_s:g} s")
        return messages

    def connect(self, name: str, rank: int, size: int) -> Communicator:
        """Return the leader's connections to other ranks. Raises an error if a rank is lost meanwhile.

        gloo waits for a rank that has not connected yet even if its process has ended. So a thread waits for gloo."""
        connected: Future[Communicator] = Future()

        def run() -> None:
            try:
                connected.set_result(connect_processes(self.rendezvous, name, rank, size))
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=run, name="connect", daemon=True).start()
        while True:
            with contextlib.suppress(TimeoutError):
                communicator = connected.result(timeout=0.05)
                self._communicators.append(communicator)
                return communicator
            self.check()

    def watch(self, communicator: Communicator) -> None:
        """Abort this communicator between GPUs if a rank is lost later.

        Its kernels would otherwise go on waiting, because it has no connection that closes when a rank's process
        ends."""
        self._device_communicators.append(communicator)

    def publish(self, plan: bytes) -> None:
        """Send a plan to all other ranks. Raises RankLost. The step counts as running until `finish_step`."""
        self._num_running += 1
        if self._nodes is not None:
            self._nodes.publish(plan)
        with self._writer_lock:
            self._writer.publish(plan)

    def finish_step(self) -> None:
        self._num_running -= 1

    def publish_copies(self, copies: bytes) -> None:
        """Ask all other ranks, which are on this machine, to make copies. `finish_copies` waits for them."""
        self._num_running += 1
        self.publish_beside_steps(copies)

    def publish_beside_steps(self, message: bytes) -> None:
        """Send a message to all other ranks, which are on this machine. Any thread may call this. Raises RankLost."""
        with self._writer_lock:
            self._writer.publish(message)

    def finish_copies(self) -> None:
        """Wait until all other ranks have made the copies of the oldest pending `publish_copies`.

        A call is pending until this method has waited for its copies. Raises EngineFailed."""
        self._num_copies += 1
        while any(self._memory.get(rank, NUM_COPIED) < self._num_copies for rank in self._followers):
            self.check()
            time.sleep(COPY_POLL_S)
        self._num_running -= 1

    def check(self) -> None:
        """Raise an error if a rank is lost."""
        if self._failure is not None:
            raise self._failure

    def end_with_error(self, reason: BaseException) -> EmberlineError:
        """End the group, because a step of the leader failed for this reason, and return the error."""
        self._is_lost.wait(EXPLAIN_TIMEOUT_S)  # the watching thread may find the rank that caused it
        if isinstance(reason, EngineFailed):
            self._fail_with(reason)
        self._fail(f"a step failed: {type(reason).__name__}: {reason}")
        assert self._failure is not None
        return self._failure

    def progress_count(self) -> int:
        """Return a number that grows while other ranks compute."""
        return sum(self._memory.get(rank, PROGRESS) for rank in self._followers)

    def limit_kv_bytes(self, kv_bytes: int, parts: Mapping[int, RankLoaded]) -> int:
        """Return the memory for KV caches on each node: `kv_bytes`, or less if another node has less memory.

        `parts`: what each rank has loaded."""
        for link in () if self._nodes is None else self._nodes.links:
            weight_bytes = sum(parts[rank].weight_bytes for rank in self.layout.ranks_of(link.node))
            kv_bytes = min(kv_bytes, max(0, link.free_bytes - weight_bytes) // 2)
        return kv_bytes

    @property
    def memory(self) -> GroupMemory:
        """The memory that the ranks of this node share."""
        return self._memory

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks on this node, without the leader's."""
        return {rank: child.process.pid for rank, child in self._processes.children.items()}

    def close(self, error: EmberlineError | None = None) -> None:
        """End all processes. A second call does nothing. `error`: why the group could not start."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._processes.kill_all()
        self._watcher.join(REAP_TIMEOUT_S)
        with self._writer_lock:
            self._writer.close()
        self._processes.close()
        os.close(self._store_fd)
        if self._nodes is not None:
            self._nodes.close(error or self._failure)
        if self._launcher is not None:
            self._launcher.close()

    # -- for the watching thread --------------------------------------------------------------------------------------

    def _watch(self, config: EngineConfig) -> None:
        try:
            for rank in self.layout.ranks_of(0):
                if rank != self.layout.leader:
                    self._processes.spawn(StartRank(config, self.layout, rank, self.rendezvous))
        except OSError as error:
            self._fail(f"a rank's process cannot be started: {error}")
        finally:
            self._has_spawned.set()
        try:
            self._watch_until_lost()
        except Exception as error:  # such as a message of a node that cannot be decoded
            self._fail(f"the ranks cannot be watched any more: {type(error).__name__}: {error}")
        self._end_all()
        self._is_closing.wait()  # when this thread ends, the operating system kills the processes

    def _watch_until_lost(self) -> None:
        """Read messages and heartbeats of the ranks until one is lost, or the group is closed."""
        tick, checked, lost_s = min(0.25, self._timeout_s / 4), time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            for child in self._processes.children.values():
                selector.register(child.control.connection, selectors.EVENT_READ, child)
            for link in () if self._nodes is None else self._nodes.links:
                selector.register(link.socket, selectors.EVENT_READ, link)
            while not self._is_closing.is_set() and self._failure is None:
                for key, _ in selector.select(tick):
                    if not self._read_messages(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if self._lost_peer is not None and (lost_s := lost_s + now - checked) > EXPLAIN_TIMEOUT_S:
                    self._fail(self._lost_peer)
                self._find_silent_ranks(min(now - checked, tick))
                self._find_stall(min(now - checked, tick))
                checked = now

    def _read_messages(self, source: RankChild | NodeLink) -> bool:
        """Receive messages of a rank or of a node; return False if it has ended."""
        if isinstance(source, NodeLink):
            return self._read_node(source)
        is_open = source.control.read_available()
        while (message := source.control.take_message()) is not None:
            self._handle_message(source.rank, message)
        if not is_open:
            self._handle_end(source.rank, source.wait_for_status())
        return is_open

    def _read_node(self, link: NodeLink) -> bool:
        is_open = link.socket.read_available()
        link.silent_s = 0.0
        while (message := link.socket.take_message()) is not None:
            match message:
                case NodeBeat(counts):
                    for rank, (beat, progress) in counts.items():
                        self._memory.set(rank, PROGRESS, progress)
                        self._memory.set(rank, HEARTBEAT, beat)
                case FromRank(rank, body):
                    self._handle_message(rank, decode_rank_message(body))
                case RankEnded(rank, status):
                    self._handle_end(rank, status)
                case Rejection():
                    self._fail_with(message.to_error())
                case _:
                    raise AssertionError(f"node 0 received a message that only it sends: {type(message).__name__}")
        if not is_open:
            self._fail(f"{self.layout.describe_node(link.node)} at {link.host} closed its connection")
        return is_open

    def _handle_message(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, Rejection):
            error = message.to_error()
            error.message = f"{self.layout.describe(rank)}: {error.message}"
            self._fail_with(error)
        else:
            self._followers[rank].inbox.put(message)

    def _handle_end(self, rank: int, status: int | None) -> None:
        """Fail because a rank's process has ended, or note that it has ended only because it lost another rank."""
        if status == LOST_PEER_STATUS:
            self._lost_peer = f"{self.layout.describe(rank)} lost its connection to another rank"
        elif not self._is_closing.is_set():
            self._fail(f"{self.layout.describe(rank)} {describe_status(status)}", hint_at_cause(status))

    def _find_silent_ranks(self, seconds: float) -> None:
        """Fail if a rank has shown no heartbeat for too long.

        `seconds`: time since the previous call, but at most one polling interval, because the clock also advances while
        the machine or this process is stopped."""
        limit = self._timeout_s if self.is_ready else max(START_TIMEOUT_S, self._timeout_s)
        if self._nodes is not None and (link := self._nodes.check(seconds, limit, self.is_ready)) is not None:
            hint = f"check whether {link.host} runs, and its network"
            self._fail(f"{self.layout.describe_node(link.node)} at {link.host} sent nothing for {limit:g} s", hint)
        for follower in self._followers.values():
            beat = self._memory.get(follower.rank, HEARTBEAT)
            follower.silent_s = follower.silent_s + seconds if beat == follower.last_beat else 0.0
            follower.last_beat = beat
            if follower.silent_s > limit:
                self._fail(f"{self.layout.describe(follower.rank)} hangs: no heartbeat for {limit:g} s")

    def _find_stall(self, seconds: float) -> None:
        """Fail if no rank makes progress while a step is running, for example because a kernel hangs."""
        counts = {rank: self._memory.get(rank, PROGRESS) for rank in self._followers}
        counts[self.layout.leader] = ops.progress_count()
        has_moved = counts != self._last_counts or not self._num_running
        self._stalled_s, self._last_counts = 0.0 if has_moved else self._stalled_s + seconds, counts
        if self._stalled_s > STALL_TIMEOUT_S:
            rank = min(counts, key=counts.__getitem__)
            late = self.layout.describe(rank)
            self._fail(f"no rank made progress in a step for {STALL_TIMEOUT_S:g} s; {late} is furthest behind")

    def _fail(self, reason: str, hint: str | None = None) -> None:
        self._fail_with(EngineFailed(reason, hint=hint or "see the server's log"))

    def _fail_with(self, error: EmberlineError) -> None:
        if self._failure is None:  # the first reason is the cause of the others
            self._failure = error
        self._is_lost.set()
        self._end_all()

    def _end_all(self) -> None:
        """End all processes, and abort collectives in which the leader may wait for them, so that these fail."""
        self._processes.kill_all()
        for communicator in self._device_communicators:
            communicator.abort()
        if self._nodes is not None:
            self._nodes.end(self._failure)
            for communicator in self._communicators:
                communicator.abort()
