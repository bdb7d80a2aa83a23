"""Gateway keys, master keys and the vault: caching, expiry, encryption and interrupted rotations."""

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
from emberline.gateway.core.errors import Conflict, StoreFailed
from emberline.gateway.core.identity import Identity
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


@pytest.mark.parametrize(("scopes", "may"), [(("use",), False), (("use", "cost"), True), (("admin",), True)])
def test_keys_with_the_scope_cost_and_admin_keys_may_state_costs(scopes: Any, may: bool) -> None:
    key = StoredKey(hash="a" * 64, shown="evk_", name="k", kind="token", account="acme", created=0, scopes=scopes)
    assert key.identity.may_state_cost is may


class KeyEnvironment:
    """A store, and two replicas that cache its keys."""

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
            self.store.commit(StoreChange(AUDIT, put=[self.run(self.vault().encrypt_to_document(place, secret, 0))]))
        )

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def env(tmp_path: Path) -> Iterator[KeyEnvironment]:
    made = KeyEnvironment(tmp_path)
    yield made
    made.close()


def make_key(secret: str, **fields: Any) -> StoredKey:
    given = {"name": "k", "kind": "virtual", "account": "acme", "created": 0}
    return StoredKey(hash=hash_secret(secret), shown=visible_prefix(secret), **given | fields)


def test_key_identifies_its_user(env: KeyEnvironment) -> None:
    secret = new_secret("virtual")
    env.put(make_key(secret, user="ann", scopes=("use",), allowed_models=("gpt-*",), allowed_providers=("openai",)))
    caller = env.run(env.keys().identify(secret))
    assert (caller.user, caller.kind, caller.is_admin, caller.account) == ("ann", "virtual", False, "acme")
    assert (
        caller.may_use_model("openai", "gpt-4o")
        and not caller.may_use_model("openai", "o3")
        and not caller.may_use_model("groq", "gpt-4o")
    )
    assert caller.may_use_gateway("acme", "any") and not caller.may_use_gateway("other", "any")
    stored = env.run(env.store.list_documents("key", "acme"))[0].body.decode()
    assert secret not in stored and secret[12:] not in stored


@pytest.mark.parametrize("wrong", ["", "x", "egt_", "evk_" + "A" * 43, "evk_" + "é" * 43, "evk_" + "\udcff" * 43])
def test_invalid_secret_has_no_identity(env: KeyEnvironment, wrong: str) -> None:
    env.put(make_key(new_secret("virtual")))
    assert env.run(env.keys().identify(wrong)) is None


def test_key_id_does_not_authenticate(env: KeyEnvironment) -> None:
    """An id is the beginning of a hash: the stored document must match the whole hash."""
    secret = new_secret("token")
    key = make_key(secret)
    forged = msgspec.structs.replace(key, hash=key.hash[:16] + "0" * 48)
    document = Document("key", "acme", key.id, msgspec.json.encode(forged))
    env.run(env.store.commit(StoreChange(AUDIT, put=[document])))
    assert env.run(env.keys().identify(secret)) is None


def test_revoked_key_is_unknown_to_every_replica_within_a_second(env: KeyEnvironment) -> None:
    secret = new_secret("virtual")
    key = make_key(secret)
    env.put(key)
    replicas = [env.keys(), env.keys()]
    assert all(env.run(each.identify(secret)) for each in replicas)
    env.put(msgspec.structs.replace(key, disabled=True))
    env.clock.advance(0.49)
    assert all(env.run(each.identify(secret)) for each in replicas)  # so that the caches are used
    env.clock.advance(0.5)
    assert not any(env.run(each.identify(secret)) for each in replicas)
    env.put(key)
    env.clock.advance(1.0)
    assert all(env.run(each.identify(secret)) for each in replicas)


def test_new_key_is_known_after_creation(env: KeyEnvironment) -> None:
    secret, keys = new_secret("virtual"), env.keys()
    assert env.run(keys.identify(secret)) is None
    env.put(make_key(secret))
    env.clock.advance(1.0)
    assert env.run(keys.identify(secret)) is not None


def test_key_expires_without_a_store_change(env: KeyEnvironment) -> None:
    secret, keys = new_secret("virtual"), env.keys()
    env.put(make_key(secret, expires=1_000_005_000))
    env.wall.time = 1_000_004.9
    assert env.run(keys.identify(secret))
    env.wall.time = 1_000_005.0
    assert env.run(keys.identify(secret)) is None


def test_known_keys_work_during_grace_of_a_store_outage(env: KeyEnvironment) -> None:
    secret, keys = new_secret("virtual"), env.keys()
    env.put(make_key(secret))
    assert env.run(keys.identify(secret))

    async def away() -> int:
        raise StoreFailed("away")

    env.store.version = away  # type: ignore[method-assign]
    env.clock.advance(29.0)
    assert env.run(keys.identify(secret))
    env.clock.advance(2.0)
    with pytest.raises(StoreFailed):
        env.run(keys.identify(secret))


@pytest.mark.parametrize("slept", [False, True])
def test_callers_share_one_read_of_the_version(
    env: KeyEnvironment, monkeypatch: pytest.MonkeyPatch, slept: bool
) -> None:
    """When no version is known, or the last one is older than the grace: a disk may need time to wake up."""
    monkeypatch.setattr(version_watch, "VERSION_TIMEOUT_S", 0.001)
    secret, keys = new_secret("virtual"), env.keys()
    env.put(make_key(secret))
    if slept:
        assert env.run(keys.identify(secret))
        env.clock.advance(31.0)
    version, request, awake = env.store.version, 0, asyncio.Event()

    async def sleepy() -> int:
        nonlocal request
        request += 1
        await awake.wait()
        return await version()

    async def do() -> None:
        env.store.version = sleepy  # type: ignore[method-assign]
        who_leaves, *others = (asyncio.create_task(keys.identify(secret)) for _ in range(8))
        await asyncio.sleep(0.05)
        who_leaves.cancel()
        awake.set()
        assert all(await asyncio.gather(*others)) and request == 1

    env.run(do())


def test_reading_the_version_times_out(env: KeyEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_watch, "FIRST_VERSION_TIMEOUT_S", 0.01)
    secret, keys, version = new_secret("virtual"), env.keys(), env.store.version
    env.put(make_key(secret))

    async def hangs() -> int:
        await asyncio.sleep(60)
        return 0

    async def do() -> None:
        env.store.version = hangs  # type: ignore[method-assign]
        found = await asyncio.gather(*(keys.identify(secret) for _ in range(8)), return_exceptions=True)
        assert all(isinstance(each, StoreFailed) for each in found)
        env.store.version = version  # type: ignore[method-assign]
        monkeypatch.setattr(version_watch, "FIRST_VERSION_TIMEOUT_S", 30.0)  # a busy machine may need longer than 10 ms
        assert await keys.identify(secret), "the next request reads it again"

    env.run(do())


def test_configured_keys_are_known(env: KeyEnvironment) -> None:
    root = Identity("root", "root", "token", is_admin=True)
    keys = env.keys(configured={"a-long-secret-of-the-operator": root})
    assert env.run(keys.identify("a-long-secret-of-the-operator")) is root
    with pytest.raises(InvalidRequest, match="short"):
        env.keys(configured={"short": root})


def read_secret(file: Path) -> str:
    return SecretFile(file).read_or_create(lambda: new_secret("token"))


def test_operator_token_is_created_once(env: KeyEnvironment, tmp_path: Path) -> None:
    file = tmp_path / "new" / "operator.token"
    token = read_secret(file)
    assert read_secret(file) == token and file.stat().st_mode & 0o777 == 0o600
    root = Identity("operator", "operator", "token", is_admin=True)
    assert env.run(env.keys(configured={token: root}).identify(token)) is root


def test_concurrent_creation_of_a_secret_has_one_winner(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: read_secret(tmp_path / "token"), range(32)))
    assert len(set(found)) == 1 and [path.name for path in tmp_path.iterdir()] == ["token"]


# Vault

PLACE = ProviderKeyID("acme", "openai")


def test_provider_key_is_decrypted_and_stored_encrypted(env: KeyEnvironment, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    env.keep(PLACE, "sk-very-secret")
    env.keep(ProviderKeyID("acme", "openai", "second"), "sk-other")
    vault = env.vault()
    assert env.run(vault.get_key("acme", "openai")) == "sk-very-secret"
    assert env.run(vault.get_key("acme", "openai", "second")) == "sk-other"
    assert env.run(vault.get_key("other", "openai")) is None
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"sk-very-secret" not in everything and "secret" not in caplog.text
    assert "secret" not in repr(vault) + repr(MasterKeys((MasterKey(b"secret" * 5 + b"12"),)))


def test_master_key_file_is_created_once_and_private(env: KeyEnvironment, tmp_path: Path) -> None:
    first = env.file.read()
    path = tmp_path / "master.key"
    assert path.stat().st_mode & 0o777 == 0o600 and env.file.read() == first
    assert list(tmp_path.glob(".secret-*")) == []
    path.chmod(0o644)
    with pytest.raises(StoreFailed, match="can be read by other users"):
        env.file.read()


def test_ciphertext_is_bound_to_its_key_id() -> None:
    masters = MasterKeys((MasterKey(bytes(32)),))
    sealed = encrypt_key("sk", PLACE, masters.current_key, 0)
    assert decrypt_key(sealed, PLACE, masters) == "sk"
    for other in (
        ProviderKeyID("acme", "openai", "x"),
        ProviderKeyID("acme", "groq"),
        ProviderKeyID("other", "openai"),
    ):
        with pytest.raises(StoreFailed, match="damaged or from a different key"):
            decrypt_key(sealed, other, masters)
    for field in ("wrapped", "sealed"):
        whole = getattr(sealed, field)
        broken = msgspec.structs.replace(sealed, **{field: whole[:-1] + bytes([whole[-1] ^ 1])})
        with pytest.raises(StoreFailed, match="damaged or from a different key"):
            decrypt_key(broken, PLACE, masters)
    with pytest.raises(StoreFailed, match="not available"):
        decrypt_key(sealed, PLACE, MasterKeys((MasterKey(b"1" * 32),)))


def test_rotation_wraps_all_keys_again(env: KeyEnvironment) -> None:
    for i in range(5):
        env.keep(ProviderKeyID("acme", f"p{i}"), f"sk-{i}")
        env.keep(ProviderKeyID("other", f"p{i}"), f"sk-other-{i}")
    running = env.vault()
    assert env.run(running.get_key("acme", "p0")) == "sk-0"
    old = env.file.read().current_key
    assert env.run(rotate_master_key(env.store, env.file, 1)) == 10
    assert env.run(remove_old_master_keys(env.store, env.file)) == 1
    assert env.file.read().current_key != old and len(env.file.read().keys) == 1
    env.clock.advance(1.0)
    for i in range(5):  # also for a replica that was running all the time
        assert env.run(running.get_key("acme", f"p{i}")) == f"sk-{i}"
        assert env.run(env.vault().get_key("other", f"p{i}")) == f"sk-other-{i}"


@pytest.mark.parametrize("commits", range(4))
def test_interrupted_rotation_leaves_keys_readable(env: KeyEnvironment, commits: int) -> None:
    for i in range(4):
        env.keep(ProviderKeyID("acme", f"p{i}"), f"sk-{i}")
    real, done = env.store.commit, 0

    async def breaks(change: StoreChange) -> int:
        nonlocal done
        if done == commits:
            raise StoreFailed("power cut")
        done += 1
        return await real(change)

    env.store.commit = breaks  # type: ignore[method-assign]
    with pytest.raises(StoreFailed, match="power cut"):
        env.run(rotate_master_key(env.store, env.file, 1))
    env.store.commit = real  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="old master key"):
        env.run(remove_old_master_keys(env.store, env.file))
    assert [env.run(env.vault().get_key("acme", f"p{i}")) for i in range(4)] == [f"sk-{i}" for i in range(4)]
    env.run(rotate_master_key(env.store, env.file, 2))
    masters = env.file.read()
    sealed = [
        msgspec.json.decode(d.body, type=EncryptedKey) for d in env.run(env.store.list_documents("provider_key", ""))
    ]
    assert {each.master for each in sealed} == {masters.current_key.id}
    assert env.run(remove_old_master_keys(env.store, env.file)) == 2
    assert [env.run(env.vault().get_key("acme", f"p{i}")) for i in range(4)] == [f"sk-{i}" for i in range(4)]


def test_key_stored_during_rotation_is_kept(env: KeyEnvironment) -> None:
    env.keep(PLACE, "sk-old")
    real = env.store.commit

    async def beside(change: StoreChange) -> int:
        env.store.commit = real  # type: ignore[method-assign]
        document = await env.vault().encrypt_to_document(PLACE, "sk-new", 1)
        await real(StoreChange(AUDIT, put=[document]))
        return await real(change)  # a conflict: the version has changed

    env.store.commit = beside  # type: ignore[method-assign]
    env.run(rotate_master_key(env.store, env.file, 1))
    assert env.run(env.vault().get_key("acme", "openai")) == "sk-new"


@pytest.mark.parametrize("text", ["", "@@@", "AAAA"])
def test_master_key_must_have_32_bytes(text: str) -> None:
    with pytest.raises(InvalidRequest, match="master key"):
        MasterKeys.parse(text)


def test_master_keys_from_the_environment(env: KeyEnvironment) -> None:
    two = MasterKeys((MasterKey(b"1" * 32), MasterKey(b"2" * 32)))
    assert MasterKeys.parse(two.to_text().replace("\n", ",")) == two
    vault = ProviderKeyVault(env.store, StoreVersionWatch(env.store, env.clock), EnvironmentMasterKeys(two))
    document = env.run(vault.encrypt_to_document(PLACE, "sk", 0))
    env.run(env.store.commit(StoreChange(AUDIT, put=[replace(document)])))
    assert env.run(vault.get_key("acme", "openai")) == "sk"


def test_identity_of_key_id_is_current(env: KeyEnvironment) -> None:
    secret, fixed = new_secret("virtual"), Identity("configured-0", "c", "token")
    key, keys = make_key(secret, allowed_models=("a",), expires=1_000_060_000), env.keys(configured={"x" * 16: fixed})
    env.put(key)
    assert env.run(keys.identity_by_key_id(key.id)) == env.run(keys.identify(secret)) == key.identity
    assert (
        env.run(keys.identity_by_key_id("configured-0")) is fixed and env.run(keys.identity_by_key_id("f" * 16)) is None
    )
    env.put(make_key(secret, allowed_models=("b",), expires=1_000_060_000))
    env.clock.advance(1)
    assert env.run(keys.identity_by_key_id(key.id)).allowed_models == ("b",)
    env.wall.advance(60)
    assert env.run(keys.identity_by_key_id(key.id)) is None
