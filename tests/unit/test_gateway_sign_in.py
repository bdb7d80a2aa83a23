"""The one-time sign-in link: replay, expiry, guesses, other machines, and what the exchange leaves behind."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest, RequestForbidden, Unauthorized
from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.schemas import KeyView
from emberline.gateway.admin.sign_in import LINK_LIFETIME_S, SignIn, check_sign_in_connection
from emberline.gateway.http.main import print_sign_in_link
from emberline.gateway.keys.key_store import KeyStore
from emberline.gateway.keys.master_keys import MasterKeyFile
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.gateway.store.version_watch import StoreVersionWatch


class SignInBench:
    def __init__(self, directory: Path) -> None:
        self._runner = asyncio.Runner()
        self.run = self._runner.run
        self.store = self.run(SQLiteStore.open(directory / "store"))
        self.clock = ManualClock(1e9)
        watch = StoreVersionWatch(self.store, self.clock, fresh_s=0)
        vault = ProviderKeyVault(self.store, watch, MasterKeyFile(directory / "master.key"))
        self.keys = KeyStore(self.store, watch, self.clock)
        self.sign_in = SignIn(AdminContext(self.store, vault, self.clock, LocalLimiter()), self.clock)

    def new_token(self) -> str:
        link = self.sign_in.create_link("http://127.0.0.1:8080")
        url, _, token = link.partition("#/sign-in?token=")
        assert url == "http://127.0.0.1:8080/", "a fragment, which no browser sends"
        return token

    def exchange(self, token: object) -> KeyView:
        return self.run(self.sign_in.exchange_token(json.dumps({"token": token}).encode()))

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SignInBench]:
    made = SignInBench(tmp_path)
    yield made
    made.close()


def test_token_is_exchanged_once_for_an_admin_key_that_expires(bench: SignInBench) -> None:
    token = bench.new_token()
    key = bench.exchange(token)
    assert key.secret and key.secret != token
    identity = bench.run(bench.keys.identify(key.secret))
    assert identity is not None and identity.is_admin and identity.account == "default"
    with pytest.raises(Unauthorized, match="used already"):
        bench.exchange(token)
    [entry] = bench.run(bench.store.list_audit_entries("default"))
    assert (entry.actor, entry.action) == ("sign-in-link", "key.create")
    assert token.encode() not in entry.after and key.secret.encode() not in entry.after
    bench.clock.advance(13 * 3600)
    assert bench.run(bench.keys.identify(key.secret)) is None
    bench.exchange(bench.new_token())
    assert len(bench.run(bench.store.list_documents("key", "default"))) == 1, "expired sign-ins are deleted"


def test_expired_token_is_refused(bench: SignInBench) -> None:
    token = bench.new_token()
    bench.clock.advance(LINK_LIFETIME_S)
    for reason in ("expired", "used already"):
        with pytest.raises(Unauthorized, match=reason):
            bench.exchange(token)


def test_guesses_are_compared_in_constant_time_and_disable_the_link(
    bench: SignInBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def compare_digest(guess: str, secret: str) -> bool:
        compared.append(len(guess))
        return compare(guess, secret)

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    token = bench.new_token()
    for guess in (token[:-1], token + "x", "", "é", "x" * 500):
        with pytest.raises(Unauthorized, match="sign-in link is wrong"):
            bench.exchange(guess)
    assert compared == [64] * 5, "hashes of one length"
    bench.exchange(token)
    token = bench.new_token()
    for _ in range(15):
        with pytest.raises(Unauthorized):
            bench.exchange("guess")
    bench.exchange(token)  # guesses do not keep the operator out
    assert "wrong_tokens=15" in caplog.text and token not in caplog.text and "guess" not in caplog.text


@pytest.mark.parametrize("body", [b"", b"[]", b'{"token": 1}', b'{"token": "x", "more": 1}', b"{"])
def test_malformed_bodies_are_refused_and_no_link_means_no_token(bench: SignInBench, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        bench.run(bench.sign_in.exchange_token(body))
    with pytest.raises(Unauthorized, match="there is none"):
        bench.exchange("")


def test_start_prints_the_link_unless_it_would_cross_a_network(
    bench: SignInBench, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    certificate = {"tls_cert": "c.pem", "tls_key": "k.pem"}
    for options, is_exposed, url in (
        ({"host": "127.0.0.1"}, False, "http://127.0.0.1:8080/"),
        ({"host": "::1"}, False, "http://[::1]:8080/"),
        ({"host": "0.0.0.0", **certificate}, True, "https://localhost:8080/"),
        ({"host": "0.0.0.0"}, True, None),
    ):
        print_sign_in_link(bench.sign_in, GatewayConfig(**options), 8080, is_exposed=is_exposed)
        printed = capsys.readouterr().out
        assert (f" {url}#/sign-in?token=" in printed) if url else (printed == "")
    assert caplog.text == "", "the token is not logged"


def test_tokens_come_over_tls_or_from_this_machine() -> None:
    for scheme, client in (("http", "127.0.0.1"), ("http", "::1"), ("https", "203.0.113.9")):
        check_sign_in_connection(scheme, client, {})
    for client, headers in (
        ("203.0.113.9", {}),
        ("", {}),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.9"}),  # a proxy on this machine
        ("127.0.0.1", {"forwarded": "for=203.0.113.9;proto=https"}),
        ("127.0.0.1", {"x-real-ip": "203.0.113.9"}),
        ("203.0.113.9", {"x-forwarded-proto": "https"}),
    ):
        with pytest.raises(RequestForbidden, match="only over TLS"):
            check_sign_in_connection("http", client, headers)
