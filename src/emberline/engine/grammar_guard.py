"""The place where a stranger's grammar is tried first: a process that may hang, crash or run out of memory.

The library meters its work, but not all of it: some schemas intersect patterns for minutes, some grammars overflow the
stack and would take the server with them. The trial runs under a timer, a smaller stack than ours and a memory limit;
whatever survives it compiles in the engine too, in the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.errors import EngineUnavailable, InvalidRequest
from emberline.core.params import Grammar

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

DEADLINE_S = 1.0  # of processor time, so that a busy machine does not refuse what an idle one takes
PATIENCE_S = 60.0  # on the wall's clock, with a child that gets no processor time; its start included
KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)  # by us or somebody else, whatever it was doing
STACK_BYTES = 4 << 20  # half of what a main thread usually has
MEMORY_BYTES = 2 << 30  # of address space
REMEMBERED = 1024
TRIAL_STEPS = 4  # masks to compute; some grammars fail only at the second


class GrammarGuard:
    """`check` blocks for as long as the trial takes, about DEADLINE_S at most: call it off the event loop."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        eos = ",".join(map(str, eos_ids))
        self._command = [sys.executable, "-m", "emberline.engine.grammar_guard", str(tokenizer), str(vocab_size), eos]
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, InvalidRequest | None] = OrderedDict()

    def start(self) -> None:
        """Optional: the first check then finds the process ready."""
        with self._lock:
            self._running()

    def check(self, grammar: Grammar, param: str = "response_format") -> None:
        question = json.dumps([grammar.kind, grammar.text])
        key = hashlib.sha256(question.encode()).digest()
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._try(grammar, question)
                if len(self._verdicts) > REMEMBERED:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(key)
            refusal = self._verdicts[key]
        if refusal is not None:
            raise InvalidRequest(refusal.message, param=param, hint=refusal.hint)

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._reap()

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if not self._ask(self._child, ""):
                raise EngineUnavailable(f"the grammar checker did not start: exit status {self._reap()}")
        return self._child

    def _ask(self, child: subprocess.Popen[str], question: str) -> str:
        """The answer's line; empty if the child died over it, or in the moment before."""
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(PATIENCE_S, child.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(question + "\n")
                child.stdin.flush()
            return child.stdout.readline()
        finally:
            timer.cancel()

    def _try(self, grammar: Grammar, question: str) -> InvalidRequest | None:
        line = self._ask(self._running(), question)
        if not line:
            return self._post_mortem(grammar)
        answer = json.loads(line)
        return InvalidRequest(answer["message"], hint=answer["hint"]) if answer else None

    def _post_mortem(self, grammar: Grammar) -> InvalidRequest:
        status = self._reap()
        if status in KILLED:  # which says nothing about the grammar
            raise EngineUnavailable("the grammar checker was killed", hint="send the request again")
        late = status == -signal.SIGPROF
        why = f"it takes more than {DEADLINE_S:g} s to prepare" if late else "it is too deep or too large to prepare"
        return InvalidRequest(f"the {grammar.kind} cannot be used: {why}", hint="make it simpler")

    def _reap(self) -> int:
        child, self._child = self._child, None
        assert child is not None and child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a question that it did not live to read
            child.stdin.close()
        child.stdout.close()
        return child.wait()


def serve(tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
    """The child: one grammar a line in, one verdict a line out; an empty line asks whether it is there."""
    from emberline.engine.grammar import GrammarCompiler

    compiler = GrammarCompiler(tokenizer, vocab_size, eos_ids)
    limits = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0}
    for limit, amount in limits.items():
        with contextlib.suppress(OSError, ValueError):  # macOS refuses some; the deadline below holds there too
            resource.setrlimit(limit, (amount, resource.getrlimit(limit)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's ^C is for the server
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a server that was killed wants no answer
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)  # unhandled, so that it ends us inside the library too
        answer = _trial(compiler, Grammar(*json.loads(line))) if line.strip() else None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _trial(compiler: GrammarCompiler, grammar: Grammar) -> dict[str, str | None] | None:
    """Compiles it and walks a few random steps; says what was wrong."""
    dice = random.Random(0)
    try:
        matcher = compiler.compile(grammar)
        for _ in range(TRIAL_STEPS):
            allowed = matcher.allowed()
            if matcher.error is not None:
                return {"message": f"the {grammar.kind} cannot be used: {matcher.error}", "hint": "make it simpler"}
            if matcher.done or not matcher.accept(dice.choice(allowed)):
                break
    except InvalidRequest as error:
        return {"message": error.message, "hint": error.hint}
    return None


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), [int(i) for i in sys.argv[3].split(",")])
