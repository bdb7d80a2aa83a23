"""Every place that listens is listed here, and listens at loopback unless an option names another address."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from emberline.cli.__main__ import COMMANDS
from emberline.core.config import RouterConfig, ServerConfig
from emberline.core.engine_config import EngineConfig
from emberline.core.gateway_config import GatewayConfig
from emberline.core.transfer_config import TransferConfig
from emberline.gateway.fakes.provider import FakeProvider
from emberline.kernels.comm.rendezvous import Rendezvous
from emberline.kv.transfer.mooncake import MooncakeEngine
from emberline.kv.transfer.tcp import serve_tcp

SRC = Path(__file__).parents[2] / "src/emberline"
# Calls that open a listening socket, or bind one.
LISTENING_CALLS = {"bind", "create_server", "start_server", "TCPStore", "ThreadingHTTPServer", "HTTPServer", "serve"}
LOOPBACK = "127.0.0.1"

# file: the number of its calls, and where they listen
LISTENERS = {
    "server/listener.py": (
        1,
        "ServiceConfig.host: the HTTP listener of serve, worker, router and gateway, /metrics too",
    ),
    "net/server.py": (1, "the socket of server/listener.py"),
    "kv/transfer/tcp.py": (1, "TransferConfig.listen_host, which is the worker's --host"),
    "kv/transfer/unix.py": (2, "a Unix socket"),
    "engine/ranks/node_address.py": (2, "--master, which has no default, and a probe of --node-address"),
    "engine/ranks/node_listener.py": (1, "the socket of node_address.py"),
    "engine/ranks/ray_launcher.py": (1, "a probe: it does not listen"),
    "kernels/comm/rendezvous.py": (1, "a client of node_listener.py's TCPStore"),
    "cluster/address.py": (1, "a probe: it does not listen"),
    "autoscaler/local_fleet.py": (1, "a lock, an abstract Unix socket: it does not listen"),
    "core/freeport.py": (1, "a probe: it does not listen"),
    # For tests and benchmarks.
    "cluster/fake.py": (1, LOOPBACK),
    "gateway/fakes/provider.py": (1, "its argument `host`"),
    "chaos/fault_proxy.py": (1, "its argument `host`, which has no default"),
    "bench/event_loop_upstream.py": (1, LOOPBACK),
    "bench/library_http_child.py": (1, LOOPBACK),
    "bench/library_otlp.py": (1, LOOPBACK),
    "bench/streams.py": (1, LOOPBACK),
    "bench/transfer.py": (1, LOOPBACK),
}


def listening_calls(file: Path) -> int:
    """How many calls in a file may open a listener. A call of our own HTTPServer needs a socket, so it is none."""
    count = 0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_ours = name in ("HTTPServer", "serve") and not _has_address(node)
            count += name in LISTENING_CALLS and not is_ours
    return count


def _has_address(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Tuple)


def test_every_listener_is_listed() -> None:
    found = {str(file.relative_to(SRC)): listening_calls(file) for file in sorted(SRC.rglob("*.py"))}
    assert {file: count for file, count in found.items() if count} == {
        file: count for file, (count, _) in LISTENERS.items()
    }


@pytest.mark.parametrize(
    "config", [ServerConfig(), RouterConfig(), GatewayConfig()], ids=lambda each: type(each).__name__
)
def test_services_listen_at_loopback(config: ServerConfig | RouterConfig | GatewayConfig) -> None:
    assert config.host == LOOPBACK and not config.open


def test_options_for_addresses_default_to_loopback() -> None:
    """None: the default of the config, which the other tests check."""
    found = {}
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"emberline.cli.{command}").add_arguments(parser)
        found |= {f"{command} {a.dest}": a.default for a in parser._actions if a.dest.endswith("host")}
    assert found["autoscale metrics_host"] == LOOPBACK and "serve host" in found
    assert {*found.values()} == {LOOPBACK, None}


def test_other_listeners_are_at_loopback() -> None:
    assert TransferConfig("name").listen_host == LOOPBACK
    for listening in (serve_tcp, MooncakeEngine.__init__, FakeProvider.start):
        assert inspect.signature(listening).parameters["host"].default == LOOPBACK, listening
    assert {each.name: each.default for each in fields(Rendezvous)}["address"] == LOOPBACK
    network = EngineConfig.build("").network
    assert network.kv_mooncake_host is None and not network.kv_mooncake
    assert EngineConfig.build("").parallel.master is None
