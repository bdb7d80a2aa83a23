"""What the command line prints when something is missing or not what it should be."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from emberline.bench.certificates import LocalCA
from emberline.cli.__main__ import COMMANDS, main
from emberline.engine.engine_child import EngineChild


@contextmanager
def serve_fixed_reply(body: bytes, status: bytes) -> Iterator[str]:
    """A server that is not a router: it answers the same to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(status))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_missing_command_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(f"{name} " in told and help_ in told for name, help_ in COMMANDS.items() if len(help_) < 50)


def test_missing_bench_lists_all_benches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])
    assert "load on any OpenAI URL" in capsys.readouterr().err


@pytest.mark.parametrize("body", [json.dumps({"error": {"message": "nothing here"}}).encode(), b"{}", b"<html>"])
@pytest.mark.parametrize("status", [b"404", b"405", b"500"])
def test_drain_reports_url_without_router(body: bytes, status: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_fixed_reply(body, status) as url:
        assert main(["drain", "w", "--router", url]) == 1
    told = capsys.readouterr().err
    assert (
        f"{url} is not a router: it answered {status.decode()}" in told
        and "(hint: set --router to the router's URL" in told
    )


def test_drain_reaches_the_other_routers_if_one_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    drained = json.dumps({"workers": []}).encode()
    gone = "http://127.0.0.1:1"
    with serve_fixed_reply(drained, b"200") as url:
        assert main(["drain", "w", "--router", gone, "--router", url]) == 1
        assert main(["drain", "w", "--no-wait", "--router", url]) == 0
    out, err = capsys.readouterr()
    assert out == "w is drained at 1 of 2 routers\nw is draining\n" and f"no router answers at {gone}" in err


@pytest.mark.parametrize("command", [["drain", "w"], ["autoscale", "--slo", "ttft_p90=1s,itl_p90=1s"]])
def test_tls_options_need_https_routers(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca = LocalCA(tmp_path)
    assert main([*command, "--router", "http://127.0.0.1:1", "--tls-ca", str(ca.file)]) == 1
    assert "with --tls-ca or --tls-cert it must be an https URL" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["gateway", "router", "serve"])
def test_port_in_use_is_reported(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([command, "--port", str(port)]) == 1
    told = capsys.readouterr().err
    assert (
        f"cannot listen on 127.0.0.1:{port}: another process is listening on this port (hint: choose another --port"
        in told
    )


def test_invalid_port_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--port", "99999"]) == 1
    assert "cannot listen on 127.0.0.1:99999: a port must be between 0 and 65535" in capsys.readouterr().err


def test_engine_process_ends_if_the_arguments_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spawn, children = EngineChild.spawn, []

    def spawn_and_record() -> EngineChild:
        children.append(spawn((sys.executable, "-c", "import time; time.sleep(60)")))
        return children[-1]

    monkeypatch.setattr(EngineChild, "spawn", spawn_and_record)
    with pytest.raises(SystemExit):
        main(["serve", "--no-such-option"])
    assert main(["serve", "--kv-port", "5"]) == 1
    assert [child.process.returncode for child in children] == [-signal.SIGKILL] * 2
    assert all(child.connection.fileno() < 0 for child in children) and "--no-such-option" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert len(children) == 2
