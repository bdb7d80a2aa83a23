"""ContenderProcess: runs one of the compared engines (a contender) in a child process.

The child process has its own Python environment. It receives jobs and returns the arrival time of every token.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from emberline.bench.job import BenchJob, TokenTimeline
from emberline.core.errors import EmberlineError

START_TIMEOUT_S = 1200.0  # seconds; one of the peers compiles for minutes
# Our package is last on the path, so that every environment keeps its own versions of other packages.
LAUNCH = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"


class ContenderFailed(EmberlineError):
    """One of the compared engines failed. The message contains the engine's error or the end of its log."""


@dataclass(frozen=True, slots=True)
class ContenderSpec:
    name: str
    python: Path
    module: str
    settings: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    same_weights: bool = True  # False: shown for information, never as `peer`


@dataclass(frozen=True, slots=True)
class ContenderRun:
    timeline: TokenTimeline
    counters: dict[str, float]


class ContenderProcess:
    def __init__(self, spec: ContenderSpec, log: Path) -> None:
        if not spec.python.exists():
            raise ContenderFailed(
                f"engine {spec.name} is not installed: {spec.python} does not exist", hint="run scripts/bench-peers"
            )
        self.spec = spec
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        root = Path(__file__).parents[2]
        began = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [spec.python, "-P", "-c", LAUNCH, str(root), spec.module, json.dumps(spec.settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        self.facts: dict[str, Any] = self._read_message(START_TIMEOUT_S)["ready"]
        self.ready_seconds = time.perf_counter() - began

    def run_job(self, job: BenchJob, timeout_s: float) -> ContenderRun:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise ContenderFailed(f"the process of engine {self.spec.name} has ended") from e
        answer = self._read_message(timeout_s)
        if "error" in answer:
            raise ContenderFailed(answer["error"])
        timeline = TokenTimeline(answer["times"])
        timeline.check_token_counts(job)
        return ContenderRun(timeline, answer["counters"])

    def stop(self) -> None:
        """Stop the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read_message(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Event()

        def kill_after_timeout() -> None:
            late.set()
            self.stop()

        timer = threading.Timer(timeout_s, kill_after_timeout)
        timer.start()
        try:
            line = self._process.stdout.readline()
        except BaseException:  # Ctrl-C: the child must not outlive us
            self.stop()
            raise
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)  # for its exit status
        self.stop()
        if late.is_set():
            raise ContenderFailed(f"engine {self.spec.name} sent no answer for {timeout_s:.0f} s")
        raise ContenderFailed(
            f"engine {self.spec.name} exited with status {self._process.returncode}: {self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors_or_all = [line for line in lines if "Error" in line] or lines or ["nothing"]
        return errors_or_all[-1][:300]
