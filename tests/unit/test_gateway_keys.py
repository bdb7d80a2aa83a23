"""Keys, master keys and the vault: what is known, for how long, and what can be read after which accident."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest
from emberline.gateway.errors import Conflict, StoreFailed
from emberline.gateway.keys.identity import Identity
from emberline.gateway.keys.key_store import KeyStore, StoredKey, hash_secret, new_secret, visible_prefix
from emberline.gateway.keys.master_keys import EnvironmentMasterKeys, MasterKey, MasterKeyFile, MasterKeys
from emberline.gateway.keys.provider_key_vault import (
    EncryptedKey,
    ProviderKeyID,
    ProviderKeyVault,
    decrypt_key,
    encrypt_key,
    remove_old_master_keys,
    rotate_master_key,
)
from emberline.gateway.keys.secret_file import SecretFile
from emberline.gateway.store import version_watch
from emberline.gateway.store.base import AuditEntry, Document, GatewayStore, StoreChange
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.gateway.store.version_watch import StoreVersionWatch

AUDIT = AuditEntry(0, "acme", "test", "test", "it")


class World:
    """A store, and two replicas that keep copies of it."""

    def __init__(self, directory: Path) -> None:
        self._runner = asyncio.Runner()
        self.run: Any = self._runner.run
        self.store: GatewayStore = self.run(SQLiteStore.open(directory / "store"))
        self.clock, self.wall = ManualClock(), ManualClock(1_000_000.0)
        self.file = MasterKeyFile(directory / "master.key")

    def keys(self, **more: Any) -> KeyStore:
        return KeyStore(self.store, StoreVersionWatch(self.store, self.clock), self.wall, **more)

    def vault(self) -> ProviderKeyVault:
        return ProviderKeyVault(self.store, StoreVersionWatch(self.store, self.clock), self.file)

    def put(self, key: StoredKey) -> None:
        old = self.run(self.store.get("key", key.account, key.id))
        document = Document("key", key.account, key.id, msgspec.json.encode(key), old.version if old else 0)
        self.run(self.store.commit(StoreChange(AUDIT, put=[document])))

    def keep(self, place: ProviderKeyID, secret: str) -> None:
        self.run(
            self.store.commit(StoreChange(AUDIT, put=[self.run(self.vault().encrypted_document(place, secret, 0))]))
        )

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def made(secret: str, **fields: Any) -> StoredKey:
    given = {"name": "k", "kind": "virtual", "account": "acme", "created": 0}
    return StoredKey(hash=hash_secret(secret), shown=visible_prefix(secret), **given | fields)


def test_a_key_is_who_it_was_made_for(world: World) -> None:
    secret = new_secret("virtual")
    world.put(made(secret, user="ann", scopes=("use",), allowed_models=("gpt-*",), allowed_providers=("openai",)))
    who = world.run(world.keys().identify(secret))
    assert (who.user, who.kind, who.admin, who.account) == ("ann", "virtual", False, "acme")
    assert (
        who.may_use_model("openai", "gpt-4o")
        and not who.may_use_model("openai", "o3")
        and not who.may_use_model("groq", "gpt-4o")
    )
    assert who.may_use_gateway("acme", "any") and not who.may_use_gateway("other", "any")
    stored = world.run(world.store.documents("key", "acme"))[0].body.decode()
    assert secret not in stored and secret[12:] not in stored


@pytest.mark.parametrize("wrong", ["", "x", "egt_", "evk_" + "A" * 43, "evk_" + "é" * 43, "evk_" + "\udcff" * 43])
def test_what_is_not_a_key_is_nobody(world: World, wrong: str) -> None:
    world.put(made(new_secret("virtual")))
    assert world.run(world.keys().identify(wrong)) is None


def test_an_id_alone_does_not_open(world: World) -> None:
    """The id is the hash's beginning: a document there must still have the whole hash."""
    secret = new_secret("token")
    key = made(secret)
    forged = msgspec.structs.replace(key, hash=key.hash[:16] + "0" * 48)
    document = Document("key", "acme", key.id, msgspec.json.encode(forged))
    world.run(world.store.commit(StoreChange(AUDIT, put=[document])))
    assert world.run(world.keys().identify(secret)) is None


def test_a_revoked_key_is_unknown_to_every_replica_within_a_second(world: World) -> None:
    secret = new_secret("virtual")
    key = made(secret)
    world.put(key)
    replicas = [world.keys(), world.keys()]
    assert all(world.run(each.identify(secret)) for each in replicas)
    world.put(msgspec.structs.replace(key, disabled=True))
    world.clock.advance(0.49)
    assert all(world.run(each.identify(secret)) for each in replicas)  # so the copies are used at all
    world.clock.advance(0.5)
    assert not any(world.run(each.identify(secret)) for each in replicas)
    world.put(key)
    world.clock.advance(1.0)
    assert all(world.run(each.identify(secret)) for each in replicas)


def test_a_key_that_was_unknown_is_known_once_it_is_made(world: World) -> None:
    secret, keys = new_secret("virtual"), world.keys()
    assert world.run(keys.identify(secret)) is None
    world.put(made(secret))
    world.clock.advance(1.0)
    assert world.run(keys.identify(secret)) is not None


def test_a_key_expires_by_the_clock_alone(world: World) -> None:
    secret, keys = new_secret("virtual"), world.keys()
    world.put(made(secret, expires=1_000_005_000))
    world.wall.time = 1_000_004.9
    assert world.run(keys.identify(secret))
    world.wall.time = 1_000_005.0
    assert world.run(keys.identify(secret)) is None


def test_a_store_that_is_away_is_trusted_for_its_grace(world: World) -> None:
    secret, keys = new_secret("virtual"), world.keys()
    world.put(made(secret))
    assert world.run(keys.identify(secret))

    async def away() -> int:
        raise StoreFailed("away")

    world.store.version = away  # type: ignore[method-assign]
    world.clock.advance(29.0)
    assert world.run(keys.identify(secret))
    world.clock.advance(2.0)
    with pytest.raises(StoreFailed):
        world.run(keys.identify(secret))


@pytest.mark.parametrize("slept", [False, True])
def test_who_has_nothing_to_go_on_with_waits_for_one_answer(
    world: World, monkeypatch: pytest.MonkeyPatch, slept: bool
) -> None:
    """When it is new, and when nobody asked for longer than the grace: a disk may take its time to wake up."""
    monkeypatch.setattr(version_watch, "VERSION_TIMEOUT_S", 0.001)
    secret, keys = new_secret("virtual"), world.keys()
    world.put(made(secret))
    if slept:
        assert world.run(keys.identify(secret))
        world.clock.advance(31.0)
    version, asked, awake = world.store.version, 0, asyncio.Event()

    async def sleepy() -> int:
        nonlocal asked
        asked += 1
        await awake.wait()
        return await version()

    async def do() -> None:
        world.store.version = sleepy  # type: ignore[method-assign]
        who_leaves, *others = (asyncio.create_task(keys.identify(secret)) for _ in range(8))
        await asyncio.sleep(0.05)
        who_leaves.cancel()
        awake.set()
        assert all(await asyncio.gather(*others)) and asked == 1

    world.run(do())


def test_nor_do_they_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_watch, "FIRST_VERSION_TIMEOUT_S", 0.01)
    secret, keys, version = new_secret("virtual"), world.keys(), world.store.version
    world.put(made(secret))

    async def hangs() -> int:
        await asyncio.sleep(60)
        return 0

    async def do() -> None:
        world.store.version = hangs  # type: ignore[method-assign]
        found = await asyncio.gather(*(keys.identify(secret) for _ in range(8)), return_exceptions=True)
        assert all(isinstance(each, StoreFailed) for each in found)
        world.store.version = version  # type: ignore[method-assign]
        assert await keys.identify(secret), "the next request reads it again"

    world.run(do())


def test_keys_of_the_configuration(world: World) -> None:
    root = Identity("root", "root", "token", is_admin=True)
    keys = world.keys(fixed={"a-long-secret-of-the-operator": root})
    assert world.run(keys.identify("a-long-secret-of-the-operator")) is root
    with pytest.raises(InvalidRequest, match="short"):
        world.keys(fixed={"short": root})


def kept(file: Path) -> str:
    return SecretFile(file).read_or_create(lambda: new_secret("token"))


def test_the_operators_token_is_made_once(world: World, tmp_path: Path) -> None:
    file = tmp_path / "new" / "operator.token"
    token = kept(file)
    assert kept(file) == token and file.stat().st_mode & 0o777 == 0o600
    root = Identity("operator", "operator", "token", is_admin=True)
    assert world.run(world.keys(fixed={token: root}).identify(token)) is root


def test_of_many_that_make_a_secret_one_wins(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: kept(tmp_path / "token"), range(32)))
    assert len(set(found)) == 1 and [path.name for path in tmp_path.iterdir()] == ["token"]


# Vault

PLACE = ProviderKeyID("acme", "openai")


def test_a_secret_comes_back_and_is_nowhere_readable(world: World, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    world.keep(PLACE, "sk-very-secret")
    world.keep(ProviderKeyID("acme", "openai", "second"), "sk-other")
    vault = world.vault()
    assert world.run(vault.get_key("acme", "openai")) == "sk-very-secret"
    assert world.run(vault.get_key("acme", "openai", "second")) == "sk-other"
    assert world.run(vault.get_key("other", "openai")) is None
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"sk-very-secret" not in everything and "secret" not in caplog.text
    assert "secret" not in repr(vault) + repr(MasterKeys((MasterKey(b"secret" * 5 + b"12"),)))


def test_the_master_key_is_made_once_and_only_its_owner_reads_it(world: World, tmp_path: Path) -> None:
    first = world.file.read()
    path = tmp_path / "master.key"
    assert path.stat().st_mode & 0o777 == 0o600 and world.file.read() == first
    assert list(tmp_path.glob(".secret-*")) == []
    path.chmod(0o644)
    with pytest.raises(StoreFailed, match="can be read by other users"):
        world.file.read()


def test_a_ciphertext_is_bound_to_its_place() -> None:
    masters = MasterKeys((MasterKey(bytes(32)),))
    sealed = encrypt_key("sk", PLACE, masters.current, 0)
    assert decrypt_key(sealed, PLACE, masters) == "sk"
    for other in (
        ProviderKeyID("acme", "openai", "x"),
        ProviderKeyID("acme", "groq"),
        ProviderKeyID("other", "openai"),
    ):
        with pytest.raises(StoreFailed, match="damaged or copied"):
            decrypt_key(sealed, other, masters)
    for field in ("wrapped", "sealed"):
        whole = getattr(sealed, field)
        broken = msgspec.structs.replace(sealed, **{field: whole[:-1] + bytes([whole[-1] ^ 1])})
        with pytest.raises(StoreFailed, match="damaged or copied"):
            decrypt_key(broken, PLACE, masters)
    with pytest.raises(StoreFailed, match="not available"):
        decrypt_key(sealed, PLACE, MasterKeys((MasterKey(b"1" * 32),)))


def test_rotation_wraps_everything_anew(world: World) -> None:
    for i in range(5):
        world.keep(ProviderKeyID("acme", f"p{i}"), f"sk-{i}")
        world.keep(ProviderKeyID("other", f"p{i}"), f"sk-other-{i}")
    running = world.vault()
    assert world.run(running.get_key("acme", "p0")) == "sk-0"
    old = world.file.read().current
    assert world.run(rotate_master_key(world.store, world.file, 1)) == 10
    assert world.run(remove_old_master_keys(world.store, world.file)) == 1
    assert world.file.read().current != old and len(world.file.read().keys) == 1
    world.clock.advance(1.0)
    for i in range(5):  # also for who was running all the time
        assert world.run(running.get_key("acme", f"p{i}")) == f"sk-{i}"
        assert world.run(world.vault().get_key("other", f"p{i}")) == f"sk-other-{i}"


@pytest.mark.parametrize("commits", range(4))
def test_an_interrupted_rotation_leaves_everything_readable(world: World, commits: int) -> None:
    for i in range(4):
        world.keep(ProviderKeyID("acme", f"p{i}"), f"sk-{i}")
    real, done = world.store.commit, 0

    async def breaks(change: StoreChange) -> int:
        nonlocal done
        if done == commits:
            raise StoreFailed("power cut")
        done += 1
        return await real(change)

    world.store.commit = breaks  # type: ignore[method-assign]
    with pytest.raises(StoreFailed, match="power cut"):
        world.run(rotate_master_key(world.store, world.file, 1))
    world.store.commit = real  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="old master key"):
        world.run(remove_old_master_keys(world.store, world.file))
    assert [world.run(world.vault().get_key("acme", f"p{i}")) for i in range(4)] == [f"sk-{i}" for i in range(4)]
    world.run(rotate_master_key(world.store, world.file, 2))
    masters = world.file.read()
    sealed = [
        msgspec.json.decode(d.body, type=EncryptedKey) for d in world.run(world.store.documents("provider_key", ""))
    ]
    assert {each.master for each in sealed} == {masters.current.id}
    assert world.run(remove_old_master_keys(world.store, world.file)) == 2
    assert [world.run(world.vault().get_key("acme", f"p{i}")) for i in range(4)] == [f"sk-{i}" for i in range(4)]


def test_a_key_stored_while_rotation_runs_is_not_lost(world: World) -> None:
    world.keep(PLACE, "sk-old")
    real = world.store.commit

    async def beside(change: StoreChange) -> int:
        world.store.commit = real  # type: ignore[method-assign]
        document = await world.vault().encrypted_document(PLACE, "sk-new", 1)
        await real(StoreChange(AUDIT, put=[document]))
        return await real(change)  # loses: the version has gone on

    world.store.commit = beside  # type: ignore[method-assign]
    world.run(rotate_master_key(world.store, world.file, 1))
    assert world.run(world.vault().get_key("acme", "openai")) == "sk-new"


@pytest.mark.parametrize("text", ["", "@@@", "AAAA"])
def test_a_master_key_has_32_bytes(text: str) -> None:
    with pytest.raises(InvalidRequest, match="master key"):
        MasterKeys.parse(text)


def test_master_keys_from_the_environment(world: World) -> None:
    two = MasterKeys((MasterKey(b"1" * 32), MasterKey(b"2" * 32)))
    assert MasterKeys.parse(two.to_text().replace("\n", ",")) == two
    vault = ProviderKeyVault(world.store, StoreVersionWatch(world.store, world.clock), EnvironmentMasterKeys(two))
    document = world.run(vault.encrypted_document(PLACE, "sk", 0))
    world.run(world.store.commit(StoreChange(AUDIT, put=[replace(document)])))
    assert world.run(vault.get_key("acme", "openai")) == "sk"


def test_who_holds_a_key_is_known_by_its_id_as_it_is_now(world: World) -> None:
    secret, fixed = new_secret("virtual"), Identity("configured-0", "c", "token")
    key, keys = made(secret, allowed_models=("a",), expires=1_000_060_000), world.keys(fixed={"x" * 16: fixed})
    world.put(key)
    assert world.run(keys.identity_of(key.id)) == world.run(keys.identify(secret)) == key.identity
    assert world.run(keys.identity_of("configured-0")) is fixed and world.run(keys.identity_of("f" * 16)) is None
    world.put(made(secret, allowed_models=("b",), expires=1_000_060_000))
    world.clock.advance(1)
    assert world.run(keys.identity_of(key.id)).allowed_models == ("b",)
    world.wall.advance(60)
    assert world.run(keys.identity_of(key.id)) is None
