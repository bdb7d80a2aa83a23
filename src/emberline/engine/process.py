"""The engine process: receives messages on a socket, steps the engines and sends their outputs.

It ends when its client closes the socket.

python -m emberline.engine.process FD
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.engine import early
from emberline.engine.fleet import Fleet
from emberline.engine.messages import (
    Abort,
    Blocks,
    Computing,
    Facts,
    Inbox,
    Message,
    Paired,
    Peers,
    Progress,
    Ready,
    Refused,
    Start,
    Submit,
    Turned,
    Watch,
    compact,
    encode,
)

if TYPE_CHECKING:
    from emberline.engine.boot import Loaded
    from emberline.models.reader import Reader

IDLE_REPORT = 1.0  # between two reports of an idle engine
QUIET_S = 0.25  # time without messages after which idle time is used to prepare later steps
REMEMBER_AFTER_S = 5.0  # from the start to recording used files, so that it does not slow down the first requests
PROGRESS_REPORT_S = 1.0  # between two reports of progress within a step
LAST_STEP_S = 10.0  # for the current step after the client has disconnected
GLANCE = 0.05  # between two checks of blocks that peers hold, of an idle engine


def main() -> int:
    # A terminal or service manager signals all processes. The client first ends open requests, then closes the socket.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    channel, booted = Channel(fileno=int(sys.argv[1])), threading.Event()
    inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox, booted), daemon=True).start()
    start = inbox.get()
    if not isinstance(start, Start):
        return 1
    began = time.perf_counter()
    try:
        reader = _read_ahead(next(reversed(start.models.values())))
        early.without_tracing()
        from emberline.engine.fleet_boot import boot_fleet

        imported = time.perf_counter()
        fleet, loaded = boot_fleet(start.models, start.rules, reader)
    except EmberlineError as e:
        channel.sendall(encode(Refused.of("", e)))
        return 1
    from emberline.kernels import ops  # imported late, because it imports torch

    booted.set()
    imports = {"imports": imported - began}
    ready = Ready({name: _facts(loaded[name], imports) for name in start.models})
    with contextlib.suppress(ConnectionError):
        channel.sendall(b"".join(map(encode, [*_news(fleet), ready])))
        if reader is not None:
            later = threading.Timer(REMEMBER_AFTER_S, early.remember)
            later.daemon = True
            later.start()
        threading.Thread(target=report_progress, args=(channel, ops.progress), daemon=True).start()
        serve(fleet, channel, inbox)
    for engine in fleet.engines.values():
        engine.close()
    return 0


class Channel(socket.socket):
    """The socket to the client. Several threads may send: each message is sent as a whole."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self._sending = threading.Lock()

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        with self._sending:
            super().sendall(data, flags)


def report_progress(channel: socket.socket, progress: Callable[[], int], interval: float = PROGRESS_REPORT_S) -> None:
    """Report to the client while kernels make progress, so that a long step is not taken for a hang.

    Returns when the client has disconnected."""
    last = progress()
    with contextlib.suppress(OSError):
        while True:
            time.sleep(interval)
            if (now := progress()) != last:
                last = now
                channel.sendall(encode(Computing()))


def _facts(loaded: Loaded, imports: dict[str, float]) -> Facts:
    dock = loaded.engine.dock
    return Facts(
        max_context=loaded.max_context,
        vocab_size=loaded.engine.runner.vocab_size,
        eos=sorted(loaded.engine.runner.eos),
        kv_tokens=loaded.kv_tokens,
        block_size=loaded.engine.config.block_size,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=loaded.kv_bytes,
        kernels=loaded.kernels,
        layout=loaded.engine.runner.layout,
        max_running=loaded.engine.config.max_running,
        seconds={**imports, **loaded.seconds},
        device=loaded.device,
        kv_dtype=loaded.kv_dtype,
        prefix_cache=loaded.engine.config.prefix_cache,
        peer=dataclasses.asdict(dock.sender.peer) if dock is not None else None,
        numerics=loaded.numerics,
    )


def _read_ahead(config: EngineConfig) -> Reader | None:
    """Start reading files before torch is imported, if a GPU is used, since the disk takes longest."""
    if config.device == "cpu" or not Path("/proc/driver/nvidia").exists():
        return None
    return early.begin(Path(config.model))


def _read(channel: socket.socket, inbox: queue.SimpleQueue[Message | None], booted: threading.Event) -> None:
    decoder = Inbox()
    with contextlib.suppress(ConnectionError):  # a client that was killed with unread data
        while data := channel.recv(1 << 16):
            for message in decoder.feed(data):
                inbox.put(message)
    inbox.put(None)
    if booted.is_set():
        time.sleep(LAST_STEP_S)  # lets serve_client end cleanly; a step that hangs must not outlive the client
    os._exit(1)  # the result is no longer needed, and another process may need the memory


def serve(fleet: Fleet, channel: socket.socket, inbox: queue.SimpleQueue[Message | None]) -> None:
    while True:
        messages = _take(inbox, wait=_pause(fleet))
        if not messages and fleet.idle:
            while fleet.is_preparing and inbox.empty():
                fleet.prepare_next()
        for message in messages:
            match message:
                case None:
                    return
                case Submit(submission):
                    try:
                        fleet.add(submission)
                    except EmberlineError as e:
                        channel.sendall(encode(Refused.of(submission.id, e)))
                case Abort(id, None):
                    fleet.abort(id)
                case Abort(id, int(index)):
                    fleet.abort_one(id, index)
                case Peers(model, peers):
                    if (pairing := fleet.engines[model].pairing) is not None:
                        pairing.meet(peers)
                case Watch():
                    for engine in fleet.engines.values():
                        engine.kv.watch()
                case _:
                    raise AssertionError(f"unexpected message to the engine: {type(message).__name__}")
        channel.sendall(b"".join(map(encode, _news(fleet))))


def _news(fleet: Fleet) -> Iterator[Message]:
    report = fleet.step()
    for name in report.turned:
        yield Turned(name, fleet.is_awake(name), fleet.turns(name))
    for name, engine in fleet.engines.items():
        if (blocks := engine.kv.news()) is not None:
            yield Blocks(name, *blocks)
    outputs = report.outputs or {name: [] for name in fleet.engines}  # an empty update is a heartbeat
    for name, new in outputs.items():
        yield Progress(name, compact(new), fleet.stats(name))
    for submission_id, error in report.refused:
        yield Refused.of(submission_id, error)
    for name, engine in fleet.engines.items():
        if engine.pairing is not None and (pairs := engine.pairing.news()) is not None:
            yield Paired(name, *pairs)


def _pause(fleet: Fleet) -> float:
    """Return the seconds to wait for messages before the next step."""
    if not fleet.idle:
        return 0.0
    if fleet.is_preparing:
        return QUIET_S
    return GLANCE if any(engine.attentive for engine in fleet.engines.values()) else IDLE_REPORT


def _take(inbox: queue.SimpleQueue[Message | None], *, wait: float) -> list[Message | None]:
    """Return all received messages; wait up to `timeout` seconds for the first one."""
    messages: list[Message | None] = []
    try:
        if wait:
            messages.append(inbox.get(timeout=wait))
        while True:
            messages.append(inbox.get_nowait())
    except queue.Empty:
        return messages


if __name__ == "__main__":
    sys.exit(main())
