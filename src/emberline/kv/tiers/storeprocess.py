"""The child process that contains a client of Mooncake's Store. StoreClient starts it and ends it.

Some calls of the client block for minutes while they hold the GIL, and its libraries may crash. So the client does not
run in the worker's process.

The process serves two SOCK_SEQPACKET sockets, one for get requests and one for all others. Each request is the JSON
list `[number, operation, key, size]`, each reply `[number, result]`. Values are passed in shared memory, in one buffer
per socket. The first message on the second socket, with number 0, is the result of the store's setup.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from emberline.kv.confine import ListenerExposed, restrict_new_listeners
from emberline.kv.mooncake import MooncakeStore, detect_fastest_protocol, new_store

CLIENT_BUFFER_BYTES = 16 << 20  # local buffer that the Mooncake client requires
MAX_MESSAGE_BYTES = 4096
LISTENER_EXPOSED = -10001  # setup result if listeners cannot be confined; below all of Mooncake's error codes
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class StoreProcessConfig:
    lines: tuple[int, int]  # descriptors of the two sockets
    shared: int  # descriptor of the shared memory
    room: int  # bytes of each of the two value buffers
    host: str  # IPv4 address at which other workers reach this process
    port: int  # first of two consecutive ports to listen at; 0: any
    master: str  # HOST:PORT of the store's master
    memory: int  # bytes that this process contributes to the store

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def serve_store(config: StoreProcessConfig, store: MooncakeStore) -> None:
    """Set up the store client, send the result, and serve both sockets until the parent process closes one of them."""
    memory = mmap.mmap(config.shared, 2 * config.room)
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    get, put = (socket.socket(fileno=line) for line in config.lines)
    try:
        with restrict_new_listeners(config.host):
            answer = store.setup(
                config.host,
                "P2PHANDSHAKE",
                config.memory,
                CLIENT_BUFFER_BYTES,
                detect_fastest_protocol(),
                "",
                config.master,
            )
    except ListenerExposed:
        answer = LISTENER_EXPOSED
    put.send(json.dumps([0, answer or store.register_buffer(begin, 2 * config.room)]).encode())
    threading.Thread(target=_serve_connection, args=(get, store, begin, config.room), daemon=True).start()
    _serve_connection(put, store, begin + config.room, config.room)


def _serve_connection(connection: socket.socket, store: MooncakeStore, buffer_address: int, buffer_bytes: int) -> None:
    calls: dict[str, Callable[[str, int], int]] = {
        "get": lambda key, _: store.get_into(key, buffer_address, buffer_bytes),
        "put": lambda key, length: store.put_from(key, buffer_address, length),
        "remove": lambda key, _: store.remove(key, True),
        "check": lambda key, _: store.is_exist(key),
        "close": lambda key, _: store.close(),
    }
    while message := connection.recv(MAX_MESSAGE_BYTES):
        number, operation, key, length = json.loads(message)
        connection.send(json.dumps([number, calls[operation](key, length)]).encode())
    os._exit(0)  # the parent is gone; the client's destructors could run for minutes


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends this process
    values = json.loads(sys.argv[1])
    config = StoreProcessConfig(**{**values, "lines": tuple(values["lines"])})
    serve_store(config, new_store(config.port))


if __name__ == "__main__":
    main()
