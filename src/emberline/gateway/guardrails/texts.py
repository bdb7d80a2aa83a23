"""JsonText: one text in the JSON of a request, a reply or an event, with its place in the JSON.

Texts in unknown fields are included, and so are large numbers and the keys of objects. Fields with identifiers or
binary data are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from emberline.core.errors import WorkTooLarge

# Fields of requests with a fixed set of values or with ids that the provider issued. All else is the client's own text
# and reaches the provider, including `user`, `name` and `metadata`.
REQUEST_SKIPPED_FIELDS = frozenset({
    "model", "service_tier", "id", "type", "role", "object", "tool_call_id", "call_id", "tool_use_id", "item_id",
    "status", "mime_type", "mimeType", "media_type",
})  # fmt: skip
REPLY_SKIPPED_FIELDS = frozenset({
    "id", "type", "role", "object", "model", "name", "tool_call_id", "call_id", "tool_use_id", "item_id",
    "finish_reason", "finishReason", "stop_reason", "status", "system_fingerprint", "mime_type", "mimeType",
    "media_type", "modelVersion", "responseId",
})  # fmt: skip
BINARY_FIELDS = frozenset({
    "data", "file_data", "b64_json", "signature", "thoughtSignature", "encrypted_content", "logprobs",
    "logprobsResult", "obfuscation", "usage", "usageMetadata",
})  # fmt: skip
CONVERSATION_FIELDS = frozenset({
    "messages", "system", "input", "instructions", "contents", "systemInstruction", "system_instruction", "prompt",
})  # fmt: skip
# Streamed in pieces, one per event.
STREAMED_FIELDS = frozenset({
    "content", "reasoning_content", "reasoning", "refusal", "text", "thinking", "arguments", "partial_json", "delta",
})  # fmt: skip
CONCATENATED_FIELDS = frozenset({"content", "text"})  # of the parts of one message, which clients show as one text
CONCATENATED_EVENTS = ("output_text.delta", "output_text.done")  # of OpenAI's Responses API
CHOICE_FIELDS = ("choices", "candidates")  # lists of alternatives, each with its own texts
EVENT_POSITION_FIELDS = (
    "type",
    "output_index",
    "content_index",
    "summary_index",
    "index",
)  # identify the text that an event belongs to

MIN_CARD_NUMBER = 10**12  # smaller numbers have fewer digits than a card
SEED_PATHS = (("seed",), ("generationConfig", "seed"), ("options", "seed"))  # large, random and not read by a model
_KEY_NAME = "(key)"  # the last element of the path of an object's key
_MAY_MATCH = re.compile(r"[\d@]|[^\x00-\x7f]")  # an object's key without any of these contains no sensitive data

_BASE64 = re.compile(r"[A-Za-z0-9+/=_\r\n-]*+")
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,[A-Za-z0-9+/=_\r\n-]*+")  # a string that only begins like one is text

TextPath = tuple[Any, ...]


class JsonText(NamedTuple):
    container: Any  # the object or list that contains it
    key: Any  # its key or index there
    text: str  # of a number, its digits
    path: TextPath

    @property
    def current(self) -> str:
        """The text as it is now, with the redactions so far."""
        value = self.container[self.key]
        return value if isinstance(value, str) else self.text

    def replace(self, new: str) -> None:
        self.container[self.key] = new

    @property
    def is_streamed(self) -> bool:
        return self.path[-1] in STREAMED_FIELDS

    @property
    def message_key(self) -> TextPath:
        """A key that is equal for all parts of one message, such as the texts in a list of content parts."""
        path = self.path
        if len(path) > 2 and path[-1] == "text":
            return (*path[:-2], "text")
        return path[:-1] if len(path) > 2 and isinstance(path[-1], int) else path

    @property
    def choice_path(self) -> TextPath:
        """The path of the choice (an element of `choices` or `candidates`) that contains the text.

        The texts of one choice are streamed one after the other.
        """
        return self.path[1 : self._choice_depth]

    @property
    def series_key(self) -> TextPath:
        """A key that is equal for all texts of a stream that clients join to one text.

        These are the pieces of a text and the parts of a message.
        """
        kind = self.path[0][0]
        if self.path[-1] not in CONCATENATED_FIELDS and not str(kind).endswith(CONCATENATED_EVENTS):
            return self.path
        rest = self.path[self._choice_depth :]
        return (kind, *self.choice_path, *(key for key in rest if not isinstance(key, int)))

    @property
    def _choice_depth(self) -> int:
        """The number of elements of `path` that lead to the text's choice, or 1 if the text is in no choice."""
        return 3 if len(self.path) > 2 and self.path[1] in CHOICE_FIELDS else 1


class ObjectKeys:
    """The keys of a JSON object as a container of texts: setting a text renames the key."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> str:
        return key

    def __setitem__(self, key: str, new_name: str) -> None:
        while new_name in self._fields:
            new_name += "_"
        renamed = {new_name if name == key else name: value for name, value in self._fields.items()}
        self._fields.clear()
        self._fields.update(renamed)


def iter_texts(
    value: Any, path: TextPath = (), skipped_fields: frozenset[str] = REPLY_SKIPPED_FIELDS
) -> Iterator[JsonText]:
    """Yield the texts in a JSON value, except those in `skipped_fields` and in binary fields.

    The keys of an object follow its values, so that a key is renamed after its value was replaced.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in skipped_fields and (
                key not in BINARY_FIELDS or (isinstance(inner, str) and not _is_base64(inner))
            ):
                yield from _iter_element_texts(value, key, inner, (*path, key), skipped_fields)
        for key in value:
            if _MAY_MATCH.search(key):
                yield JsonText(ObjectKeys(value), key, key, (*path, key, _KEY_NAME))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _iter_element_texts(value, number, inner, (*path, _element_index(inner, number)), skipped_fields)


def _iter_element_texts(
    container: Any, key: Any, element: Any, path: TextPath, skipped_fields: frozenset[str]
) -> Iterator[JsonText]:
    if isinstance(element, str):
        if element and not (element.startswith("data:") and _DATA_URL.fullmatch(element)):
            yield JsonText(container, key, element, path)
    elif isinstance(element, (dict, list)):
        yield from iter_texts(element, path, skipped_fields)
    elif isinstance(element, (int, float)) and _may_be_card_number(element) and path not in SEED_PATHS:
        yield JsonText(container, key, str(int(element)), path)


def _may_be_card_number(number: int | float) -> bool:
    return abs(number) >= MIN_CARD_NUMBER and (isinstance(number, int) or number.is_integer())


def _is_base64(text: str) -> bool:
    return _BASE64.fullmatch(text) is not None


def _element_index(element: Any, position: int) -> Any:
    return element.get("index", position) if isinstance(element, dict) else position


def iter_event_texts(event: Any) -> Iterator[JsonText]:
    position = tuple(event.get(name) for name in EVENT_POSITION_FIELDS) if isinstance(event, dict) else ()
    return iter_texts(event, (position,))


def list_event_texts(payload: bytes, max_texts: int) -> list[tuple[TextPath, str]]:
    """Return (path, text) for every text of an event. This function runs in a child process.

    Raise WorkTooLarge if the event has more than `max_texts` texts.
    """
    texts = [(text.path, text.text) for text in iter_event_texts(decode_event(payload))]
    if len(texts) > max_texts:
        raise WorkTooLarge(f"a stream event contains {len(texts)} texts; guardrails check at most {max_texts}")
    return texts


def decode_event(payload: bytes) -> Any:
    """Return the decoded event. An event that is not JSON becomes an object with one text.

    Raise RecursionError if the JSON is nested too deeply.
    """
    try:
        return msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeError):  # not RecursionError: JSON nested too deeply must not pass as text
        return {"text": payload.decode("utf-8", "replace")}  # a provider's own format


def encode_event(name: bytes, decoded: Any) -> bytes:
    remove_logprobs(decoded)
    head = b"event: %b\n" % name if name else b""
    return head + b"data: %b\n\n" % msgspec.json.encode(decoded)


def rewrite_event(name: bytes, payload: bytes, new_texts: dict[int, str]) -> bytes:
    """Return the event with some texts replaced. This function runs in a child process.

    `new_texts` maps the index of a text in the result of `list_event_texts` to the new text.
    """
    event = decode_event(payload)
    for number, text in enumerate(list(iter_event_texts(event))):
        if number in new_texts:
            text.container[text.key] = new_texts[number]
    return encode_event(name, event)


def iter_request_texts(body: Any) -> Iterator[JsonText]:
    return iter_texts(body, (), REQUEST_SKIPPED_FIELDS)


def extract_conversation_text(body: Any) -> str:
    """Return the text of a request's conversation, without its tool definitions."""
    fields = {key: inner for key, inner in body.items() if key in CONVERSATION_FIELDS} if isinstance(body, dict) else {}
    return "\n".join(text.text for text in iter_texts(fields))


def remove_logprobs(value: Any) -> None:
    """Remove log probabilities in place, because they contain the tokens that were redacted."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("logprobs", "logprobsResult"):
                value[key] = [] if isinstance(inner, list) else None
            else:
                remove_logprobs(inner)
    elif isinstance(value, list):
        for inner in value:
            remove_logprobs(inner)
