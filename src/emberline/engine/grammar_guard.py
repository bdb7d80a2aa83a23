"""GrammarTrialProcess: tries a request's grammar in a child process, which may hang or crash.

The library limits most of its work, but not all: some schemas intersect patterns for minutes, and some grammars
overflow the stack, which would end the server. The trial runs with a CPU time limit, a memory limit and a smaller
stack than the engine's, so a grammar that passes compiles in the engine too, in the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from emberline.core.errors import EngineUnavailable, InvalidRequest
from emberline.core.params import GrammarSpec

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

MAX_CPU_S = 1.0  # CPU time of one trial, so that a busy machine accepts what an idle one does
TRIAL_TIMEOUT_S = 20.0  # wall time of one trial, for a child that gets little CPU time
START_TIMEOUT_S = 60.0  # wall time of the child's start
NICENESS = 5  # added to the server's niceness, so that requests without a new grammar get a processor core first
KILL_STATUSES = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)  # exit statuses of a child that something else ended
STACK_BYTES = 4 << 20  # half of the usual stack of a main thread
MEMORY_BYTES = 2 << 30  # address space
MAX_CACHED_VERDICTS = 1024
TRIAL_STEPS = 4  # masks to compute; some grammars fail only at the second one


class GrammarVerdict(NamedTuple):
    """The result of a trial. `error` is None if the grammar can be used."""

    error: InvalidRequest | None

    def raise_error(self, param: str) -> None:
        """Raise the error, if there is one, for the request field `param`."""
        if self.error is not None:
            raise InvalidRequest(self.error.message, param=param, hint=self.error.hint)


class GrammarVerdictCache:
    """The verdicts of the grammars that were tried or used last."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()  # by hash, because grammars may be large

    def __len__(self) -> int:
        return len(self._verdicts)

    def find(self, grammar: GrammarSpec) -> GrammarVerdict | None:
        key = _hash_of(grammar)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def add(self, grammar: GrammarSpec, verdict: GrammarVerdict) -> None:
        self._verdicts[_hash_of(grammar)] = verdict
        if len(self._verdicts) > MAX_CACHED_VERDICTS:
            self._verdicts.popitem(last=False)


class GrammarGuard:
    """Checks grammars in a child process, one at a time. A server uses `worker/grammar_checker.py` instead."""

    def __init__(self, process: GrammarTrialProcess) -> None:
        self._process = process
        self._verdicts = GrammarVerdictCache()

    def check(self, grammar: GrammarSpec, param: str = "response_format") -> None:
        """Raise InvalidRequest if the grammar cannot be used, EngineUnavailable if the child cannot run."""
        if (verdict := self._verdicts.find(grammar)) is None:
            verdict = self._process.run(grammar)
            self._verdicts.add(grammar, verdict)
        verdict.raise_error(param)

    def close(self) -> None:
        self._process.close()


class GrammarTrialProcess:
    """A child process that tries one grammar at a time. It is started by the first trial.

    `run` blocks for up to about MAX_CPU_S of CPU time: call it in a thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        eos = ",".join(map(str, eos_ids))
        self._command = [sys.executable, "-m", "emberline.engine.grammar_guard", str(tokenizer), str(vocab_size), eos]
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start the child process now, instead of at the first trial."""
        with self._lock:
            self._ensure_running()

    def run(self, grammar: GrammarSpec) -> GrammarVerdict:
        """Raises EngineUnavailable if the child process cannot run, or ended without the grammar's fault."""
        with self._lock:
            reply = self._send_and_receive(self._ensure_running(), _line_of(grammar), TRIAL_TIMEOUT_S)
            if not reply:
                return GrammarVerdict(self._error_of_dead_child(grammar))
        answer = json.loads(reply)
        return GrammarVerdict(InvalidRequest(answer["message"], hint=answer["hint"]) if answer else None)

    def close(self) -> None:
        """End the child process. A trial under way raises EngineUnavailable, and so do later ones."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            if self._child is not None:
                self._wait_for_exit()

    def _ensure_running(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise EngineUnavailable("the server is shutting down")
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if not self._send_and_receive(self._child, "", START_TIMEOUT_S):
                raise EngineUnavailable(
                    f"the grammar checker process did not start: exit status {self._wait_for_exit()}"
                )
        return self._child

    def _send_and_receive(self, child: subprocess.Popen[str], line: str, timeout_s: float) -> str:
        """Send a line to the child process and return its reply; "" if the process died. At the timeout, kill it."""
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(line + "\n")
                child.stdin.flush()
            return child.stdout.readline()
        finally:
            timer.cancel()

    def _error_of_dead_child(self, grammar: GrammarSpec) -> InvalidRequest:
        status = self._wait_for_exit()
        if status in KILL_STATUSES:  # not the grammar's fault
            raise EngineUnavailable("the grammar checker process was killed", hint="send the request again")
        timed_out = status == -signal.SIGPROF
        why = f"compiling it takes more than {MAX_CPU_S:g} s" if timed_out else "it is nested too deeply or too large"
        return InvalidRequest(f"the {grammar.kind} cannot be used: {why}", hint="simplify it")

    def _wait_for_exit(self) -> int:
        child, self._child = self._child, None
        assert child is not None and child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died before it had read the line
            child.stdin.close()
        child.stdout.close()
        return child.wait()


def _line_of(grammar: GrammarSpec) -> str:
    return json.dumps([grammar.kind, grammar.text])


def _hash_of(grammar: GrammarSpec) -> bytes:
    return hashlib.sha256(_line_of(grammar).encode()).digest()


def serve_checks(tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
    """Read one grammar per line from stdin and write one result per line. An empty line is a ping.

    This function runs in the child process."""
    from emberline.engine.grammar import GrammarCompiler

    compiler = GrammarCompiler(tokenizer, vocab_size, eos_ids)
    os.nice(NICENESS)
    limits = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0}
    for limit, amount in limits.items():
        with contextlib.suppress(OSError, ValueError):  # macOS rejects some; the CPU time limit below works there too
            resource.setrlimit(limit, (amount, resource.getrlimit(limit)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the server is gone
    for line in sys.stdin:
        # Unhandled, so that the signal ends the process even inside the library.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        verdict = _try_grammar(compiler, GrammarSpec(*json.loads(line))) if line.strip() else None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


def _try_grammar(compiler: GrammarCompiler, grammar: GrammarSpec) -> dict[str, str | None] | None:
    """Compile the grammar and let it accept a few random tokens.

    Return None if that works, else the message and the hint of the error."""
    rng = random.Random(0)
    try:
        matcher = compiler.compile(grammar)
        for _ in range(TRIAL_STEPS):
            allowed = matcher.allowed_tokens()
            if matcher.error is not None:
                return {"message": f"the {grammar.kind} cannot be used: {matcher.error}", "hint": "simplify it"}
            if matcher.is_complete or not matcher.accept(rng.choice(allowed)):
                break
    except InvalidRequest as error:
        return {"message": error.message, "hint": error.hint}
    return None


if __name__ == "__main__":
    serve_checks(Path(sys.argv[1]), int(sys.argv[2]), [int(i) for i in sys.argv[3].split(",")])
