"""Offload: run the CPU work of one large request in a child process, off the event loop.

`re`, `msgspec` and `json` hold the interpreter's lock during a call, so a thread does not help: 30 MB of JSON hold it
for about 300 ms, 30 MB of digits in a guardrail's patterns for 20 s. Small inputs are processed on the event loop,
where they cost less than sending them to a child:

    found = peek(body) if len(body) < LARGE_INPUT_BYTES else await offload.run(len(body), peek, body)

There are two child processes, each started when it is first needed: one for inputs up to HUGE_INPUT_BYTES and one for
larger ones, so that a request of 200 kB does not wait for one of 30 MB. Clients take turns (`fair_threads.py`). A call
that takes more than MAX_CPU_SECONDS of CPU time ends its child and raises WorkTooLarge; the next call starts a new
child. The function is passed by its module and name, so it must be importable; arguments, result and error are pickled.
Unpickling holds the interpreter's lock in the server's process, so a function whose input may have a million objects
returns few objects or rejects the request.
Children run at a lower priority than the server, so that its event loop gets a core first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, ParamSpec, TypeVar

from emberline.core.errors import EmberlineError, EngineUnavailable, WorkTooLarge
from emberline.core.fair_threads import MAX_WAITING, FairThreads, current_client

LARGE_INPUT_BYTES = 1 << 17  # smaller inputs are processed on the event loop
HUGE_INPUT_BYTES = 1 << 20  # larger inputs have their own child process
MAX_CPU_SECONDS = 10.0  # CPU time of one call, so that a busy machine accepts what an idle one does
MAX_WALL_SECONDS = 120.0  # wall time of one call including the child's start, for a child that gets no CPU time
NICENESS = 10  # added to the server's niceness
PIPE_BYTES = 16 << 10  # a message of this size fits into an empty pipe, so writing it never waits
_LENGTH = struct.Struct("!Q")
_COMMAND = (sys.executable, "-m", "emberline.core.offload")

P = ParamSpec("P")
T = TypeVar("T")


ExitError = Callable[[int, float], EmberlineError]  # takes the exit status and the limit of CPU seconds


def _parsing_error(status: int, cpu_seconds: float) -> EmberlineError:
    if status == -signal.SIGPROF:
        return WorkTooLarge(
            f"parsing the request took more than the limit of {cpu_seconds:g} s of CPU time",
            hint="send a smaller request",
        )
    return EngineUnavailable(
        f"the process that parses large requests ended with exit status {status}", hint="send the request again"
    )


class OffloadProcess:
    """One child process and the thread that waits for its results."""

    def __init__(
        self,
        name: str,
        cpu_seconds: float = MAX_CPU_SECONDS,
        wall_seconds: float = MAX_WALL_SECONDS,
        *,
        niceness: int = NICENESS,
        memory_bytes: int = 0,
        exit_error: ExitError = _parsing_error,
    ) -> None:
        """`memory_bytes` limits the child's address space; 0: no limit. `exit_error` makes the error of a call that
        ended the child."""
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        self._command = (*_COMMAND, str(niceness), str(memory_bytes))
        self._exit_error = exit_error
        self._lock = threading.Lock()  # one call at a time
        # Requests with a small body share one turn, but may have large replies: together they may fill the queue.
        self._threads = FairThreads(f"{name} inputs", 1, max_waiting_per_tenant=MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.calls = 0  # number of calls so far, for tests

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(current_client.get(), lambda: self.call(function, *args, **kwargs))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `run`, but blocks: call it in a thread."""
        with self._lock:
            if self._is_closed:
                raise EngineUnavailable("the server is shutting down")
            value: T = self._call(function, args, kwargs)
            return value

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        # Copying 30 MB holds the interpreter's lock, writing them to a pipe does not: large arguments are not pickled.
        arguments = tuple(
            pickle.PickleBuffer(each) if type(each) is bytes and len(each) >= LARGE_INPUT_BYTES else each
            for each in args
        )
        buffers: list[pickle.PickleBuffer] = []
        call = pickle.dumps(
            (self._cpu_seconds, function, arguments, kwargs), pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append
        )
        reply = self._send_and_receive([call, *(each.raw() for each in buffers)])
        if reply is None:
            raise self._exit_error(self._wait_for_exit(), self._cpu_seconds)
        succeeded, value = pickle.loads(reply)
        if not succeeded:
            raise value
        return value

    def _send_and_receive(self, message: list[bytes | memoryview]) -> bytes | None:
        """Send a message to the child process and return the pickled reply; None if the child died.

        The child is started if it is not running."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        # A timer takes a thread, whose start takes 0.1 ms, so only messages whose writing may wait have one.
        timer = threading.Timer(self._wall_seconds, process.kill)
        is_small = sum(len(part) for part in message) <= PIPE_BYTES
        if not is_small:
            timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_LENGTH.pack(len(message)))
                for part in message:
                    process.stdin.write(_LENGTH.pack(len(part)))
                    process.stdin.write(part)
                process.stdin.flush()
            if is_small and not _wait_until_readable(process.stdout, self._wall_seconds):
                process.kill()
            return _read_message(process.stdout)
        finally:
            timer.cancel()

    def _wait_for_exit(self) -> int:
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died before it had read the message
            process.stdin.close()
        process.stdout.close()
        return process.wait()

    def close(self) -> None:
        """End the child process. The calls under way and later ones fail.

        A server's children also end by themselves when their stdin ends."""
        self._is_closed = True
        self._threads.close()
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._wait_for_exit()


class Offload:
    def __init__(self) -> None:
        self.large, self.huge = OffloadProcess("large"), OffloadProcess("huge")

    async def run(self, input_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function in a child process and return its result.

        `input_bytes`: size of the function's input, which selects the child. Raises the function's own error,
        WorkTooLarge if it takes too much CPU time, or EngineUnavailable if the child died of another cause."""
        return await (self.large if input_bytes <= HUGE_INPUT_BYTES else self.huge).run(function, *args, **kwargs)

    async def run_inline_if_small(
        self, input_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function in this process if `input_bytes` is below LARGE_INPUT_BYTES, else call `run`."""
        return (
            function(*args, **kwargs)
            if input_bytes < LARGE_INPUT_BYTES
            else await self.run(input_bytes, function, *args, **kwargs)
        )


offload = Offload()  # the one instance of this process


def _wait_until_readable(stream: IO[bytes], seconds: float) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read_message(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = stream.read(size)
    return data if len(data) == size else None


def serve_calls(niceness: int, memory_bytes: int) -> None:
    """Run pickled calls from stdin until stdin ends. This is the main function of the child process."""
    if niceness:
        _lower_priority(niceness)
    if memory_bytes:
        with contextlib.suppress(OSError, ValueError):  # macOS rejects it
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the server is gone
    calls, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # output that a library prints must not be taken for a reply
    while len(head := calls.read(_LENGTH.size)) == _LENGTH.size:
        parts = [_read_message(calls) for _ in range(_LENGTH.unpack(head)[0])]
        if None in parts:
            return
        data = _run_call(*parts)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(_LENGTH.pack(len(data)))
        replies.write(data)
        replies.flush()


def _lower_priority(niceness: int) -> None:
    """Lower this process's priority, so that event loops get a processor core first.

    At equal priority, on two cores with two busy child processes, event loops waited up to 60 ms for a core."""
    os.nice(niceness)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _run_call(pickled_call: bytes | None, *buffers: bytes | None) -> bytes:
    try:
        assert pickled_call is not None
        cpu_seconds, function, args, kwargs = pickle.loads(pickled_call, buffers=buffers)
        # Unhandled, so that the signal ends the process even inside a library.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        return pickle.dumps((True, function(*args, **kwargs)), pickle.HIGHEST_PROTOCOL)
    except Exception as e:
        e.__traceback__ = e.__context__ = e.__cause__ = None
        return pickle.dumps((False, e), pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    serve_calls(int(sys.argv[1]), int(sys.argv[2]))
