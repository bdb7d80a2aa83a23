"""`emberline cluster up`: which processes it starts, as what, and what they know."""

from __future__ import annotations

import argparse
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from emberline.cli import cluster, drain, serve
from emberline.cli.options import explicit_options
from emberline.cluster.supervisor import build_processes
from emberline.core.config import RouterConfig, WorkerConfig
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.gpus import Gpu, usable_gpus
from emberline.core.keys import add_key_from_environment, read_cluster_keys
from emberline.core.transfer_config import TransferConfig


def counts(*options: str) -> dict[str, int]:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    return {role: n for role, n in cluster._worker_counts(parser.parse_args(["up", *options, "m"])).items() if n}


def test_worker_counts() -> None:
    assert counts() == {"both": 2} and counts("--workers", "3") == {"both": 3}
    assert counts("--prefill", "1", "--decode", "2") == {"prefill": 1, "decode": 2}
    assert counts("--prefill", "1", "--workers", "1") == {"prefill": 1, "both": 1}
    for wrong in (["--workers", "0"], ["--prefill", "2"], ["--decode", "-1", "--workers", "2"]):
        with pytest.raises(InvalidRequest):
            counts(*wrong)


@pytest.mark.parametrize("option", ["--kv-checksums", "--kv-mooncake", "--kv-port=7000", "--worker-name=w"])
def test_worker_options_need_router(option: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(InvalidRequest, match="for a worker of a router"):
        serve._worker_config(parser.parse_args(["m", option]))
    assert serve._worker_config(parser.parse_args(["m", option, "--router", "http://r"])) is not None


def test_keys_are_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_processes(
        ["--port", "1"],
        {"prefill": 1, "decode": 2},
        ["m"],
        router_url="http://r",
        cluster_keys=("hush", "old"),
        log_dir=Path("/logs"),
        api_keys=["first key", "second"],
    )
    assert [child.name for child in made] == ["router", "prefill-1", "decode-1", "decode-2"]
    assert made[2].arguments == ["worker", "m", "--role", "decode", "--router", "http://r", "--worker-name", "decode-1"]
    assert all(child.environment["EMBERLINE_CLUSTER_KEY"] == "hush\nold" for child in made)
    for key in ("hush", "first key", "second"):
        assert all(key not in child.arguments and key not in repr(child) for child in made)
    for child in made:
        monkeypatch.setenv("EMBERLINE_API_KEY", child.environment["EMBERLINE_API_KEY"])
        assert add_key_from_environment([]) == ("first key", "second")


def test_each_worker_has_its_own_kv_ports() -> None:
    counts = {"prefill": 1, "both": 2}
    made = build_processes(
        [], counts, ["m"], router_url="http://r", cluster_keys=("k",), log_dir=Path("/logs"), kv_port=7000
    )
    assert [child.arguments[-2:] for child in made[1:]] == [["--kv-port", str(port)] for port in (7000, 7008, 7016)]
    with pytest.raises(InvalidRequest, match="option of the cluster"):
        cluster._worker_options(argparse.Namespace(options=["--kv-port=7000"], model="m"), 2, [])


def test_each_engine_has_its_own_kv_ports() -> None:
    config = EngineConfig.build("m", kv_port=7000, transfer=TransferConfig("w", required=False))
    second = config.with_kv_ports(1)
    assert (second.network.kv_port, second.transfer) == (7008, TransferConfig("w", listen_port=7008, required=True))
    free = EngineConfig.build("m", transfer=TransferConfig("w", required=False))
    assert free.with_kv_ports(1) == free
    with pytest.raises(InvalidRequest, match="kv_port is 65535"):
        EngineConfig.build("m", kv_port=65535)


def test_mooncake_enables_checksums_by_default() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)

    def sealed(*options: str) -> bool:
        given = explicit_options(parser.parse_args(["m", *options]), EngineConfig)
        return EngineConfig.build("", **given).network.uses_checksums

    assert not sealed() and sealed("--kv-checksums") and sealed("--kv-mooncake")
    assert not sealed("--kv-mooncake", "--no-kv-checksums")


def test_mooncake_host_needs_mooncake() -> None:
    with pytest.raises(InvalidRequest, match="neither kv_mooncake nor kv_store"):
        EngineConfig.build("m", kv_mooncake_host="10.0.0.1")


def test_all_processes_get_the_tls_options() -> None:
    files: dict[str, Any] = {"tls_cert": "c.pem", "tls_key": "k.pem"}
    config = RouterConfig(host="0.0.0.0", **files, tls_ca="ca.pem", tls_names=("a", "*.b"), tls_client_certs="cluster")
    assert cluster._router_url(config, 8000) == "https://127.0.0.1:8000", "a certificate cannot have 0.0.0.0"
    options = cluster._tls_options(config)
    assert options == ["--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-ca", "ca.pem", "--tls-names", "a,*.b",
                       "--tls-client-certs", "cluster"]  # fmt: skip
    assert cluster._tls_options(RouterConfig()) == [] and cluster._router_url(RouterConfig(), 1) == "http://127.0.0.1:1"
    with pytest.raises(InvalidRequest, match="the workers must check the certificate of the router"):
        cluster._router_url(RouterConfig(**files), 8000)


def test_cluster_key_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "hush")
    assert read_cluster_keys() == ("hush",)
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "")
    assert read_cluster_keys() == () and WorkerConfig(("http://r",)).role == "both"


def test_drain_waits_until_blocks_are_fetched() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "p", "health": "draining", "open": 0, "transfer": {"leases": 2}, "seconds_since_beat": 0.5},
        {"name": "d", "health": "lost", "open": 1, "transfer": {"leases": 3}, "seconds_since_beat": 9.0},
        {"name": "vllm", "health": "ready", "open": 4, "transfer": None, "seconds_since_beat": 0.25},
    ]
    rows = [{**row, "incarnation": row["name"]} for row in rows]
    left = {name: drain._remaining_work({"workers": rows}, name, name) for name in ("p", "d", "vllm", "gone")}
    assert left == {"p": (0, 2, 0.5), "d": (1, 0, -1.0), "vllm": (4, 0, 0.25), "gone": (0, 0, -1.0)}
    assert drain._remaining_work({"workers": rows}, "vllm", "the one before") == (0, 0, -1.0)


def test_router_dying_mid_reply_counts_as_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def half() -> None:
            for _ in range(2):
                visitor, _ = listener.accept()
                with visitor:
                    visitor.recv(1 << 16)
                    visitor.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        thread = threading.Thread(target=half)
        thread.start()
        assert cluster._fetch_status(url, "key") is None
        with pytest.raises(EmberlineError, match="no router"):
            drain.Router(url, {}).call("/cluster/status")
        thread.join()


@pytest.mark.parametrize("late", [["--port", "8001"], ["--port=8001"], ["--prefill", "1"], ["--role", "decode"]])
def test_cluster_options_after_model_are_refused(late: list[str]) -> None:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    with pytest.raises(InvalidRequest, match="before the model"):
        cluster._worker_options(parser.parse_args(["up", "m", *late]), 2, [])
    assert cluster._worker_options(parser.parse_args(["up", "m", "--", "--threads", "3"]), 2, []) == [
        "m",
        "--threads",
        "3",
    ]


def start_options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    return parser.parse_args(["up", *words])


SMI = "0, GPU-a, 9.0, 140000\n1, GPU-b, 7.5, 80000\n2, GPU-c, 9.0, 100000\n"


@pytest.mark.parametrize(("visible", "expected"), [(None, ["0", "2"]), ("GPU-c", ["2"]), ("2,0", ["2", "0"]), ("", [])])
def test_workers_use_available_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{SMI}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in usable_gpus()] == expected


def test_no_gpus_without_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert usable_gpus() == []


def test_workers_share_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu("0", 100 << 30), Gpu("2", 80 << 30)]
    assert cluster._worker_options(start_options("m"), 2, [], gpus) == ["m"], (
        "each has a GPU of its own, and plans its memory"
    )
    assert cluster._worker_options(start_options("m"), 4, [], gpus) == ["m", "--kv-memory", str(20 << 30)]
    assert cluster._worker_options(start_options("m", "--kv-memory", "1G"), 4, [], gpus) == ["m", "--kv-memory", "1G"]
    assert cluster._worker_options(start_options("m"), 1, [])[-2:] == ["--device", "cpu"]
    monkeypatch.setattr(cluster, "core_count", lambda: 16)
    for ranks, threads in (((), 8), (("--tp", "2", "--pp=2"), 2), (("--tp=16",), 1)):
        options = cluster._worker_options(start_options("m", *ranks), 2, [])
        assert options[1:3] == ["--threads", str(threads)], "threads are per rank, and all ranks share the cores"
    may = {
        words: cluster._may_use_gpus(start_options("m", *words))
        for words in ((), ("--device", "cpu"), ("--threads=2",))
    }
    assert may == {(): True, ("--device", "cpu"): False, ("--threads=2",): False}
    assert cluster._may_use_gpus(start_options("m", "--device", "cuda")) and cluster._may_use_gpus(
        start_options("m", "--device=cuda")
    )
    made = build_processes(
        [], {"both": 3}, ["m"], router_url="http://r", cluster_keys=("k",), log_dir=Path("/logs"), gpus=["0", "2"]
    )
    assert [child.environment.get("CUDA_VISIBLE_DEVICES") for child in made[1:]] == ["0", "2", "0"]
