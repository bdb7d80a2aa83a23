"""AWS Signature Version 4: signs with a key derived for one day, region and service.

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
    """Return `headers`, all of them signed, plus those of the signature; `now` is Unix time."""
    parts = urlsplit(url)
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    result = {name.lower(): value for name, value in headers.items()} | {"host": parts.netloc, "x-amz-date": stamp}
    if credentials.token:
        result["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(result))
    lines = [f"{name}:{' '.join(result[name].split())}" for name in sorted(result)]
    digest = hashlib.sha256(body).hexdigest()
    request = "\n".join((method, _canonical_path(parts.path), _canonical_query(parts.query), *lines, "", names, digest))
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = "\n".join((ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    signature = hmac.new(signing_key(credentials.secret, stamp[:8], region, service), text.encode(), "sha256")
    given = f"Credential={credentials.id}/{scope}, SignedHeaders={names}, Signature={signature.hexdigest()}"
    return result | {"authorization": f"{ALGORITHM} {given}"}


def signing_key(secret: str, day: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return key


def _canonical_path(path: str) -> str:
    """Return the normalised path, URL-encoded once more than it is sent."""
    tail = "/" if path.endswith(("/", "/.", "/..")) else ""
    plain = posixpath.normpath(path or "/").lstrip("/")
    return quote("/" + plain + (tail if plain else ""), safe="/-_.~")


def _canonical_query(query: str) -> str:
    pairs = (each.partition("=") for each in query.split("&") if each)
    encoded = [(quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~")) for name, _, value in pairs]
    return "&".join(f"{name}={value}" for name, value in sorted(encoded))
