"""StoreClient: reads and writes values in Mooncake's Store through a child process, with timeouts.

A call that times out continues in the child process, and the buffer of the call cannot be used until its result
arrives. If that takes too long, the child process is killed and started again. The blocks in the memory that it
contributed to the store are then lost.
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
from emberline.kv.confine import LOOPBACK, is_loopback, resolve_ipv4_address
from emberline.kv.tiers.storeprocess import LISTENER_EXPOSED, MAX_MESSAGE_BYTES, StoreProcessConfig

log = logging.getLogger("emberline.kv")

CALL_TIMEOUT_S = 1.0
SETUP_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 3.0
STUCK_TIMEOUT_S = 60.0  # Mooncake itself gives up on a master after 30 s
MASTER_UNREACHABLE = -900  # results up to this mean that the master does not answer
# Results that are not failures: no memory is left; the value is being written; the key does not exist.
NO_MEMORY, NOT_READY, NOT_FOUND = -200, -703, -704


@dataclass(frozen=True, slots=True)
class StoreListenAddress:
    """The address at which this worker's part of the shared store listens."""

    host: str | None = None  # address of this host; None: loopback, for a master on this machine
    port: int = 0  # first of two consecutive ports; 0: any that are free


class StoreUnavailable(Exception):
    """The store's master process, or our child process that talks to it, does not answer."""


class StoreConnection:
    """A socket to the child process that carries one call at a time, with a shared buffer for the values."""

    def __init__(self, sock: socket.socket, buffer: memoryview) -> None:
        self.buffer = buffer
        self.lock = threading.Lock()  # held by the caller for the length of a call
        self._socket = sock
        self._request_number = 0  # of the last request
        self._pending_since: float | None = None  # time of the last request, until its result has arrived

    def check_buffer_free(self) -> None:
        """Raise StoreUnavailable if an earlier call may still use the buffer."""
        if self._pending_since is not None:
            self.receive_result(0.0)

    def call(self, operation: str, key: str, size: int, timeout_s: float) -> int:
        """Send a request to the child process and return its result.

        Raises StoreUnavailable if no result arrives in time.
        """
        self.check_buffer_free()
        self._request_number += 1
        request = json.dumps([self._request_number, operation, key, size]).encode()
        try:
            self._socket.send(request, socket.MSG_DONTWAIT)
        except OSError as error:
            raise StoreUnavailable(
                f"the connection to the child process of the KV store client failed: {error}"
            ) from error
        result = self.receive_result(timeout_s)
        if result <= MASTER_UNREACHABLE:
            raise StoreUnavailable(f"the KV store's master does not answer: Mooncake error code {result}")
        return result

    def receive_result(self, timeout_s: float) -> int:
        """Return the result of the last request.

        Before the first request, this is the result of the store's setup, which the child process sends unasked.
        """
        self._pending_since = self._pending_since or time.monotonic()
        self._socket.settimeout(max(timeout_s, 1e-3))
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            late = f"no answer within {timeout_s:g} s" if timeout_s else "an earlier call has not been answered yet"
            raise StoreUnavailable(f"the KV store did not answer in time: {late}") from error
        except OSError as error:
            raise StoreUnavailable(
                f"the connection to the child process of the KV store client failed: {error}"
            ) from error
        if not message:
            raise StoreUnavailable("the child process of the KV store client has ended")
        number, result = json.loads(message)
        assert number == self._request_number
        self._pending_since = None
        return int(result)

    @property
    def is_call_stuck(self) -> bool:
        return self._pending_since is not None and time.monotonic() - self._pending_since > STUCK_TIMEOUT_S

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a result


@dataclass(slots=True)
class StoreProcess:
    popen: subprocess.Popen[bytes]
    get: StoreConnection
    put: StoreConnection
    is_ready: bool = False

    @property
    def needs_restart(self) -> bool:
        return self.popen.poll() is not None or self.get.is_call_stuck or self.put.is_call_stuck

    def kill(self) -> None:
        self.get.shut_down()
        self.put.shut_down()
        self.popen.kill()
        self.popen.wait()


class StoreClient:
    def __init__(
        self, master: str, memory_bytes: int, value_bytes: int, listen_address: StoreListenAddress | None = None
    ) -> None:
        """Prepare a client. The child process is started by `ensure_running`.

        `master` is the HOST:PORT of the store's master process. This worker contributes `memory_bytes` to the store. No
        value may be longer than `value_bytes`.
        """
        listen_address = listen_address or StoreListenAddress()
        host, _, port = master.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequest(
                f"kv_store is {master!r}, but must be the HOST:PORT of the store's master", param="kv_store"
            )
        self._master, self._address = master, (host, int(port))
        self._host, self._port = _listen_host(host, listen_address.host), listen_address.port
        self._memory_bytes = memory_bytes
        self._buffer_bytes = -(-value_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._process: StoreProcess | None = None

    @property
    def pid(self) -> int | None:
        return self._process.popen.pid if self._process is not None else None

    def get(self, key: str) -> memoryview | int:
        """Return the value of the key, or the store's error code. The value is valid until the next `get`."""
        line = self._require_ready().get
        with line.lock:
            size = line.call("get", key, 0, CALL_TIMEOUT_S)
        return line.buffer[:size] if size > 0 else size

    def put(self, key: str, write_value: Callable[[memoryview], int]) -> tuple[int, int]:
        """Store a value and return the store's result code and the length of the value.

        `write_value` writes the value into the buffer that it receives, and returns the value's length.
        """
        line = self._require_ready().put
        with line.lock:
            line.check_buffer_free()
            size = write_value(line.buffer)
            return line.call("put", key, size, CALL_TIMEOUT_S), size

    def remove(self, key: str) -> None:
        line = self._require_ready().put
        with line.lock:
            line.call("remove", key, 0, CALL_TIMEOUT_S)

    def ensure_running(self) -> None:
        """Start the child process, or restart it if needed.

        Raises StoreUnavailable if the store's master process does not answer.
        """
        if self._process is not None and self._process.needs_restart:
            self._process.kill()
            self._process = None
        timeout_s = CALL_TIMEOUT_S
        if self._process is None:
            self._process, timeout_s = self._start_process(), SETUP_TIMEOUT_S
        process = self._process
        with process.put.lock:
            if not process.is_ready and (result := process.put.receive_result(timeout_s)) != 0:
                process.kill()
                reason = (
                    f"its listeners cannot be confined to {self._host}"
                    if result == LISTENER_EXPOSED
                    else f"error {result}"
                )
                raise StoreUnavailable(f"the KV store client does not start: {reason}")
            process.is_ready = True
            process.put.call("check", "anything", 0, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Withdraw this worker's memory from the store, if the store answers, and end the child process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(StoreUnavailable), process.put.lock:
            if process.is_ready:
                process.put.call("close", "", 0, CLOSE_TIMEOUT_S)
        process.kill()

    def _require_ready(self) -> StoreProcess:
        if self._process is None or not self._process.is_ready:
            raise StoreUnavailable("the KV store has not answered since this process started")
        return self._process

    def _start_process(self) -> StoreProcess:
        """Start the child process if the store's master accepts connections.

        Without this check, Mooncake would wait minutes for a master that is missing.
        """
        try:
            socket.create_connection(self._address, timeout=CALL_TIMEOUT_S).close()
        except OSError as error:
            raise StoreUnavailable(f"cannot connect to the KV store's master at {self._master}: {error}") from error
        try:
            return self._spawn_process()
        except OSError as error:  # out of descriptors, memory or processes, perhaps only for now
            raise StoreUnavailable(f"cannot start the child process of the KV store client: {error}") from error

    def _spawn_process(self) -> StoreProcess:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        shared = os.memfd_create("emberline-store", os.MFD_CLOEXEC)
        try:
            os.ftruncate(shared, 2 * self._buffer_bytes)
            memory = memoryview(mmap.mmap(shared, 2 * self._buffer_bytes))
            lines = (pairs[0][1].fileno(), pairs[1][1].fileno())
            task = StoreProcessConfig(
                lines, shared, self._buffer_bytes, self._host, self._port, self._master, self._memory_bytes
            )
            command = [sys.executable, "-m", "emberline.kv.tiers.storeprocess", task.as_json()]
            running = subprocess.Popen(
                command, pass_fds=(*lines, shared), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        finally:
            os.close(shared)
            for _, child_end in pairs:
                child_end.close()
        get, put = (
            StoreConnection(pair[0], memory[i * self._buffer_bytes :][: self._buffer_bytes])
            for i, pair in enumerate(pairs)
        )
        return StoreProcess(running, get, put)


def _listen_host(master_host: str, configured_host: str | None) -> str:
    """Return the address to listen at: the configured one, or loopback if the store's master runs on this machine.

    Raises InvalidRequest if the master is remote and no address is configured. Mooncake authenticates no peer, so the
    operator must choose to listen at a network address.
    """
    if configured_host is None:
        if is_loopback(master_host):
            return LOOPBACK
        raise InvalidRequest(
            f"kv_store names a master at {master_host}, which opens this worker's part of the store to the network: "
            "Mooncake authenticates no peer",
            param="kv_store",
            hint="add --kv-mooncake-host with this host's address in a network that you trust",
        )
    address = resolve_ipv4_address(configured_host, "kv_mooncake_host")
    if not is_loopback(address):
        log.warning(
            "KV store open to the network: host=%s; Mooncake authenticates no peer, so any process that reaches its "
            "ports can read and overwrite what it holds (hint: use a network of the workers' own, or a firewall)",
            address,
        )
    return address
