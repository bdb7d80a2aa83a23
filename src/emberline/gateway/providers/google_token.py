"""Gets and caches short-lived Google access tokens.

A service account signs an assertion to get one, a user's credentials have a refresh token. Tokens are cached until
shortly before they expire.
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
from emberline.gateway.dialects.errors import parse_error
from emberline.gateway.errors import ProviderErrorReply, UpstreamBroken, UpstreamTimeout
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
    """A service account's key, or gcloud's user credentials; `region` is Cloudflare's addition."""

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
        """Parse credentials given as JSON or base64-encoded JSON; None if `text` is an access token."""
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


class _Token(msgspec.Struct):
    access_token: str
    expires_in: float = ASSERTION_LIFETIME_S


class GoogleTokenCache:
    def __init__(self, base_url: str, *, public_only: bool = False) -> None:
        """`base_url`: a server whose token endpoint is trusted besides Google's."""
        self._base_url = base_url
        self._public_only = public_only
        self._tokens: dict[bytes, tuple[str, float]] = {}  # hash of the credentials -> token and its expiry
        self._locks: dict[bytes, asyncio.Lock] = {}

    async def get_token(self, account: GoogleCredentials, upstream: UpstreamClient, seconds: float, now: float) -> str:
        id = _credentials_hash(account)
        if len(self._tokens) >= MAX_CACHED_TOKENS or len(self._locks) >= MAX_CACHED_TOKENS:
            self._tokens.clear()
            self._locks.clear()
        try:
            async with (
                asyncio.timeout(seconds),
                self._locks.setdefault(id, asyncio.Lock()),
            ):  # concurrent callers wait for one token request
                token, until = self._tokens.get(id, ("", 0.0))
                if now + REFRESH_EARLY_S >= until:
                    result = await self._fetch_token(account, upstream, seconds, now)
                    token = result.access_token
                    self._tokens[id] = (token, now + result.expires_in)
        except TimeoutError:
            raise UpstreamTimeout(f"Google issued no access token within {seconds:.3g} s") from None
        return token

    def forget(self, account: GoogleCredentials) -> None:
        """Remove the cached token, because Google rejected it."""
        self._tokens.pop(_credentials_hash(account), None)

    async def _fetch_token(
        self, account: GoogleCredentials, upstream: UpstreamClient, seconds: float, now: float
    ) -> _Token:
        if not is_trusted_url(account.token_uri, self._base_url, "googleapis.com"):
            raise InvalidRequest(
                f"token_uri of the Google credentials is not a Google server: {account.token_uri[:100]!r}",
                hint=f"use {TOKEN_URL}",
            )
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        request = ProviderRequest(
            "POST", account.token_uri, headers, urlencode(_token_request(account, now)).encode(), self._public_only
        )
        incoming = await upstream.send(request, seconds)
        try:
            body = await incoming.read_all(seconds, MAX_REPLY_BYTES)
        finally:
            incoming.close()
        if incoming.status >= 400:
            kind, status = ("server", 502) if incoming.status >= 500 else ("access", 401)
            message = f"Google issued no access token (status {incoming.status}): {parse_error(body).message}"
            raise ProviderErrorReply(message, reason=kind, status=status, headers={}, body=body)  # type: ignore[arg-type]
        try:
            return msgspec.json.decode(body, type=_Token)
        except JSON_DECODE_ERRORS as e:
            raise UpstreamBroken(f"Google's token reply cannot be decoded: {e}") from e


def _credentials_hash(account: GoogleCredentials) -> bytes:
    return hashlib.sha256(msgspec.json.encode(account)).digest()


def _token_request(account: GoogleCredentials, now: float) -> dict[str, str]:
    if account.type == "authorized_user":
        mine = {"client_id": account.client_id, "client_secret": account.client_secret}
        return {"grant_type": "refresh_token", "refresh_token": account.refresh_token, **mine}
    return {"grant_type": _JWT_GRANT_TYPE, "assertion": sign_assertion(account, int(now))}


def sign_assertion(account: GoogleCredentials, now: int) -> str:
    head = {"alg": "RS256", "typ": "JWT", "kid": account.private_key_id}
    claims = {
        "iss": account.client_email,
        "scope": SCOPE,
        "aud": account.token_uri,
        "iat": now,
        "exp": now + ASSERTION_LIFETIME_S,
    }
    text = b".".join(_base64url(msgspec.json.encode(each)) for each in (head, claims))
    return (text + b"." + _base64url(_sign(account.private_key, text))).decode()


def _sign(private_key: str, text: bytes) -> bytes:
    """Sign `text` with an RSA key, and verify the signature.

    Validating the key itself would block the event loop for 200 ms. A signature of an inconsistent key could leak the
    key, so the signature is verified instead.
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


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
