"""GrammarThread: compiles an engine's grammars without stopping the engine's loop.

Compiling may take a second. Grammars are compiled one at a time: few grammars are slow, and the kernels need the other
cores. The order is that of arrival, but grammars that were slow before come last, so that many requests with them delay
no other new grammar for long. A grammar is skipped if its future was dropped before its compilation began."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakValueDictionary, ref

from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.params import GrammarSpec

if TYPE_CHECKING:  # needs llguidance, which a machine without structured output may lack
    from emberline.engine.grammar import GrammarCompiler, GrammarMatcher


MIN_SLOW_SECONDS = 0.05
MAX_KNOWN_SLOW = 4096


class GrammarThread:
    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        # Made in the thread with the first grammar, because it reads a tokenizer.
        self._compiler: GrammarCompiler | None = None
        self._thread: threading.Thread | None = None
        # Each entry: seconds of the last compilation, number of the call, grammar, future.
        self._queue: PriorityQueue[tuple[float, int, GrammarSpec, ReferenceType[Future[GrammarMatcher]]]]
        self._queue = PriorityQueue()
        self._numbers = count()
        self._slow: OrderedDict[int, float] = OrderedDict()  # seconds of slow compilations, by hash of the grammar
        self._futures: WeakValueDictionary[GrammarSpec, Future[GrammarMatcher]] = WeakValueDictionary()

    def compile(self, grammar: GrammarSpec) -> Future[GrammarMatcher]:
        """Return a future of a compiled matcher, which each request forks. It may raise EmberlineError.

        As long as the future exists, the grammar is not compiled again."""
        if (pending := self._futures.get(grammar)) is not None:
            return pending
        future = self._futures[grammar] = Future()
        if self._compiler is not None and (matcher := self._compiler.find_compiled(grammar)) is not None:
            future.set_result(matcher)
            return future
        self._queue.put((self._slow.get(hash(grammar), 0.0), next(self._numbers), grammar, ref(future)))
        if self._thread is None:  # a daemon, so that a compilation that hangs does not keep the process alive
            self._thread = threading.Thread(target=self._compile_queued, name="grammars", daemon=True)
            self._thread.start()
        return future

    def _compile_queued(self) -> None:
        while True:
            _, _, grammar, future = self._queue.get()
            self._compile_one(grammar, future)

    def _compile_one(self, grammar: GrammarSpec, future_ref: ReferenceType[Future[GrammarMatcher]]) -> None:
        if (future := future_ref()) is None:
            return
        try:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            start = time.monotonic()
            matcher = self._compiler.compile(grammar)
            self._record_seconds(grammar, time.monotonic() - start)
            future.set_result(matcher)
        except EmberlineError as e:
            future.set_exception(e)
        except BaseException as e:  # the library's panics are not Exceptions
            future.set_exception(InvalidRequest(f"the {grammar.kind} cannot be used: {e}", param="response_format"))

    def _record_seconds(self, grammar: GrammarSpec, seconds: float) -> None:
        if seconds >= MIN_SLOW_SECONDS:
            self._slow[hash(grammar)] = seconds
            self._slow.move_to_end(hash(grammar))
            if len(self._slow) > MAX_KNOWN_SLOW:
                self._slow.popitem(last=False)
