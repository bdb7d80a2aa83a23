"""AsyncEngine: an engine process and its streams of outputs. It starts the process, and starts it again if it dies or
hangs; whatever was open then ends with an error. Every stream ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from enum import Enum
from typing import Any

from emberline.core.clock import SystemClock
from emberline.core.config import EngineConfig, FleetConfig
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable
from emberline.core.events import Output, Stats
from emberline.core.request import Submission
from emberline.engine.ledger import Ledger
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
    encode,
)
from emberline.engine.output_queue import OutputQueue

log = logging.getLogger("emberline.engine")

READ = 1 << 18
LONGEST_PAUSE = 30.0  # seconds between attempts to restart
REAP = 2.0  # seconds for a process to end by itself, and as many again once it was killed
BOOT_TIMEOUT = 900.0  # seconds for imports, kernels and the weights of a model


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class AsyncEngine:
    def __init__(
        self,
        models: Mapping[str, EngineConfig],
        rules: FleetConfig,
        *,
        stall_timeout: float = 120.0,
        command: tuple[str, ...] = (sys.executable, "-m", "emberline.engine.process"),
    ) -> None:
        self.models = dict(models)
        self.state = State.STARTING
        self.ready: dict[str, Facts] = {}  # what each model came to, the last time
        self.stats = dict.fromkeys(models, Stats())
        self.turned: dict[str, Turned] = {}  # the last each model was said to fall asleep or wake
        self.paired: dict[str, Paired] = {}  # with whom each model was last said to be paired
        self.ledger = Ledger(models)  # of blocks, once somebody watches
        self.restarts = 0
        self.progress_reports = 0  # received while steps were computed
        self.last_sign = 0.0  # when the process last said anything
        self.on_stats: Callable[[str, Stats], None] = lambda model, stats: None  # called with every report
        self._rules = rules
        self._stall_timeout = stall_timeout
        self._clock = SystemClock()
        self._command = command
        self._open: dict[str, OutputQueue] = {}
        self._peers: dict[str, list[dict[str, Any]]] = {}
        self._watched = False
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def is_awake(self, model: str) -> bool:
        return self.state is State.READY and self.turned[model].awake

    @property
    def num_open(self) -> int:
        return len(self._open)

    def now(self) -> float:
        """On the clock that Timing is told in."""
        return self._clock.now()

    @property
    def silent_seconds(self) -> float:
        return self._clock.now() - self.last_sign

    async def start(self) -> None:
        """Returns when the engine is ready; raises what kept it from starting."""
        assert self._keeper is None
        self._started = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())
        await self._started

    async def stop(self) -> None:
        self.state = State.STOPPED
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._end_all(EngineUnavailable("the server is shutting down"))

    async def submit(self, submission: Submission, *, merging: bool = False) -> AsyncGenerator[Output, None]:
        """The outputs of a submission, each of its completions ending once. Leaving the loop early aborts it.
        `merging`: outputs that wait for the caller may be merged into one with several tokens."""
        assert submission.id not in self._open
        if not self._tell(Submit(submission)):
            state = State.RESTARTING if self.state is State.READY else self.state  # it is gone, which is not noted yet
            raise EngineUnavailable(f"the engine is {state.value}", hint="retry in a few seconds")
        inbox = self._open[submission.id] = OutputQueue(merging=merging)
        left = submission.params.n
        try:
            while left:
                item = await inbox.get()
                if isinstance(item, EmberlineError):
                    left = 0
                    raise item
                left -= item.finish is not None
                yield item
        finally:
            self._open.pop(submission.id, None)
            if left:
                self._tell(Abort(submission.id, None))

    def abort_one(self, submission_id: str, index: int) -> None:
        """Ends one of the n completions of an open submission; its stream still says so."""
        if submission_id in self._open:
            self._tell(Abort(submission_id, index))

    def pair(self, model: str, peers: list[dict[str, Any]]) -> None:
        """With these and nobody else, now and after every restart; `paired` says what came of it."""
        self._peers[model] = peers
        self._tell(Peers(model, peers))

    def watch(self) -> None:
        """The ledger is kept, now and after every restart."""
        if not self._watched:
            self._watched = True
            self._tell(Watch())

    def _tell(self, message: Message) -> bool:
        """False: no engine is there to hear it. A dead one's socket may be known to be closed before its death is."""
        if self.state is not State.READY or self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(encode(message))
        return True

    # -- keeping the process alive ---------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = 0.5
        while True:
            began = self._clock.now()
            try:
                why = await self._live()
            except Exception as e:  # no memory for a process, no descriptor for its socket: nobody else tries again
                log.exception("the engine process is given up")
                why = EngineFailed(f"{type(e).__name__}: {e}")
            first = self._started is not None and not self._started.done()
            if first:
                assert self._started is not None
                self._started.set_exception(why)
                return
            self.state = State.RESTARTING
            self.restarts += 1
            log.error(
                "engine process ended: %s; %d open requests ended with an error; restarting", why, len(self._open)
            )
            self._end_all(
                EngineFailed(
                    f"the engine died while the request was open: {why.message}", hint="send the request again"
                )
            )
            pause = 0.5 if self._clock.now() - began > 60 else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _live(self) -> EmberlineError:
        """One life of the process, from start to death; returns why it ended."""
        self._process, ours = self._spawned()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=READ)
        self.last_sign = self._clock.now()
        self._writer.write(encode(Start(self.models, self._rules)))
        watcher = asyncio.create_task(self._watch(self._process, self._writer))
        refusal: EmberlineError | None = None
        try:
            frames = Inbox()
            while data := await reader.read(READ):
                self.last_sign = self._clock.now()
                for message in frames.feed(data):
                    refusal = self._receive(message) or refusal
        except ConnectionError:
            pass
        finally:
            watcher.cancel()
            self._writer.close()
            await self._reap(self._process)
        status = self._process.returncode
        return refusal or EngineFailed("it was killed, and does not end" if status is None else f"exit status {status}")

    def _spawned(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """A new process, and our end of the line to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            line = theirs.fileno()
            try:
                return subprocess.Popen([*self._command, str(line)], pass_fds=[line], stdout=sys.stderr), ours
            except OSError:
                ours.close()
                raise

    def _receive(self, message: Message) -> EmberlineError | None:
        match message:
            case Progress(model, outputs, stats):
                self.stats[model] = stats
                self.on_stats(model, stats)
                for output in outputs:
                    if isinstance(output, Output):
                        if (inbox := self._open.get(output.id)) is not None:
                            inbox.put(output)
                    elif (inbox := self._open.get(output[0])) is not None:
                        inbox.put_tokens(*output)
            case Computing():
                self.progress_reports += 1
            case Turned():
                self.turned[message.model] = message
            case Blocks(model, whole, stored, removed):
                self.ledger.take(model, whole, stored, removed)
            case Paired():
                self.paired[message.model] = message
            case Ready(models):
                self.ready, self.paired = models, {}
                self.state = State.READY
                self.ledger.restart()
                if self._watched:
                    self._tell(Watch())
                for model, peers in self._peers.items():
                    self.pair(model, peers)
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Refused(id=""):
                return message.error()
            case Refused(id):
                if (inbox := self._open.get(id)) is not None:
                    inbox.put(message.error())
        return None

    async def _watch(self, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        """A process that reports nothing is stuck: it is ended, and all that waits for it. An idle one reports too, and
        so does one that computes a long step, as long as its kernels make progress.
        Ticks are counted: where the whole machine was paused, the clock went on for both."""
        tick = min(1.0, self._stall_timeout / 4)
        silent, heard = 0.0, self.last_sign
        while True:
            await asyncio.sleep(tick)
            silent = silent + tick if self.last_sign == heard else 0.0
            heard = self.last_sign
            booting = max(BOOT_TIMEOUT * len(self.models), self._stall_timeout)
            patience = self._stall_timeout if self.state is State.READY else booting
            if silent > patience:
                log.error("engine process silent for %.0f s: ending it", self.silent_seconds)
                process.kill()
                writer.transport.abort()  # one that does not end keeps its end of the line
                return

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """One that a driver holds on to does not even end when it is killed: everybody else goes on without it."""
        for last in (False, True):
            until = self._clock.now() + REAP
            while self._clock.now() < until:
                if process.poll() is not None:
                    return
                await asyncio.sleep(0.02)
            if not last:
                process.kill()

    def _end_all(self, error: EmberlineError) -> None:
        for inbox in self._open.values():
            inbox.put(error)
