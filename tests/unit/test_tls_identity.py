"""TLSIdentity: which files are refused at the start, rotation, and the names of peers."""

from __future__ import annotations

import shutil
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from emberline.bench.certificates import IssuedFiles, LocalCA
from emberline.core import tls
from emberline.core.config import RouterConfig, ServerConfig, WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import ForeignWorkerConfig
from emberline.core.gateway_config import GatewayConfig
from emberline.core.tls import CHECK_INTERVAL_S, RETRY_INTERVAL_S, TLSIdentity, certificate_names, match_names
from emberline.core.tls_config import TLSConfig


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def identity_of(files: IssuedFiles, ca: Path | None = None, **more: Callable[[], float]) -> TLSIdentity:
    config = TLSConfig(str(files.cert), str(files.key), str(ca) if ca else None)
    return TLSIdentity(config, **more)


def served_certificate(identity: TLSIdentity, ca: Path) -> bytes:
    """The certificate that a new client sees, in DER."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(ca))
    client = context.wrap_bio(outgoing, incoming, server_hostname="localhost")
    server = identity.listener_context().wrap_bio(incoming, outgoing, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


# -- at the start ------------------------------------------------------------------------------------------------------


def damage(files: IssuedFiles, ca: LocalCA, how: str) -> None:
    match how:
        case "missing certificate":
            files.cert.unlink()
        case "missing key":
            files.key.unlink()
        case "not a certificate":
            files.cert.write_text("hello")
        case "not a key":
            files.key.write_text("hello")
        case "another key":
            shutil.copy(ca.issue("other").key, files.key)
        case "expired":
            ca.issue("server", starts_in=timedelta(days=-2))
        case "not valid yet":
            ca.issue("server", starts_in=timedelta(days=2))
        case "encrypted key":
            from cryptography.hazmat.primitives import serialization as form

            key = form.load_pem_private_key(files.key.read_bytes(), None)
            secret = form.BestAvailableEncryption(b"password")
            files.key.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, secret))
        case "missing CA":
            ca.file.unlink()
        case "not a CA":
            ca.file.write_text("hello")


@pytest.mark.parametrize(
    ("how", "param", "message"),
    [
        ("missing certificate", "tls_cert", "cannot be read: No such file"),
        ("missing key", "tls_key", "cannot be read: No such file"),
        ("not a certificate", "tls_cert", "no certificate in PEM format"),
        ("not a key", "tls_key", "no key in PEM"),
        ("another key", "tls_key", "does not belong to the certificate"),
        ("expired", "tls_cert", r"expired on 20\d\d-"),
        ("not valid yet", "tls_cert", r"valid only from 20\d\d-"),
        ("encrypted key", "tls_key", "encrypted with a password"),
        ("missing CA", "tls_ca", "cannot be read: No such file"),
        ("not a CA", "tls_ca", "no certificate in PEM format"),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path: Path, how: str, param: str, message: str) -> None:
    ca = LocalCA(tmp_path)
    files = ca.issue("server")
    identity_of(files, ca.file)
    damage(files, ca, how)
    with pytest.raises(InvalidRequest, match=message) as caught:
        identity_of(files, ca.file)
    assert caught.value.param == param and caught.value.hint


def test_certificate_of_another_ca_is_refused_for_a_worker(tmp_path: Path) -> None:
    ca, other = LocalCA(tmp_path), LocalCA(tmp_path, "other")
    identity_of(ca.issue("mine"), ca.file).check_accepts_itself()
    with pytest.raises(InvalidRequest, match="would not be accepted by peers") as caught:
        identity_of(other.issue("theirs"), ca.file).check_accepts_itself()
    assert caught.value.param == "tls_ca"


def test_certificate_without_an_allowed_name_is_refused_for_a_worker(tmp_path: Path) -> None:
    ca = LocalCA(tmp_path)
    files = ca.issue("mine", ("a.workers.example",))
    config = TLSConfig(str(files.cert), str(files.key), str(ca.file), ("*.workers.example",))
    TLSIdentity(config).check_accepts_itself()
    with pytest.raises(InvalidRequest, match=r"has the names a\.workers\.example, and none of them is allowed"):
        TLSIdentity(replace(config, peer_names=("*.other.example",))).check_accepts_itself()


CERT: dict[str, Any] = {"tls_cert": "c", "tls_key": "k"}
SECURE_WORKER = WorkerConfig(("https://r",))
TLS_SERVER, PLAIN_SERVER = (ForeignWorkerConfig.parse(f"vllm={scheme}://b:8000") for scheme in ("https", "http"))


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (lambda: RouterConfig(tls_cert="c"), "tls_key"),
        (lambda: RouterConfig(tls_key="k"), "tls_cert"),
        (lambda: RouterConfig(tls_ca="a"), "tls_cert"),
        (lambda: RouterConfig(**CERT, tls_names=("n",)), "tls_names"),
        (lambda: RouterConfig(**CERT, tls_client_certs="cluster"), "tls_client_certs"),
        (lambda: RouterConfig(**CERT, tls_ca="a", tls_client_certs="some"), "tls_client_certs"),
        (lambda: RouterConfig(**CERT, tls_ca="a", foreign=(TLS_SERVER, PLAIN_SERVER)), "foreign"),
        (lambda: ServerConfig(**CERT, tls_ca="a", tls_names=("n",)), "tls_names"),
        (lambda: ServerConfig(**CERT, worker=SECURE_WORKER), "tls_ca"),
        (lambda: ServerConfig(**CERT, tls_ca="a", worker=WorkerConfig(("http://r",))), "router"),
        (
            lambda: ServerConfig(**CERT, tls_ca="a", worker=WorkerConfig(("https://r",), worker_url="http://w")),
            "worker_url",
        ),
        (lambda: GatewayConfig(engine_tls_ca="a"), "engine"),
        (lambda: GatewayConfig(engine="https://e", engine_tls_cert="c"), "engine_tls_key"),
    ],
)
def test_options_that_need_others_are_refused(build: Callable[[], object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build()
    assert caught.value.param == param
    assert ServerConfig(**CERT, tls_ca="a", tls_names=("n",), worker=SECURE_WORKER).scheme == "https"
    assert RouterConfig(**CERT, tls_ca="a", foreign=(TLS_SERVER,)) and RouterConfig(**CERT, foreign=(PLAIN_SERVER,))


# -- rotation ----------------------------------------------------------------------------------------------------------


def replace_files(files: IssuedFiles, new: IssuedFiles) -> None:
    for target, source in zip(files, new, strict=True):
        source.replace(target)


def test_changed_files_are_used_for_new_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca, clock = LocalCA(tmp_path), Clock()
    files = ca.issue("server")
    identity = identity_of(files, monotonic=clock)
    first = served_certificate(identity, ca.file)

    replace_files(files, ca.issue("new"))
    assert served_certificate(identity, ca.file) == first, "the files are looked at once a second"
    clock.time += CHECK_INTERVAL_S
    second = served_certificate(identity, ca.file)
    assert second != first and (identity.reloads, identity.failed_reloads) == (1, 0)

    ca.issue("newer").cert.replace(files.cert)  # the key is still the old one
    clock.time += CHECK_INTERVAL_S
    assert served_certificate(identity, ca.file) == second
    clock.time += CHECK_INTERVAL_S
    assert served_certificate(identity, ca.file) == second
    assert (identity.reloads, identity.failed_reloads) == (1, 1), "unchanged files are not tried again"
    assert "does not belong to the certificate" in caplog.text

    (tmp_path / "newer-key.pem").replace(files.key)
    clock.time += CHECK_INTERVAL_S
    assert served_certificate(identity, ca.file) not in (first, second)
    files.cert.unlink()
    clock.time += CHECK_INTERVAL_S
    assert served_certificate(identity, ca.file) not in (first, second)
    assert (identity.reloads, identity.failed_reloads) == (2, 2)


def test_certificate_that_becomes_valid_later_is_tried_again(tmp_path: Path) -> None:
    ca, clock, wall = LocalCA(tmp_path), Clock(), Clock()
    wall.time = time.time()
    files = ca.issue("server")
    identity = identity_of(files, monotonic=clock, now=wall)
    first = served_certificate(identity, ca.file)
    replace_files(files, ca.issue("new", starts_in=timedelta(minutes=2)))  # the clock of its CA is ahead
    clock.time += CHECK_INTERVAL_S
    assert served_certificate(identity, ca.file) == first
    clock.time += RETRY_INTERVAL_S
    assert served_certificate(identity, ca.file) == first
    assert (identity.reloads, identity.failed_reloads) == (0, 1), "one version of the files counts once"
    wall.time += 120
    clock.time += RETRY_INTERVAL_S
    identity.listener_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)  # a new connection
    assert (identity.reloads, identity.failed_reloads) == (1, 1)
    clock.time += 2 * RETRY_INTERVAL_S
    identity.listener_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
    assert (identity.reloads, identity.failed_reloads) == (1, 1)


def test_ca_that_vanishes_during_a_reload_keeps_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ca, clock = LocalCA(tmp_path), Clock()
    files = ca.issue("server")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(ca.file.read_bytes())
    identity = identity_of(files, bundle, monotonic=clock)
    replace_files(files, ca.issue("new"))
    check = tls._check_certificates

    def check_and_remove(path: Path, *args: Any, **kwargs: Any) -> float:
        expires_at = check(path, *args, **kwargs)
        if path == bundle:
            bundle.unlink()
        return expires_at

    monkeypatch.setattr(tls, "_check_certificates", check_and_remove)
    clock.time += CHECK_INTERVAL_S
    identity.listener_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)  # a new connection
    assert (identity.reloads, identity.failed_reloads) == (0, 1) and "of tls_ca cannot be read" in caplog.text


def test_names_match_exactly_or_one_label_below_a_domain() -> None:
    allowed = ("Router.example", "*.workers.example", "10.0.0.1", "spiffe://x/worker")
    for name in ("router.example", "a.workers.example", "10.0.0.1", "spiffe://x/worker"):
        assert match_names([name], allowed), name
    for name in ("example", "workers.example", "a.b.workers.example", "10.0.0.2", "x.router.example", ""):
        assert not match_names([name], allowed), name
    assert not match_names([], allowed)


@pytest.mark.parametrize(
    ("kind", "value", "is_allowed"),
    [
        ("DNS", "A.Workers.example", True),
        ("DNS", "spiffe://x/worker", False),
        ("DNS", "10.0.0.1", False),
        ("IP Address", "10.0.0.1", True),
        ("IP Address", "FD00:0:0:0:0:0:0:1", True),
        ("URI", "spiffe://x/worker", True),
        ("URI", "https://x/a.workers.example", False),
        ("email", "someone@mail.workers.example", False),
        ("email", "spiffe://x/worker", False),
        ("DirName", ((("commonName", "a.workers.example"),),), False),
        ("Registered ID", "1.2.3", False),
    ],
)
def test_names_of_a_certificate_count_by_their_kind(kind: str, value: Any, is_allowed: bool) -> None:
    names = certificate_names({"subjectAltName": ((kind, value),)})
    assert match_names(names, ("*.workers.example", "10.0.0.1", "fd00::1", "spiffe://x/worker", "1.2.3")) is is_allowed
