"""What scripts/serve prints when everything answers."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from emberline.cli import startup_summary
from emberline.core.gateway_config import GatewayConfig

EMBEDDER = {"id": "minilm", "kind": "embedding"}
CHAT = {"id": "smollm2", "kind": "chat"}


@contextmanager
def serve_models(status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [EMBEDDER, CHAT]}).encode()
            self.send_response(status if self.path == "/v1/models" else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_summary_lists_urls_key_file_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_models(200) as port:
        assert startup_summary.main([str(port), str(port)]) == 0
    told = capsys.readouterr().err
    url = f"http://127.0.0.1:{port}"
    assert f"Playground   {url}/" in told and f"Dashboard    {url}/" in told
    assert str(GatewayConfig().admin_key_file) in told
    assert f"curl {url}/v1/chat/completions" in told and '"model": "smollm2"' in told
    assert "Authorization" not in told


def test_example_is_valid_shell_command(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_models(200) as port:
        startup_summary.main([str(port)])
    told = capsys.readouterr().err
    command = told[told.index("curl ") : told.index("  Stop")].replace("curl ", "printf '%s\\n' ", 1)
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    request = json.loads(words[-1])
    assert request["messages"] == [{"role": "user", "content": startup_summary.EXAMPLE_QUESTION}]
    assert request["temperature"] == 0


def test_readme_has_the_same_example() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    found = re.search(r"-d '(\{.*\})'", readme)
    assert found is not None
    body = json.loads(found[1])
    assert body["messages"][0]["content"] == startup_summary.EXAMPLE_QUESTION and body["temperature"] == 0


def test_example_has_key_header_if_server_has_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_models(401) as port:
        startup_summary.main([str(port)])
    told = capsys.readouterr().err
    assert "Authorization: Bearer API_KEY" in told and "Dashboard" not in told


def test_waiting_ends_with_parent() -> None:
    assert not startup_summary.wait_until_ready("http://127.0.0.1:9", lambda: False)


def test_loading_server_is_waited_for() -> None:
    statuses, waits = [503, 503, 200], iter([True, True, True, False])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()
    assert startup_summary.wait_until_ready(f"http://127.0.0.1:{server.server_port}", lambda: next(waits))
    assert statuses == []
    server.shutdown()
    server.server_close()
