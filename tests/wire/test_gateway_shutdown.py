"""A gateway that stops while streams are open: each gets an error event of its dialect and is logged as failed."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pytest
from local_gateway import LocalGateway

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}


@pytest.mark.parametrize("path", BODIES)
def test_open_streams_get_an_error_event(tmp_path: Path, path: str) -> None:
    gateway = LocalGateway(tmp_path, ("oai",), lambda urls: {"openai": {"base_url": urls["oai"], "key": "k"}})
    with gateway:
        gateway.fakes["oai"].pace = 1.0
        gateway.fakes["oai"].fault_after = 1000
        body = json.dumps({"model": "openai/gpt-5", "stream": True, **BODIES[path]}).encode()
        request = urllib.request.Request(f"{gateway.url}/v1/{path}", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            id = reply.headers["cf-aig-log-id"]
            got = reply.readline()
            assert got.startswith((b"data:", b"event:"))
            stopping = threading.Thread(target=gateway._loop.run, args=(gateway._server.stop(0.0),))
            stopping.start()
            got += reply.read()
            stopping.join(30)
        assert b"server shut down" in got and b"[DONE]" not in got and b"message_stop" not in got
        record = gateway.record(id)
        assert (record.status, record.success, record.ended, record.error) == (503, False, "cut", "shutting_down")
