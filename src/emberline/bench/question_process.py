"""asked: a process beside us, at the other end of a pipe, that answers what it is asked until it is told to stop."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Ask = Callable[[str], Any]


@contextmanager
def question_process(serve: Callable[..., None], *arguments: Any) -> Iterator[Ask]:
    """`serve` is given its end of the pipe, then the arguments; "stop" ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, *arguments))
    child.start()

    def ask(what: str) -> Any:
        ours.send(what)
        return ours.recv()

    try:
        yield ask
    finally:
        ours.send("stop")
        child.join()
