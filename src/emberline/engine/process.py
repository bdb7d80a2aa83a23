"""The engine process: reads messages from the socket it was given, steps the engine, answers. It ends with its client.

python -m emberline.engine.process FD
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.engine import early
from emberline.engine.engine import Engine
from emberline.engine.messages import Abort, Inbox, Message, Progress, Ready, Refused, Start, Submit, encode

if TYPE_CHECKING:
    from emberline.models.reader import Reader

IDLE_REPORT = 1.0  # seconds between reports when there is nothing to do


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle: it ends us by closing the socket
    channel = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
    start = inbox.get()
    if not isinstance(start, Start):
        return 1
    began = time.perf_counter()
    try:
        reader = _read_ahead(start.config)
        early.without_tracing()
        from emberline.engine.boot import boot

        imported = time.perf_counter()
        loaded = boot(start.config, reader)
    except EmberlineError as e:
        channel.sendall(encode(Refused.of("", e)))
        return 1
    channel.sendall(
        encode(
            Ready(
                max_context=loaded.max_context,
                vocab_size=loaded.engine.runner.vocab_size,
                kv_tokens=loaded.kv_tokens,
                block_size=loaded.engine.config.block_size,
                weight_bytes=loaded.weight_bytes,
                kv_bytes=loaded.kv_bytes,
                kernels=loaded.kernels,
                seconds={"imports": imported - began, **loaded.seconds},
            )
        )
    )
    if reader is not None:
        threading.Thread(target=early.remember, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        _serve(loaded.engine, channel, inbox)
    return 0


def _read_ahead(config: EngineConfig) -> Reader | None:
    """For a GPU the disk is the longest way: it starts before torch is imported."""
    if config.device == "cpu" or not Path("/proc/driver/nvidia").exists():
        return None
    return early.begin(Path(config.model))


def _read(channel: socket.socket, inbox: queue.SimpleQueue[Message | None]) -> None:
    frames = Inbox()
    while data := channel.recv(1 << 16):
        for message in frames.feed(data):
            inbox.put(message)
    inbox.put(None)


def _serve(engine: Engine, channel: socket.socket, inbox: queue.SimpleQueue[Message | None]) -> None:
    while True:
        for message in _take(inbox, wait=engine.idle):
            match message:
                case None:
                    return
                case Submit(submission):
                    try:
                        engine.add(submission)
                    except EmberlineError as e:
                        channel.sendall(encode(Refused.of(submission.id, e)))
                case Abort(id, None):
                    engine.abort(id)
                case Abort(id, int(index)):
                    engine.abort_one(id, index)
                case _:
                    raise AssertionError(f"the engine cannot take {type(message).__name__}")
        outputs = engine.step()
        channel.sendall(encode(Progress(outputs, engine.stats())))


def _take(inbox: queue.SimpleQueue[Message | None], *, wait: bool) -> list[Message | None]:
    """All that has come; with nothing to compute, waits for the first a while."""
    messages: list[Message | None] = []
    try:
        if wait:
            messages.append(inbox.get(timeout=IDLE_REPORT))
        while True:
            messages.append(inbox.get_nowait())
    except queue.Empty:
        return messages


if __name__ == "__main__":
    sys.exit(main())
