"""AWS Signature Version 4: signs a request with a key that is derived for one day, region and service.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

from __future__ import annotations

import hashlib
import hmac
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote, urlsplit

ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    id: str
    secret: str
    token: str = ""  # session token


def sign_headers(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    credentials: AwsCredentials,
    *,
    region: str,
    service: str,
    now: float,
) -> dict[str, str]:
    """Return `headers` and the headers of the signature, which covers all of `headers`.

    `now` is Unix time in seconds.
    """
    parts = urlsplit(url)
    timestamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    result = {name.lower(): value for name, value in headers.items()} | {"host": parts.netloc, "x-amz-date": timestamp}
    if credentials.token:
        result["x-amz-security-token"] = credentials.token
    signed_names = ";".join(sorted(result))
    lines = [f"{name}:{' '.join(result[name].split())}" for name in sorted(result)]
    digest = hashlib.sha256(body).hexdigest()
    canonical_request = "\n".join(
        (method, _canonical_path(parts.path), _canonical_query(parts.query), *lines, "", signed_names, digest)
    )
    scope = f"{timestamp[:8]}/{region}/{service}/aws4_request"
    string_to_sign = "\n".join((ALGORITHM, timestamp, scope, hashlib.sha256(canonical_request.encode()).hexdigest()))
    signature = hmac.new(
        derive_signing_key(credentials.secret, timestamp[:8], region, service), string_to_sign.encode(), "sha256"
    )
    authorization = (
        f"Credential={credentials.id}/{scope}, SignedHeaders={signed_names}, Signature={signature.hexdigest()}"
    )
    return result | {"authorization": f"{ALGORITHM} {authorization}"}


def derive_signing_key(secret: str, day: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return key


def _canonical_path(path: str) -> str:
    """Return the path that the signature covers: the request's path, normalised and percent-encoded again."""
    tail = "/" if path.endswith(("/", "/.", "/..")) else ""
    plain = posixpath.normpath(path or "/").lstrip("/")
    return quote("/" + plain + (tail if plain else ""), safe="/-_.~")


def _canonical_query(query: str) -> str:
    pairs = (each.partition("=") for each in query.split("&") if each)
    encoded = [(quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~")) for name, _, value in pairs]
    return "&".join(f"{name}={value}" for name, value in sorted(encoded))
