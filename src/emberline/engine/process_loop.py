"""What the engine process does: it receives messages on a socket, steps the engines and sends their outputs.

The process ends when the server process closes the socket."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.engine import preload
from emberline.engine.engine_group import EngineGroup
from emberline.engine.messages import (
    Abort,
    BlockChanges,
    ComputeProgress,
    EngineMessage,
    EngineMessageDecoder,
    EngineUpdate,
    LoadedModelInfo,
    PairingChange,
    Ready,
    Rejection,
    SetAsleep,
    SetPeers,
    SleepStateChange,
    StartEngine,
    Submit,
    WatchBlocks,
    compact_outputs,
    encode_message,
)
from emberline.engine.torch_import import has_gpu_driver, import_torch_for_cpu

if TYPE_CHECKING:
    from emberline.engine.loaded_engine import LoadedEngine
    from emberline.models.reader import FileReader

IDLE_REPORT_INTERVAL_S = 1.0  # between two reports of an idle engine
QUIET_BEFORE_PREPARING_S = 0.25  # time without messages after which idle time is used to prepare later steps
RECORD_DELAY_S = 5.0  # from the start to recording used files, so that it does not slow down the first requests
PROGRESS_REPORT_INTERVAL_S = 1.0  # between two reports of progress within a step
LAST_STEP_TIMEOUT_S = 10.0  # for the current step after the client has disconnected
LEASE_POLL_INTERVAL_S = 0.05  # between two checks of blocks that peers hold, of an idle engine


def run_engine_process(connection_fd: int) -> int:
    """Serve the socket until it is closed, and return the exit status of the process."""
    # A terminal or service manager signals all processes. The client first ends open requests, then closes the socket.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    client, is_booted = ClientSocket(fileno=connection_fd), threading.Event()
    inbox: queue.SimpleQueue[EngineMessage | None] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(client, inbox, is_booted), daemon=True).start()
    began = time.perf_counter()
    if not has_gpu_driver():
        preload.skip_unused_torch_imports()
        import_torch_for_cpu()
        importlib.import_module("emberline.engine.engine_group_boot")  # while the server process prepares
    start = inbox.get()
    if not isinstance(start, StartEngine):
        return 1
    try:
        reader = _start_preload(next(reversed(start.models.values())))
        preload.skip_unused_torch_imports()
        from emberline.engine.engine_group_boot import boot_engine_group

        imported = time.perf_counter()
        group, loaded = boot_engine_group(start.models, start.rules, reader)
    except EmberlineError as e:
        client.sendall(encode_message(Rejection.from_error("", e)))
        return 1
    from emberline.kernels import ops  # imported late, because it imports torch

    gc.freeze()  # objects of the start are permanent
    gc.enable()
    is_booted.set()
    imports, status = {"imports": imported - began}, 0
    ready = Ready({name: _loaded_model_info(loaded[name], imports) for name in start.models})
    with contextlib.suppress(ConnectionError):
        client.sendall(b"".join(map(encode_message, [*_run_step(group), ready])))
        if reader is not None:
            timer = threading.Timer(RECORD_DELAY_S, preload.write_file_record)
            timer.daemon = True
            timer.start()

        def count_progress() -> int:
            return ops.progress_count() + group.progress_count()

        threading.Thread(target=report_progress, args=(client, count_progress), daemon=True).start()
        try:
            serve_client(group, client, inbox)
        except EmberlineError as e:  # a rank was lost
            client.sendall(encode_message(Rejection.from_error("", e)))
            status = 1
    for engine in group.engines.values():
        engine.close()
    return status


class ClientSocket(socket.socket):
    """The socket to the server process. Several threads may call `sendall`; their messages are not mixed."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self._send_lock = threading.Lock()

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        with self._send_lock:
            super().sendall(data, flags)


def report_progress(
    client: socket.socket, progress_counter: Callable[[], int], interval: float = PROGRESS_REPORT_INTERVAL_S
) -> None:
    """Send progress reports while the engine computes, so that a long step does not look like a hang.

    A report is sent if `progress_counter` has changed in the last `interval` seconds: while kernels compute, or models
    sleep or wake. Returns when the server process has disconnected."""
    last = progress_counter()
    with contextlib.suppress(OSError):
        while True:
            time.sleep(interval)
            if (now := progress_counter()) != last:
                last = now
                client.sendall(encode_message(ComputeProgress()))


def _loaded_model_info(loaded: LoadedEngine, import_seconds: dict[str, float]) -> LoadedModelInfo:
    endpoint = loaded.engine.transfer_endpoint
    return LoadedModelInfo(
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
        seconds={**import_seconds, **loaded.seconds},
        device=loaded.device,
        kv_dtype=loaded.kv_dtype,
        prefix_cache=loaded.engine.config.prefix_cache,
        peer=endpoint.sender.peer.as_dict() if endpoint is not None else None,
        numerics=loaded.numerics,
        stored_dtype=loaded.stored_dtype,
        full_context=loaded.full_context,
        speculates=loaded.engine.scheduler.drafter is not None,
        kv_groups=len(loaded.engine.groups.windows),
        ranks=loaded.ranks,
        kv_contexts=loaded.engine.num_full_contexts,
    )


def _start_preload(config: EngineConfig) -> FileReader | None:
    """If one GPU is used, start reading files before torch is imported, since reading takes longest.

    With several ranks, return None: each rank reads only its own part of the files, and does that itself."""
    if config.device == "cpu" or not has_gpu_driver() or config.parallel.num_ranks > 1:
        return None
    return preload.start_preload(Path(config.model))


def _read_messages(
    client: socket.socket, inbox: queue.SimpleQueue[EngineMessage | None], is_booted: threading.Event
) -> None:
    decoder = EngineMessageDecoder()
    with contextlib.suppress(ConnectionError):  # a client that was killed with unread data
        while data := client.recv(1 << 16):
            for message in decoder.feed(data):
                inbox.put(message)
    inbox.put(None)
    if is_booted.is_set():
        time.sleep(LAST_STEP_TIMEOUT_S)  # lets serve_client end cleanly; a step that hangs must not outlive the client
    os._exit(1)  # the result is no longer needed, and another process may need the memory


def serve_client(group: EngineGroup, client: socket.socket, inbox: queue.SimpleQueue[EngineMessage | None]) -> None:
    while True:
        messages = _take_messages(inbox, timeout=_message_timeout(group))
        if not messages and group.idle:
            while group.is_preparing and inbox.empty():
                group.prepare_next()
        for message in messages:
            match message:
                case None:
                    return
                case Submit(submission):
                    try:
                        group.add(submission)
                    except EmberlineError as e:
                        client.sendall(encode_message(Rejection.from_error(submission.id, e)))
                case Abort(id, None):
                    group.abort(id)
                case Abort(id, int(index)):
                    group.abort_completion(id, index)
                case SetPeers(model, peers):
                    if (pairing := group.engines[model].pairing) is not None:
                        pairing.set_peers(peers)
                case WatchBlocks():
                    for engine in group.engines.values():
                        engine.kv.track_prefix_changes()
                case SetAsleep(on):
                    group.set_asleep(on)
                case _:
                    raise AssertionError(
                        f"the engine process received a message that only it sends: {type(message).__name__}"
                    )
        client.sendall(b"".join(map(encode_message, _run_step(group))))


def _run_step(group: EngineGroup) -> Iterator[EngineMessage]:
    report = group.step()
    for name in report.sleep_changes:
        yield SleepStateChange(name, group.is_awake(name), group.sleep_stats(name))
    for name, engine in group.engines.items():
        if (blocks := engine.kv.take_prefix_changes()) is not None:
            yield BlockChanges(name, *blocks)
    outputs = report.outputs or {name: [] for name in group.engines}  # an empty update is a heartbeat
    for name, new in outputs.items():
        yield EngineUpdate(name, compact_outputs(new), group.stats(name))
    for submission_id, error in report.rejected:
        yield Rejection.from_error(submission_id, error)
    for name, engine in group.engines.items():
        if engine.pairing is not None and (pairs := engine.pairing.take_state_change()) is not None:
            yield PairingChange(name, *pairs)


def _message_timeout(group: EngineGroup) -> float:
    """Return how many seconds to wait for messages before the next step: 0 if there is work to do."""
    if not group.idle:
        return 0.0
    if group.is_preparing:
        return QUIET_BEFORE_PREPARING_S
    return (
        LEASE_POLL_INTERVAL_S
        if any(engine.needs_polling for engine in group.engines.values())
        else IDLE_REPORT_INTERVAL_S
    )


def _take_messages(inbox: queue.SimpleQueue[EngineMessage | None], *, timeout: float) -> list[EngineMessage | None]:
    """Return all received messages; wait up to `timeout` seconds for the first one."""
    messages: list[EngineMessage | None] = []
    try:
        if timeout:
            messages.append(inbox.get(timeout=timeout))
        while True:
            messages.append(inbox.get_nowait())
    except queue.Empty:
        return messages
