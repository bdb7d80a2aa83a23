"""A cluster with mutual TLS: real processes, the real OpenAI client, rotation while a stream runs."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from routers import spawn, stop, tiny_model, until
from servers import Server

from emberline.bench.certificates import IssuedFiles, LocalCA
from emberline.cli.__main__ import main
from emberline.core.freeport import free_port
from emberline.core.tls import CHECK_INTERVAL_S
from emberline.kv.transfer.channel import MessageKind
from emberline.kv.transfer.errors import PeerLost
from emberline.kv.transfer.tls_channel import make_channel

CLUSTER_KEY = "key of the cluster"


@dataclass
class SecureCluster:
    ca: LocalCA
    router: Server
    files: IssuedFiles  # of the router

    def context(self, files: IssuedFiles | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca.file))
        if files is not None:
            context.load_cert_chain(*files)
        return context

    def call(self, path: str, body: Any = None, files: IssuedFiles | None = None) -> Any:
        headers = {"authorization": f"Bearer {CLUSTER_KEY}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.router.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=10, context=self.context(files)) as reply:
            text = reply.read().decode()
        return json.loads(text) if "json" in reply.headers["content-type"] else text

    def client(self) -> openai.OpenAI:
        transport = openai.DefaultHttpxClient(verify=self.context())
        return openai.OpenAI(base_url=f"{self.router.url}/v1", api_key="k", http_client=transport, max_retries=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    """A router and a worker. API clients need no certificate, the processes do."""
    home = tmp_path_factory.mktemp("tls")
    ca, model = LocalCA(home), tiny_model(home / "model")
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        files = ca.issue(name, ("127.0.0.1", f"{name}.cluster.example"))
        options = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(ca.file))
        more = ("--tls-names", "*.cluster.example", "--tls-client-certs", "cluster", "--cluster-key", CLUSTER_KEY)
        started.append(spawn(home / f"{name}.log", "-m", "emberline.cli", *words, *options, *more))
        return started[-1]

    port = free_port()
    url = f"https://127.0.0.1:{port}"
    router = Server(url, start("router", "router", "--port", str(port)), home / "router.log")
    made = SecureCluster(ca, router, IssuedFiles(home / "router-cert.pem", home / "router-key.pem"))
    worker = ("--embedder", "none", "--threads", "1", "--device", "cpu", "--served-name", "tiny", "--role", "prefill")
    start("p", "worker", str(model), "--router", url, "--worker-name", "p", *worker)
    try:
        until(lambda: made.call("/health")["workers"].get("p") == "ready")
        yield made
    finally:
        stop(*started)


def test_stream_goes_on_while_the_router_rotates(cluster: SecureCluster) -> None:
    messages: Any = [{"role": "user", "content": "count to a hundred"}]
    with cluster.client() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        new = cluster.ca.issue("new", ("127.0.0.1", "new.cluster.example"))
        for target, source in zip(cluster.files, new, strict=True):
            source.replace(target)
        time.sleep(CHECK_INTERVAL_S + 0.1)
        assert "emberline:tls_reloads_total 1" in cluster.call("/metrics", files=cluster.files)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        assert again.usage is not None and again.usage.completion_tokens == 4


def test_kv_transfer_of_a_worker_needs_a_certificate(cluster: SecureCluster) -> None:
    """The test registers as a worker, and so learns where the prefill worker's engine listens."""
    registration = {"name": "x", "incarnation": "x", "url": "https://127.0.0.1:1", "models": [{"name": "tiny"}]}
    peer = cluster.call("/cluster/register", registration, cluster.files)["peers"]["tiny"][0]
    assert "tcp" not in peer["endpoints"]
    host, _, port = peer["endpoints"]["tls"].rpartition(":")

    def send_hello(context: ssl.SSLContext | None) -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            connection = plain if context is None else context.wrap_socket(plain, server_hostname=host)
            with connection:
                channel = make_channel(connection, 5.0)
                channel.send_json(MessageKind.HELLO, 1, {"incarnation": peer["incarnation"]}, time.monotonic() + 5)
                return channel.receive(time.monotonic() + 5).body

    assert b"layout" in send_hello(cluster.context(cluster.files)), "it asks for the layout, which the test left out"
    for refused in (None, cluster.context(), cluster.context(cluster.ca.issue("other", ("other.example",)))):
        with pytest.raises((PeerLost, OSError)):
            send_hello(refused)


def test_calls_of_strangers_are_refused(cluster: SecureCluster, tmp_path: Path) -> None:
    stranger = cluster.ca.issue("stranger", ("127.0.0.1", "stranger.example"))
    foreign = LocalCA(tmp_path).issue("foreign", ("127.0.0.1", "router.cluster.example"))
    for files, word in ((None, "without a client certificate"), (stranger, "stranger.example")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            cluster.call("/cluster/drain", {"name": "p"}, files)
        assert caught.value.code == 403 and word in caught.value.read().decode()
    plain = {"name": "x", "incarnation": "x", "url": "http://127.0.0.1:1", "models": [{"name": "tiny"}]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        cluster.call("/cluster/register", plain, cluster.files)
    assert caught.value.code == 400 and "it must be an https URL" in caught.value.read().decode()
    with pytest.raises(OSError, match=r"(?i)alert|reset|closed|EOF"):
        cluster.call("/health", files=foreign)
    with pytest.raises(OSError, match=r"(?i)reset|closed|without response"):
        urllib.request.urlopen(cluster.router.url.replace("https", "http") + "/health", timeout=10)
    assert cluster.call("/health")["workers"]["p"] == "ready", "API clients and probes need no certificate"


def test_drain_with_a_certificate(cluster: SecureCluster, capsys: pytest.CaptureFixture[str]) -> None:
    tls = ["--tls-cert", str(cluster.files.cert), "--tls-key", str(cluster.files.key), "--tls-ca", str(cluster.ca.file)]
    command = ["drain", "p", "--router", cluster.router.url, "--cluster-key", CLUSTER_KEY]
    assert main([*command, "--no-wait", *tls]) == 0 and main([*command, "--undo", *tls]) == 0
    assert "accepts requests again" in capsys.readouterr().out
    assert main([*command, "--tls-ca", str(cluster.ca.file)]) != 0
    assert "without a client certificate" in capsys.readouterr().err
