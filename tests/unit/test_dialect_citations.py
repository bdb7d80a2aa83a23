"""Citations in every wire format: the page and the cited text survive translation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from citation_cases import (
    BEFORE,
    CHUNKS,
    CITED,
    CITING,
    CITING_STREAMS,
    FIRST,
    LOCATION,
    PAGE,
    TEXT,
    grounding_metadata,
)
from dialect_cases import MODELS, PAIRS, data
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.gateway.dialects.canonical import TextContent
from emberline.gateway.dialects.citations import assign_citations, split_at_citations
from emberline.gateway.dialects.translate import (
    ReplyContext,
    StreamTranslator,
    TargetModel,
    translate_reply,
    translate_request,
)
from emberline.wire.deltas import ChatDialect, Citation

CONTEXT = ReplyContext(created=1700000000, id="made-1")
FoundCitation = tuple[str, str, str | None]  # cited text, URL, title
CITATION: FoundCitation = (CITED, PAGE["url"], PAGE["title"])


def translate_reply_body(reply: dict[str, Any], source: ChatDialect, target: ChatDialect) -> tuple[Any, set[str]]:
    body, changed = translate_reply(json.dumps(reply).encode(), source, target, CONTEXT)
    return json.loads(body), {change.field for change in changed}


def translate_stream(stream: bytes, source: ChatDialect, target: ChatDialect) -> list[Any]:
    translator = StreamTranslator(source, target, CONTEXT)
    output = translator.push(stream) + translator.end()
    rows = [line[6:] for line in output.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(row) for row in rows if row != b"[DONE]"]


def read_annotations(text: str, rows: list[Any]) -> list[FoundCitation]:
    return [(text[row["start_index"] : row["end_index"]], row["url"], row["title"]) for row in rows]


def read_grounding(parts: list[bytes], metadata: Any) -> list[FoundCitation]:
    citations = []
    for support in metadata.get("groundingSupports", ()):
        segment = support["segment"]
        words = parts[segment["partIndex"]][segment["startIndex"] : segment["endIndex"]].decode()
        assert words == segment["text"]
        pages = [metadata["groundingChunks"][index]["web"] for index in support["groundingChunkIndices"]]
        citations += [(words, page["uri"], page["title"]) for page in pages]
    return citations


def find_citations(reply: Any, dialect: ChatDialect) -> list[FoundCitation]:
    """Return the citations as a client of the wire format finds them."""
    match dialect:
        case "openai-chat":
            message = reply["choices"][0]["message"]
            return read_annotations(message["content"], [row["url_citation"] for row in message.get("annotations", ())])
        case "openai-responses":
            texts = [part for item in reply["output"] for part in item.get("content", ())]
            return [citation for part in texts for citation in read_annotations(part["text"], part["annotations"])]
        case "anthropic":
            blocks = [(block, citation) for block in reply["content"] for citation in block.get("citations") or ()]
            return [(block["text"], citation["url"], citation["title"]) for block, citation in blocks]
        case "gemini":
            candidate = reply["candidates"][0]
            parts = [part.get("text", "").encode() for part in candidate["content"]["parts"]]
            return read_grounding(parts, candidate.get("groundingMetadata", {}))


def find_citations_in_stream(events: list[Any], dialect: ChatDialect) -> list[FoundCitation]:
    match dialect:
        case "openai-chat":
            pieces = [row["delta"] for event in events for row in event["choices"]]
            (rows,) = [piece["annotations"] for piece in pieces if "annotations" in piece]
            text = "".join(piece.get("content") or "" for piece in pieces)
            return read_annotations(text, [row["url_citation"] for row in rows])
        case "openai-responses":
            return find_citations(events[-1]["response"], dialect)
        case "anthropic":
            blocks: list[Any] = []
            for event in events:
                if event["type"] == "content_block_start":
                    blocks.append({"text": "", "citations": []})
                elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                    blocks[-1]["text"] += event["delta"]["text"]
                elif event["type"] == "content_block_delta" and event["delta"]["type"] == "citations_delta":
                    blocks[-1]["citations"].append(event["delta"]["citation"])
            return find_citations({"content": blocks}, dialect)
        case "gemini":
            rows = [event["candidates"][0] for event in events]
            text = "".join(part["text"] for row in rows for part in row["content"]["parts"])
            return read_grounding([text.encode()], rows[-1].get("groundingMetadata", {}))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_reply_keeps_citation(source: ChatDialect, target: ChatDialect) -> None:
    body, changed = translate_reply_body(CITING[source], source, target)
    assert find_citations(body, target) == [CITATION]
    assert changed == ({"reply.citations.cited_text"} if source == "anthropic" else set())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_stream_keeps_citation(source: ChatDialect, target: ChatDialect) -> None:
    """In an Anthropic stream a citation refers to the whole open block."""
    words = {"openai-responses": FIRST + BEFORE + CITED}.get(source, TEXT) if target == "anthropic" else CITED
    got = find_citations_in_stream(translate_stream(CITING_STREAMS[source], source, target), target)
    assert got == [(words, *CITATION[1:])]


@pytest.mark.parametrize("source", ["openai-chat", "openai-responses", "anthropic", "gemini"])
def test_citation_survives_anthropic_round_trip(source: ChatDialect) -> None:
    """Anthropic's blocks are split where the cited text starts and ends, so that the offsets survive."""
    body, _ = translate_reply_body(CITING[source], source, "anthropic")
    assert "".join(block.get("text", "") for block in body["content"]) == TEXT
    back, _ = translate_reply_body(body, "anthropic", "openai-chat")
    assert find_citations(back, "openai-chat") == [CITATION]


def test_responses_stream_has_annotation_events() -> None:
    events = translate_stream(CITING_STREAMS["anthropic"], "anthropic", "openai-responses")
    (added,) = [event for event in events if event["type"] == "response.output_text.annotation.added"]
    item = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    place = {name: added[name] for name in ("item_id", "output_index", "content_index", "annotation_index")}
    assert place == {"item_id": item["id"], "output_index": 0, "content_index": 0, "annotation_index": 0}
    done = {event["type"]: event for event in events}
    parts = [
        done["response.content_part.done"]["part"],
        done["response.output_item.done"]["item"]["content"][0],
        done["response.completed"]["response"]["output"][0]["content"][0],
    ]
    assert [part["annotations"] for part in parts] == [[added["annotation"]]] * 3


def test_citation_of_closed_text_is_in_final_response() -> None:
    call = {"functionCall": {"name": "f", "args": {}}}
    parts = [{"text": FIRST}, call, {"text": CITED}, call]
    last = {
        "content": {"parts": parts},
        "finishReason": "STOP",
        "groundingMetadata": grounding_metadata(len(FIRST.encode())),
    }
    stream = data({"candidates": [last]})
    assert find_citations_in_stream(translate_stream(stream, "gemini", "openai-responses"), "openai-responses") == [
        CITATION
    ]


def test_anthropic_block_cites_each_page_once() -> None:
    """In an Anthropic stream a citation refers to the whole block, so a page cited twice appears once."""
    supports = [grounding_metadata(at)["groundingSupports"][0] for at in (0, 1)]
    stream = data(
        gemini_reply(groundingMetadata={"groundingChunks": CHUNKS, "groundingSupports": supports}, finishReason="STOP")
    )
    assert find_citations_in_stream(translate_stream(stream, "gemini", "anthropic"), "anthropic") == [CITATION]


def test_citations_stay_with_their_choice() -> None:
    row = {"type": "url_citation", "url_citation": {"url": "https://x", "start_index": 1, "end_index": 2}}
    chunks = [{"id": "i", "choices": [{"index": at, "delta": {"content": "éa"}}]} for at in (0, 1)]
    chunks += [{"choices": [{"index": 1, "delta": {"annotations": [row]}, "finish_reason": "stop"}]}]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    late = {
        "choices": [{"index": 1, "delta": {"annotations": [row]}}]
    }  # after the finish reason: ignored, the stream does not fail
    events = translate_stream(data(*chunks, late, b"[DONE]"), "openai-chat", "gemini")
    first, second = events[-1]["candidates"]
    assert "groundingMetadata" not in first
    assert read_grounding(["éa".encode()], second["groundingMetadata"]) == [("a", "https://x", "")]


def test_anthropic_stream_keeps_encrypted_index() -> None:
    """A continued stream is parsed and rendered in its own wire format."""
    events = translate_stream(CITING_STREAMS["anthropic"], "anthropic", "anthropic")
    assert [e["delta"]["citation"] for e in events if e.get("delta", {}).get("type") == "citations_delta"] == [LOCATION]
    opened = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert opened == [0, 1]  # text after a citation starts a new block


# -- citations without counterpart -------------------------------------------------------------------------------------

DOCUMENT = {"type": "char_location", "cited_text": "x", "document_index": 0, "document_title": "d"}
RESULT = {"type": "search_result_location", "cited_text": "", "search_result_index": 0, "title": None}
FILE = {"type": "file_citation", "file_id": "f", "filename": "f.txt", "index": 3}
RETRIEVED = {"retrievedContext": {"title": "d", "text": "x"}}


def anthropic_reply(*citations: Any) -> dict[str, Any]:
    return {**CITING["anthropic"], "content": [{"type": "text", "text": CITED, "citations": list(citations)}]}


def gemini_reply(**metadata: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": [{"text": CITED}]}, **metadata}]}


def responses_reply(*annotations: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": CITED, "annotations": list(annotations)}]
    return {**CITING["openai-responses"], "output": [{"type": "message", "role": "assistant", "content": content}]}


WITHOUT_URL: list[tuple[ChatDialect, Any, set[str]]] = [
    ("anthropic", anthropic_reply(DOCUMENT), {"reply.citations"}),
    ("anthropic", anthropic_reply({**RESULT, "source": "shelf 4"}), {"reply.citations"}),
    ("openai-responses", responses_reply(FILE), {"reply.annotations"}),
    (
        "gemini",
        gemini_reply(groundingMetadata={"webSearchQueries": ["x"], "searchEntryPoint": {"renderedContent": "<b>"}}),
        {"reply.groundingMetadata.webSearchQueries", "reply.groundingMetadata.searchEntryPoint"},
    ),
    (
        "gemini",
        gemini_reply(groundingMetadata=grounding_metadata(0) | {"groundingChunks": [RETRIEVED]}),
        {"reply.groundingMetadata.groundingChunks"},
    ),
    ("gemini", gemini_reply(citationMetadata={"citationSources": [{"endIndex": 3}]}), {"reply.citationMetadata"}),
]


@pytest.mark.parametrize(("source", "reply", "reported"), WITHOUT_URL)
def test_citation_without_url_is_reported(source: ChatDialect, reply: Any, reported: set[str]) -> None:
    for target in [target for other, target in PAIRS if other == source]:
        body, changed = translate_reply_body(reply, source, target)
        assert changed == reported and not find_citations(body, target)


def test_citation_with_url_survives_beside_one_without() -> None:
    body, changed = translate_reply_body(anthropic_reply(DOCUMENT, LOCATION), "anthropic", "openai-chat")
    assert find_citations(body, "openai-chat") == [CITATION]
    assert changed == {"reply.citations", "reply.citations.cited_text"}
    metadata = grounding_metadata(0) | {"groundingChunks": [*CHUNKS, CHUNKS[0]]}
    body, changed = translate_reply_body(gemini_reply(groundingMetadata=metadata), "gemini", "openai-chat")
    assert find_citations(body, "openai-chat") == [CITATION] and not changed


def test_alternative_citation_fields() -> None:
    body, _ = translate_reply_body(
        anthropic_reply({**RESULT, "source": PAGE["url"], "title": PAGE["title"]}), "anthropic", "gemini"
    )
    assert find_citations(body, "gemini") == [CITATION]
    for rows in ("citationSources", "citations"):
        row = {"startIndex": 0, "endIndex": 4, "uri": "https://x", "license": "MIT"}
        body, changed = translate_reply_body(gemini_reply(citationMetadata={rows: [row]}), "gemini", "anthropic")
        assert find_citations(body, "anthropic") == [("Oslo", "https://x", None)] and not changed
    quoted = grounding_metadata(0) | {
        "groundingChunks": [{"retrievedContext": {"uri": "gs://b/x", "text": "il pleut"}}]
    }
    body, _ = translate_reply_body(gemini_reply(groundingMetadata=quoted), "gemini", "anthropic")
    assert body["content"][0]["citations"][0]["cited_text"] == "il pleut"


MALFORMED: list[Any] = [
    None,
    5,
    "x",
    [1],
    [{}],
    [{"type": "url_citation"}],
    [{"type": "url_citation", "url_citation": {}}],
]


@pytest.mark.parametrize("malformed", MALFORMED)
def test_malformed_citation_does_not_fail_reply(malformed: Any) -> None:
    chat = json.loads(json.dumps(CITING["openai-chat"]))
    chat["choices"][0]["message"]["annotations"] = malformed
    replies: list[tuple[ChatDialect, Any]] = [
        ("openai-chat", chat),
        ("openai-responses", responses_reply() | {"output": [{"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "x", "annotations": malformed}]}]}),
        ("anthropic", {**CITING["anthropic"], "content": [{"type": "text", "text": "x", "citations": malformed}]}),
        ("gemini", gemini_reply(groundingMetadata=malformed, citationMetadata=malformed)),
        ("gemini", gemini_reply(groundingMetadata={"groundingChunks": malformed, "groundingSupports": malformed})),
        ("gemini", gemini_reply(groundingMetadata={"groundingChunks": CHUNKS, "groundingSupports": [
            {"segment": {"startIndex": malformed, "partIndex": malformed},
             "groundingChunkIndices": [malformed, -1, 7]}]})),
    ]  # fmt: skip
    for source, reply in replies:
        for target in [target for other, target in PAIRS if other == source]:
            assert not find_citations(translate_reply_body(reply, source, target)[0], target)


@pytest.mark.parametrize("place", [{}, {"start_index": None, "end_index": 3}, {"start_index": 9, "end_index": 2}])
def test_citation_without_offsets_is_kept(place: Any) -> None:
    body, _ = translate_reply_body(
        responses_reply({"type": "url_citation", "url": "https://x", **place}), "openai-responses", "anthropic"
    )
    assert find_citations(body, "anthropic") == [(CITED, "https://x", None)]


# -- Gemini streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats_all", [True, False])
def test_gemini_chunk_indices_count_over_events(repeats_all: bool) -> None:
    """Chunk indices count over all events, whether or not each event repeats the earlier chunks."""
    one, two = CHUNKS[0], {"web": {"uri": "https://two", "title": "Two"}}
    first = grounding_metadata(0)
    second = {**grounding_metadata(0), "groundingChunks": [one, two] if repeats_all else [two]}
    second["groundingSupports"] = [{**second["groundingSupports"][0], "groundingChunkIndices": [0, 1]}]
    stream = data(
        gemini_reply(groundingMetadata=first),
        {"candidates": [{"content": {"parts": []}, "groundingMetadata": second, "finishReason": "STOP"}]},
    )
    got = find_citations_in_stream(translate_stream(stream, "gemini", "openai-chat"), "openai-chat")
    assert got == [CITATION, (CITED, "https://two", "Two")]


# -- earlier messages --------------------------------------------------------------------------------------------------


def conversation(source: ChatDialect) -> dict[str, Any]:
    user = {"role": "user", "content": "so?"}
    if source == "openai-chat":
        return {"model": "m", "messages": [CITING[source]["choices"][0]["message"], user]}
    if source == "anthropic":
        message = {"role": "assistant", "content": CITING[source]["content"]}
        return {"model": "m", "max_tokens": 9, "messages": [message, user]}
    return {"model": "m", "input": [*CITING[source]["output"], user]}


def translate_conversation(source: ChatDialect, target: ChatDialect) -> tuple[Any, set[str]]:
    body, changed = translate_request(
        json.dumps(conversation(source)).encode(), source, target, TargetModel(MODELS[target])
    )
    return json.loads(body), {change.field for change in changed if "annot" in change.field or "cit" in change.field}


@pytest.mark.parametrize("source", ["openai-chat", "anthropic"])
def test_responses_request_keeps_earlier_citations(source: ChatDialect) -> None:
    body, changed = translate_conversation(source, "openai-responses")
    parts = body["input"][0]["content"]
    assert [citation for part in parts for citation in read_annotations(part["text"], part.get("annotations", []))] == [
        CITATION
    ]
    assert changed == ({"messages[].citations.cited_text"} if source == "anthropic" else set())


DROPPED_FIELDS: list[tuple[ChatDialect, ChatDialect, str]] = [
    ("openai-chat", "anthropic", "messages[].annotations"),
    ("openai-chat", "gemini", "messages[].annotations"),
    ("openai-responses", "openai-chat", "input[].content[].annotations"),
    ("openai-responses", "anthropic", "input[].content[].annotations"),
    ("anthropic", "openai-chat", "messages[].content[].citations"),
    ("anthropic", "gemini", "messages[].content[].citations"),
]


@pytest.mark.parametrize(("source", "target", "reported"), DROPPED_FIELDS)
def test_dropped_earlier_citations_are_reported(source: ChatDialect, target: ChatDialect, reported: str) -> None:
    body, changed = translate_conversation(source, target)
    assert changed == {reported} and PAGE["url"] not in json.dumps(body)


# -- offsets -----------------------------------------------------------------------------------------------------------

texts = st.text(st.sampled_from("aé🙂 \n"), max_size=8)


@given(st.lists(texts, min_size=1, max_size=3), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_assigned_citations_keep_their_text(part_texts: list[str], spans: list[tuple[int, int]]) -> None:
    """Assigning and splitting keeps all text, makes no blank block, and loses no citation."""
    whole_text = "".join(part_texts)
    parts = [TextContent(text) for text in part_texts]
    citations = [Citation(f"https://{at}", start=min(span), end=max(span)) for at, span in enumerate(spans)]
    assign_citations(parts, citations)
    assert all(0 <= each.start <= each.end <= len(part.text) for part in parts for each in part.citations)
    blocks = [block for part in parts for block in split_at_citations(part)]
    assert "".join(text for text, _ in blocks) == whole_text
    for part in parts:
        assert all(text.strip() for text, _ in split_at_citations(part)) or not part.text.strip()
    for citation in citations if whole_text else ():
        words = "".join(text for text, cited in blocks if citation.url in [each.url for each in cited])
        assert words and whole_text[citation.start : citation.end].strip() in words


def test_overlapping_citations_split_text() -> None:
    one, two = Citation("https://1", start=0, end=4), Citation("https://2", start=2, end=6)
    assert split_at_citations(TextContent("abcdef", citations=[one, two])) == [
        ("ab", [one]),
        ("cd", [one, two]),
        ("ef", [two]),
    ]
    assert (
        split_at_citations(TextContent("  ab  ", citations=[Citation("https://1", start=2, end=4)]))[0][0] == "  ab  "
    )
