"""Provider: where a call goes and how it is asked there. Most differ in data only: a URL, the paths of the dialects
they speak, the header of their key; the others override `url`, `authorize`, `request` or, if one request is not enough
or has to be signed, `ask`. Who replies in a way of its own gives a Decoder with the request."""

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

# Of one connection, or of us: never sent on as they came.
HELD = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
                  "trailer", "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "cookie",
                  "x-auth-token", "forwarded", "x-real-ip", "cf-cache-ttl", "cf-skip-cache", *TRACES})  # fmt: skip
OURS = ("cf-aig-", "x-emberline-", "x-forwarded-")
CHANGED = "x-emberline-changed"
CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "xi-api-key")


class Provider:
    slug: str
    base_url: ClassVar[str] = ""
    prefix: ClassVar[str] = ""  # of an endpoint that is in none of its dialects
    paths: ClassVar[Mapping[Dialect, str]] = {}  # what it speaks -> the endpoint, which may have {model} in it
    needs_key: ClassVar[bool] = True
    own_errors: ClassVar[bool] = False  # not in the shape of the dialect that it speaks
    counts_streams: ClassVar[bool] = True  # knows stream_options.include_usage
    takes_thoughts: ClassVar[bool] = False  # of others, in a conversation's history
    realtime: ClassVar[str] = ""  # the path of its WebSocket
    prefill: Prefill = ""  # how its chat goes on with the assistant's last turn
    max_tokens_name: ClassVar[str] = (
        "max_completion_tokens"  # in OpenAI's chat dialect; older ones know only max_tokens
    )

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public: bool = False
    ) -> None:
        """`public`: only a public address may be asked."""
        self._base_url = (base_url or self.base_url).rstrip("/")
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.public = public
        self.native = self.paths

    @property
    def origin(self) -> str:
        """Whose trouble is shared: the same for all that is asked at one place."""
        return f"{self.slug} {self._base_url}"

    def speaks(self, dialect: Dialect, model: str = "") -> bool:
        return dialect == "raw" or dialect in self.native

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        """What is spoken at a path of this provider; "raw" is what is not looked into."""
        for dialect, path in self.native.items():
            if self._below(path) == self._below(endpoint):
                return dialect
        return "raw"

    def model_in(self, endpoint: str) -> str:
        """Of those that write it in their paths: there it counts, whatever a body says besides."""
        return ""

    def streams_at(self, endpoint: str, query: str = "") -> bool:
        """Of those that have a path of its own for it."""
        return False

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        return self.native[dialect].format(model=model)

    def recipient(self, model: str, max_output: int | None) -> Recipient:
        """What a translation for it has to know."""
        return Recipient(model, max_output, self.takes_thoughts, self.max_tokens_name)

    def url(self, endpoint: str, query: str) -> str:
        return f"{self._base_url}/{self._below(endpoint)}" + (f"?{query}" if query else "")

    def _below(self, endpoint: str) -> str:
        """Some write the version into the URL: it is not doubled."""
        return endpoint.removeprefix(self.prefix) if self._base_url.endswith(f"/{self.prefix[:-1]}") else endpoint

    def authorize(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Bearer {key}"

    def request(self, call: Call, key: str | None) -> Outgoing:
        """`call` speaks one of the provider's dialects by now; without a key the caller's own is in its headers."""
        headers = {**forwarded(call.headers), **call.trace, **self._headers}
        if key is not None:
            for name in CREDENTIALS:
                headers.pop(name, None)
            self.authorize(headers, key)
        return Outgoing(call.method, self.url(call.endpoint, call.query), headers, call.body, self.public)

    async def ask(self, request: Outgoing, upstream: Upstream, seconds: float, now: float) -> Incoming:
        """The reply's head, within this time. `now`: in seconds since 1970."""
        return decoded(request, await upstream.send(request, seconds))


def report(call: Call, field: str, why: str) -> None:
    """That the provider is asked otherwise than the client did."""
    call.notes[CHANGED] = ", ".join(filter(None, (call.notes.get(CHANGED), f"{field}={why}")))


def near(url: str, base_url: str, domain: str) -> bool:
    """What a provider, or a key, says where to ask next is believed if it is the same server or one of its domain."""
    there, here = urlsplit(url), urlsplit(base_url)
    if (there.scheme, there.netloc) == (here.scheme, here.netloc):
        return True
    return there.scheme == "https" and f".{there.hostname}".endswith(f".{domain}") and "@" not in there.netloc


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in HELD and not name.startswith(OURS)}
