"""SignIn: exchanges the one-time token of a sign-in link for an admin key that expires.

A start of the gateway prints the link. The token is in the URL's fragment, which browsers send neither to servers nor
in the Referer header. The dashboard removes it from the address bar and sends it in the body of a POST request. The
gateway accepts it over TLS or from this machine only, so it never crosses a network in clear text. The token cannot be
guessed, so wrong ones do not disable the link: otherwise any client could keep the operator out.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import RequestForbidden, Unauthorized
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, decode_json
from emberline.gateway.admin.schemas import KeyView, StrictStruct
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.paths import DEFAULT_NAME
from emberline.gateway.keys.key_store import StoredKey, hash_secret, new_secret, visible_prefix
from emberline.gateway.store.base import Document

log = logging.getLogger("emberline.gateway")

SIGN_IN_PATH = "/sign-in"
LINK_LIFETIME_S = 1800.0
SESSION_LIFETIME_MS = 12 * 3_600_000
SESSION_KEY_NAME = "dashboard sign-in"
_PROXY_HEADERS = ("via", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_LINK = Identity("sign-in-link", "sign-in link", "token", is_admin=True, account=DEFAULT_NAME)
_HINT = "restart the gateway for a new link, or sign in with an admin key"


class SignInSpec(StrictStruct, frozen=True, kw_only=True):
    token: str


class SignIn:
    """The sign-in link of this process. Until `create_link` is called, every token is refused."""

    def __init__(self, context: AdminContext, clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._token_hash = ""
        self._expires_at = 0.0
        self._wrong_tokens = 0

    def create_link(self, url: str) -> str:
        """Return a link to the dashboard at `url` with a new token, which replaces the token before it."""
        token = secrets.token_urlsafe(32)
        self._token_hash = _hash_token(token)
        self._expires_at = self._clock.now() + LINK_LIFETIME_S
        self._wrong_tokens = 0
        return f"{url}/#/sign-in?token={token}"

    async def exchange_token(self, body: bytes) -> KeyView:
        """Return a new admin key, with its secret, for the token in a request's body. The token is then used up.

        Raise Unauthorized if the token is wrong, used or expired.
        """
        self._use_token(decode_json(body, SignInSpec).token)
        secret, now = new_secret("token"), self._context.now_ms()
        key = StoredKey(
            hash=hash_secret(secret),
            shown=visible_prefix(secret),
            name=SESSION_KEY_NAME,
            kind="token",
            account=DEFAULT_NAME,
            created=now,
            scopes=("use", "admin"),
            expires=now + SESSION_LIFETIME_MS,
        )
        document = Document("key", DEFAULT_NAME, key.id, msgspec.json.encode(key))
        request = AdminRequest(_LINK, {"account": DEFAULT_NAME}, {}, b"")
        documents = await self._context.list_all_documents("key", DEFAULT_NAME)
        old = [each for each in documents if _is_expired_session(each, now)]
        view = KeyView.from_stored_key(key)
        await self._context.commit(request, "key.create", key.id, put=[document], delete=old, after=view)
        return KeyView.from_stored_key(key, secret)

    def _use_token(self, token: str) -> None:
        if not self._token_hash:
            raise Unauthorized("the sign-in link was used already, or there is none for this process", hint=_HINT)
        if not hmac.compare_digest(_hash_token(token), self._token_hash):
            self._wrong_tokens += 1
            log.warning("Wrong sign-in token: wrong_tokens=%d", self._wrong_tokens)
            raise Unauthorized("the token of the sign-in link is wrong", hint=_HINT)
        self._token_hash = ""
        if self._clock.now() >= self._expires_at:
            raise Unauthorized(f"the sign-in link expired after {LINK_LIFETIME_S / 60:.0f} minutes", hint=_HINT)


def check_sign_in_connection(scheme: str, client: str, headers: dict[str, str]) -> None:
    """Raise RequestForbidden unless the token came over TLS, or from a program on this machine."""
    is_forwarded = any(name in headers for name in _PROXY_HEADERS)
    if scheme == "https" or (_is_loopback(client) and not is_forwarded):
        return
    raise RequestForbidden(
        "a sign-in link works only over TLS, or in a browser on the gateway's own machine",
        hint="sign in with an admin key, or give the gateway a certificate (--tls-cert, --tls-key)",
    )


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_expired_session(document: Document, now_ms: int) -> bool:
    """Return whether a stored key is of an earlier sign-in and has expired."""
    key = decode_json(document.body, StoredKey)
    return key.name == SESSION_KEY_NAME and key.expires is not None and key.expires <= now_ms
