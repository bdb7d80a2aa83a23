"""Texts: every string of a request, a reply or an event that somebody wrote, wherever it is: parts that nobody has
heard of are looked at too. Names of things, and data, are no texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from emberline.core.errors import WorkTooLarge

# Of requests: what has a fixed set of values, or is a name that was given to the client. All else is the client's own
# text, and goes to the provider: what a `user`, a `name` or `metadata` holds, too.
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
                     "partial_json", "delta"})  # fmt: skip  # come in pieces, one an event
JOINED = frozenset({"content", "text"})  # of the parts of one message; clients show them as one text
JOINED_EVENTS = ("output_text.delta", "output_text.done")  # those of OpenAI's responses
APART = ("choices", "candidates")  # each of these has texts of its own, beside the others
PLACES = ("type", "output_index", "content_index", "summary_index", "index")  # tell an event's texts from another's

_BASE64 = re.compile(r"[A-Za-z0-9+/=_\r\n-]*+")
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,[A-Za-z0-9+/=_\r\n-]*+")  # what only begins like one is text

Path = tuple[Any, ...]


class Text(NamedTuple):
    holder: Any  # the object or list it is in
    key: Any  # and where
    text: str
    path: Path

    @property
    def grows(self) -> bool:
        return self.path[-1] in GROWING

    @property
    def group(self) -> Path:
        """The same for texts that are parts of one message: a list of texts, or of objects with one each."""
        path = self.path
        if len(path) > 2 and path[-1] == "text":
            return (*path[:-2], "text")
        return path[:-1] if len(path) > 2 and isinstance(path[-1], int) else path

    @property
    def voice(self) -> Path:
        """What is said in one voice comes one after the other. Of an event's text."""
        return self.path[1 : self._answer]

    @property
    def series(self) -> Path:
        """The same for texts that clients put together: pieces of a text, and parts of a message. Of an event's."""
        kind = self.path[0][0]
        if self.path[-1] not in JOINED and not str(kind).endswith(JOINED_EVENTS):
            return self.path
        rest = self.path[self._answer :]
        return (kind, *self.voice, *(step for step in rest if not isinstance(step, int)))

    @property
    def _answer(self) -> int:
        """How many steps of the path tell which answer of several it is."""
        return 3 if len(self.path) > 2 and self.path[1] in APART else 1


def texts_of(value: Any, path: Path = (), skipped: frozenset[str] = NAMES) -> Iterator[Text]:
    """`skipped`: fields that are not looked at."""
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
    place = tuple(event.get(name) for name in PLACES) if isinstance(event, dict) else ()
    return texts_of(event, (place,))


def texts_of_event(payload: bytes, most: int) -> list[tuple[Path, str]]:
    """Every text of an event, with its path, for another process. WorkTooLarge, if there are more than `most`."""
    found = [(text.path, text.text) for text in event_texts(read_event(payload))]
    if len(found) > most:
        raise WorkTooLarge(f"an event has {len(found)} texts; at most {most} are looked at")
    return found


def read_event(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeError):  # what is nested too deep must not pass for that
        return {"text": payload.decode("utf-8", "replace")}  # of a provider's own kind


def written_event(name: bytes, found: Any) -> bytes:
    silence(found)
    head = b"event: %b\n" % name if name else b""
    return head + b"data: %b\n\n" % msgspec.json.encode(found)


def rewritten_event(name: bytes, payload: bytes, changed: dict[int, str]) -> bytes:
    """The event with other texts in some places, counted as `texts_of_event` lists them; for another process."""
    found = read_event(payload)
    for number, text in enumerate(list(event_texts(found))):
        if number in changed:
            text.holder[text.key] = changed[number]
    return written_event(name, found)


def request_texts(body: Any) -> Iterator[Text]:
    return texts_of(body, (), FIXED)


def conversation(body: Any) -> str:
    """What is said in a request, without what tools are there."""
    said = {key: inner for key, inner in body.items() if key in SAID} if isinstance(body, dict) else {}
    return "\n".join(text.text for text in texts_of(said))


def silence(value: Any) -> None:
    """Takes away what else tells of the words that were said: their probabilities."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("logprobs", "logprobsResult"):
                value[key] = [] if isinstance(inner, list) else None
            else:
                silence(inner)
    elif isinstance(value, list):
        for inner in value:
            silence(inner)
