"""TLSIdentity: the certificate, private key and CAs of this process, for its listeners and its connections to peers.

The files are read again when they change, so that keys rotate without a restart: new connections use the new files,
and open connections continue. If the new files are not usable, the old ones stay in use, and the new ones are tried
again: a certificate may become valid only a little later, or the process may have had too many open files.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.tls_config import TLSConfig

log = logging.getLogger("emberline.tls")

CHECK_INTERVAL_S = 1.0  # between two checks whether the files have changed
RETRY_INTERVAL_S = 10.0  # until files that were not usable are read again, if they have not changed
FAILURE_LOG_INTERVAL_S = 1.0  # between two log lines about failed handshakes

FileState = tuple[int, int, int]  # time of the last change in ns, inode, bytes


@dataclass(frozen=True, slots=True)
class _LoadedFiles:
    """The SSL contexts made from one version of the certificate, key and CA files."""

    for_clients: ssl.SSLContext | None  # of an HTTP listener; None: without a certificate
    for_peers: ssl.SSLContext | None  # of a listener for cluster peers only
    to_peers: ssl.SSLContext
    expires_at: float  # Unix time at which the first certificate of the chain expires; infinity: there is none


def open_identity(config: TLSConfig | None) -> TLSIdentity | None:
    """Return the identity of these settings; None if `config` is None. Raises InvalidRequest if files are unusable."""
    return None if config is None else TLSIdentity(config)


class TLSIdentity:
    def __init__(
        self,
        config: TLSConfig,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files. Raises InvalidRequest if one is missing, damaged, expired or does not fit the others."""
        self.config = config
        self.reloads = 0  # times that changed files were put to use
        self.failed_reloads = 0  # versions of the files that were not usable
        self.failed_handshakes = 0  # of connections that others opened
        self._now, self._monotonic = now, monotonic
        self._paths = [Path(each) for each in (config.cert, config.key, config.ca) if each is not None]
        self._states = self._read_file_states()
        self._files = _load_files(config, now(), self)
        self._checked_at = monotonic()
        self._retry_at = float("inf")  # when files that were not usable are read again
        self._failure_logged_at = -FAILURE_LOG_INTERVAL_S

    @property
    def expires_at(self) -> float:
        return self._files.expires_at

    def listener_context(self) -> ssl.SSLContext:
        """Return the context of an HTTP listener.

        If a CA is set, clients must present a certificate. But if `client_certs` is "cluster", clients may also connect
        without one."""
        return _CurrentContext.make(lambda: self._current().for_clients, is_server=True)

    def peer_listener_context(self) -> ssl.SSLContext:
        """Return the context of a listener for cluster peers, which need a certificate if a CA is set."""
        return _CurrentContext.make(lambda: self._current().for_peers, is_server=True)

    def peer_client_context(self) -> ssl.SSLContext:
        """Return the context of connections to cluster peers."""
        return _CurrentContext.make(lambda: self._current().to_peers, is_server=False)

    def check_accepts_itself(self) -> None:
        """Raise InvalidRequest unless this process would accept its own certificate from a peer.

        The certificate must be acceptable from a server and from a client. Peers of a cluster have the same CAs and
        names, so they would refuse the certificate too."""
        server, client = _make_context(self.config, is_server=True), _make_context(self.config, is_server=False)
        server.verify_mode, client.check_hostname = ssl.CERT_REQUIRED, False
        client.peer_names = self.config.peer_names
        try:
            _shake_hands(server, client)
        except ssl.SSLError as error:
            raise InvalidRequest(
                f"the certificate {self.config.cert} would not be accepted by peers: {_reason(error)}",
                param="tls_ca",
                hint=f"it must be signed by a CA in {self.config.ca}, be usable for servers and for clients,"
                " and have one of --tls-names if that is set",
            ) from error

    def record_failed_handshake(self, error: ssl.SSLError) -> None:
        self.failed_handshakes += 1
        if self._monotonic() - self._failure_logged_at >= FAILURE_LOG_INTERVAL_S:
            self._failure_logged_at = self._monotonic()
            log.info("TLS handshake of a client failed: reason=%s", _reason(error))

    def _current(self) -> _LoadedFiles:
        """Return the contexts of the newest usable version of the files."""
        if (now := self._monotonic()) - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            states = self._read_file_states()
            if (is_changed := states != self._states) or now >= self._retry_at:
                self._states = states
                self._reload(is_retry=not is_changed)
        return self._files

    def _reload(self, *, is_retry: bool) -> None:
        self._retry_at = float("inf")
        try:
            self._files = _load_files(self.config, self._now(), self)
        except InvalidRequest as error:
            self._retry_at = self._monotonic() + RETRY_INTERVAL_S
            self.failed_reloads += not is_retry
            level = logging.DEBUG if is_retry else logging.WARNING
            log.log(level, "Changed TLS files are not usable, keeping the old ones: error=%s", error)
        else:
            self.reloads += 1
            log.info("TLS files reloaded: cert=%s expires_at=%s", self.config.cert, _format_time(self.expires_at))

    def _read_file_states(self) -> list[FileState | None]:
        return [_file_state(path) for path in self._paths]


class _CurrentContext(ssl.SSLContext):
    """An SSLContext that delegates each new connection to the context of the newest files.

    asyncio, uvloop and http.client accept it."""

    _find: Callable[[], ssl.SSLContext | None]

    @staticmethod
    def make(find: Callable[[], ssl.SSLContext | None], *, is_server: bool) -> _CurrentContext:
        made = _CurrentContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        made._find = find
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        context = self._find()
        assert context is not None
        return context.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        context = self._find()
        assert context is not None
        return context.wrap_socket(*args, **kwargs)


class _CheckedContext(ssl.SSLContext):
    """A context whose handshakes also check the names in the peer's certificate, and report failures."""

    peer_names: tuple[str, ...] = ()  # empty: any name
    on_failure: Callable[[ssl.SSLError], None] | None = None


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        _do_handshake(self, super().do_handshake)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        _do_handshake(self, lambda: ssl.SSLSocket.do_handshake(self, block))


def _do_handshake(connection: ssl.SSLObject | ssl.SSLSocket, handshake: Callable[[], None]) -> None:
    context = connection.context
    assert isinstance(context, _CheckedContext)
    try:
        handshake()
        if context.peer_names:
            names = certificate_names(connection.getpeercert())
            if not match_names(names, context.peer_names):
                raise ssl.SSLCertVerificationError(
                    1, f"the peer's certificate has the names {', '.join(names) or 'none'}, and none of them is allowed"
                )
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise
    except ssl.SSLError as error:
        if context.on_failure is not None:
            context.on_failure(error)
        raise


def certificate_names(certificate: Any) -> tuple[str, ...]:
    """Return the DNS names, IP addresses and URIs in a certificate, as `getpeercert` returns it.

    They are in the form in which `match_names` compares them. Names of other kinds, such as email addresses, do not
    identify a server and are left out, and so are DNS names in the form of an address or a URI."""
    names = ((kind, value) for kind, value in (certificate or {}).get("subjectAltName", ()))
    return tuple(
        _normalise_name(value)
        for kind, value in names
        if kind in ("IP Address", "URI") or (kind == "DNS" and not _is_address_or_uri(value))
    )


def match_names(names: Iterable[str], allowed: Sequence[str]) -> bool:
    """Return whether a name is allowed. An allowed name `*.DOMAIN` stands for all DNS names one label below DOMAIN."""
    patterns = {_normalise_name(each) for each in allowed}
    return any(
        name in patterns or (not _is_address_or_uri(name) and f"*.{name.partition('.')[2]}" in patterns)
        for name in names
    )


def _normalise_name(name: str) -> str:
    """Return a name in the form in which names are compared, since an IPv6 address can be written in many ways."""
    try:
        return ipaddress.ip_address(name).compressed
    except ValueError:
        return name.lower()


def _is_address_or_uri(name: str) -> bool:
    return ":" in name or "/" in name or name.replace(".", "").isdecimal()


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_files(config: TLSConfig, now: float, identity: TLSIdentity) -> _LoadedFiles:
    expires_at = float("inf")
    if config.cert is not None:
        expires_at = _check_certificates(Path(config.cert), "tls_cert", now, is_chain=True)
    if config.ca is not None:
        _check_certificates(Path(config.ca), "tls_ca", now, is_chain=False)
    to_peers = _make_context(config, is_server=False)
    to_peers.peer_names = config.peer_names
    if config.peer_names:
        to_peers.check_hostname = False  # a peer has one of these names wherever it runs
    if config.cert is None:
        return _LoadedFiles(None, None, to_peers, expires_at)
    for_clients, for_peers = _make_context(config, is_server=True), _make_context(config, is_server=True)
    if config.ca is not None:
        for_clients.verify_mode = ssl.CERT_REQUIRED if config.client_certs == "all" else ssl.CERT_OPTIONAL
        for_peers.verify_mode = ssl.CERT_REQUIRED
        for_peers.peer_names = config.peer_names
    for_clients.on_failure = for_peers.on_failure = identity.record_failed_handshake
    return _LoadedFiles(for_clients, for_peers, to_peers, expires_at)


def _make_context(config: TLSConfig, *, is_server: bool) -> _CheckedContext:
    context = _CheckedContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslobject_class, context.sslsocket_class = _CheckedObject, _CheckedSocket
    if config.cert is not None:
        assert config.key is not None
        try:
            context.load_cert_chain(config.cert, config.key, password=_refuse_password)
        except (OSError, ValueError) as error:
            raise _key_error(config.cert, config.key, error) from error
    if config.ca is not None:
        try:
            context.load_verify_locations(config.ca)
        except OSError as error:  # it was readable when its certificates were checked
            what = f"the file {config.ca} of tls_ca cannot be read: {error.strerror}"
            raise InvalidRequest(what, param="tls_ca", hint="check the path and the file's permissions") from error
    elif not is_server:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


def _check_certificates(path: Path, param: str, now: float, *, is_chain: bool) -> float:
    """Return the earliest time at which a certificate of a file expires.

    Raises InvalidRequest if the file has no certificate, if a certificate of a chain is not valid now, or if none of
    several CAs is valid now."""
    from cryptography import x509  # takes 0.2 s

    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        what = f"the file {path} of {param} cannot be read: {error.strerror}"
        raise InvalidRequest(what, param=param, hint="check the path and the file's permissions") from error
    except ValueError as error:
        what = f"the file {path} of {param} has no certificate in PEM format"
        raise InvalidRequest(what, param=param, hint="it begins with -----BEGIN CERTIFICATE-----") from error
    valid_from = [each.not_valid_before_utc.timestamp() for each in certificates]
    expiries = [each.not_valid_after_utc.timestamp() for each in certificates]
    are_valid = [start <= now < end for start, end in zip(valid_from, expiries, strict=True)]
    if not (all(are_valid) if is_chain else any(are_valid)):
        start, end = (valid_from[(i := are_valid.index(False))], expiries[i])
        problem = f"expired on {_format_time(end)}" if now >= end else f"is valid only from {_format_time(start)} on"
        raise InvalidRequest(
            f"a certificate in {path} of {param} {problem}",
            param=param,
            hint="renew it, and check this machine's clock",
        )
    return min(expiries)


def _key_error(cert: str, key: str, error: Exception) -> InvalidRequest:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        what = f"the private key {key} does not belong to the certificate {cert}"
        return InvalidRequest(what, param="tls_key", hint="give the key that the certificate was requested with")
    if isinstance(error, _PasswordNeeded):
        what = f"the private key {key} is encrypted with a password"
        return InvalidRequest(what, param="tls_key", hint=f"decrypt it: openssl pkey -in {key} -out FILE")
    reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else "no key in PEM"
    what = f"the private key {key} cannot be read: {reason}"
    return InvalidRequest(what, param="tls_key", hint="check the path and the file's permissions and format")


class _PasswordNeeded(ValueError):
    pass


def _refuse_password() -> str:
    raise _PasswordNeeded


def _file_state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> None:
    """Do a handshake in memory. Raises ssl.SSLError if one side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


def _reason(error: ssl.SSLError) -> str:
    return str(getattr(error, "verify_message", "") or error.strerror or error)


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds != float("inf") else "never"
