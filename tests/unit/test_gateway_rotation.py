"""`emberline gateway rotate-keys`, as an operator runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from emberline.cli.__main__ import main
from emberline.core.clock import SystemClock
from emberline.gateway.keys.masterkeys import FixedKeys, KeyFile, MasterKeys
from emberline.gateway.keys.vault import MasterSource, Place, Vault
from emberline.gateway.store.base import Audit, Change
from emberline.gateway.store.opening import open_store
from emberline.gateway.store.watch import Watch

PLACE = Place("acme", "openai")


async def _vault(directory: Path, masters: MasterSource, secret: str | None = None) -> str | None:
    """Stores a secret, if there is one; else reads it."""
    store = await open_store(f"sqlite:{directory}/store")
    vault = Vault(store, Watch(store, SystemClock()), masters)
    if secret is not None:
        document = await vault.document(PLACE, secret, 0)
        await store.commit(Change(Audit(0, "acme", "t", "t", "t"), put=[document]))
    found = await vault.reveal("acme", "openai")
    await store.close()
    return found


def configured(directory: Path) -> list[str]:
    config = directory / "gateway.toml"
    config.write_text(f'store = "sqlite:{directory}/store"\nmaster_key = "{directory}/master.key"\n')
    return ["gateway", "rotate-keys", "--config", str(config)]


def test_rotating_the_key_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = KeyFile(tmp_path / "master.key")
    assert asyncio.run(_vault(tmp_path, file, "sk-1")) == "sk-1"
    old = file.read().current
    assert main(configured(tmp_path)) == 0
    assert "1 keys" in capsys.readouterr().out
    assert file.read().keys[1] == old and asyncio.run(_vault(tmp_path, file)) == "sk-1"
    assert main([*configured(tmp_path), "--forget-old"]) == 0
    assert len(file.read().keys) == 1 and asyncio.run(_vault(tmp_path, file)) == "sk-1"


def test_rotating_the_key_in_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = MasterKeys.parse("A" * 43 + "=")
    asyncio.run(_vault(tmp_path, FixedKeys(old), "sk-1"))
    both = old.with_new()
    monkeypatch.setenv("EMBERLINE_MASTER_KEY", both.text())
    assert main(configured(tmp_path)) == 0
    assert both.current.id in capsys.readouterr().out and not (tmp_path / "master.key").exists()
    assert asyncio.run(_vault(tmp_path, FixedKeys(MasterKeys(both.keys[:1])))) == "sk-1"
    assert main([*configured(tmp_path), "--forget-old"]) == 1
