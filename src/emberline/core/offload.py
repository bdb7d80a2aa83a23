"""Offload: the CPU work of one large request runs in a child process, so that the event loop keeps its turns.

`re`, `msgspec` and `json` hold the interpreter's lock for as long as one call takes, so a thread does not help: 30 MB
of JSON hold it for about 300 ms, 30 MB of digits in a guardrail's patterns for 20 s. Small inputs stay on the loop,
where they cost less than the way to a child:

    found = peek(body) if len(body) < LARGE else await offload.run(len(body), peek, body)

There are two children, each started when it is first needed: one for inputs up to HUGE bytes and one for larger ones,
so that a request of 200 kB does not wait for one of 30 MB. A call that takes more than CPU_SECONDS of processor time
ends its child and raises WorkTooLarge; the next call starts another. The function is named by its module, so it must be
importable; arguments, result and error are pickled. Unpickling holds the interpreter's lock in the server's process:
a function returns few objects, or refuses the request, where its input may have a million. Children run at a lower
priority than the server, whose event loop gets a core first where there are few.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, ParamSpec, TypeVar

from emberline.core.errors import EngineUnavailable, WorkTooLarge

LARGE = 1 << 17  # bytes: smaller inputs are worked on where they are
HUGE = 1 << 20  # bytes: larger inputs have a child of their own
CPU_SECONDS = 10.0  # processor time of one call, so that a busy machine does not refuse what an idle one takes
WALL_SECONDS = 120.0  # for a child that gets no processor time; its start included
NICENESS = 10  # added to the server's own
_LENGTH = struct.Struct("!Q")
_COMMAND = (sys.executable, "-m", "emberline.core.offload")

P = ParamSpec("P")
T = TypeVar("T")


class Child:
    """One process and the thread that waits for it. `call` blocks: it runs in that thread."""

    def __init__(self, name: str, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"offload-{name}")
        self._process: subprocess.Popen[bytes] | None = None
        self.calls = 0  # for tests: how many were made

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        result: T = await loop.run_in_executor(self._thread, self._call, function, args, kwargs)
        return result

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        # Copying 30 MB holds the interpreter's lock, writing them to a pipe does not: large arguments are not pickled.
        plain = tuple(
            pickle.PickleBuffer(each) if type(each) is bytes and len(each) >= LARGE else each for each in args
        )
        apart: list[pickle.PickleBuffer] = []
        question = pickle.dumps(
            (self._cpu_seconds, function, plain, kwargs), pickle.HIGHEST_PROTOCOL, buffer_callback=apart.append
        )
        answer = self._answer([question, *(each.raw() for each in apart)])
        if answer is None:
            status = self._reap()
            if status == -signal.SIGPROF:
                raise WorkTooLarge(
                    f"the request takes more than {self._cpu_seconds:g} s of processor time to read",
                    hint="send less at once",
                )
            raise EngineUnavailable(f"the process that reads large requests ended: exit status {status}")
        succeeded, value = pickle.loads(answer)
        if not succeeded:
            raise value
        return value

    def _answer(self, question: list[bytes | memoryview]) -> bytes | None:
        """The pickled answer; None: the child died."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_LENGTH.pack(len(question)))
                for part in question:
                    process.stdin.write(_LENGTH.pack(len(part)))
                    process.stdin.write(part)
                process.stdin.flush()
            return _read(process.stdout)
        finally:
            timer.cancel()

    def _reap(self) -> int:
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a question that it did not live to read
            process.stdin.close()
        process.stdout.close()
        return process.wait()

    def close(self) -> None:
        """For tests: servers leave it to the end of their own process, with which the child's input ends."""
        self._thread.shutdown()
        if self._process is not None:
            self._process.kill()
            self._reap()


class Offload:
    def __init__(self) -> None:
        self.large, self.huge = Child("large"), Child("huge")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, from a child that is chosen by the size of the input in bytes. The function's own
        error, WorkTooLarge, or EngineUnavailable if the child was killed by something else."""
        return await (self.large if size <= HUGE else self.huge).run(function, *args, **kwargs)

    async def run_by_size(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`; an input of less than LARGE bytes is worked on at once, in this process."""
        return function(*args, **kwargs) if size < LARGE else await self.run(size, function, *args, **kwargs)


offload = Offload()  # of this process


def _read(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = stream.read(size)
    return data if len(data) == size else None


def serve() -> None:
    """The child: one pickled call after the other, until its input ends."""
    _lower_priority()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's ^C is for the server
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a server that was killed wants no answer
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not be taken for an answer
    while len(head := questions.read(_LENGTH.size)) == _LENGTH.size:
        question = [_read(questions) for _ in range(_LENGTH.unpack(head)[0])]
        if None in question:
            return
        data = _answered(*question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_LENGTH.pack(len(data)))
        answers.write(data)
        answers.flush()


def _lower_priority() -> None:
    """With two cores and two busy children, waking event loops waited up to 60 ms for a core."""
    os.nice(NICENESS)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _answered(question: bytes | None, *apart: bytes | None) -> bytes:
    try:
        assert question is not None
        cpu_seconds, function, args, kwargs = pickle.loads(question, buffers=apart)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # not handled, so that it ends us inside a library too
        return pickle.dumps((True, function(*args, **kwargs)), pickle.HIGHEST_PROTOCOL)
    except Exception as e:
        e.__traceback__ = e.__context__ = e.__cause__ = None
        return pickle.dumps((False, e), pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    serve()
