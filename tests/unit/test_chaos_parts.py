"""The parts of `emberline chaos` that decide: a judge that lets something pass would make everything look well."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import random
import signal
from pathlib import Path

import pytest

from emberline.chaos.chaos_process import ChaosProcess
from emberline.chaos.chaos_report import ChaosReport
from emberline.chaos.client import ChaosClient, RequestOutcome, Verdict, judge_reply
from emberline.chaos.fault_proxy import FaultProxy, ProxiedConnection
from emberline.chaos.fault_scheduler import FaultScheduler, ScheduledFault, draw_faults
from emberline.chaos.fault_table import FAULTS
from emberline.chaos.faults import _damage_files_in
from emberline.chaos.observed_reply import ObservedReply
from emberline.chaos.reference_case import ReferenceCase
from emberline.chaos.request_progress import RequestObserver, RequestStage
from emberline.cli.__main__ import main
from emberline.core.config import Role

PACKAGE = Path(__file__).parents[2] / "src" / "emberline"
PATH = "/v1/completions"


def chunk(text: str, finish: str | None = None) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"text": text, "finish_reason": finish}]}).encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"code": "worker_lost", "message": "gone", "type": "server_error"}}\n\n'
GOOD = [chunk("one"), chunk(" two"), chunk(" three"), chunk("", "length"), USAGE, DONE]


def verdict(*events: bytes) -> Verdict:
    right = ObservedReply.from_stream(PATH, b"".join(GOOD))
    case = ReferenceCase(PATH, {"stream": True}, True, right)
    return judge_reply(case, 200, b"".join(events))[0]


def test_correct_stream_is_answered() -> None:
    assert verdict(*GOOD) is Verdict.ANSWERED
    assert verdict(chunk("on"), chunk("e two three"), *GOOD[3:]) is Verdict.ANSWERED  # cut elsewhere, the same text
    assert verdict(*GOOD[:2], ERROR, DONE) is Verdict.ERROR


def test_cancelling_run_cancels_requests() -> None:
    class Hangs:
        async def request(self, *_: object) -> None:
            await asyncio.sleep(60)

    async def do() -> None:
        sights = RequestObserver()
        case = ReferenceCase(PATH, {"stream": True}, True, ObservedReply.from_stream(PATH, b"".join(GOOD)))
        asked = ChaosClient(Hangs(), "http://nowhere", sights, 30.0).run(case, sights.track_request())  # type: ignore[arg-type]
        task = asyncio.create_task(asked)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(do())


@pytest.mark.parametrize(
    "events",
    [
        [GOOD[0], *GOOD[2:]],  # lost
        [GOOD[0], *GOOD],  # repeated
        [GOOD[0], chunk(" zwei"), *GOOD[2:]],  # changed
        [*GOOD[:2], GOOD[3], USAGE, DONE],  # cut short, and called whole
        [*GOOD[:4], GOOD[3], USAGE, DONE],  # two endings
        [*GOOD, DONE],
        [*GOOD, chunk("more")],
        GOOD[:5],  # none
        GOOD[:2],
        [*GOOD[:3], chunk("", "stop"), USAGE, DONE],
        [*GOOD[:4], DONE],  # nothing counted
        [chunk("two"), ERROR, DONE],  # wrong before the error
        [*GOOD[:2], ERROR],
        [b": said 0 5 10\n\n", *GOOD],
        [GOOD[0], b"data: {\n\n", *GOOD[1:]],
    ],
)
def test_wrong_stream_is_detected(events: list[bytes]) -> None:
    assert verdict(*events) is Verdict.WRONG


def test_replies_without_stream_are_judged() -> None:
    whole = {"choices": [{"text": "one two three", "finish_reason": "length"}],
             "usage": {"prompt_tokens": 3, "completion_tokens": 4}}  # fmt: skip
    case = ReferenceCase(PATH, {}, True, ObservedReply.from_body(200, json.dumps(whole).encode()))
    assert judge_reply(case, 200, json.dumps(whole).encode())[0] is Verdict.ANSWERED
    assert judge_reply(case, 503, b'{"error": {"code": "engine_unavailable", "message": "later"}}')[0] is Verdict.ERROR
    for status, body in ((200, json.dumps(whole)[:-9]), (502, "Bad Gateway"), (500, '{"error": {"message": ""}}')):
        assert judge_reply(case, status, body.encode())[0] is Verdict.WRONG


def test_proxy_traffic_shows_request_stages() -> None:
    async def seen() -> None:
        sights = RequestObserver()
        sight, other = sights.track_request(), sights.track_request()
        to_p, to_d = sights.make_traffic_filter("p"), sights.make_traffic_filter("d")
        p, d = ProxiedConnection(None, None), ProxiedConnection(None, None)  # type: ignore[arg-type]
        assert (sight.stage, sight.prefill_worker) == (RequestStage.QUEUED, None)
        to_p(p, True, b'POST /cluster/prefill HTTP/1.1\r\n\r\n{"body":{"user":"%b"' % sight.marker_text.encode())
        assert (sight.stage, sight.prefill_worker) == (RequestStage.PREFILL, "p")
        to_p(p, False, b'{"ticket":{}}\n')
        assert (sight.stage, sight.decode_worker) == (RequestStage.TRANSFER, None)
        to_d(d, True, b'POST /cluster/resume HTTP/1.1\r\n\r\n{"body":{"user":"%b"' % sight.marker_text.encode())
        to_d(d, False, b": sa")
        assert (sight.stage, sight.decode_worker) == (RequestStage.TRANSFER, "d")
        to_d(d, False, b"id 0 5 0\n\n")
        assert (sight.stage, sight.group_count) == (RequestStage.FIRST, 1)
        to_d(d, False, b": said 0 5 0\n\n" * 3)
        assert (sight.stage, other.stage) == (RequestStage.DECODE, RequestStage.QUEUED)
        await asyncio.wait_for(sight.wait_for_stage(RequestStage.FIRST), 1)
        sights.stop_tracking(other)
        await asyncio.wait_for(other.wait_for_stage(RequestStage.DECODE), 1)

    asyncio.run(seen())


def test_scheduler_always_leaves_an_answering_worker() -> None:
    """Of three faults at a time, whatever they are and whoever is away."""
    dice = random.Random(5)
    places = [
        fake_process("prefill-1", "prefill"),
        fake_process("decode-1", "decode"),
        fake_process("decode-2", "decode", mapped=True),
    ]
    turns, names, both = FaultScheduler(places, dice), {fake_process.name for fake_process in places}, 0
    faults, going, kinds = draw_faults(FAULTS, dice), list[ScheduledFault](), set[str]()
    for _ in range(3000):
        while len(turns.pending) < 10:
            turns.pending.append(next(faults))
        harsh = {name for name, fault in turns.active_claims.items() if not fault.keeps_workers_available}
        absent = {
            name
            for name in ("prefill-1", "decode-1", "store")
            if dice.random() < 0.1 and name not in turns.active_claims
        }
        if names <= harsh | absent:
            absent.clear()
        while len(going) < 3 and (turn := turns.next_fault(absent)) is not None:
            going.append(turn)
            kinds.add(turn.fault.name)
            assert turn.answering_worker.name not in absent | harsh and not (
                turn.fault.needs_tcp_transfer and turn.answering_worker.uses_shared_memory
            )
            assert not set(turn.claimed) & absent
        away = absent | {name for name, fault in turns.active_claims.items() if not fault.keeps_workers_available}
        assert not names <= away
        both += {"decode-1", "decode-2"} <= away - absent
        assert "router" not in away or len(going) == 1
        assert sorted(turns.active_claims) == sorted(claim for turn in going for claim in turn.claimed), (
            "one at a time each"
        )
        if going:
            turns.finish_fault(going.pop(dice.randrange(len(going))))
    assert both and kinds == {fault.name for fault in FAULTS}


def fake_process(name: str, role: Role, *, mapped: bool = False) -> ChaosProcess:
    return ChaosProcess(name, role, 0, None, None, uses_shared_memory=mapped)  # type: ignore[arg-type]


def test_proxy_fails_and_recovers() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async def tried() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        wire = await FaultProxy("127.0.0.1", 0, server.sockets[0].getsockname()).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        wire.bytes_to_corrupt = 1
        writer.write(b"hello")
        assert await reader.readexactly(5) != b"hello" and wire.corrupted_bytes == 1
        wire.pause_forwarding()
        writer.write(b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(5), 0.05)
        wire.end_faults()
        assert await reader.readexactly(5) == b"hello"
        wire.refuse_connections()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        with pytest.raises(OSError):
            await _exchange(wire.port)
        wire.end_faults()
        assert await _exchange(wire.port) == b"again"
        wire.stop()
        with pytest.raises(ConnectionRefusedError):
            await _exchange(wire.port)
        server.close()

    async def _exchange(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"again")
        try:
            return await reader.readexactly(5)
        except asyncio.IncompleteReadError as e:
            raise ConnectionResetError from e
        finally:
            writer.close()

    asyncio.run(asyncio.wait_for(tried(), 20))


WALL = {
    "core/clock.py",
    "core/tls.py",  # whether a certificate is valid today
    "server/tracing.py",  # when a span began, as others read it
    "worker/request_context.py",  # when a reply was made, as its client is told
    "router/http/relay.py",  # the same
    "router/http/router_app.py",  # since when it runs
    "worker/engine_app.py",
    "worker/ollama_handler.py",  # when a model was loaded
    "worker/response_store.py",  # when a response was stored, which outlives a restart
    "tokens/template.py",  # the date that a prompt may tell
    "kv/tiers/disk.py",  # beside times of files, which are of the wall too
}
PACKAGES = ("core", "tokens", "kv", "engine", "router", "cluster", "api", "server", "worker", "models", "chaos")


def _reads_wall_clock(tree: ast.Module) -> bool:
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}
    return bool(names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "WallClock"})


def test_no_code_waits_by_wall_clock() -> None:
    """It may jump. The gateway, which tells when things happened, is another matter."""
    found = set()
    for package in PACKAGES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            text = path.read_text()
            if any(word in text for word in ("time.time", "datetime.", "WallClock")) and _reads_wall_clock(
                ast.parse(text)
            ):
                found.add(str(path.relative_to(PACKAGE)))
    assert {name for name in found if "gateway" not in name} == WALL


def test_damage_works_on_files_of_any_size(tmp_path: Path) -> None:
    folder = tmp_path / "layout" / "ab"
    folder.mkdir(parents=True)
    sizes = (0, 1, 5000, 100_000)
    for size in sizes:
        (folder / str(size)).write_bytes(bytes(size))
    _damage_files_in(tmp_path, "spoil")
    assert [sum((folder / str(size)).read_bytes()) for size in sizes] == [0, 16, 16, 16]
    _damage_files_in(tmp_path, "tear")
    assert [(folder / str(size)).stat().st_size < size for size in sizes] == [False, True, True, True]
    _damage_files_in(tmp_path, "spoil")
    _damage_files_in(tmp_path, "fail")
    for size in sizes:
        with pytest.raises(OSError):
            (folder / str(size)).read_bytes()


def test_missing_model_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "no-such-model"]) == 1
    assert "no model 'no-such-model'" in capsys.readouterr().err


def test_interrupted_run_prints_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: object, ledger: ChaosReport, *_: object) -> None:
        ending = RequestOutcome(Verdict.ANSWERED, "", 0.0, 1.5)
        ledger.record_fault(
            "kill router", "queued", ending, migration_count=0, detection_count=0, is_error_expected=False
        )
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    monkeypatch.setattr("emberline.chaos.chaos_run.run_chaos", play)
    monkeypatch.setattr("emberline.chaos.chaos_cluster.ChaosCluster", lambda settings, home: None)
    monkeypatch.setattr("emberline.hub.source.resolve_model", lambda model: tmp_path)
    assert main(["chaos", "m", "--logs", str(tmp_path), "--json", str(tmp_path / "told.json")]) == 128 + signal.SIGTERM
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["all"] == {"count": 1, "answered": 1} and told["slowest_request_seconds"] == 1.5
