"""One reply with a citation in each wire format, unstreamed and streamed.

Before the cited text are characters of two and four bytes, and another text part, so that wrong offsets show.
"""

from __future__ import annotations

from typing import Any

from dialect_cases import REPLIES, chunk, data, named

from emberline.wire.deltas import ChatDialect

FIRST, BEFORE, CITED, AFTER = "Je cherche 🔎. ", "Voilà 🙂: ", "Oslo pluvieux.", " Bon."
SECOND = BEFORE + CITED + AFTER
TEXT = FIRST + SECOND
PAGE = {"url": "https://wx.example/oslo", "title": "Météo"}

START = len(FIRST + BEFORE)
ANNOTATION = {**PAGE, "start_index": START, "end_index": START + len(CITED)}
SECOND_ANNOTATION = {**PAGE, "type": "url_citation", "start_index": len(BEFORE), "end_index": len(BEFORE + CITED)}
LOCATION = {**PAGE, "type": "web_search_result_location", "cited_text": "il pleut", "encrypted_index": "Zm9v"}
CHUNKS = [{"web": {"uri": PAGE["url"], "title": PAGE["title"]}}]


def grounding_metadata(begin: int, **more: Any) -> dict[str, Any]:
    """Return Gemini's metadata for the cited text, which starts at byte `begin`."""
    segment = {"startIndex": begin, "endIndex": begin + len(CITED.encode()), "text": CITED, **more}
    return {"groundingChunks": CHUNKS, "groundingSupports": [{"segment": segment, "groundingChunkIndices": [0]}]}


def _message(id: str, text: str, *annotations: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": list(annotations)}]
    return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": content}


def _candidate(parts: list[Any], **more: Any) -> dict[str, Any]:
    candidate = {"content": {"parts": parts, "role": "model"}, "index": 0, **more}
    return {**REPLIES["gemini"], "candidates": [candidate]}


def _chat(**choice: Any) -> dict[str, Any]:
    return {**REPLIES["openai-chat"], "choices": [{"index": 0, "logprobs": None, **choice}]}


_ANNOTATED = {"annotations": [{"type": "url_citation", "url_citation": ANNOTATION}]}
_ITEMS = [_message("msg_1", FIRST), _message("msg_2", SECOND, SECOND_ANNOTATION)]
_BLOCKS: list[tuple[str, list[Any] | None]] = [(FIRST, None), (BEFORE, None), (CITED, [LOCATION]), (AFTER, None)]

CITING: dict[ChatDialect, dict[str, Any]] = {
    "openai-chat": _chat(message={"role": "assistant", "content": TEXT, **_ANNOTATED}, finish_reason="stop"),
    "openai-responses": {**REPLIES["openai-responses"], "output": _ITEMS},
    "anthropic": {
        **REPLIES["anthropic"],
        "content": [{"type": "text", "text": text, "citations": cited} for text, cited in _BLOCKS],
        "stop_reason": "end_turn",
    },
    "gemini": _candidate(
        [{"text": "Hm.", "thought": True}, {"text": FIRST}, {"text": SECOND}],
        finishReason="STOP",
        groundingMetadata=grounding_metadata(len(BEFORE.encode()), partIndex=2),
    ),
}


def _response(kind: str, output: list[Any]) -> dict[str, Any]:
    return {"type": f"response.{kind}", "response": {**REPLIES["openai-responses"], "status": kind, "output": output}}


def _text_deltas(index: int, *texts: str) -> list[dict[str, Any]]:
    place = {"item_id": f"msg_{index + 1}", "output_index": index, "content_index": 0, "logprobs": []}
    return [{"type": "response.output_text.delta", **place, "delta": text} for text in texts]


def _block(index: int, text: str, cited: list[Any] | None) -> list[dict[str, Any]]:
    pieces: list[Any] = [{"type": "citations_delta", "citation": citation} for citation in cited or ()]
    pieces += [{"type": "text_delta", "text": text[:3]}, {"type": "text_delta", "text": text[3:]}]
    return [
        {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": index, "delta": piece} for piece in pieces),
        {"type": "content_block_stop", "index": index},
    ]


_ANNOTATION_ADDED = {
    "type": "response.output_text.annotation.added",
    "item_id": "msg_2",
    "output_index": 1,
    "content_index": 0,
}

CITING_STREAMS: dict[ChatDialect, bytes] = {
    "openai-chat": data(
        chunk({"role": "assistant", "content": FIRST}), chunk({"content": SECOND}),
        chunk(_ANNOTATED), chunk({}, "stop"), b"[DONE]",
    ),
    "openai-responses": named(
        _response("created", []), *_text_deltas(0, FIRST), *_text_deltas(1, BEFORE, CITED),
        {**_ANNOTATION_ADDED, "annotation_index": 0, "annotation": SECOND_ANNOTATION}, *_text_deltas(1, AFTER),
        _response("completed", _ITEMS),
    ),
    "anthropic": named(
        {"type": "message_start", "message": {**REPLIES["anthropic"], "content": [], "stop_reason": None}},
        *(event for at, (text, cited) in enumerate(_BLOCKS) for event in _block(at, text, cited)),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 20}},
        {"type": "message_stop"},
    ),
    "gemini": data(
        _candidate([{"text": FIRST}]), _candidate([{"text": SECOND[:9]}]),
        _candidate([{"text": SECOND[9:]}], finishReason="STOP",
                   groundingMetadata=grounding_metadata(len(TEXT[:START].encode()))),
    ),
}  # fmt: skip
