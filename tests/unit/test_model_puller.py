"""ModelPuller: one child process for all callers of a model, its errors, its end, and a full disk."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from hub_server import serve_repository, serving

from emberline.core.errors import DownloadError, EmberlineError, Overloaded
from emberline.worker.model_puller import MAX_OPEN_PULLS, PULL_COMMAND, ModelPuller

SAFETY_DEADLINE_S = 60.0


def child(code: str) -> tuple[str, ...]:
    """Return a command with which a puller starts this code in place of the download."""
    return (
        sys.executable,
        "-c",
        f"import json, os, sys, time\nsay = lambda **line: print(json.dumps(line), flush=True)\n{code}",
    )


def run(test: Callable[[], object]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(SAFETY_DEADLINE_S):
            await test()  # type: ignore[misc]

    asyncio.run(limited())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_progress_ends_with_the_directory() -> None:
    puller = ModelPuller(
        child("say(completed=1, total=2); say(completed=2, total=2); say(directory='/d/' + sys.argv[1])")
    )

    async def test() -> None:
        async with aclosing(puller.pull("name")) as reports:
            seen = [report async for report in reports]
        assert seen[-1].directory == "/d/name"
        assert await puller.pull_directory("name") == Path("/d/name")

    run(test)


def test_callers_share_a_process_until_the_last_leaves(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write(f'{{os.getpid()}}\\n'); say(completed=1, total=9); time.sleep(600)"
    puller = ModelPuller(child(code))

    async def test() -> None:
        first, second = puller.pull("name"), puller.pull("name")
        for caller in (first, second):
            assert (await anext(caller)).completed == 1
        assert {source: report.total for source, report in puller.open_pulls.items()} == {"name": 9}
        (pid,) = map(int, starts.read_text().split())
        await first.aclose()
        assert is_running(pid)
        await second.aclose()
        assert not is_running(pid)
        again = puller.pull("name")
        await anext(again)
        assert len(starts.read_text().split()) == 2
        await again.aclose()

    run(test)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (
            "say(error='no such model', hint='check it', code='model_error', status=400)",
            EmberlineError,
            "no such model",
        ),
        ("pass", DownloadError, "ended without a result"),
        ("time.sleep(600)", DownloadError, "made no progress"),
    ],
)
def test_failures_reach_every_caller(code: str, error: type[EmberlineError], text: str) -> None:
    puller = ModelPuller(child(code), silence_timeout_s=5.0)

    async def test() -> None:
        results = await asyncio.gather(*(puller.pull_directory("n") for _ in range(2)), return_exceptions=True)
        for result in results:
            assert isinstance(result, error) and text in str(result)

    run(test)


def test_missing_program_is_an_error() -> None:
    async def test() -> None:
        with pytest.raises(DownloadError, match="cannot start the download"):
            await ModelPuller(("/no/such/program",)).pull_directory("n")

    run(test)


def test_full_disk_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with serving() as site:
        serve_repository(site, {"config.json": b"{}", "model.safetensors": b"x" * 200_000})
        settings = {"EMBERLINE_CACHE": str(tmp_path), "HF_ENDPOINT": site.url, "HF_HUB_OFFLINE": "0"}
        process = subprocess.Popen(
            [*PULL_COMMAND, "hf:org/name"],
            stdin=subprocess.PIPE,  # stays open: the child ends with it
            stdout=subprocess.PIPE,
            env={**os.environ, **settings},
            preexec_fn=_limit_file_size,
        )
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        process.communicate(timeout=SAFETY_DEADLINE_S)
    report = json.loads(lines[-1])
    assert process.returncode == 1 and "cannot write hf:org/name" in report["error"]
    assert "free disk space" in report["hint"]


def _limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_number_of_downloads_is_limited() -> None:
    puller = ModelPuller(child("say(completed=1, total=2); sys.stdin.read()"))

    async def test() -> None:
        first = [puller.pull(f"model{i}") for i in range(MAX_OPEN_PULLS)]
        for each in first:
            await anext(each)
        with pytest.raises(Overloaded, match="model0b cannot be downloaded now: 4 downloads are running"):
            await puller.pull_directory("model0b")
        async with aclosing(puller.pull("model0")) as same:
            await anext(same)  # shares the download of the first caller
        await first.pop().aclose()
        async with aclosing(puller.pull("model0b")) as other:
            await anext(other)
        for each in first:
            await each.aclose()

    run(test)
