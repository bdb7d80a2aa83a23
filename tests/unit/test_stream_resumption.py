"""Which workers a router asks for the tokens of a stream that a client continues."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emberline.cluster.registration import ModelRegistration, WorkerRegistration
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig
from emberline.core.errors import EmberlineError, EngineUnavailable, StreamNotResumable
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.stream_resumption import StreamResumer
from emberline.router.request_summary import RequestSummary
from emberline.router.worker_client import UpstreamUnreachable

INCARNATION, CLUSTER_KEY = "abc", "cluster-secret"


class FakeReply:
    def __init__(self, status: int) -> None:
        self.status = status

    async def read_all(self) -> bytes:
        return b"{}"

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "error"), [(401, EngineUnavailable), (403, EngineUnavailable), (410, StreamNotResumable)]
)
def test_refused_cluster_key_is_named(status: int, error: type[EmberlineError]) -> None:
    """The keys of router and worker may have their lines in another order. Such an error must not hide that."""

    class Client:
        async def request(self, url: str, request: Any) -> Any:
            return FakeReply(status)

    config = RouterConfig(cluster_key=CLUSTER_KEY, beat_seconds=0.05)
    dispatcher = Dispatcher(config, ManualClock())
    model = ModelRegistration("m", "f", 4096, 8, 4096, 16)
    dispatcher.register(WorkerRegistration("w", INCARNATION, "http://127.0.0.1:9", (model,)))
    exchange = SimpleNamespace(path="/v1/completions", headers={}, header=lambda name: "")
    resumer = StreamResumer(dispatcher, cast("Any", Client()), config)
    with pytest.raises(error) as raised:
        asyncio.run(
            resumer.find_stream(
                cast("Any", exchange),
                RequestSummary("m", 0, True, None),
                f"{INCARNATION}.{'0' * 16}.1.0",
                b"{}",
            )
        )
    assert ("refuses the router's cluster key" in str(raised.value)) == (status != 410)


class RecordingClient:
    def __init__(self) -> None:
        self.keys: list[str] = []

    async def request(self, url: str, request: Any) -> Any:
        self.keys.append(request.headers.get("authorization", ""))
        raise UpstreamUnreachable("refused")


def test_cluster_key_is_not_sent_to_servers_of_other_kinds() -> None:
    config = RouterConfig(cluster_key=CLUSTER_KEY, beat_seconds=0.05)
    dispatcher, client = Dispatcher(config, ManualClock()), RecordingClient()
    model = ModelRegistration("m", "f", 4096, 8, 4096, 16)
    dispatcher.register(WorkerRegistration("vllm", INCARNATION, "http://127.0.0.1:9", (model,), "both", "vllm"))
    exchange = SimpleNamespace(path="/v1/completions", headers={}, header=lambda name: "")
    summary = RequestSummary("m", 0, True, None)
    resumer = StreamResumer(dispatcher, cast("Any", client), config)
    with pytest.raises(StreamNotResumable):
        asyncio.run(resumer.find_stream(cast("Any", exchange), summary, f"{INCARNATION}.{'0' * 16}.1.0", b"{}"))
    assert client.keys == []
