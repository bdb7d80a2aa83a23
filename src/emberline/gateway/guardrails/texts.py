"""JsonText: every text in the JSON of a request, a reply or an event.

Texts in unknown fields are included; identifiers and binary data are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from emberline.core.errors import WorkTooLarge

# Fields of requests with a fixed set of values or with ids that the provider issued. All else is the client's own text
# and reaches the provider, including `user`, `name` and `metadata`.
FIXED = frozenset({"model", "service_tier", "id", "type", "role", "object", "tool_call_id", "call_id", "tool_use_id",
                   "item_id", "status", "mime_type", "mimeType", "media_type"})  # fmt: skip
NAMES = frozenset({"id", "type", "role", "object", "model", "name", "tool_call_id", "call_id", "tool_use_id", "item_id",
                   "finish_reason", "finishReason", "stop_reason", "status", "system_fingerprint", "mime_type",
                   "mimeType", "media_type", "modelVersion", "responseId"})  # fmt: skip
DATA = frozenset({"data", "file_data", "b64_json", "signature", "thoughtSignature", "encrypted_content", "logprobs",
                  "logprobsResult", "obfuscation", "usage", "usageMetadata"})  # fmt: skip
SAID = frozenset({"messages", "system", "input", "instructions", "contents", "systemInstruction", "system_instruction",
                  "prompt"})  # fmt: skip
GROWING = frozenset({"content", "reasoning_content", "reasoning", "refusal", "text", "thinking", "arguments",
                     "partial_json", "delta"})  # fmt: skip  # streamed in pieces, one per event
JOINED = frozenset({"content", "text"})  # of the parts of one message, which clients show as one text
JOINED_EVENTS = ("output_text.delta", "output_text.done")  # of OpenAI's Responses API
APART = ("choices", "candidates")  # lists of alternatives, each with its own texts
PLACES = (
    "type",
    "output_index",
    "content_index",
    "summary_index",
    "index",
)  # identify the text that an event belongs to

_BASE64 = re.compile(r"[A-Za-z0-9+/=_\r\n-]*+")
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,[A-Za-z0-9+/=_\r\n-]*+")  # a string that only begins like one is text

Path = tuple[Any, ...]


class Text(NamedTuple):
    holder: Any  # the object or list that contains it
    key: Any  # its key or index there
    text: str
    path: Path

    @property
    def grows(self) -> bool:
        return self.path[-1] in GROWING

    @property
    def group(self) -> Path:
        """Equal for texts that are parts of one message: a list of texts, or of objects with one text each."""
        path = self.path
        if len(path) > 2 and path[-1] == "text":
            return (*path[:-2], "text")
        return path[:-1] if len(path) > 2 and isinstance(path[-1], int) else path

    @property
    def voice(self) -> Path:
        """The choice that the text of an event belongs to; texts of one choice are streamed in sequence."""
        return self.path[1 : self._answer]

    @property
    def series(self) -> Path:
        """Equal for texts of events that clients concatenate: pieces of a text, and parts of a message."""
        kind = self.path[0][0]
        if self.path[-1] not in JOINED and not str(kind).endswith(JOINED_EVENTS):
            return self.path
        rest = self.path[self._answer :]
        return (kind, *self.voice, *(key for key in rest if not isinstance(key, int)))

    @property
    def _answer(self) -> int:
        """The number of path elements up to the choice."""
        return 3 if len(self.path) > 2 and self.path[1] in APART else 1


def texts_of(value: Any, path: Path = (), skipped: frozenset[str] = NAMES) -> Iterator[Text]:
    """Yield the texts of a JSON value, without those in skipped fields."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in skipped and (key not in DATA or (isinstance(inner, str) and not _is_data(inner))):
                yield from _inner(value, key, inner, (*path, key), skipped)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _inner(value, number, inner, (*path, _index(inner, number)), skipped)


def _inner(holder: Any, key: Any, inner: Any, path: Path, skipped: frozenset[str]) -> Iterator[Text]:
    if isinstance(inner, str):
        if inner and not (inner.startswith("data:") and _DATA_URL.fullmatch(inner)):
            yield Text(holder, key, inner, path)
    elif isinstance(inner, (dict, list)):
        yield from texts_of(inner, path, skipped)


def _is_data(text: str) -> bool:
    return _BASE64.fullmatch(text) is not None


def _index(inner: Any, number: int) -> Any:
    return inner.get("index", number) if isinstance(inner, dict) else number


def event_texts(event: Any) -> Iterator[Text]:
    position = tuple(event.get(name) for name in PLACES) if isinstance(event, dict) else ()
    return texts_of(event, (position,))


def texts_of_event(payload: bytes, most: int) -> list[tuple[Path, str]]:
    """Return path and text of every text of an event; for another process. Raises WorkTooLarge."""
    texts = [(text.path, text.text) for text in event_texts(read_event(payload))]
    if len(texts) > most:
        raise WorkTooLarge(f"an event has {len(texts)} texts; at most {most} are checked")
    return texts


def read_event(payload: bytes) -> Any:
    """Return the decoded event, or an object with its text if it is not JSON. Raises RecursionError."""
    try:
        return msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeError):  # not RecursionError: JSON nested too deeply must not pass as text
        return {"text": payload.decode("utf-8", "replace")}  # a provider's own format


def written_event(name: bytes, found: Any) -> bytes:
    silence(found)
    head = b"event: %b\n" % name if name else b""
    return head + b"data: %b\n\n" % msgspec.json.encode(found)


def rewritten_event(name: bytes, payload: bytes, changed: dict[int, str]) -> bytes:
    """Return the event with new texts, numbered as in `list_event_texts`; for another process."""
    event = read_event(payload)
    for number, text in enumerate(list(event_texts(event))):
        if number in changed:
            text.holder[text.key] = changed[number]
    return written_event(name, event)


def request_texts(body: Any) -> Iterator[Text]:
    return texts_of(body, (), FIXED)


def conversation(body: Any) -> str:
    """Return the text of a request's conversation, without its tool definitions."""
    fields = {key: inner for key, inner in body.items() if key in SAID} if isinstance(body, dict) else {}
    return "\n".join(text.text for text in texts_of(fields))


def silence(value: Any) -> None:
    """Remove log probabilities in place, because they contain the redacted tokens."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("logprobs", "logprobsResult"):
                value[key] = [] if isinstance(inner, list) else None
            else:
                silence(inner)
    elif isinstance(value, list):
        for inner in value:
            silence(inner)
