"""RequestSummary: the fields of a request that the choice of a worker depends on.

Only these fields of the JSON body are decoded. The worker validates them, not the router. If a field has an unexpected
type, the router ignores the prompt and chooses the worker by load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.prefixmap import PromptPrefix

MIN_PREFIX_BYTES = 256  # shorter prefixes save too little computing to influence routing
MAX_PREFIXES_PER_PROMPT = 48
SYSTEM_ROLES = ("system", "developer")


class _ModelField(msgspec.Struct):
    model: str = ""


class _RoutingFields(_ModelField):
    """The fields that the choice of a worker depends on, for all API protocols together."""

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


class _RoleField(msgspec.Struct):
    role: str = ""


_ROLE_FIELD = msgspec.json.Decoder(_RoleField)
_MODEL_FIELD = msgspec.json.Decoder(_ModelField)
_BODY = msgspec.json.Decoder(_RoutingFields)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class RequestSummary:
    model: str
    prompt_bytes: int  # bytes of the prompt as it stands in the body
    stream: bool
    max_tokens: int | None  # limit of generated tokens, all choices together; None: no limit given
    session: str = ""  # value of the session affinity header
    digest: bytes = b""  # hash of the whole prompt
    prefixes: tuple[PromptPrefix, ...] = ()  # prefixes at which this prompt may diverge from others, shortest first
    is_single_sequence: bool = False  # one prompt, one choice, no echo and no prompt logprobs
    conversation: bytes = b""  # hash of the prompt up to its first user message, the same in all turns
    endpoints: tuple[str, ...] = ()  # HOST:PORT of workers that an endpoint picker chose, preferred first

    @staticmethod
    def parse(body: bytes, session_id: str = "", tenant_id: str = "") -> RequestSummary:
        """Return the summary of a JSON body. Raises InvalidRequest if it is not JSON or `model` is not a string.

        `tenant_id` is a hash of the client's API key, or "" if the router requires no key. Prompts of different tenants
        never share cached blocks."""
        try:
            fields = _BODY.decode(body)
        except msgspec.ValidationError:
            return RequestSummary(_read_model_name(body), len(body), False, None, session_id)
        except JSON_DECODE_ERRORS as e:
            raise InvalidRequest(f"the body is not JSON: {e}") from e
        parts = [memoryview(part) for part in _prompt_parts(fields)]
        digest, prefixes, conversation = _hash_prompt(fields, parts, tenant_id)
        limit = fields.max_completion_tokens or fields.max_output_tokens or fields.max_tokens
        return RequestSummary(
            fields.model,
            sum(map(len, parts)),
            bool(fields.stream),
            limit * max(fields.n or 1, 1) if limit and limit > 0 else None,
            session_id,
            digest,
            prefixes,
            _is_single_sequence(fields),
            conversation,
        )


def _read_model_name(body: bytes) -> str:
    try:
        return _MODEL_FIELD.decode(body).model
    except msgspec.ValidationError as e:
        raise InvalidRequest(f"the field 'model' must be a string: {e}", param="model") from e
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(f"the body is not JSON: {e}") from e


def _prompt_parts(body: _RoutingFields) -> Iterator[msgspec.Raw]:
    """Yield the parts of the prompt in the order in which chat templates write them. A list is yielded item by item."""
    yield from (part for part in (body.tools, body.system, body.instructions) if len(memoryview(part)))
    yield from body.messages
    for text in (body.prompt, body.input):
        if bytes(memoryview(text)[:1]) == b"[":
            yield from _ITEMS.decode(text)
        elif len(memoryview(text)):
            yield text


def _is_single_sequence(body: _RoutingFields) -> bool:
    if (body.n or 1) != 1 or body.echo or body.prompt_logprobs is not None:
        return False
    if bytes(memoryview(body.prompt)[:1]) != b"[":
        return True
    items = _ITEMS.decode(body.prompt)  # a list of token ids is one prompt; texts or lists of ids are several
    return len(items) == 1 or all(bytes(memoryview(item)[:1]).isdigit() for item in items[:1])


def _find_first_user_part(prompt_parts: list[memoryview]) -> int:
    """Return the index of the first message whose role is not in SYSTEM_ROLES, or else the last index."""
    for i, part in enumerate(prompt_parts):
        if bytes(part[:1]) != b"{":
            continue
        try:
            if _ROLE_FIELD.decode(part).role not in SYSTEM_ROLES:
                return i
        except JSON_DECODE_ERRORS:
            return i
    return len(prompt_parts) - 1


def _hash_prompt(
    body: _RoutingFields, prompt_parts: list[memoryview], tenant_id: str = ""
) -> tuple[bytes, tuple[PromptPrefix, ...], bytes]:
    """Return the hash of the complete prompt, the prefixes of the prompt, and the hash of its first messages.

    One prefix ends at the end of each part, for example a message, because the next turn of a conversation adds parts
    there. Within a long part, prefixes end at 256, 512, 1024 .. bytes. Prefixes are measured in bytes, not in token
    blocks. They show which workers have probably cached the prompt, but not which KV blocks a cache holds."""
    digest = blake2b(body.model.encode(), digest_size=16)
    digest.update(b"\0" + bytes(body.cache_salt) + b"\0" + tenant_id.encode())
    prefixes: list[PromptPrefix] = []
    length, next_end = 0, MIN_PREFIX_BYTES
    first_user_part, conversation = _find_first_user_part(prompt_parts), b""
    for i, part in enumerate(prompt_parts):
        start = 0
        while length + len(part) - start >= next_end:
            taken = next_end - length
            digest.update(part[start : start + taken])
            start, length, next_end = start + taken, next_end, next_end * 2
            prefixes.append(PromptPrefix(digest.digest(), length))
        digest.update(part[start:])
        length += len(part) - start
        if i == first_user_part:
            conversation = digest.digest()
        if length >= MIN_PREFIX_BYTES and length != (prefixes[-1].length if prefixes else 0):
            prefixes.append(PromptPrefix(digest.digest(), length))
    half = MAX_PREFIXES_PER_PROMPT // 2
    kept = prefixes if len(prefixes) <= MAX_PREFIXES_PER_PROMPT else prefixes[:half] + prefixes[-half:]
    return digest.digest(), tuple(kept), conversation
