"""Requests that move: prompts computed on one worker and answered on another, streams that go on elsewhere. Whatever
fails, a client's stream is the one that never moved, or ends with a typed error; and nothing is left open."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from routers import SRC, Fakes, get, until

from emberline.cluster.fake_completion import FakeCompletion, FakeRequest
from emberline.router.policy import rendezvous_hash

LENGTH = 12
WELL = b"".join(FakeCompletion(7, FakeRequest(max_tokens=LENGTH, uneven=True)).stream_chunks(0, 0, False))
WORDS = FakeCompletion(7, FakeRequest(max_tokens=LENGTH))
RESUME, PREFILL, CHAT = "/cluster/resume", "/cluster/prefill", "/v1/chat/completions"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fakes]:
    """Workers that do everything."""
    more = ("--stuck-after", "2", "--lost-after", "2", "--migration-wait", "0")
    made = Fakes(tmp_path_factory.mktemp("plain"), *more)
    made.start("a", "b", "c")
    yield made
    made.close()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fakes]:
    """One that prefills, two that decode."""
    more = ("--stuck-after", "2", "--lost-after", "2", "--ticket-timeout", "2")
    made = Fakes(tmp_path_factory.mktemp("split"), *more)
    made.start("p", role="prefill")
    made.start("d", "e", role="decode")
    until(lambda: all(made.row(name)["paired"] == ["p"] for name in "de"))
    yield made
    made.close()


def expected_text(fakes: Fakes) -> None:
    """All workers are, and the router knows."""
    for name in fakes.workers:
        fakes.tell(name, "well")

    def healed() -> bool:
        rows = fakes.status()["workers"]
        if all(row["breaker"] == "closed" and row["health"] == "ready" for row in rows):
            return True
        ask(fakes, session=os.urandom(4).hex())  # a trial for whoever needs one
        return False

    until(healed)


def ask(fakes: Fakes, session: str = "s", size: int = 4000, **more: Any) -> tuple[bytes, Any]:
    """A reply's bytes and its headers."""
    connection = http.client.HTTPConnection(fakes.url.removeprefix("http://"), timeout=60)
    messages = [{"role": "user", "content": f"{os.urandom(8).hex()} {'x' * size}"}]
    body = {"model": "fake", "messages": messages, "max_tokens": LENGTH, "stream": True, "seed": 7, "uneven": True}
    headers = {"content-type": "application/json", **({"x-session-affinity": session} if session else {})}
    connection.request("POST", CHAT, json.dumps({**body, **more}), headers)
    reply = connection.getresponse()
    got = reply.read()
    connection.close()
    return got, reply.headers


def words(got: bytes) -> str:
    chunks = [json.loads(event[6:]) for event in got.decode().split("\n\n") if event.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def is_expected(got: bytes) -> bool:
    """To the byte, but for what the prompt cost."""
    events, unmoved = got.split(b"\n\n"), WELL.split(b"\n\n")
    return events[:-3] == unmoved[:-3] and b'"completion_tokens":12' in events[-3] and events[-2:] == unmoved[-2:]


def wait_until_idle(fakes: Fakes) -> bool:
    status = fakes.status()
    open_ = [r["open"] or r["prefill_tokens"] or r["decode_tokens"] for r in status["workers"]]
    return not status["open_requests"] and not any(open_) and not any(fakes.tell(n)["running"] for n in fakes.workers)


def migration_counts(fakes: Fakes) -> dict[tuple[str, str], int]:
    return {(m["reason"], m["outcome"]): m["count"] for m in fakes.status()["migrations"]}


def preferred_worker(fakes: Fakes, session: str = "s") -> str:
    return str(ask(fakes, session, size=0)[1]["x-emberline-worker"])


# After the first byte


@pytest.mark.parametrize("mode", ["break", "tear", "stall"])
@pytest.mark.parametrize("after", [1, 4, LENGTH])  # the last holds the protocol's own ending
def test_broken_stream_continues_at_other_worker(plain: Fakes, mode: str, after: int) -> None:
    expected_text(plain)
    first, before = preferred_worker(plain), migration_counts(plain)
    reason = "stuck" if mode == "stall" else "broken"
    plain.tell(first, mode, after=after)
    got, headers = ask(plain)
    assert headers["x-emberline-worker"] == first and is_expected(got), got.decode()
    after_ = migration_counts(plain)
    assert after_.pop((reason, "went on")) == before.pop((reason, "went on"), 0) + 1 and after_ == before
    until(lambda: wait_until_idle(plain))


def test_migrations_are_limited(plain: Fakes) -> None:
    expected_text(plain)
    first = preferred_worker(plain)
    for name in plain.workers:
        plain.tell(name, "break", after=2)
    got, _ = ask(plain)
    assert b"worker_lost" in got and got.endswith(b"data: [DONE]\n\n") and got.count(b"[DONE]") == 1
    text = words(got[: got.index(b'{"error"') - 6])
    twice, thrice = ("".join(map(WORDS.text_at, range(count))) for count in (3, 6))  # the fourth is held back
    assert text in (twice, thrice), "two tokens of each; the third is spared if the others have not been heard of since"
    expected_text(plain)
    plain.tell(first, "break", after=2)
    others = [name for name in plain.workers if name != first]
    for name in others:
        plain.tell(name, "break", after=3, times=1, calls=RESUME)
    before = migration_counts(plain).get(("broken", "went on"), 0)
    got, _ = ask(plain)
    assert b"worker_lost" in got and 1 <= migration_counts(plain)["broken", "went on"] - before <= 2, (
        "each worker breaks but once"
    )
    until(lambda: wait_until_idle(plain))


@pytest.mark.parametrize("mode", ["refuse", "full", "missing", "bad", "break"])
def test_failed_resume_tries_another_worker(plain: Fakes, mode: str) -> None:
    """The first to be asked to go on refuses, or breaks before it says anything; the next can."""
    expected_text(plain)
    first = preferred_worker(plain)
    plain.tell(first, "break", after=3)
    others = [name for name in plain.workers if name != first]
    plain.tell(others[0], mode, after=0, calls=RESUME)
    plain.tell(others[1], "well")
    for _ in range(4):
        got, _ = ask(plain)
        assert is_expected(got), got.decode()
    until(lambda: wait_until_idle(plain))


def test_stream_ends_with_error_if_no_worker_can_continue(plain: Fakes) -> None:
    expected_text(plain)
    first = preferred_worker(plain)
    before = migration_counts(plain).get(("broken", "given up"), 0)
    for name in plain.workers:
        plain.tell(name, "missing", calls=RESUME)
    plain.tell(first, "break", after=3)
    got, _ = ask(plain)
    assert b"worker_lost" in got and words(got[: got.index(b'{"error"') - 6]) == "".join(map(WORDS.text_at, range(3)))
    assert migration_counts(plain)["broken", "given up"] == before + 1
    until(lambda: wait_until_idle(plain))


def test_stream_is_not_continued_with_other_dtype(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "--migration-wait", "0")
    try:
        fakes.start("narrow")
        fakes.start("wide", dtype="float32")
        name = preferred_worker(fakes)
        other = "wide" if name == "narrow" else "narrow"
        fakes.tell(name, "break", after=3)
        got, _ = ask(fakes)
        text, _, error = got.partition(b'data: {"error"')
        assert words(text) == "".join(map(WORDS.text_at, range(3))) and fakes.tell(other)["resumed"] == 0
        assert b"worker_lost" in error and b"dtype (" in error and b"kv_dtype (" in error
        fakes.start("same", dtype="bfloat16" if name == "narrow" else "float32")
        sessions = (f"session {i}" for i in range(1000))
        got, _ = ask(
            fakes, next(s for s in sessions if max(fakes.workers, key=lambda w: rendezvous_hash(s, w)) == name)
        )
        assert is_expected(got) and fakes.tell(other)["resumed"] == 0 and fakes.tell("same")["resumed"] == 1
    finally:
        fakes.close()


def test_stream_waits_for_worker_to_continue(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "--migration-wait", "30")
    try:
        fakes.start("a")
        fakes.tell("a", "break", after=4, times=1)
        assert is_expected(ask(fakes)[0]), "it broke once, and is still the only one"
        fakes.tell("a", "die", after=4)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(ask(fakes)[0]))
        thread.start()
        fakes.workers["a"].wait(30)
        fakes.start("b")
        thread.join(30)
        assert is_expected(got[0]) and migration_counts(fakes) == {("broken", "went on"): 2}
        fakes.start("c")
        for name in ("b", "c"):
            fakes.tell(name, "break", after=2)
        assert words(ask(fakes)[0].partition(b'data: {"error"')[0]) == "".join(map(WORDS.text_at, range(8))), (
            "four times"
        )
    finally:
        fakes.close()


def test_stream_continues_at_full_worker(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "--queue", "0")
    try:
        fakes.start("a", "b", pace=0.02, max_running=1)
        fakes.tell("a", "die", after=6)
        fakes.tell("b", "die", after=1 << 20)
        got: list[bytes] = []
        threads = [threading.Thread(target=lambda: got.append(ask(fakes, "", 0, max_tokens=60)[0])) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole = "".join(map(FakeCompletion(7, FakeRequest(max_tokens=60)).text_at, range(60)))
        assert [words(each) for each in got] == [whole, whole] and migration_counts(fakes) == {("broken", "went on"): 1}
        assert fakes.workers["a"].wait(10) == 1
    finally:
        fakes.close()


def test_slow_client_loses_no_token(tmp_path: Path) -> None:
    """Its worker dies while what was read of it cannot be passed on."""
    fakes = Fakes(tmp_path, "--lost-after", "2")
    try:
        fakes.start("a", "b")
        speech = FakeCompletion(7, FakeRequest(max_tokens=120_000))
        connection = http.client.HTTPConnection(fakes.url.removeprefix("http://"), timeout=60)
        body = {"model": "fake", "messages": [], "max_tokens": speech.length, "stream": True, "seed": 7}
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        first, counts = reply.headers["x-emberline-worker"], [0, 0]

        def settled() -> bool:
            counts.append(fakes.tell(first)["generated"])
            return counts[-1] == counts[-2] == counts[-3]

        until(settled)
        assert 0 < counts[-1] < speech.length
        fakes.workers[first].kill()
        until(lambda: fakes.health(first) == "lost")
        time.sleep(0.6)  # and what it had is cut off
        got = reply.read()
        connection.close()
        assert got == b"".join(speech.stream_chunks(len(json.dumps(body)) // 4, 0, False))
        assert sum(migration_counts(fakes).values()) == 1 and fakes.status()["open_requests"] == 0
    finally:
        fakes.close()


# Before it


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["refuse", "full", "fail", "break", "tear", "stall"])
def test_retry_before_first_byte_gives_same_reply(plain: Fakes, mode: str, stream: bool) -> None:
    expected_text(plain)
    first = preferred_worker(plain)
    plain.tell(first, mode, after=0)
    before = migration_counts(plain)
    got, headers = ask(plain, stream=stream)
    assert headers["x-emberline-worker"] != first and migration_counts(plain) == before
    assert is_expected(got) if stream else json.loads(got)["choices"][0]["message"]["content"] == words(WELL)
    until(lambda: wait_until_idle(plain))


def test_broken_reply_without_stream_is_cut_off(plain: Fakes) -> None:
    """It is too long to be kept until it is whole, and cannot go on elsewhere."""
    expected_text(plain)
    before = [plain.tell(name, "tear", after=0)["resumed"] for name in plain.workers]
    with pytest.raises(http.client.IncompleteRead):
        ask(plain, stream=False, max_tokens=200_000)
    assert [plain.tell(name)["resumed"] for name in plain.workers] == before
    until(lambda: wait_until_idle(plain))


def test_untracked_stream_ends_with_error(plain: Fakes) -> None:
    """Another server than ours: it knows nothing of tracks."""
    expected_text(plain)
    first = preferred_worker(plain)
    plain.tell(first, "break", after=3)
    port = plain.ports[first]
    direct = get(f"http://127.0.0.1:{port}{CHAT}", {"max_tokens": 2, "stream": True, "seed": 7})
    assert ": said" not in direct
    got, _ = ask(plain, untracked=True)
    assert b"worker_lost" in got and words(got[: got.index(b'{"error"') - 6]) == "".join(map(WORDS.text_at, range(3)))
    until(lambda: wait_until_idle(plain))


# Split


def test_long_prompt_is_split(split: Fakes) -> None:
    expected_text(split)
    before = {name: split.tell(name) for name in split.workers}
    for stream in (True, False):
        got, headers = ask(split, stream=stream)
        assert headers["x-emberline-prefill"] == "p" and headers["x-emberline-worker"] in "de"
        assert is_expected(got) if stream else json.loads(got)["choices"][0]["message"]["content"] == words(WELL)
    now = {name: split.tell(name) for name in split.workers}
    assert now["p"]["prefilled"] == before["p"]["prefilled"] + 2
    assert sum(now[n]["pulled"] - before[n]["pulled"] for n in "de") == 2
    assert all(now[n]["prompts"] == before[n]["prompts"] for n in "de"), "they computed nothing"
    assert split.status()["decisions"]["split"] >= 2 and split.status()["prefills"]["done"] >= 2
    until(lambda: wait_until_idle(split))


def test_short_cached_or_multiple_choice_prompt_is_not_split(split: Fakes) -> None:
    expected_text(split)
    before = split.tell("p")["prefilled"]
    assert "x-emberline-prefill" not in ask(split, size=100)[1]
    assert "x-emberline-prefill" not in ask(split, n=2)[1]
    messages = [{"role": "user", "content": "known " * 1000}]
    first, second = (ask(split, "", messages=messages)[1] for _ in range(2))
    assert "x-emberline-prefill" in first and "x-emberline-prefill" not in second
    assert second["x-emberline-worker"] == first["x-emberline-worker"]
    assert split.tell("p")["prefilled"] == before + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", [("refuse", 0), ("full", 0), ("fail", 0), ("missing", 0), ("break", 0), ("tear", 0),
                                   ("stall", 0), ("break", 1), ("tear", 1), ("stall", 1)])  # fmt: skip
def test_prefill_failure_is_invisible_to_client(split: Fakes, fault: tuple[str, int], stream: bool) -> None:
    expected_text(split)
    mode, after = fault
    split.tell("p", mode, after=after)
    before = split.status()["prefills"]
    got, headers = ask(split, stream=stream)
    assert is_expected(got) if stream else json.loads(got)["choices"][0]["message"]["content"] == words(WELL)
    assert headers["x-emberline-worker"] in "de" and ("x-emberline-prefill" in headers) == (after == 1)
    until(lambda: wait_until_idle(split))
    now = split.status()["prefills"]
    assert sum(now.values()) == sum(before.values()) + 1 and now.get("done", 0) == before.get("done", 0)


def test_invalid_request_is_refused_once(split: Fakes) -> None:
    expected_text(split)
    split.tell("p", "bad")
    asked = {name: split.tell(name)["asked"] for name in "de"}
    got, headers = ask(split)
    assert json.loads(got)["error"]["message"] == "not now" and headers["retry-after"] == "7"
    assert {name: split.tell(name)["asked"] for name in "de"} == asked
    until(lambda: wait_until_idle(split))


@pytest.mark.parametrize("mode", ["refuse", "full", "fail", "break", "tear", "stall", "missing"])
def test_ticket_moves_to_another_worker_before_first_byte(split: Fakes, mode: str) -> None:
    expected_text(split)
    first = preferred_worker(split)
    (other,) = {"d", "e"} - {first}
    split.tell(first, mode, after=0, calls=RESUME)
    before = split.tell("p")["prefilled"], split.tell(other)["pulled"]
    got, headers = ask(split)
    assert is_expected(got), got.decode()
    assert split.tell("p")["prefilled"] == before[0] + 1, "computed once"
    if mode == "missing":  # it knows how to answer, not how to go on
        assert headers["x-emberline-worker"] == first
    else:
        assert headers["x-emberline-worker"] == other and split.tell(other)["pulled"] == before[1] + 1
    until(lambda: wait_until_idle(split))


@pytest.mark.parametrize("mode", ["break", "tear", "stall"])
@pytest.mark.parametrize("after", [1, 5, LENGTH])
def test_broken_split_stream_continues(split: Fakes, mode: str, after: int) -> None:
    expected_text(split)
    first = preferred_worker(split)
    split.tell(first, mode, after=after)
    got, headers = ask(split)
    assert headers["x-emberline-worker"] == first and headers["x-emberline-prefill"] == "p" and is_expected(got)
    until(lambda: wait_until_idle(split))


def fail_then(split: Fakes, before: int, mode: str) -> None:
    until(lambda: split.tell("p")["prefilled"] > before)
    split.tell("p", mode, after=0)


@pytest.mark.parametrize("mode", ["well", "refuse", "bad", "missing", "break", "stall"])
def test_continuing_worker_fetches_blocks(split: Fakes, mode: str) -> None:
    """From who computed them, if that one can give them again."""
    expected_text(split)
    first = preferred_worker(split)
    (other,) = {"d", "e"} - {first}
    split.tell(first, "break", after=5, times=1)
    before = {name: split.tell(name) for name in ("p", other)}
    if mode != "well":  # but only after it has computed them once
        threading.Thread(target=fail_then, args=(split, before["p"]["prefilled"], mode)).start()
        split.tell(first, "stall", after=5, times=1)
    got, headers = ask(split)
    assert headers["x-emberline-prefill"] == "p" and is_expected(got), got.decode()
    now = {name: split.tell(name) for name in ("p", other)}
    assert now["p"]["asked"] == before["p"]["asked"] + 2
    assert now[other]["pulled"] == before[other]["pulled"] + (mode == "well")
    assert (now[other]["prompts"] == before[other]["prompts"]) == (mode == "well")
    until(lambda: wait_until_idle(split))


def test_client_disconnect_ends_both_attempts(split: Fakes) -> None:
    expected_text(split)
    first = preferred_worker(split)
    for point in ("before the ticket", "after the ticket"):
        split.tell("p", "stall", after=int(point == "after the ticket"))
        split.tell(first, "stall", after=0, calls=RESUME)
        connection = http.client.HTTPConnection(split.url.removeprefix("http://"), timeout=60)
        body = {"model": "fake", "messages": [{"role": "user", "content": point * 400}], "stream": True}
        connection.request(
            "POST", CHAT, json.dumps(body), {"content-type": "application/json", "x-session-affinity": "s"}
        )
        until(lambda: split.tell("p")["running"])
        if point == "after the ticket":
            until(lambda: split.tell(first)["running"])
        connection.close()
        until(lambda: wait_until_idle(split))


def test_prefill_workers_answer_as_last_resort(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "--lost-after", "2")
    try:
        fakes.start("p", role="prefill")
        assert is_expected(ask(fakes)[0]) and fakes.tell("p")["prefilled"] == 0
        fakes.start("d", role="decode", shy=True)
        got, headers = ask(fakes)
        assert is_expected(got) and headers["x-emberline-worker"] == "d" and "x-emberline-prefill" not in headers, (
            "unpaired"
        )
        fakes.tell("d", "die", after=4)
        assert is_expected(ask(fakes)[0]) and fakes.tell("p")["resumed"] == 1
    finally:
        fakes.close()


# Drains


def test_drain_moves_streams(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path)
    try:
        fakes.start("a", "b")
        first = preferred_worker(fakes)
        fakes.tell(first, "stall", after=5)  # it would never end
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(ask(fakes)[0]))
        thread.start()
        until(lambda: fakes.tell(first)["running"] == 1)
        command = [sys.executable, "-m", "emberline.cli", "drain", first, "--router", fakes.url, "--move"]
        told = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=60
        )
        thread.join(30)
        assert f"{first} is drained" in told.stdout and is_expected(got[0])
        assert migration_counts(fakes) == {("drained", "went on"): 1} and fakes.row(first)["moved"] == 1
        other = "b" if first == "a" else "a"
        assert fakes.tell(first)["prefilled"] == 1 and fakes.tell(other)["pulled"] == 1, "its blocks go along"
        assert fakes.tell(first)["offered_output"] > 0, "those of what it has said too"
        until(lambda: wait_until_idle(fakes))
    finally:
        fakes.close()


def test_drain_waits_if_no_stream_can_move(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path)
    try:
        fakes.start("a", "b", pace=0.02)
        first = preferred_worker(fakes, "x")
        (other,) = {"a", "b"} - {first}
        fakes.tell(other, "full", calls=RESUME)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(ask(fakes, "x", max_tokens=200)[0]))
        thread.start()
        until(lambda: fakes.tell(first)["generated"] > 20)
        get(f"{fakes.url}/cluster/drain", {"name": first, "move": True})
        thread.join(30)
        whole = "".join(map(FakeCompletion(7, FakeRequest(max_tokens=200)).text_at, range(200)))
        assert words(got[0]) == whole, "it went back to where it was"
        assert fakes.tell(first)["resumed"] == 1 and wait_until_idle(fakes)
    finally:
        fakes.close()
