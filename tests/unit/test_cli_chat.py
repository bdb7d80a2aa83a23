"""`emberline chat` as people use it: a real process on a real terminal (a pty) or pipe, against a fake server."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import ANSWER, FakeServer

COMMAND = [sys.executable, "-m", "emberline.cli", "chat"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "TERM": "dumb"}
PATIENCE = 20.0


class Terminal:
    """A chat process on a pty: what it wrote so far, and a keyboard."""

    def __init__(self, *arguments: str) -> None:
        self.screen, terminal = pty.openpty()
        # A session of its own with this terminal in charge of it, so that Ctrl-C becomes a signal.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *COMMAND, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=ENVIRONMENT,
        )
        os.close(terminal)
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def expect(self, pattern: str) -> str:
        """Reads on until the pattern is there; what came up to its end, which is then consumed."""
        seen = self.wait(pattern, PATIENCE)
        assert seen is not None, f"no {pattern!r} in {self.output!r}"
        return seen

    def wait(self, pattern: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.output)) is None:
            ready, _, _ = select.select([self.screen], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            self.output += os.read(self.screen, 4096).decode()
        seen, self.output = self.output[: found.end()], self.output[found.end() :]
        return seen

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C at the prompt, and again if nothing happens: a signal that comes after the prompt is drawn and before
        keys are waited for is seen by Python's readline with the next key (5 of 295,043 presses on a busy machine)."""
        for _ in range(4):
            self.type("\x03")
            if self.wait(pattern, PATIENCE / 4) is not None:
                return
        raise AssertionError(f"no {pattern!r} in {self.output!r}")

    def leave(self) -> int:
        """Ctrl-D, at the prompt: typed earlier it is the terminal's and not the program's."""
        self.expect("> ")
        self.type("\x04")
        return self.close()

    def close(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            os.close(self.screen)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def pipe(question: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=question, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT
    )


def test_conversation_shows_usage(fake: FakeServer) -> None:
    chat = Terminal("--url", fake.url, "--temperature", "0.5", "--system", "Be brief.")
    chat.expect("fake at .*/help")
    chat.expect("> ")
    chat.type("first\n")
    assert "finished blocks" in chat.expect(r"TTFT \d+ ms .*tok/s .*tokens .*prompt \d+ \(0 cached\)")
    chat.type("second\n")
    chat.expect(r"prompt \d+ \([1-9]\d* cached\)")
    chat.type("/reset\n")
    chat.expect("new conversation")
    chat.type("/system Be rude.\n")
    chat.expect("system prompt: Be rude")
    chat.type("third\n")
    chat.expect("TTFT")
    chat.type("/nonsense\n")
    chat.expect("/nonsense is not a command")
    chat.type("/help\n")
    chat.expect("/exit")
    chat.type("/exit\n")
    assert chat.close() == 0
    first, second, third = fake.requests
    assert first["temperature"] == 0.5
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "first"}]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == ANSWER
    assert third["messages"] == [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "third"}]


def test_ctrl_c_stops_answer_but_not_program(fake: FakeServer) -> None:
    fake.token_seconds = 0.02
    chat = Terminal("--url", fake.url)
    chat.expect("> ")
    chat.type("forever\n")
    chat.expect("prefix cache")
    chat.type("\x03")
    chat.expect(r"≈ \d+ tokens")
    chat.expect("stopped")
    chat.expect("> ")
    chat.interrupt("/exit or Ctrl-D")  # at the prompt it only clears the line
    fake.token_seconds = 0.0
    chat.type("hello\n")
    chat.expect("TTFT")
    assert chat.leave() == 0
    deadline = time.monotonic() + PATIENCE
    while fake.gone != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.gone == 1, "the server was not told"
    assert fake.requests[1]["messages"][1]["content"].startswith("The prefix cache"), "the partial answer is kept"


def test_errors_are_shown_and_conversation_continues(fake: FakeServer) -> None:
    chat = Terminal("--url", fake.url)
    for question, told in {
        "fail-429": r"answered 429: .*queue is full.*retry in 7 s",
        "fail-400": r"answered 400: .*temperature is 9",
        "fail-drop": "connection to .* was lost.*kept",
        "fail-engine": "engine died.*send the question again",
        "hello": "TTFT",
    }.items():
        chat.expect("> ")
        chat.type(f"{question}\n")
        chat.expect(told)
    assert chat.leave() == 0
    roles = [m["role"] for m in fake.requests[-1]["messages"]]
    assert roles == ["user", "assistant"] * 2 + ["user"], "refused questions are not kept, broken-off answers are"


def test_unreachable_server_hints_how_to_start_one() -> None:
    with FakeServer() as server:
        url = server.url
    done = pipe("hello", "--url", url)
    assert done.returncode == 1
    assert "no server answers at" in done.stderr
    assert "emberline serve" in done.stderr
    assert done.stdout == ""


def test_pipe_gets_plain_answer(fake: FakeServer) -> None:
    done = pipe(
        "hello\n", "--url", f"{fake.url}/v1", "--max-tokens", "9", "--seed", "3", "--top-k", "4", "--top-p", "0.5"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER[:36] + "\n", "")
    sent = fake.requests[0]
    assert {k: sent[k] for k in ("model", "max_tokens", "seed", "top_k", "top_p")} == {
        "model": "fake", "max_tokens": 9, "seed": 3, "top_k": 4, "top_p": 0.5,
    }  # fmt: skip
    assert "temperature" not in sent, "what was not asked for is the server's to choose"


def test_refused_request_fails_in_pipe(fake: FakeServer) -> None:
    done = pipe("fail-400", "--url", fake.url)
    assert done.returncode == 1
    assert "temperature is 9" in done.stderr


def test_escape_sequences_do_not_reach_the_terminal(fake: FakeServer) -> None:
    chat = Terminal("--url", fake.url)
    chat.expect("> ")
    chat.type("escapes\n")
    seen = chat.expect("TTFT")
    assert "]0;owned" in seen
    assert "\x1b]0;owned" not in seen
    assert chat.leave() == 0


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_invalid_url_is_reported(url: str) -> None:
    done = pipe("hello", "--url", url)
    assert done.returncode == 1
    assert "which is not an http or https URL" in done.stderr


def test_unknown_model_is_refused_before_conversation(fake: FakeServer) -> None:
    done = pipe("hello", "--url", fake.url, "--model", "nope")
    assert done.returncode == 1 and not fake.requests
    assert "has no model 'nope' (hint: --model may be fake)" in done.stderr and "Traceback" not in done.stderr


def test_embedder_is_not_chosen_as_chat_model(fake: FakeServer) -> None:
    fake.models.insert(0, {"id": "embedder", "owned_by": "emberline", "kind": "embedding"})
    assert pipe("hello", "--url", fake.url).returncode == 0
    assert fake.requests[0]["model"] == "fake"
