"""StoreClient: values in Mooncake's Store, through a process of its own, with every wait bounded.

Who asks waits a moment only. A call that is late goes on over there; its room is nobody's until it is answered, and if
that takes too long, the process is ended and another one begun. What it gave to the store is lost then.
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

WAIT = 1.0  # seconds for one value
SETUP = 10.0  # seconds for all that comes before the first
CLOSE = 3.0
STUCK = 60.0  # seconds until a process that owes an answer is given up: it gives up on a master after 30
UNREACHABLE = -900  # this and all below: the master does not answer
# Other answers, which are nobody's failure: no memory is left; the value is being written; it is not there.
NO_ROOM, NOT_READY, NOT_THERE = -200, -703, -704


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where our part of the store listens."""

    host: str | None = None  # address of this host; None: loopback, for a master on this machine
    port: int = 0  # first of two; 0: any that are free


class StoreDown(Exception):
    """The master, or our own process, does not do its work."""


class Line:
    """Questions to the process, one at a time, and the memory that their values are in."""

    def __init__(self, sock: socket.socket, room: memoryview) -> None:
        self.room = room
        self.lock = threading.Lock()  # of who asks
        self._socket = sock
        self._number = 0  # of the last question
        self._owed: float | None = None  # since when it has not been answered

    def free(self) -> None:
        """Raises StoreDown if an earlier call may still use the room."""
        if self._owed is not None:
            self.expect(0.0)

    def ask(self, operation: str, key: str, size: int, seconds: float) -> int:
        self.free()
        self._number += 1
        question = json.dumps([self._number, operation, key, size]).encode()
        try:
            self._socket.send(question, socket.MSG_DONTWAIT)
        except OSError as error:
            raise StoreDown(f"its process is gone: {error}") from error
        answer = self.expect(seconds)
        if answer <= UNREACHABLE:
            raise StoreDown(f"its master does not answer ({answer})")
        return answer

    def expect(self, seconds: float) -> int:
        """The answer to the last question; the first one comes unasked."""
        self._owed = self._owed or time.monotonic()
        self._socket.settimeout(max(seconds, 1e-3))
        try:
            told = self._socket.recv(MESSAGE)
        except TimeoutError as error:
            raise StoreDown(f"no answer within {seconds:g} s" if seconds else "an earlier answer is owed") from error
        except OSError as error:
            raise StoreDown(f"its process is gone: {error}") from error
        if not told:
            raise StoreDown("its process has ended")
        number, answer = json.loads(told)
        assert number == self._number
        self._owed = None
        return int(answer)

    @property
    def stuck(self) -> bool:
        return self._owed is not None and time.monotonic() - self._owed > STUCK

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits


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
        """`master`: HOST:PORT. `memory`: bytes that we give to the store. `value_bytes`: the most of one value."""
        place = place or StorePlace()
        host, _, port = master.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequest(f"{master!r} is not HOST:PORT of a store's master", param="kv_store")
        self._master, self._address = master, (host, int(port))
        self._host, self._port = _our_address(host, place.host), place.port
        self._memory = memory
        self._room = -(-value_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.running.pid if self._process is not None else None

    def get(self, key: str) -> memoryview | int:
        """The value, until the next call of this; or the answer in place of one."""
        line = self._ready().get
        with line.lock:
            size = line.ask("get", key, 0, WAIT)
        return line.room[:size] if size > 0 else size

    def put(self, key: str, fill: Callable[[memoryview], int]) -> tuple[int, int]:
        """`fill`: writes the value to where it is told, and says how long it is. The answer, and that length."""
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
        """Raises StoreDown unless the master answers. Begins, and begins anew, if it has to."""
        if self._process is not None and self._process.useless:
            self._process.end()
            self._process = None
        patience = WAIT
        if self._process is None:
            self._process, patience = self._started(), SETUP
        process = self._process
        with process.put.lock:
            if not process.ready and (answer := process.put.expect(patience)) != 0:
                process.end()
                reason = f"its listeners cannot be confined to {self._host}" if answer == EXPOSED else str(answer)
                raise StoreDown(f"its client does not start ({reason})")
            process.ready = True
            process.put.ask("check", "anything", 0, WAIT)

    def close(self) -> None:
        """Takes our memory out of the store, if it answers."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(StoreDown), process.put.lock:
            if process.ready:
                process.put.ask("close", "", 0, CLOSE)
        process.end()

    def _ready(self) -> Process:
        if self._process is None or not self._process.ready:
            raise StoreDown("it has not been reached yet")
        return self._process

    def _started(self) -> Process:
        """A client waits for a master for minutes, so we knock first."""
        try:
            socket.create_connection(self._address, timeout=WAIT).close()
        except OSError as error:
            raise StoreDown(f"nobody answers at {self._master}: {error}") from error
        try:
            return self._spawned()
        except OSError as error:  # descriptors, memory or processes have run out, perhaps only for now
            raise StoreDown(f"its process cannot be started: {error}") from error

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
            for _, theirs in pairs:
                theirs.close()
        get, put = (Line(pair[0], memory[i * self._room :][: self._room]) for i, pair in enumerate(pairs))
        return Process(running, get, put)


def _our_address(master: str, stated: str | None) -> str:
    """Return the address that our memory is offered at. Mooncake authenticates no peer, so only a setting opens it."""
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
