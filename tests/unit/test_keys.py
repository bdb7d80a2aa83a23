"""Keys that would let every caller in, or that no request can carry, are refused without being shown."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from emberline.cli import gateway
from emberline.cli.__main__ import main
from emberline.core.config import RouterConfig, ServerConfig, WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.core.keys import add_key_from_environment, read_cluster_keys

WORKER = WorkerConfig(("http://r",))


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (lambda key: RouterConfig(api_keys=(key,)), "api_keys"),
        (lambda key: ServerConfig(api_keys=("good", key)), "api_keys"),
        (lambda key: GatewayConfig(api_keys=(key,)), "api_keys"),
        (lambda key: GatewayConfig(engine_key=key), "engine_key"),
        (lambda key: RouterConfig(cluster_key=key), "cluster_key"),
        (lambda key: ServerConfig(worker=WORKER, cluster_key=key), "cluster_key"),
        (lambda key: RouterConfig(cluster_key="good", other_cluster_keys=(key,)), "cluster_key"),
    ],
)
def test_unusable_keys_are_refused(build: Callable[[str], object], param: str) -> None:
    for key, reason in (
        ("", "is empty"),
        (" \n", "is empty"),
        ("secret\n", "begins or ends with"),
        ("sec\nret", "other than printable ASCII"),
        ("s\xe9cret", "other than printable ASCII"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            build(key)
        assert caught.value.param == param and "ret" not in str(caught.value)
    build("a key")


def test_cluster_key_of_the_environment_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "")
    assert read_cluster_keys() == ()
    for arguments in (["drain", "w", "--cluster-key", "secret\n"], ["drain", "w"]):
        monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "secret\n")
        assert main(arguments) != 0
        error = capsys.readouterr().err
        assert "begins or ends with" in error and "secret" not in error


def test_several_cluster_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "new\nold\n\nnew\n")
    assert read_cluster_keys() == ("new", "old") and read_cluster_keys("given") == ("given",)
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "new\n old")
    with pytest.raises(InvalidRequest, match="begins or ends with"):
        read_cluster_keys()


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (["serve"], "EMBERLINE_API_KEY"),
        (["router"], "EMBERLINE_API_KEY"),
        (["cluster", "up"], "EMBERLINE_API_KEY"),
        (["gateway"], "EMBERLINE_ADMIN_KEY"),
    ],
)
def test_api_keys_are_read_from_the_environment(
    command: list[str],
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    monkeypatch.setenv(variable, "secret\n")
    assert main([*command, "--api-key", "k" * 16]) == 1
    assert "the key of api_keys begins or ends with" in capsys.readouterr().err
    monkeypatch.setenv(variable, "first")
    assert add_key_from_environment(("first", "second"), variable) == ("first", "second")
    monkeypatch.setenv(variable, "")
    assert add_key_from_environment(("second",), variable) == ("second",)


def test_secrets_of_a_gateway_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    monkeypatch.setenv("EMBERLINE_STORE_URL", "postgresql://u:p@h/d")
    monkeypatch.setenv("EMBERLINE_REDIS_URL", "redis://:p@h")
    monkeypatch.setenv("EMBERLINE_ENGINE_KEY", "k")
    config = gateway.build_config({"store": "sqlite:x"}, parser.parse_args([]))
    assert (config.store, config.redis, config.engine_key) == ("postgresql://u:p@h/d", "redis://:p@h", "k")
    config = gateway.build_config({}, parser.parse_args(["--store", "sqlite:y"]))
    assert config.store == "sqlite:y"


@pytest.mark.parametrize(
    ("name", "value"), [("store", 98765), ("engine_key", 98765), ("api_keys", [98765]), ("api_keys", "98765")]
)
def test_settings_of_a_gateway_with_the_wrong_type_are_named(name: str, value: object) -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    with pytest.raises(InvalidRequest, match=f"the setting {name} is a secret, which has the wrong type") as refused:
        gateway.build_config({name: value}, parser.parse_args([]))
    assert "98765" not in str(refused.value) and refused.value.param == name
    with pytest.raises(InvalidRequest, match="the setting port is 'x', which has the wrong type"):
        gateway.build_config({"port": "x"}, parser.parse_args([]))


@pytest.mark.parametrize("engine", ["", "router:8000", "ftp://router"])
def test_engine_of_a_gateway_that_is_no_url_is_named(engine: str) -> None:
    with pytest.raises(InvalidRequest, match=f"engine is '{engine}'; it must be an http or https URL"):
        GatewayConfig(engine=engine)


@pytest.mark.parametrize("name", ["queue", "split_tokens", "migration_wait", "lost_after"])
def test_router_setting_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is nan"):
        RouterConfig(**{name: float("nan")})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"x-vendor-key": 12345}, "otlp_headers.x-vendor-key is of type int"),
        ({"x-vendor-key": ["12345"]}, "otlp_headers.x-vendor-key is of type list"),
        ({"x-vendor-key": "12345\n"}, "otlp_headers.x-vendor-key has a character other than"),
        ({"x vendor": "12345"}, "'x vendor', a name that HTTP does not allow"),
    ],
)
def test_headers_for_the_collector_that_are_no_text_are_named(headers: dict[str, object], reason: str) -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        gateway.build_config({"otlp_headers": headers}, parser.parse_args([]))
    assert caught.value.param == "otlp_headers" and "12345" not in str(caught.value)
    assert gateway.build_config({"otlp_headers": {"x-vendor-key": "12345"}}, parser.parse_args([])).otlp_headers
