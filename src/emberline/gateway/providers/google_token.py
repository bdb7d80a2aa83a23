"""GoogleTokenCache: requests and caches short-lived Google access tokens.

A service account signs an assertion to get an access token; user credentials contain a refresh token instead. Tokens
are cached until shortly before they expire.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from urllib.parse import urlencode

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import ProviderErrorReply, UpstreamBroken, UpstreamTimeout
from emberline.gateway.dialects.errors import parse_error
from emberline.gateway.providers.base import is_trusted_url
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TOKEN_URL = "https://oauth2.googleapis.com/token"
ASSERTION_LIFETIME_S = 3600
REFRESH_EARLY_S = 120.0  # before its expiry a token is replaced
MAX_CACHED_TOKENS = 1024
MAX_REPLY_BYTES = 1 << 16
MAX_KEY_CHARACTERS = 8192
_JWT_GRANT_TYPE = "urn:ietf:params:oauth:grant-type:jwt-bearer"


class GoogleCredentials(msgspec.Struct):
    """The key of a service account, or gcloud's user credentials.

    `region` is not part of Google's format; Cloudflare's AI Gateway adds it.
    """

    type: str = "service_account"
    project_id: str = ""
    private_key_id: str = ""
    private_key: str = ""
    client_email: str = ""
    client_id: str = ""
    client_secret: str = ""
    refresh_token: str = ""
    quota_project_id: str = ""
    token_uri: str = TOKEN_URL
    region: str = ""

    @staticmethod
    def parse(text: str) -> GoogleCredentials | None:
        """Parse credentials given as JSON or base64-encoded JSON. Return None if `text` is an access token."""
        if not text.startswith("{"):
            try:
                text = base64.b64decode(text, validate=True).decode()
            except (binascii.Error, ValueError):
                return None
        if not text.startswith("{"):
            return None
        try:
            return msgspec.json.decode(text, type=GoogleCredentials)
        except JSON_DECODE_ERRORS as e:
            raise InvalidRequest(
                f"the Google credentials are not valid JSON: {e}", hint="use a service account's key file"
            ) from None

    @property
    def project(self) -> str:
        return self.project_id or self.quota_project_id


class _AccessToken(msgspec.Struct):
    access_token: str
    expires_in: float = ASSERTION_LIFETIME_S


class GoogleTokenCache:
    def __init__(self, base_url: str, *, public_only: bool = False) -> None:
        """Create an empty cache. Tokens are requested only from Google's servers and from `base_url`."""
        self._base_url = base_url
        self._public_only = public_only
        self._tokens: dict[bytes, tuple[str, float]] = {}  # hash of the credentials -> token and its expiry
        self._locks: dict[bytes, asyncio.Lock] = {}

    async def get_token(
        self, credentials: GoogleCredentials, upstream: UpstreamClient, timeout_s: float, now: float
    ) -> str:
        credentials_hash = _credentials_hash(credentials)
        if len(self._tokens) >= MAX_CACHED_TOKENS or len(self._locks) >= MAX_CACHED_TOKENS:
            self._tokens.clear()
            self._locks.clear()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._locks.setdefault(credentials_hash, asyncio.Lock()),  # concurrent callers share one token request
            ):
                token, expiry = self._tokens.get(credentials_hash, ("", 0.0))
                if now + REFRESH_EARLY_S >= expiry:
                    fetched = await self._fetch_token(credentials, upstream, timeout_s, now)
                    token = fetched.access_token
                    self._tokens[credentials_hash] = (token, now + fetched.expires_in)
        except TimeoutError:
            raise UpstreamTimeout(f"Google issued no access token within {timeout_s:.3g} s") from None
        return token

    def forget_token(self, credentials: GoogleCredentials) -> None:
        """Remove the cached token, because Google rejected it."""
        self._tokens.pop(_credentials_hash(credentials), None)

    async def _fetch_token(
        self, credentials: GoogleCredentials, upstream: UpstreamClient, timeout_s: float, now: float
    ) -> _AccessToken:
        if not is_trusted_url(credentials.token_uri, self._base_url, "googleapis.com"):
            raise InvalidRequest(
                f"token_uri of the Google credentials must be on a Google server, not {credentials.token_uri[:100]!r}",
                hint=f"use {TOKEN_URL}",
            )
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        request = ProviderRequest(
            "POST",
            credentials.token_uri,
            headers,
            urlencode(_token_request_fields(credentials, now)).encode(),
            self._public_only,
        )
        incoming = await upstream.send(request, timeout_s)
        try:
            body = await incoming.read_all(timeout_s, MAX_REPLY_BYTES)
        finally:
            incoming.close()
        if incoming.status >= 400:
            reason, status = ("server", 502) if incoming.status >= 500 else ("access", 401)
            message = f"Google issued no access token (status {incoming.status}): {parse_error(body).message}"
            raise ProviderErrorReply(message, reason=reason, status=status, headers={}, body=body)  # type: ignore[arg-type]
        try:
            return msgspec.json.decode(body, type=_AccessToken)
        except JSON_DECODE_ERRORS as e:
            raise UpstreamBroken(f"Google's token reply cannot be decoded: {e}") from e


def _credentials_hash(credentials: GoogleCredentials) -> bytes:
    return hashlib.sha256(msgspec.json.encode(credentials)).digest()


def _token_request_fields(credentials: GoogleCredentials, now: float) -> dict[str, str]:
    if credentials.type == "authorized_user":
        client = {"client_id": credentials.client_id, "client_secret": credentials.client_secret}
        return {"grant_type": "refresh_token", "refresh_token": credentials.refresh_token, **client}
    return {"grant_type": _JWT_GRANT_TYPE, "assertion": sign_assertion(credentials, int(now))}


def sign_assertion(credentials: GoogleCredentials, now: int) -> str:
    head = {"alg": "RS256", "typ": "JWT", "kid": credentials.private_key_id}
    claims = {
        "iss": credentials.client_email,
        "scope": SCOPE,
        "aud": credentials.token_uri,
        "iat": now,
        "exp": now + ASSERTION_LIFETIME_S,
    }
    text = b".".join(_encode_base64url(msgspec.json.encode(each)) for each in (head, claims))
    return (text + b"." + _encode_base64url(_sign_with_rsa(credentials.private_key, text))).decode()


def _sign_with_rsa(private_key: str, text: bytes) -> bytes:
    """Sign `text` with an RSA key, and verify the signature.

    A signature made with an inconsistent key could leak the key. Validating the key would block the event loop for 200
    ms, so only the signature is verified.
    """
    try:
        key = load_pem_private_key(private_key[:MAX_KEY_CHARACTERS].encode(), None, unsafe_skip_rsa_key_validation=True)
        if not isinstance(key, rsa.RSAPrivateKey) or key.key_size > 4096:
            raise InvalidRequest(
                "private_key of the Google credentials must be an RSA key of at most 4096 bits",
                hint="use the key file as Google created it",
            )
        signature = key.sign(text, padding.PKCS1v15(), SHA256())
        key.public_key().verify(signature, text, padding.PKCS1v15(), SHA256())
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as e:
        raise InvalidRequest(
            f"private_key of the Google credentials is invalid: {e}", hint="use the key file as Google created it"
        ) from None
    return signature


def _encode_base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
