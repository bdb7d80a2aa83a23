"""TLSConfig: the files of a process's certificate, key and CAs, and the names that peers' certificates must have."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest

CLIENT_CERT_CHOICES = ("all", "cluster")


@dataclass(frozen=True, slots=True)
class TLSConfig:
    cert: str | None  # PEM file: the certificate, then intermediate ones; None: a client without a certificate
    key: str | None  # PEM file with the certificate's private key
    ca: str | None = None  # PEM file with the CAs of peers; None: the system's CAs, and clients need no certificate
    peer_names: tuple[str, ...] = ()  # allowed names of cluster peers; empty: the host of their URL, and any client
    client_certs: str = "all"  # calls that need a client certificate, if `ca` is set: all, or cluster calls only

    @staticmethod
    def from_options(
        cert: str | None,
        key: str | None,
        ca: str | None,
        peer_names: tuple[str, ...] = (),
        client_certs: str = "all",
        prefix: str = "tls",
    ) -> TLSConfig | None:
        """Return the settings for --tls-cert and the related options; None if none of them is set.

        `prefix`: the start of the options' names. Raises InvalidRequest if an option is set without another option that
        it needs, or if `client_certs` is unknown."""
        flag = f"--{prefix.replace('_', '-')}"
        if (cert is None) != (key is None):
            missing = "key" if key is None else "cert"
            other = "cert" if key is None else "key"
            message = f"{flag}-{other} is set without {flag}-{missing}: a certificate and its key belong together"
            raise InvalidRequest(message, param=f"{prefix}_{missing}", hint=f"add {flag}-{missing} FILE")
        if client_certs not in CLIENT_CERT_CHOICES:
            message = f"tls_client_certs is {client_certs!r}; it must be one of {', '.join(CLIENT_CERT_CHOICES)}"
            raise InvalidRequest(message, param="tls_client_certs")
        if ca is None and (peer_names or client_certs != "all"):
            name = "tls_names" if peer_names else "tls_client_certs"
            message = f"{name} is set without tls_ca: without a CA, no certificate of a peer is checked"
            raise InvalidRequest(message, param=name, hint="add --tls-ca FILE")
        return None if cert is None and ca is None else TLSConfig(cert, key, ca, peer_names, client_certs)

    @staticmethod
    def for_listener(
        cert: str | None, key: str | None, ca: str | None, peer_names: tuple[str, ...] = (), client_certs: str = "all"
    ) -> TLSConfig | None:
        """Return the settings of a server; None if it serves plain HTTP.

        Raises InvalidRequest if an option is set without another that it needs."""
        config = TLSConfig.from_options(cert, key, ca, peer_names, client_certs)
        if config is not None and config.cert is None:
            message = "tls_ca is set without tls_cert: a server needs a certificate to check those of its clients"
            raise InvalidRequest(message, param="tls_cert", hint="add --tls-cert FILE and --tls-key FILE")
        return config
