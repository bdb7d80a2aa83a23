"""A process that holds a client of Mooncake's Store: some of its calls hang for minutes with the interpreter's lock
held, and what it is linked with may crash. Started by `StoreClient`, and gone when that is.

Two lines, sockets that keep messages apart: `[number, operation, key, size]` comes in, `[number, answer]` goes out.
Each has a room in shared memory, where values are. The first answer on the second line is that of the beginning.
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

from emberline.kv.confine import ListenerExposed, confined_to
from emberline.kv.mooncake import Store, new_store, protocol

LOCAL = 16 << 20  # bytes that the client wants for itself
MESSAGE = 4096  # bytes, at most
EXPOSED = -10001  # the answer where listeners cannot be confined; Mooncake's own are above
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Task:
    lines: tuple[int, int]  # descriptors, as is:
    shared: int
    room: int  # bytes of each of the two rooms
    host: str  # IPv4 address that others reach us at
    port: int  # first of the two that we listen at; 0: any
    master: str
    memory: int  # bytes that we give to the store

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def run(task: Task, store: Store) -> None:
    memory = mmap.mmap(task.shared, 2 * task.room)
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    get, put = (socket.socket(fileno=line) for line in task.lines)
    try:
        with confined_to(task.host):
            answer = store.setup(task.host, "P2PHANDSHAKE", task.memory, LOCAL, protocol(), "", task.master)
    except ListenerExposed:
        answer = EXPOSED
    put.send(json.dumps([0, answer or store.register_buffer(begin, 2 * task.room)]).encode())
    threading.Thread(target=_serve, args=(get, store, begin, task.room), daemon=True).start()
    _serve(put, store, begin + task.room, task.room)


def _serve(line: socket.socket, store: Store, room: int, size: int) -> None:
    calls: dict[str, Callable[[str, int], int]] = {
        "get": lambda key, _: store.get_into(key, room, size),
        "put": lambda key, length: store.put_from(key, room, length),
        "remove": lambda key, _: store.remove(key, True),
        "check": lambda key, _: store.is_exist(key),
        "close": lambda key, _: store.close(),
    }
    while told := line.recv(MESSAGE):
        number, operation, key, length = json.loads(told)
        line.send(json.dumps([number, calls[operation](key, length)]).encode())
    os._exit(0)  # nobody is left; what its destructors would do may take minutes


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started us decides
    told = json.loads(sys.argv[1])
    task = Task(**{**told, "lines": tuple(told["lines"])})
    run(task, new_store(task.port))


if __name__ == "__main__":
    main()
