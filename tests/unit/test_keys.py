"""Keys that would let every caller in, or that no request can carry, are refused without being shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emberline.cli.__main__ import main
from emberline.core.config import RouterConfig, ServerConfig, WorkerConfig, cluster_key_from_environment
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig

WORKER = WorkerConfig(("http://r",))


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (lambda key: RouterConfig(api_keys=(key,)), "api_keys"),
        (lambda key: ServerConfig(api_keys=("good", key)), "api_keys"),
        (lambda key: GatewayConfig(api_keys=(key,)), "api_keys"),
        (lambda key: RouterConfig(cluster_key=key), "cluster_key"),
        (lambda key: ServerConfig(worker=WORKER, cluster_key=key), "cluster_key"),
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
    assert cluster_key_from_environment() is None
    for arguments in (["drain", "w", "--cluster-key", "secret\n"], ["drain", "w"]):
        monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", "secret\n")
        assert main(arguments) != 0
        error = capsys.readouterr().err
        assert "begins or ends with" in error and "secret" not in error
