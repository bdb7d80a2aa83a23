"""GatewayRequest and GatewayReply, which pass through the gateway's layers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, Protocol, TypeAlias, TypedDict, Unpack

import msgspec

from emberline.gateway.core.assistant_prefill import AssistantPrefill
from emberline.gateway.core.body_summary import BodySummary
from emberline.gateway.core.guardrail_finding import GuardrailFinding
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.options import Metadata, RequestOptions
from emberline.gateway.core.request_body import BodyFields
from emberline.gateway.core.settings import GatewaySettings
from emberline.wire.usage import Usage

Dialect = Literal["openai-chat", "openai-responses", "openai-embeddings", "anthropic", "gemini", "raw"]

# In place of a provider's name: a route or a pool chooses the provider.
DYNAMIC, POOL = VIRTUAL_PROVIDERS = ("dynamic", "pool")


class ProviderAttempt(msgspec.Struct, frozen=True):
    """One attempt to get a reply from a provider, with its outcome."""

    provider: str
    model: str
    step: int  # index of the step, from 0
    attempt: int  # index of the attempt within the step, from 0
    status: int  # HTTP status; 0 without a response
    outcome: str  # "answered", or the error code
    seconds: float  # duration of the attempt
    key: str = ""  # alias of the provider key, if one was chosen


class RequestStep(msgspec.Struct, frozen=True):
    """One provider and model to try, with the fields that differ from the request's own.

    A field that is None has the same value as in the request.
    """

    provider: str
    model: str
    endpoint: str | None = None
    dialect: Dialect | None = None
    headers: dict[str, str] | None = None
    body: bytes | None = None
    stream: bool | None = None
    options: RequestOptions | None = None  # already merged over the request's options
    is_dialect_endpoint: bool = False  # the endpoint is the dialect's, not yet translated to the provider's own
    body_fields: BodyFields | None = None  # fields of `body`, if the step has a body
    body_summary: BodySummary | None = None  # summary of `body`, if it is large


class RequestChanges(TypedDict, total=False):
    """The fields of a GatewayRequest that layers and providers change in a copy.

    GatewayRequest describes each field.
    """

    provider: str
    model: str
    endpoint: str
    dialect: Dialect
    method: str
    headers: dict[str, str]
    query: str
    body: bytes
    stream: bool
    max_output: int | None
    options: RequestOptions
    attempts: list[ProviderAttempt]
    reply_headers: dict[str, str]
    steps: tuple[RequestStep, ...]
    is_dialect_endpoint: bool
    step_index: int
    is_last_step: bool
    access_granted: bool
    hedge_delay_s: float | None
    findings: list[GuardrailFinding]
    redacted_bodies: list[bytes]
    body_fields: BodyFields | None
    body_summary: BodySummary | None
    choice_count: int
    prefill: AssistantPrefill
    deadline: float


class GatewayRequest(msgspec.Struct):
    """A request as the layers see it.

    GatewayRequest and GatewayReply are msgspec.Structs, because creating one takes a tenth of the time of a dataclass.
    """

    id: str
    account: str
    gateway: str
    provider: str
    endpoint: str  # path after the provider, without a leading slash
    dialect: Dialect  # the client's protocol
    method: str
    headers: dict[str, str]  # names in lower case
    query: str
    body: bytes
    model: str  # this field and the next two are read from the body without validation
    stream: bool
    max_output: int | None
    options: RequestOptions
    identity: Identity
    settings: GatewaySettings
    started_at: float  # arrival time on the gateway's monotonic clock, seconds
    deadline: float  # on the same clock, seconds
    attempts: list[ProviderAttempt] = []
    reply_headers: dict[str, str] = {}
    steps: tuple[RequestStep, ...] = ()  # providers to try, in this order; (): only this request's own provider
    is_dialect_endpoint: bool = False  # the endpoint is the dialect's, not yet translated to the provider's own
    step_index: int = 0  # index of the current step
    is_last_step: bool = True  # no step follows
    access_granted: bool = False  # set by a route: a key that may use the route may use every model the route leads to
    hedge_delay_s: float | None = None  # delay before the second step is started in parallel with the first
    findings: list[GuardrailFinding] = []  # of guardrails
    redacted_bodies: list[bytes] = []  # the last one is the body as sent, without what the guardrails removed
    body_fields: BodyFields | None = None  # fields of the current body
    body_summary: BodySummary | None = None  # summary of the current body, if it is large
    choice_count: int = 1  # choices that the body requests, of at most `max_output` tokens each
    prefill: AssistantPrefill = ""  # how to continue the body's last message if it is the assistant's
    trace_headers: dict[str, str] = {}  # W3C trace headers, forwarded to the provider

    @property
    def metadata(self) -> Metadata:
        """Return the request's metadata.

        Values set by the gateway and by the key override those sent by the client.
        """
        return {**(self.options.metadata or {}), **self.settings.metadata, **self.identity.metadata}

    def with_changes(self, **changes: Unpack[RequestChanges]) -> GatewayRequest:
        """Return a copy with some fields changed.

        The copy shares the list `attempts` and the dict `reply_headers`, unless they are changed. A change of the
        body resets `body_fields` and `body_summary`.
        """
        if "body" in changes and changes["body"] is not self.body:
            changes.setdefault("body_fields", None)
            changes.setdefault("body_summary", None)
        return msgspec.structs.replace(self, **changes)


class ReplyStream(Protocol):
    """A streamed reply body.

    Each chunk contains one or more whole events. Closing the stream early cancels the request.
    """

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


CloseCallback: TypeAlias = "Callable[[GatewayReply], Awaitable[None]]"


class GatewayReply(msgspec.Struct):
    """A reply on its way to the client. Every reply must be closed.

    `close` runs each callback in `close_callbacks` once, the innermost layer's first, even if a callback raises or the
    closing task is cancelled.
    """

    status: int
    headers: dict[str, str]
    body: bytes | ReplyStream
    dialect: Dialect = "raw"  # the client's protocol
    usage: Usage | None = None  # this field and the following ones are final once the body has ended
    micros: int | None = None  # cost in micro-dollars
    model: str = ""
    provider: str = ""
    step_index: int = 0
    cached: bool = False
    ended: str = ""  # "": still open; "complete", "cut" (broke off), "error", "left" (the client disconnected)
    estimated: bool = False  # the gateway counted `usage` itself
    error: str = ""  # error code
    error_message: str = ""  # for the log: one line, without keys
    continued_by: str = ""  # provider that continued the stream after it broke off
    first_byte_s: float | None = None  # time from arrival to the first content
    send_timeout_s: float = 60.0  # time the client has to read the reply
    close_callbacks: list[CloseCallback] = []

    async def close(self) -> None:
        first_error: BaseException | None = None
        try:
            if not isinstance(self.body, bytes):
                await self.body.aclose()
            elif not self.ended:
                self.ended = "complete" if self.status < 400 else "error"
        except BaseException as e:
            first_error = e
        callbacks, self.close_callbacks = self.close_callbacks, []
        for callback in callbacks:
            try:
                await callback(self)
            except BaseException as e:
                first_error = first_error or e
        if first_error is not None:
            raise first_error


Handler: TypeAlias = Callable[[GatewayRequest], Awaitable[GatewayReply]]
Layer: TypeAlias = Callable[[Handler], Handler]
