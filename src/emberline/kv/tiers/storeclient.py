"""StoreClient: reads and writes values in Mooncake's Store through a child process, with timeouts.

A call that times out continues in the child process. Its buffer stays unusable until the result arrives. If that takes
too long, the child is killed and started again; the blocks in the memory that it contributed to the store are lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.kv.confine import LOOPBACK, address_of, is_loopback
from emberline.kv.tiers.storeprocess import EXPOSED, MESSAGE, Task

log = logging.getLogger("emberline.kv")

WAIT = 1.0
SETUP = 10.0
CLOSE = 3.0
STUCK = 60.0  # Mooncake itself gives up on a master after 30 s
UNREACHABLE = -900  # results up to this mean that the master does not answer
# Results that are not failures: no memory is left; the value is being written; the key does not exist.
NO_ROOM, NOT_READY, NOT_THERE = -200, -703, -704


@dataclass(frozen=True, slots=True)
class StorePlace:
    """The address at which this worker's part of the store listens."""

    host: str | None = None  # address of this host; None: loopback, for a master on this machine
    port: int = 0  # first of two consecutive ports; 0: any that are free


class StoreDown(Exception):
    """The store's master or the child process does not answer."""


class Line:
    """A socket to the child process, for one call at a time, with the buffer that its values pass through."""

    def __init__(self, sock: socket.socket, room: memoryview) -> None:
        self.room = room
        self.lock = threading.Lock()  # held by the caller for the length of a call
        self._socket = sock
        self._number = 0  # of the last request
        self._owed: float | None = None  # time of the last request, until its result has arrived

    def free(self) -> None:
        """Raise StoreUnavailable if an earlier call may still use the buffer."""
        if self._owed is not None:
            self.expect(0.0)

    def ask(self, operation: str, key: str, size: int, seconds: float) -> int:
        """Send a request and return its result. Raises StoreUnavailable if none arrives in time."""
        self.free()
        self._number += 1
        request = json.dumps([self._number, operation, key, size]).encode()
        try:
            self._socket.send(request, socket.MSG_DONTWAIT)
        except OSError as error:
            raise StoreDown(f"the store's client process is gone: {error}") from error
        result = self.expect(seconds)
        if result <= UNREACHABLE:
            raise StoreDown(f"the store's master does not answer (error {result})")
        return result

    def expect(self, seconds: float) -> int:
        """Return the result of the last request, or that of the setup, which the child sends by itself."""
        self._owed = self._owed or time.monotonic()
        self._socket.settimeout(max(seconds, 1e-3))
        try:
            message = self._socket.recv(MESSAGE)
        except TimeoutError as error:
            late = f"no answer within {seconds:g} s" if seconds else "an earlier call has not been answered yet"
            raise StoreDown(f"the store's client process is slow: {late}") from error
        except OSError as error:
            raise StoreDown(f"the store's client process is gone: {error}") from error
        if not message:
            raise StoreDown("the store's client process has ended")
        number, result = json.loads(message)
        assert number == self._number
        self._owed = None
        return int(result)

    @property
    def stuck(self) -> bool:
        return self._owed is not None and time.monotonic() - self._owed > STUCK

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a result


@dataclass(slots=True)
class Process:
    running: subprocess.Popen[bytes]
    get: Line
    put: Line
    ready: bool = False

    @property
    def useless(self) -> bool:
        return self.running.poll() is not None or self.get.stuck or self.put.stuck

    def end(self) -> None:
        self.get.hang_up()
        self.put.hang_up()
        self.running.kill()
        self.running.wait()


class StoreClient:
    def __init__(self, master: str, memory: int, value_bytes: int, place: StorePlace | None = None) -> None:
        """Prepare a client; `check` starts the child process.

        `master`: HOST:PORT. `memory_bytes`: memory that this worker contributes to the store. `value_bytes`: the
        largest value.
        """
        place = place or StorePlace()
        host, _, port = master.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequest(f"kv_store is {master!r}; it must be the master's HOST:PORT", param="kv_store")
        self._master, self._address = master, (host, int(port))
        self._host, self._port = _our_address(host, place.host), place.port
        self._memory = memory
        self._room = -(-value_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.running.pid if self._process is not None else None

    def get(self, key: str) -> memoryview | int:
        """Return the value, valid until the next `get`, or the store's error code."""
        line = self._ready().get
        with line.lock:
            size = line.ask("get", key, 0, WAIT)
        return line.room[:size] if size > 0 else size

    def put(self, key: str, fill: Callable[[memoryview], int]) -> tuple[int, int]:
        """Store the value that `fill` writes into its argument, a buffer, and whose length it returns.

        Return the store's result code and the length.
        """
        line = self._ready().put
        with line.lock:
            line.free()
            size = fill(line.room)
            return line.ask("put", key, size, WAIT), size

    def remove(self, key: str) -> None:
        line = self._ready().put
        with line.lock:
            line.ask("remove", key, 0, WAIT)

    def check(self) -> None:
        """Start or restart the child process if needed. Raises StoreUnavailable unless the master answers."""
        if self._process is not None and self._process.useless:
            self._process.end()
            self._process = None
        timeout_s = WAIT
        if self._process is None:
            self._process, timeout_s = self._started(), SETUP
        process = self._process
        with process.put.lock:
            if not process.ready and (result := process.put.expect(timeout_s)) != 0:
                process.end()
                reason = f"its listeners cannot be confined to {self._host}" if result == EXPOSED else f"error {result}"
                raise StoreDown(f"the store's client does not start: {reason}")
            process.ready = True
            process.put.ask("check", "anything", 0, WAIT)

    def close(self) -> None:
        """Withdraw this worker's memory from the store, if the store answers, and end the child process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(StoreDown), process.put.lock:
            if process.ready:
                process.put.ask("close", "", 0, CLOSE)
        process.end()

    def _ready(self) -> Process:
        if self._process is None or not self._process.ready:
            raise StoreDown("the store has not answered since the start")
        return self._process

    def _started(self) -> Process:
        """Start the child process if the master accepts connections: Mooncake waits minutes for a missing one."""
        try:
            socket.create_connection(self._address, timeout=WAIT).close()
        except OSError as error:
            raise StoreDown(f"cannot connect to the store's master at {self._master}: {error}") from error
        try:
            return self._spawned()
        except OSError as error:  # out of descriptors, memory or processes, perhaps only for now
            raise StoreDown(f"the store's client process cannot be started: {error}") from error

    def _spawned(self) -> Process:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        shared = os.memfd_create("emberline-store", os.MFD_CLOEXEC)
        try:
            os.ftruncate(shared, 2 * self._room)
            memory = memoryview(mmap.mmap(shared, 2 * self._room))
            lines = (pairs[0][1].fileno(), pairs[1][1].fileno())
            task = Task(lines, shared, self._room, self._host, self._port, self._master, self._memory)
            command = [sys.executable, "-m", "emberline.kv.tiers.storeprocess", task.as_json()]
            running = subprocess.Popen(
                command, pass_fds=(*lines, shared), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        finally:
            os.close(shared)
            for _, child_end in pairs:
                child_end.close()
        get, put = (Line(pair[0], memory[i * self._room :][: self._room]) for i, pair in enumerate(pairs))
        return Process(running, get, put)


def _our_address(master: str, stated: str | None) -> str:
    """Return the address to listen at: the configured one, or loopback for a master on this machine.

    Raises InvalidRequest for a remote master without a setting: Mooncake authenticates no peer, so listening at a
    network address must be the operator's choice.
    """
    if stated is None:
        if is_loopback(master):
            return LOOPBACK
        raise InvalidRequest(
            f"kv_store names a master at {master}, which opens this worker's part of the store to the network: "
            "Mooncake authenticates no peer",
            param="kv_store",
            hint="add --kv-mooncake-host with this host's address in a network that you trust",
        )
    address = address_of(stated, "kv_mooncake_host")
    if not is_loopback(address):
        log.warning(
            "KV store open to the network: host=%s; Mooncake authenticates no peer, so any process that reaches its "
            "ports can read and overwrite what it holds (hint: use a network of the workers' own, or a firewall)",
            address,
        )
    return address
