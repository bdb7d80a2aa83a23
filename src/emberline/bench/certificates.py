"""LocalCA: a certificate authority in a directory, which signs certificates for tests and benchmarks."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class IssuedFiles(NamedTuple):
    cert: Path
    key: Path


class LocalCA:
    def __init__(self, directory: Path, name: str = "ca") -> None:
        """Create the CA and write its certificate to NAME.pem in the directory."""
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _make_builder(name, name, self._key.public_key(), -timedelta(days=30), timedelta(days=60))
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        names: Sequence[str] = ("localhost", "127.0.0.1"),
        *,
        starts_in: timedelta = timedelta(0),
        valid_for: timedelta = timedelta(days=1),
    ) -> IssuedFiles:
        """Write a certificate with these names (DNS or IP) and its key to NAME-cert.pem and NAME-key.pem."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _make_builder(name, self._name, key.public_key(), starts_in, valid_for)
        sans = x509.SubjectAlternativeName([_parse_name(each) for each in names])
        certificate = builder.add_extension(sans, critical=False).sign(self._key, hashes.SHA256())
        files = IssuedFiles(self._directory / f"{name}-cert.pem", self._directory / f"{name}-key.pem")
        files.key.touch(mode=0o600)
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        return files


def _make_builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, starts_in: timedelta, valid_for: timedelta
) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - timedelta(minutes=1) + starts_in
    return x509.CertificateBuilder(
        issuer_name=_make_name(issuer),
        subject_name=_make_name(subject),
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=start,
        not_valid_after=start + valid_for,
    )


def _make_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _parse_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
