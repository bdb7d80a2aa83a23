"""A split cluster with mutual TLS: real processes, the real OpenAI client, rotation while a stream runs."""

from __future__ import annotations

import json
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

CLUSTER_KEY = "key of the cluster"


@dataclass
class SecureCluster:
    ca: LocalCA
    router: Server
    files: IssuedFiles
    home: Path

    def context(self, files: IssuedFiles | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca.file))
        if files is not None:
            context.load_cert_chain(*files)
        return context

    def get(self, path: str, key: str = CLUSTER_KEY, files: IssuedFiles | None = None) -> Any:
        request = urllib.request.Request(self.router.url + path, headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=10, context=self.context(files)) as reply:
            text = reply.read().decode()
        return json.loads(text) if "json" in reply.headers["content-type"] else text

    def client(self) -> openai.OpenAI:
        transport = openai.DefaultHttpxClient(verify=self.context())
        return openai.OpenAI(base_url=f"{self.router.url}/v1", api_key="k", http_client=transport, max_retries=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    """A router, a prefill and a decode worker. API clients need no certificate, the processes do."""
    home = tmp_path_factory.mktemp("tls")
    ca, model = LocalCA(home), tiny_model(home / "model")
    started: list[subprocess.Popen[bytes]] = []

    def tls_options(name: str) -> tuple[str, ...]:
        files = ca.issue(name, ("127.0.0.1", f"{name}.cluster.example"))
        options = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(ca.file))
        return (*options, "--tls-names", "*.cluster.example", "--tls-client-certs", "cluster")

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        common = (*tls_options(name), "--cluster-key", CLUSTER_KEY)
        started.append(spawn(home / f"{name}.log", "-m", "emberline.cli", *words, *common))
        return started[-1]

    port = free_port()
    url = f"https://127.0.0.1:{port}"
    router = start("router", "router", "--port", str(port), "--split-tokens", "8")
    made = SecureCluster(ca, Server(url, router, home / "router.log"), IssuedFiles(home / "a", home / "b"), home)
    made.files = IssuedFiles(home / "router-cert.pem", home / "router-key.pem")
    for role in ("prefill", "decode"):
        options = ("--embedder", "none", "--threads", "1", "--device", "cpu", "--served-name", "tiny", "--role", role)
        start(role, "worker", str(model), "--router", url, "--worker-name", role, *options)
    try:
        until(lambda: _is_ready(made))
        yield made
    finally:
        stop(*started)


def _is_ready(cluster: SecureCluster) -> bool:
    rows = {row["name"]: row for row in cluster.get("/cluster/status", files=cluster.files)["workers"]}
    return len(rows) == 2 and all(row["health"] == "ready" for row in rows.values()) and bool(rows["decode"]["paired"])


def test_stream_and_handoff_over_tls_while_the_router_rotates(cluster: SecureCluster) -> None:
    words = "count the words of this long prompt " * 4
    messages: Any = [{"role": "user", "content": words}]
    with cluster.client() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        assert stream.response.headers["x-emberline-prefill"] == "prefill"
        next(iter(stream))
        new = cluster.ca.issue("new", ("127.0.0.1", "new.cluster.example"))
        for target, source in zip(cluster.files, new, strict=True):
            source.replace(target)
        time.sleep(1.1)
        assert "emberline:tls_reloads_total 1" in cluster.get("/metrics", files=cluster.files)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        assert again.usage is not None and again.usage.completion_tokens == 4
    transfer = {row["name"]: row["transfer"] for row in cluster.get("/cluster/status", files=cluster.files)["workers"]}
    assert transfer["decode"]["pulled_bytes"] > 0


def test_calls_of_strangers_are_refused(cluster: SecureCluster, tmp_path: Path) -> None:
    stranger = cluster.ca.issue("stranger", ("127.0.0.1", "stranger.example"))
    foreign = LocalCA(tmp_path).issue("foreign", ("127.0.0.1", "router.cluster.example"))
    for files, word in ((None, "without a client certificate"), (stranger, "stranger.example")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            cluster.get("/cluster/drain", files=files)
        assert caught.value.code == 405, "a wrong method is reported first"
        request = urllib.request.Request(
            f"{cluster.router.url}/cluster/drain",
            b'{"name": "decode"}',
            {"content-type": "application/json", "authorization": f"Bearer {CLUSTER_KEY}"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10, context=cluster.context(files))
        assert caught.value.code == 403 and word in caught.value.read().decode()
    with pytest.raises(OSError, match=r"(?i)alert|reset|closed|EOF"):
        cluster.get("/health", files=foreign)
    with pytest.raises(OSError):
        urllib.request.urlopen(cluster.router.url.replace("https", "http") + "/health", timeout=10)
    assert cluster.get("/health")["status"] == "ready", "API clients and probes need no certificate"


def test_drain_with_a_certificate(cluster: SecureCluster, capsys: pytest.CaptureFixture[str]) -> None:
    tls = ["--tls-cert", str(cluster.files.cert), "--tls-key", str(cluster.files.key), "--tls-ca", str(cluster.ca.file)]
    command = ["drain", "prefill", "--router", cluster.router.url, "--cluster-key", CLUSTER_KEY]
    assert main([*command, "--no-wait", *tls]) == 0 and main([*command, "--undo", *tls]) == 0
    assert "accepts requests again" in capsys.readouterr().out
    assert main([*command, "--tls-ca", str(cluster.ca.file)]) != 0
    assert "without a client certificate" in capsys.readouterr().err
