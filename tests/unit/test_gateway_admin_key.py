"""A gateway without configured keys creates an admin key once, readable by the owner of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.http.main import _identities_by_key


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    return tmp_path


def test_admin_key_is_created_once_and_is_admin(cache: Path) -> None:
    (token, identity), *others = _identities_by_key(GatewayConfig()).items()
    assert identity.is_admin and not others and len(token) >= 24
    assert list(_identities_by_key(GatewayConfig())) == [token]
    file = cache / "gateway" / "admin.key"
    assert file.read_text() == token and file.stat().st_mode & 0o777 == 0o600


def test_configured_keys_replace_the_admin_key(cache: Path) -> None:
    assert list(_identities_by_key(GatewayConfig(api_keys=("a", "b")))) == ["a", "b"]
    assert not (cache / "gateway").exists()
