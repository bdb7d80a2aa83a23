"""The setting timeouts.connect limits how long opening a connection to a provider may take."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_gateway import TIMEOUTS, LocalGateway


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never takes part in a TLS handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_connecting_ends_at_the_configured_limit(tmp_path: Path, silent_port: int) -> None:
    providers = {"custom-slow": {"base_url": f"https://127.0.0.1:{silent_port}"}}
    timeouts = {**TIMEOUTS, "connect": 0.25}
    with LocalGateway(tmp_path, [], lambda _: providers, timeouts=timeouts, retries={"attempts": 1}) as gateway:
        status, _, body = gateway.post("/v1/chat/completions", {"model": "custom-slow/m", "messages": []})
    assert status == 502 and "took longer than the limit of 0.25 s" in json.loads(body)["error"]["message"]
