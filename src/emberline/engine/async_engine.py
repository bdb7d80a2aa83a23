"""AsyncEngine: runs an engine process and streams its outputs.

If the process dies or hangs, open requests end with an error, and the process is restarted. Every stream ends
exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping
from enum import Enum
from typing import Any

from emberline.core.clock import SystemClock
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable
from emberline.core.events import Output, Stats
from emberline.core.request import Submission
from emberline.engine import messages
from emberline.engine.block_event_log import BlockEventLog
from emberline.engine.engine_child import EngineChild
from emberline.engine.output_queue import OutputQueue

log = logging.getLogger("emberline.engine")

READ_BYTES = 1 << 18
MAX_RESTART_PAUSE_S = 30.0  # before a restart
REAP_TIMEOUT_S = 2.0  # for a process to end by itself, and again after it was killed
BOOT_TIMEOUT_S = 900.0  # for imports, kernels and weights of one model


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class AsyncEngine:
    def __init__(
        self,
        models: Mapping[str, EngineConfig],
        time_sharing: TimeSharingConfig,
        *,
        stall_timeout: float = 120.0,
        max_restart_pause: float = MAX_RESTART_PAUSE_S,
        command: tuple[str, ...] | None = None,
        child: EngineChild | None = None,
    ) -> None:
        """Store the settings of the engine process, which `start` starts.

        `stall_timeout`: seconds without a message from the process after which it counts as hung. `max_restart_pause`:
        in seconds. The pause before a restart doubles each time the process has run for less than a minute. `command`:
        starts the process; None: ENGINE_COMMAND. `child`: a process that was started already, which is used for the
        first start."""
        self.models = dict(models)
        self.state = EngineState.STARTING
        self.model_info: dict[str, messages.LoadedModelInfo] = {}  # by model, from the latest start of the process
        self.stats = dict.fromkeys(models, Stats())
        self.sleep_states: dict[str, messages.SleepStateChange] = {}  # latest message of each model
        self.pairing_states: dict[str, messages.PairingChange] = {}  # latest message of each model
        self.block_events = BlockEventLog(models)  # filled after watch_blocks
        self.restarts = 0
        self.progress_reports = 0  # received while steps were computed
        self.last_message_at = 0.0  # time of the latest message of the process
        self.on_stats: Callable[[str, Stats], None] = lambda model, stats: None  # called with every report
        self._time_sharing = time_sharing
        self._stall_timeout, self._max_restart_pause = stall_timeout, max_restart_pause
        self._clock = SystemClock()
        self._command = command
        self._first_child = child
        self._open_queues: dict[str, OutputQueue] = {}
        self._peers: dict[str, list[dict[str, Any]]] = {}
        self._watches_blocks = False
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def is_awake(self, model: str) -> bool:
        return self.state is EngineState.READY and self.sleep_states[model].awake

    @property
    def num_open_submissions(self) -> int:
        return len(self._open_queues)

    def now(self) -> float:
        """Return the current time in seconds on the clock with which the times in Timing are measured."""
        return self._clock.now()

    @property
    def seconds_without_message(self) -> float:
        return self._clock.now() - self.last_message_at

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises EmberlineError if it could not start."""
        assert self._supervisor is None
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._keep_process_running())
        await self._started

    async def stop(self) -> None:
        self.state = EngineState.STOPPED
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail_open_requests(EngineUnavailable("the server is shutting down"))

    async def submit(self, submission: Submission, *, merges: bool = False) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a submission until all of its completions have ended.

        Closing the generator aborts the submission. `merges`: if the caller is slow, several outputs may be
        merged into one with several tokens. Raises EngineUnavailable if the process is not ready, EngineFailed if it
        dies."""
        assert submission.id not in self._open_queues
        if not self._send(messages.Submit(submission)):
            # The socket is closed, but that was not handled yet.
            state = EngineState.RESTARTING if self.state is EngineState.READY else self.state
            raise EngineUnavailable(
                f"the engine cannot accept requests: it is {state.value}", hint="retry in a few seconds"
            )
        queue = self._open_queues[submission.id] = OutputQueue(merges=merges)
        left = submission.params.n
        try:
            while left:
                item = await queue.get()
                if isinstance(item, EmberlineError):
                    left = 0
                    raise item
                left -= item.finish is not None
                yield item
        finally:
            self._open_queues.pop(submission.id, None)
            if left:
                self._send(messages.Abort(submission.id, None))

    def abort_completion(self, submission_id: str, index: int) -> None:
        """Abort one of the n completions of an open submission.

        The submission's stream still yields an output with the finish reason of the aborted completion."""
        if submission_id in self._open_queues:
            self._send(messages.Abort(submission_id, index))

    def set_peers(self, model: str, peers: list[dict[str, Any]]) -> None:
        """Connect a model's engine to these peers and no others, now and after every restart of the process.

        `pairing_states` shows which connections succeeded."""
        self._peers[model] = peers
        self._send(messages.SetPeers(model, peers))

    def watch_blocks(self) -> None:
        """Record changes of the cached KV blocks in `block_events`, from now on and after every restart."""
        if not self._watches_blocks:
            self._watches_blocks = True
            self._send(messages.WatchBlocks())

    @property
    def is_asleep(self) -> bool:
        """Whether all models sleep."""
        return self.state is EngineState.READY and not any(map(self.is_awake, self.models))

    def set_asleep(self, on: bool) -> None:
        """Ask the process to put all models without open requests to sleep, or to wake models.

        This method does not wait; `is_asleep` shows the state that the process has reported. Raises EngineUnavailable
        if the process is not ready."""
        if not self._send(messages.SetAsleep(on)):
            raise EngineUnavailable(f"the engine is {self.state.value}", hint="retry in a few seconds")

    def _send(self, message: messages.EngineMessage) -> bool:
        """Send a message; return False if the process is not ready or its socket is closed."""
        if self.state is not EngineState.READY or self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(messages.encode_message(message))
        return True

    # -- the process -----------------------------------------------------------------------------------------------

    async def _keep_process_running(self) -> None:
        pause = 0.5
        while True:
            began = self._clock.now()
            try:
                why = await self._run_process()
            except (
                Exception
            ) as e:  # for example no memory or no file descriptor: without this, nothing would restart it
                log.exception("Starting or running the engine process failed")
                why = EngineFailed(f"{type(e).__name__}: {e}")
            first = self._started is not None and not self._started.done()
            if first:
                assert self._started is not None
                self._started.set_exception(why)
                return
            self.state = EngineState.RESTARTING
            self.restarts += 1
            log.error(
                "Engine process ended, restarting: reason=%s failed_requests=%d restarts=%d",
                why,
                len(self._open_queues),
                self.restarts,
            )
            self._fail_open_requests(
                EngineFailed(
                    f"the engine process ended while the request was open: {why.message}", hint="send the request again"
                )
            )
            pause = 0.5 if self._clock.now() - began > 60 else min(pause * 2, self._max_restart_pause)
            await asyncio.sleep(pause)

    async def _run_process(self) -> EmberlineError:
        """Start a process, handle its messages until it ends, and return why it ended."""
        child, self._first_child = self._first_child or EngineChild.spawn(self._command), None
        self._process, ours = child
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
        self.last_message_at = self._clock.now()
        self._writer.write(messages.encode_message(messages.StartEngine(self.models, self._time_sharing)))
        watcher = asyncio.create_task(self._watch_for_stall(self._process, self._writer))
        error: EmberlineError | None = None
        try:
            decoder = messages.EngineMessageDecoder()
            while data := await reader.read(READ_BYTES):
                self.last_message_at = self._clock.now()
                for message in decoder.feed(data):
                    error = self._handle_message(message) or error
        except ConnectionError:
            pass
        finally:
            watcher.cancel()
            self._writer.close()
            await self._wait_for_exit(self._process)
        status = self._process.returncode
        return error or EngineFailed("killed, but still running" if status is None else f"exit status {status}")

    def _handle_message(self, message: messages.EngineMessage) -> EmberlineError | None:
        """Handle a message; return an error if the process reports that it could not start."""
        match message:
            case messages.EngineUpdate(model, outputs, stats):
                self.stats[model] = stats
                self.on_stats(model, stats)
                for output in outputs:
                    if isinstance(output, Output):
                        if (queue := self._open_queues.get(output.id)) is not None:
                            queue.put(output)
                    elif (queue := self._open_queues.get(output[0])) is not None:
                        queue.put_tokens(*output)
            case messages.ComputeProgress():
                self.progress_reports += 1
            case messages.SleepStateChange():
                self.sleep_states[message.model] = message
            case messages.BlockChanges(model, whole, stored, removed):
                self.block_events.record(model, whole, stored, removed)
            case messages.PairingChange():
                self.pairing_states[message.model] = message
            case messages.Ready(models):
                self.model_info, self.pairing_states = models, {}
                self.state = EngineState.READY
                self.block_events.restart()
                if self._watches_blocks:
                    self._send(messages.WatchBlocks())
                for model, peers in self._peers.items():
                    self.set_peers(model, peers)
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case messages.Rejection(id=""):
                return message.to_error()
            case messages.Rejection(id):
                if (queue := self._open_queues.get(id)) is not None:
                    queue.put(message.to_error())
        return None

    async def _watch_for_stall(self, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        """Kill the process if it sends no message for the stall timeout.

        A healthy process sends messages even while it is idle or in a long step. The time without messages is counted
        in ticks of this loop and not by the clock, because the clock also advances while the machine is suspended."""
        tick = min(1.0, self._stall_timeout / 4)
        silent, last = 0.0, self.last_message_at
        while True:
            await asyncio.sleep(tick)
            silent = silent + tick if self.last_message_at == last else 0.0
            last = self.last_message_at
            boot_timeout = max(BOOT_TIMEOUT_S * len(self.models), self._stall_timeout)
            timeout = self._stall_timeout if self.state is EngineState.READY else boot_timeout
            if silent > timeout:
                log.error(
                    "Engine process hangs and is killed: seconds_without_message=%.0f timeout_s=%.0f",
                    self.seconds_without_message,
                    timeout,
                )
                process.kill()
                writer.transport.abort()  # a process that does not end keeps its end of the socket open
                return

    async def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process ends; kill it after a while.

        A process that hangs in a driver may survive the kill. This method then returns anyway."""
        for last in (False, True):
            until = self._clock.now() + REAP_TIMEOUT_S
            while self._clock.now() < until:
                if process.poll() is not None:
                    return
                await asyncio.sleep(0.02)
            if not last:
                process.kill()

    def _fail_open_requests(self, error: EmberlineError) -> None:
        for queue in self._open_queues.values():
            queue.put(error)
