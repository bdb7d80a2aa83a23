"""Texts: every string of a request, a reply or an event that somebody wrote, wherever it is: parts that nobody has
heard of are looked at too. Names of things, and data, are no texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# Of whole requests: what is said to the model, and not about the request.
ABOUT = frozenset({"model", "user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"})
NAMES = frozenset({"id", "type", "role", "object", "model", "name", "tool_call_id", "call_id", "tool_use_id", "item_id",
                   "finish_reason", "finishReason", "stop_reason", "status", "system_fingerprint", "mime_type",
                   "mimeType", "media_type", "modelVersion", "responseId"})  # fmt: skip
DATA = frozenset({"data", "file_data", "b64_json", "signature", "thoughtSignature", "encrypted_content", "logprobs",
                  "logprobsResult", "obfuscation", "usage", "usageMetadata"})  # fmt: skip
SAID = frozenset({"messages", "system", "input", "instructions", "contents", "systemInstruction", "system_instruction",
                  "prompt"})  # fmt: skip
GROWING = frozenset({"content", "reasoning_content", "reasoning", "refusal", "text", "thinking", "arguments",
                     "partial_json", "delta"})  # fmt: skip  # come in pieces, one an event
APART = ("choices", "candidates")  # each of these has texts of its own, beside the others
PLACES = ("type", "output_index", "content_index", "summary_index", "index")  # tell an event's texts from another's

Path = tuple[Any, ...]


class Text(NamedTuple):
    holder: Any  # the object or list it is in
    key: Any  # and where
    text: str
    path: Path

    @property
    def grows(self) -> bool:
        return self.key in GROWING

    @property
    def voice(self) -> Path:
        """What is said in one voice comes one after the other."""
        return self.path[:3] if len(self.path) > 2 and self.path[1] in APART else ()


def texts_of(value: Any, path: Path = ()) -> Iterator[Text]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in NAMES and key not in DATA:
                yield from _inner(value, key, inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _inner(value, number, inner, (*path, _index(inner, number)))


def _inner(holder: Any, key: Any, inner: Any, path: Path) -> Iterator[Text]:
    if isinstance(inner, str):
        if inner and not (inner.startswith("data:") and ";base64," in inner[:200]):
            yield Text(holder, key, inner, path)
    else:
        yield from texts_of(inner, path)


def _index(inner: Any, number: int) -> Any:
    return inner.get("index", number) if isinstance(inner, dict) else number


def event_texts(event: Any) -> Iterator[Text]:
    place = tuple(event.get(name) for name in PLACES) if isinstance(event, dict) else ()
    return texts_of(event, (place,))


def request_texts(body: Any) -> Iterator[Text]:
    if isinstance(body, dict):
        for key, inner in body.items():
            if key not in ABOUT:
                yield from _inner(body, key, inner, (key,))
    else:
        yield from texts_of(body)


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
