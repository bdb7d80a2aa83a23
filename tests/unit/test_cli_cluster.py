"""`emberline cluster up`: which processes it starts, as what, and what they know."""

from __future__ import annotations

import argparse
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from emberline.cli import cluster, drain, serve, service
from emberline.cluster.supervisor import children
from emberline.core.config import EngineConfig, TransferConfig, WorkerConfig, cluster_key
from emberline.core.errors import EmberlineError, InvalidRequest


def counts(*options: str) -> dict[str, int]:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    return {role: n for role, n in cluster._workers(parser.parse_args(["up", *options, "m"])).items() if n}


def test_how_many_of_each() -> None:
    assert counts() == {"both": 2} and counts("--workers", "3") == {"both": 3}
    assert counts("--prefill", "1", "--decode", "2") == {"prefill": 1, "decode": 2}
    assert counts("--prefill", "1", "--workers", "1") == {"prefill": 1, "both": 1}
    for wrong in (["--workers", "0"], ["--prefill", "2"], ["--decode", "-1", "--workers", "2"]):
        with pytest.raises(InvalidRequest):
            counts(*wrong)


@pytest.mark.parametrize("option", ["--kv-checksums", "--kv-mooncake", "--kv-port=7000", "--worker-name=w"])
def test_who_has_no_router_exchanges_nothing(option: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(InvalidRequest, match="for a worker of a router"):
        serve._worker(parser.parse_args(["m", option]))
    assert serve._worker(parser.parse_args(["m", option, "--router", "http://r"])) is not None


def test_the_key_is_in_no_command() -> None:
    made = children(["--port", "1"], {"prefill": 1, "decode": 2}, ["m"], url="http://r", key="hush", logs=Path("/logs"))
    assert [child.name for child in made] == ["router", "prefill-1", "decode-1", "decode-2"]
    assert made[2].arguments == ["worker", "m", "--role", "decode", "--router", "http://r", "--worker-name", "decode-1"]
    assert all("hush" not in child.arguments and "hush" not in repr(child) for child in made)
    assert all(child.environment["EMBERLINE_CLUSTER_KEY"] == "hush" for child in made)


def test_every_worker_has_kv_ports_of_its_own() -> None:
    counts = {"prefill": 1, "both": 2}
    made = children([], counts, ["m"], url="http://r", key="k", logs=Path("/logs"), kv_port=7000)
    assert [child.arguments[-2:] for child in made[1:]] == [["--kv-port", str(port)] for port in (7000, 7008, 7016)]
    with pytest.raises(InvalidRequest, match="every worker's"):
        cluster._worker(argparse.Namespace(options=["--kv-port=7000"], model="m"), 2, [])


def test_engines_of_one_worker_have_kv_ports_of_their_own() -> None:
    config = EngineConfig("m", kv_port=7000, transfer=TransferConfig("w", required=False))
    second = config.with_kv_ports(1)
    assert (second.kv_port, second.transfer) == (7008, TransferConfig("w", port=7008, required=True))
    free = EngineConfig("m", transfer=TransferConfig("w", required=False))
    assert free.with_kv_ports(1) == free
    with pytest.raises(InvalidRequest, match="kv_port is 65535"):
        EngineConfig("m", kv_port=65535)


def test_checksums_come_with_mooncake_unless_they_are_switched_off() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)

    def sealed(*options: str) -> bool:
        given = service.given(parser.parse_args(["m", *options]), EngineConfig) | {"model": ""}
        return EngineConfig(**given).seals_blocks

    assert not sealed() and sealed("--kv-checksums") and sealed("--kv-mooncake")
    assert not sealed("--kv-mooncake", "--no-kv-checksums")


def test_an_address_for_mooncake_needs_mooncake() -> None:
    with pytest.raises(InvalidRequest, match="neither kv_mooncake nor kv_store"):
        EngineConfig("m", kv_mooncake_host="10.0.0.1")


def test_the_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "hush")
    assert cluster_key() == "hush"
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "")
    assert cluster_key() is None and WorkerConfig("http://r").role == "both"


def test_a_worker_is_drained_when_others_have_what_is_theirs() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "p", "health": "draining", "open": 0, "transfer": {"leases": 2}, "seconds_since_beat": 0.5},
        {"name": "d", "health": "lost", "open": 1, "transfer": {"leases": 3}, "seconds_since_beat": 9.0},
        {"name": "vllm", "health": "ready", "open": 4, "transfer": None, "seconds_since_beat": 0.25},
    ]
    rows = [{**row, "incarnation": row["name"]} for row in rows]
    left = {name: drain._left({"workers": rows}, name, name) for name in ("p", "d", "vllm", "gone")}
    assert left == {"p": (0, 2, 0.5), "d": (1, 0, -1.0), "vllm": (4, 0, 0.25), "gone": (0, 0, -1.0)}
    assert drain._left({"workers": rows}, "vllm", "the one before") == (0, 0, -1.0)


def test_a_router_that_dies_in_the_middle_of_its_answer_is_away() -> None:
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
        assert cluster._status(url, "key") is None
        with pytest.raises(EmberlineError, match="no router"):
            drain._ask(url, "/cluster/status")
        thread.join()


@pytest.mark.parametrize("late", [["--port", "8001"], ["--port=8001"], ["--prefill", "1"], ["--role", "decode"]])
def test_what_is_the_clusters_is_refused_after_the_model(late: list[str]) -> None:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    with pytest.raises(InvalidRequest, match="before the model"):
        cluster._worker(parser.parse_args(["up", "m", *late]), 2, [])
    assert cluster._worker(parser.parse_args(["up", "m", "--", "--threads", "3"]), 2, []) == ["m", "--threads", "3"]
