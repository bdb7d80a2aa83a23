"""ObjectIds: an id works for its owner, on every replica with the master key, and for no other caller."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from gateway_requests import call

from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.keys.master_keys import MasterKeyFile
from emberline.gateway.keys.object_ids import ObjectIds, StoredObject

FOUND = StoredObject("resp_68af", "openai", "team")
ALICE = call(identity=Identity("a", "alice", "virtual"))


@pytest.fixture
def key_file(tmp_path: Path) -> MasterKeyFile:
    return MasterKeyFile(tmp_path / "master")


def test_id_works_on_every_replica_for_its_owner(key_file: MasterKeyFile) -> None:
    id = ObjectIds(key_file).wrap(FOUND, ALICE)
    assert id.startswith("resp_") and id.replace("_", "").replace("-", "").isalnum()
    assert ObjectIds(key_file).unwrap(id, ALICE) == FOUND


def elsewhere(**place: str) -> GatewayRequest:
    return msgspec.structs.replace(ALICE, **place)


STRANGERS = [
    call(identity=Identity("b", "bob", "virtual")),
    call(identity=Identity("a", "alice", "token")),
    call(identity=ANONYMOUS),
    elsewhere(account="other"),
    elsewhere(gateway="other"),
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=["key", "kind", "anonymous", "account", "gateway"])
def test_id_does_not_exist_for_others(key_file: MasterKeyFile, stranger: GatewayRequest) -> None:
    ids = ObjectIds(key_file)
    assert ids.unwrap(ids.wrap(FOUND, ALICE), stranger) is None


def test_changed_ids_do_not_exist(key_file: MasterKeyFile) -> None:
    ids = ObjectIds(key_file)
    id = ids.wrap(FOUND, ALICE)
    changed = [id[:at] + ("A" if id[at] != "A" else "B") + id[at + 1 :] for at in range(5, len(id) - 1)]
    for each in (
        *changed,
        id[:-3],
        id + "AAAA",
        id[5:],
        "resp_",
        "",
        "resp_\u00e9",
        FOUND.id,
        id.replace("resp", "conv"),
    ):
        assert ids.unwrap(each, ALICE) is None, each


def test_ids_survive_a_new_master_key(key_file: MasterKeyFile) -> None:
    """A process that has read the old key accepts ids of a process that has read the new one, and the reverse."""
    old = ObjectIds(key_file)
    before = old.wrap(FOUND, ALICE)
    key_file.write(key_file.read().with_new_key())
    new = ObjectIds(key_file)
    after = new.wrap(FOUND, ALICE)
    assert before != after
    assert new.unwrap(before, ALICE) == old.unwrap(after, ALICE) == FOUND
