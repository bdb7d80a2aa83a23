"""A gateway that nobody gave a key makes one, once, for whoever owns its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberline.core.gateway_config import GatewayConfig
from emberline.server.gateway.main import _configured_keys


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_made_once_and_manages(cache: Path) -> None:
    (token, who), *others = _configured_keys(GatewayConfig()).items()
    assert who.is_admin and not others and len(token) >= 24
    assert list(_configured_keys(GatewayConfig())) == [token]
    file = cache / "gateway" / "admin.key"
    assert file.read_text() == token and file.stat().st_mode & 0o777 == 0o600


def test_keys_that_were_given_are_all_there_are(cache: Path) -> None:
    assert list(_configured_keys(GatewayConfig(api_keys=("a", "b")))) == ["a", "b"]
    assert not (cache / "gateway").exists()
