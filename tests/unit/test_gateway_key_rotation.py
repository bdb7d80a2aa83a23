"""`emberline gateway rotate-keys` as an operator runs it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from emberline.cli.__main__ import main
from emberline.core.clock import SystemClock
from emberline.gateway.keys.master_keys import EnvironmentMasterKeys, MasterKeyFile, MasterKeys
from emberline.gateway.keys.provider_key_vault import MasterKeySource, ProviderKeyID, ProviderKeyVault
from emberline.gateway.store.base import AuditEntry, StoreChange
from emberline.gateway.store.factory import open_store
from emberline.gateway.store.version_watch import StoreVersionWatch

PLACE = ProviderKeyID("acme", "openai")


async def _vault(directory: Path, masters: MasterKeySource, secret: str | None = None) -> str | None:
    """Store the secret if one is given; else return the stored one."""
    store = await open_store(f"sqlite:{directory}/store")
    vault = ProviderKeyVault(store, StoreVersionWatch(store, SystemClock()), masters)
    if secret is not None:
        document = await vault.encrypt_to_document(PLACE, secret, 0)
        await store.commit(StoreChange(AuditEntry(0, "acme", "t", "t", "t"), put=[document]))
    found = await vault.get_key("acme", "openai")
    await store.close()
    return found


def make_config(directory: Path) -> list[str]:
    config = directory / "gateway.toml"
    config.write_text(f'store = "sqlite:{directory}/store"\nmaster_key = "{directory}/master.key"\n')
    return ["gateway", "rotate-keys", "--config", str(config)]


def test_master_key_in_file_is_rotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = MasterKeyFile(tmp_path / "master.key")
    assert asyncio.run(_vault(tmp_path, file, "sk-1")) == "sk-1"
    old = file.read().current_key
    assert main(make_config(tmp_path)) == 0
    assert "1 keys" in capsys.readouterr().out
    assert file.read().keys[1] == old and asyncio.run(_vault(tmp_path, file)) == "sk-1"
    assert main([*make_config(tmp_path), "--forget-old"]) == 0
    assert len(file.read().keys) == 1 and asyncio.run(_vault(tmp_path, file)) == "sk-1"


def test_master_key_in_environment_is_rotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = MasterKeys.parse("A" * 43 + "=")
    asyncio.run(_vault(tmp_path, EnvironmentMasterKeys(old), "sk-1"))
    both = old.with_new_key()
    monkeypatch.setenv("EMBERLINE_MASTER_KEY", both.to_text())
    assert main(make_config(tmp_path)) == 0
    assert both.current_key.id in capsys.readouterr().out and not (tmp_path / "master.key").exists()
    assert asyncio.run(_vault(tmp_path, EnvironmentMasterKeys(MasterKeys(both.keys[:1])))) == "sk-1"
    assert main([*make_config(tmp_path), "--forget-old"]) == 1


def test_rotation_elsewhere_than_at_the_gateway_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(make_config(tmp_path)) == 1
    assert f"no master key at {tmp_path}/master.key" in capsys.readouterr().err
    assert not (tmp_path / "master.key").exists() and not (tmp_path / "store").exists()


def test_file_stays_with_its_owner_if_root_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MasterKeyFile(tmp_path / "master.key")
    keys, owner = file.read(), (tmp_path / "master.key").stat()
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda descriptor, user, group: changed.append((user, group)))
    file.write(keys)
    assert not changed
    monkeypatch.setattr(os, "geteuid", lambda: owner.st_uid + 1)
    file.write(keys)
    assert changed == [(owner.st_uid, owner.st_gid)]
