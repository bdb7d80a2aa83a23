"""Call and Reply: one request on its way through the gateway, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from emberline.gateway.body import Peek
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects.prefill import Prefill
from emberline.gateway.guardrails.finding import Finding
from emberline.gateway.keys.identity import Identity
from emberline.gateway.options import Metadata, Options
from emberline.gateway.settings import Settings
from emberline.gateway.survey import Survey

Dialect = Literal["openai-chat", "openai-responses", "openai-embeddings", "anthropic", "gemini", "raw"]

DYNAMIC, POOL = VIRTUAL = ("dynamic", "pool")  # stand where a provider does: a route, or a pool, chooses one


class Attempted(msgspec.Struct, frozen=True):
    """One try at one provider."""

    provider: str
    model: str
    step: int  # which of the fallbacks, from 0
    attempt: int  # which try of this step, from 0
    status: int  # HTTP; 0: there was none
    outcome: str  # "answered", or the code of the error
    seconds: float
    key: str = ""  # alias of the provider's key, where one was chosen


class Step(msgspec.Struct, frozen=True):
    """A place to ask, with what is different there; whatever is None is the call's own."""

    provider: str
    model: str
    endpoint: str | None = None
    dialect: Dialect | None = None
    headers: dict[str, str] | None = None
    body: bytes | None = None
    stream: bool | None = None
    options: Options | None = None  # already laid over the request's
    plain: bool = False  # the endpoint is the dialect's, not yet a provider's own
    seen: Peek | None = None  # of its body, where it has one
    surveyed: Survey | None = None  # of a large one


class Call(msgspec.Struct):
    """A Struct, as a Reply is, because making one costs a tenth of what a dataclass does."""

    id: str
    account: str
    gateway: str
    provider: str
    endpoint: str  # the path after the provider, without a slash at its beginning
    dialect: Dialect  # what the client speaks
    method: str
    headers: dict[str, str]  # names in lower case
    query: str
    body: bytes
    model: str  # this and the next two are peeked from the body, and not validated
    stream: bool
    max_output: int | None
    options: Options
    identity: Identity
    settings: Settings  # of this gateway
    began: float  # on the clock handed in
    deadline: float
    trail: list[Attempted] = []  # what was tried
    notes: dict[str, str] = {}  # headers for the reply
    steps: tuple[Step, ...] = ()  # where to ask, in this order; (): where the call itself says
    plain: bool = False  # the endpoint is the dialect's, not yet a provider's own
    step: int = 0  # of which this is one
    last: bool = True  # there is no other after it
    cleared: bool = False  # who may use a route may use what it leads to
    hedge: float | None = None  # seconds after which the second step is asked beside the first
    findings: list[Finding] = []  # of guardrails
    redacted: list[bytes] = []  # the last is the body as it was sent, without what they took
    seen: Peek | None = None  # of the body as it is
    surveyed: Survey | None = None  # of a large body, as it is
    answers: int = 1  # that the body asks for, of `max_output` each
    prefill: Prefill = ""  # its last turn is the assistant's, to be gone on with, in this way
    trace: dict[str, str] = {}  # W3C's headers, for who is asked

    @property
    def metadata(self) -> Metadata:
        """What a key says of its user cannot be said otherwise by a request, nor what its gateway says."""
        return {**(self.options.metadata or {}), **self.settings.metadata, **self.identity.metadata}

    def moved(self, **changes: Any) -> Call:
        """The same call with some things otherwise; the trail and the notes are shared."""
        if "body" in changes and changes["body"] is not self.body:
            changes.setdefault("seen", None)
            changes.setdefault("surveyed", None)
        return msgspec.structs.replace(self, **changes)


class Stream(Protocol):
    """A reply as it comes: whole events, one or several a chunk. Closing it before its end cancels upstream."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


Ending: TypeAlias = "Callable[[Reply], Awaitable[None]]"


class Reply(msgspec.Struct):
    """Whoever has one closes it: then, and once, those that wait for its end are called, the innermost first, and all
    of them, also if one fails or whoever closes it is stopped meanwhile."""

    status: int
    headers: dict[str, str]
    body: bytes | Stream
    dialect: Dialect = "raw"  # that its client speaks
    usage: Usage | None = None  # this and what follows is known when the body has ended
    micros: int | None = None
    model: str = ""
    provider: str = ""
    step: int = 0
    cached: bool = False
    ended: str = ""  # "", "complete", "cut", "error", "left"
    estimated: bool = False  # usage was counted here, from what passed
    error: str = ""  # the code of what went wrong
    continued: str = ""  # who went on with it after it broke
    first_byte: float | None = None  # seconds from the call's beginning
    patience: float = 60.0  # seconds that its client has to take it
    endings: list[Ending] = []

    async def close(self) -> None:
        failed: BaseException | None = None
        try:
            if not isinstance(self.body, bytes):
                await self.body.aclose()
            elif not self.ended:
                self.ended = "complete" if self.status < 400 else "error"
        except BaseException as e:
            failed = e
        endings, self.endings = self.endings, []
        for ending in endings:
            try:
                await ending(self)
            except BaseException as e:
                failed = failed or e
        if failed is not None:
            raise failed


Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
Layer: TypeAlias = Callable[[Handler], Handler]
