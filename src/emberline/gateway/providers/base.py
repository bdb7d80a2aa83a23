"""The base class of all providers.

Most providers differ in data only: the URL, the paths of the wire formats they support, the header of the key. Others
override `build_url`, `authorize`, `build_request`, or `send` where requests are signed or one is not enough. A provider
with its own reply format sets a ReplyDecoder in the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from emberline.gateway.call import Call, Dialect
from emberline.gateway.dialects.prefill import Prefill
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.upstream.outgoing import Outgoing, decoded
from emberline.gateway.upstream.upstream import Incoming, Upstream
from emberline.trace.context import HEADERS as TRACES

# Hop-by-hop headers, and headers meant for the gateway: never forwarded.
HELD = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
                  "trailer", "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "cookie",
                  "x-auth-token", "forwarded", "x-real-ip", "cf-cache-ttl", "cf-skip-cache", *TRACES})  # fmt: skip
OURS = ("cf-aig-", "x-emberline-", "x-forwarded-")
CHANGED = "x-emberline-changed"
CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "xi-api-key")


class Provider:
    slug: str
    base_url: ClassVar[str] = ""
    prefix: ClassVar[str] = ""  # put before endpoints in none of the supported wire formats
    paths: ClassVar[Mapping[Dialect, str]] = {}  # wire format -> endpoint, which may contain {model}
    needs_key: ClassVar[bool] = True
    own_errors: ClassVar[bool] = False  # errors do not follow the wire format
    counts_streams: ClassVar[bool] = True  # accepts stream_options.include_usage
    takes_thoughts: ClassVar[bool] = False  # accepts other models' reasoning in the history
    realtime: ClassVar[str] = ""  # path of its WebSocket
    prefill: Prefill = ""  # how its chat continues the assistant's last message
    max_tokens_name: ClassVar[str] = "max_completion_tokens"  # chat field; older APIs know only max_tokens

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public: bool = False
    ) -> None:
        """`public_only`: connect to public addresses only."""
        self._base_url = (base_url or self.base_url).rstrip("/")
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.public = public
        self.native = self.paths

    @property
    def origin(self) -> str:
        """The provider's name and address, by which failures are counted."""
        return f"{self.slug} {self._base_url}"

    def speaks(self, dialect: Dialect, model: str = "") -> bool:
        return dialect == "raw" or dialect in self.native

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        """Return the wire format at a path of this provider, "raw" if it is unknown."""
        for dialect, path in self.native.items():
            if self._below(path) == self._below(endpoint):
                return dialect
        return "raw"

    def model_in(self, endpoint: str) -> str:
        """Return the model that the path names, "" if none; it takes precedence over the body's."""
        return ""

    def streams_at(self, endpoint: str, query: str = "") -> bool:
        """Return whether the path itself asks for a stream."""
        return False

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        return self.native[dialect].format(model=model)

    def recipient(self, model: str, max_output: int | None) -> Recipient:
        """Return what a translation must know about the model."""
        return Recipient(model, max_output, self.takes_thoughts, self.max_tokens_name)

    def url(self, endpoint: str, query: str) -> str:
        return f"{self._base_url}/{self._below(endpoint)}" + (f"?{query}" if query else "")

    def _below(self, endpoint: str) -> str:
        """Return the endpoint without its version prefix if base_url already ends with the version."""
        return endpoint.removeprefix(self.prefix) if self._base_url.endswith(f"/{self.prefix[:-1]}") else endpoint

    def authorize(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Bearer {key}"

    def request(self, call: Call, key: str | None) -> Outgoing:
        """Return the HTTP request for `call`, which is already in one of the provider's wire formats.

        Without `key`, the caller's own credentials in the headers are forwarded.
        """
        headers = {**forwarded(call.headers), **call.trace, **self._headers}
        if key is not None:
            for name in CREDENTIALS:
                headers.pop(name, None)
            self.authorize(headers, key)
        return Outgoing(call.method, self.url(call.endpoint, call.query), headers, call.body, self.public)

    async def ask(self, request: Outgoing, upstream: Upstream, seconds: float, now: float) -> Incoming:
        """Send the request and return the reply once its head has arrived; `now` is Unix time in seconds."""
        return decoded(request, await upstream.send(request, seconds))


def report(call: Call, field: str, why: str) -> None:
    """Record in a reply header that a field of the client's request was changed or dropped."""
    call.notes[CHANGED] = ", ".join(filter(None, (call.notes.get(CHANGED), f"{field}={why}")))


def near(url: str, base_url: str, domain: str) -> bool:
    """Return whether a URL may receive credentials: it is the same server, or HTTPS in `domain`."""
    there, here = urlsplit(url), urlsplit(base_url)
    if (there.scheme, there.netloc) == (here.scheme, here.netloc):
        return True
    return there.scheme == "https" and f".{there.hostname}".endswith(f".{domain}") and "@" not in there.netloc


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in HELD and not name.startswith(OURS)}
