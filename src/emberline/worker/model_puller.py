"""ModelPuller: downloads models while the server runs, each in a child process that all its callers share.

If the last caller leaves, the child process ends; the next pull of the model resumes the download.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from emberline.core.errors import DownloadError, EmberlineError, ModelError, Overloaded
from emberline.hub.pull_process import PullReport

PULL_COMMAND = (sys.executable, "-m", "emberline.hub.pull_process")
MAX_OPEN_PULLS = 4  # each has a process
BUSY_RETRY_S = 30
SILENCE_TIMEOUT_S = 300.0  # without progress: a stalled network, or a file whose hash takes too long


def make_pull_error(report: PullReport) -> ModelError:
    """Return the error of the child process, with its code and status."""
    error = ModelError(report.error, hint=report.hint or None)
    error.code, error.status = report.code, report.status
    return error


class ModelPuller:
    def __init__(self, command: tuple[str, ...] = PULL_COMMAND, silence_timeout_s: float = SILENCE_TIMEOUT_S) -> None:
        self._command = command
        self._silence_timeout_s = silence_timeout_s
        self._open: dict[str, _SharedPull] = {}  # by the model's source

    async def pull(self, source: str) -> AsyncGenerator[PullReport, None]:
        """Download a model if it is not in the cache. Yield the progress, and the report with the directory last.

        Raises ModelError, DownloadError, or Overloaded if too many models are downloaded. Closing the generator
        ends the download, unless another caller waits for the same model.
        """
        shared = self._open.get(source)
        if shared is None:
            if len(self._open) >= MAX_OPEN_PULLS:
                raise Overloaded(
                    f"{source} cannot be downloaded now: {MAX_OPEN_PULLS} downloads are running",
                    retry_after=BUSY_RETRY_S,
                )
            shared = self._open[source] = _SharedPull(source, self._command, self._silence_timeout_s)
        shared.num_callers += 1
        try:
            report = None
            while not (report is not None and report.directory):
                report = await shared.wait_for_news(report)
                yield report
        finally:
            shared.num_callers -= 1
            if shared.is_done or not shared.num_callers:
                if self._open.get(source) is shared:
                    del self._open[source]
                if not shared.num_callers:
                    await shared.stop()

    @property
    def open_pulls(self) -> dict[str, PullReport]:
        """The newest progress of each download that runs, by the model's source."""
        return {source: shared.newest or PullReport() for source, shared in self._open.items()}

    async def pull_directory(self, source: str) -> Path:
        """Download a model if it is not in the cache, and return its directory."""
        async with contextlib.aclosing(self.pull(source)) as reports:
            async for report in reports:
                if report.directory:
                    return Path(report.directory)
        raise AssertionError("a pull ends with a directory or an error")


class _SharedPull:
    """A running child process, and its newest report."""

    def __init__(self, source: str, command: tuple[str, ...], silence_timeout_s: float) -> None:
        self._source = source
        self.num_callers = 0
        self.newest: PullReport | None = None
        self._error: EmberlineError | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(source, command, silence_timeout_s))

    @property
    def is_done(self) -> bool:
        return self._task.done()

    async def wait_for_news(self, last_seen: PullReport | None) -> PullReport:
        """Return the newest report when it differs from `last_seen`. Raises the error of the download."""
        while self.newest is None or self.newest is last_seen:
            if self._error is not None:
                raise self._error
            if self._task.done():
                raise DownloadError(f"the download of {self._source} was cancelled")
            await self._changed.wait()
        return self.newest

    async def stop(self) -> None:
        if not (self.newest is not None and self.newest.directory):  # else the process is ending by itself
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self, source: str, command: tuple[str, ...], silence_timeout_s: float) -> None:
        try:
            await self._follow_process(source, command, silence_timeout_s)
        except EmberlineError as error:
            self._error = error
        except OSError as error:
            self._error = DownloadError(f"cannot start the download of {source}: {error}")
        finally:
            self._notify()

    async def _follow_process(self, source: str, command: tuple[str, ...], silence_timeout_s: float) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, source, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        try:
            while True:
                async with asyncio.timeout(silence_timeout_s):
                    line = await process.stdout.readline()
                if not line:
                    raise DownloadError(f"the process that downloads {source} ended without a result")
                report = msgspec.json.decode(line, type=PullReport)
                if report.error:
                    raise make_pull_error(report)
                self.newest = report
                self._notify()
                if report.directory:
                    return
        except TimeoutError:
            hint = "check the network, and pull it again: the download resumes"
            what = f"the download of {source} made no progress for {silence_timeout_s:.0f} s"
            raise DownloadError(what, hint=hint) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
