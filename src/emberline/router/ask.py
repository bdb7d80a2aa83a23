"""Ask: what the router needs to know of a request, read from its body without decoding the rest. Whether the body is a
good one is the worker's to say: what is not understood here is routed by load alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.net.notjson import NOT_JSON
from emberline.router.prefixmap import Point

SHORTEST = 256  # bytes: what is shorter is not worth a detour
MOST_POINTS = 48


class _Named(msgspec.Struct):
    model: str = ""


class _Body(_Named):
    """The fields of all protocols that matter here."""

    stream: bool | None = None
    n: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: list[msgspec.Raw] = []
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_NAMED = msgspec.json.Decoder(_Named)
_BODY = msgspec.json.Decoder(_Body)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Ask:
    model: str
    size: int  # bytes of the prompt, as written
    stream: bool
    most_tokens: int | None  # to be generated, all choices together
    session: str = ""
    digest: bytes = b""  # of the prompt
    points: tuple[Point, ...] = ()  # where this prompt could part from others, shortest first
    single: bool = False  # one prompt, one choice, and nothing is to be said about the prompt

    @staticmethod
    def read(body: bytes, session: str = "", tenant: str = "") -> Ask:
        """`tenant`: a name for the client's API key, if there are any: tenants share no cache."""
        try:
            asked = _BODY.decode(body)
        except msgspec.ValidationError:
            return Ask(_named(body), len(body), False, None, session)
        except NOT_JSON as e:
            raise InvalidRequest(f"the body is not JSON: {e}") from e
        parts = [memoryview(part) for part in _parts(asked)]
        most = asked.max_completion_tokens or asked.max_output_tokens or asked.max_tokens
        return Ask(
            asked.model,
            sum(map(len, parts)),
            bool(asked.stream),
            most * max(asked.n or 1, 1) if most and most > 0 else None,
            session,
            *_points(asked, parts, tenant),
            _is_single(asked),
        )


def _named(body: bytes) -> str:
    try:
        return _NAMED.decode(body).model
    except msgspec.ValidationError as e:
        raise InvalidRequest(f"the body does not say which model: {e}", param="model") from e
    except NOT_JSON as e:
        raise InvalidRequest(f"the body is not JSON: {e}") from e


def _parts(asked: _Body) -> Iterator[msgspec.Raw]:
    """The prompt, in the order in which templates put it; a list is taken item by item."""
    yield from (part for part in (asked.tools, asked.system, asked.instructions) if len(memoryview(part)))
    yield from asked.messages
    for text in (asked.prompt, asked.input):
        if bytes(memoryview(text)[:1]) == b"[":
            yield from _ITEMS.decode(text)
        elif len(memoryview(text)):
            yield text


def _is_single(asked: _Body) -> bool:
    if (asked.n or 1) != 1 or asked.echo or asked.prompt_logprobs is not None:
        return False
    if bytes(memoryview(asked.prompt)[:1]) != b"[":
        return True
    items = _ITEMS.decode(asked.prompt)  # token ids are one prompt, texts or lists of ids are several
    return len(items) == 1 or all(bytes(memoryview(item)[:1]).isdigit() for item in items[:1])


def _points(asked: _Body, parts: list[memoryview], tenant: str = "") -> tuple[bytes, tuple[Point, ...]]:
    """A digest of it all, and points: one at the end of each part, where a conversation grows, and inside long ones at
    lengths that double. They name bytes of requests, not blocks of tokens: where to look for a cache, not what is in
    it."""
    digest = blake2b(asked.model.encode(), digest_size=16)
    digest.update(b"\0" + bytes(asked.cache_salt) + b"\0" + tenant.encode())
    ends: list[Point] = []
    length, cut = 0, SHORTEST
    for part in parts:
        at = 0
        while length + len(part) - at >= cut:
            take = cut - length
            digest.update(part[at : at + take])
            at, length, cut = at + take, cut, cut * 2
            ends.append(Point(digest.digest(), length))
        digest.update(part[at:])
        length += len(part) - at
        if length >= SHORTEST and length != (ends[-1].length if ends else 0):
            ends.append(Point(digest.digest(), length))
    half = MOST_POINTS // 2
    return digest.digest(), tuple(ends if len(ends) <= MOST_POINTS else ends[:half] + ends[-half:])
