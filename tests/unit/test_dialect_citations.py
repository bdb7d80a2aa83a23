"""What a model cites, through every dialect: the page, and the words that rest on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from citation_cases import BEFORE, CHUNKS, CITED, CITING, CITING_STREAMS, FIRST, LOCATION, PAGE, TEXT, grounding
from dialect_cases import MODELS, PAIRS, data
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.gateway.dialects.citations import pieces, spread
from emberline.gateway.dialects.inner import Citation, Spoken, Text
from emberline.gateway.dialects.translate import (
    Asked,
    Recipient,
    StreamTranslator,
    translate_reply,
    translate_request,
)

ASKED = Asked(created=1700000000, id="made-1")
Found = tuple[str, str, str | None]  # words of the reply, url, title
CITATION: Found = (CITED, PAGE["url"], PAGE["title"])


def replied(reply: dict[str, Any], source: Spoken, target: Spoken) -> tuple[Any, set[str]]:
    body, changed = translate_reply(json.dumps(reply).encode(), source, target, ASKED)
    return json.loads(body), {change.field for change in changed}


def streamed(stream: bytes, source: Spoken, target: Spoken) -> list[Any]:
    translator = StreamTranslator(source, target, ASKED)
    made = translator.push(stream) + translator.end()
    rows = [line[6:] for line in made.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(row) for row in rows if row != b"[DONE]"]


def in_annotations(text: str, rows: list[Any]) -> list[Found]:
    return [(text[row["start_index"] : row["end_index"]], row["url"], row["title"]) for row in rows]


def in_grounding(parts: list[bytes], said: Any) -> list[Found]:
    found = []
    for support in said.get("groundingSupports", ()):
        place = support["segment"]
        words = parts[place["partIndex"]][place["startIndex"] : place["endIndex"]].decode()
        assert words == place["text"]
        pages = [said["groundingChunks"][at]["web"] for at in support["groundingChunkIndices"]]
        found += [(words, page["uri"], page["title"]) for page in pages]
    return found


def found(reply: Any, dialect: Spoken) -> list[Found]:
    """As a client of the dialect would look for them."""
    match dialect:
        case "openai-chat":
            message = reply["choices"][0]["message"]
            return in_annotations(message["content"], [row["url_citation"] for row in message.get("annotations", ())])
        case "openai-responses":
            texts = [part for item in reply["output"] for part in item.get("content", ())]
            return [each for part in texts for each in in_annotations(part["text"], part["annotations"])]
        case "anthropic":
            blocks = [(block, cited) for block in reply["content"] for cited in block.get("citations") or ()]
            return [(block["text"], cited["url"], cited["title"]) for block, cited in blocks]
        case "gemini":
            candidate = reply["candidates"][0]
            parts = [part.get("text", "").encode() for part in candidate["content"]["parts"]]
            return in_grounding(parts, candidate.get("groundingMetadata", {}))


def found_in_stream(events: list[Any], dialect: Spoken) -> list[Found]:
    match dialect:
        case "openai-chat":
            pieces = [row["delta"] for event in events for row in event["choices"]]
            (rows,) = [piece["annotations"] for piece in pieces if "annotations" in piece]
            text = "".join(piece.get("content") or "" for piece in pieces)
            return in_annotations(text, [row["url_citation"] for row in rows])
        case "openai-responses":
            return found(events[-1]["response"], dialect)
        case "anthropic":
            blocks: list[Any] = []
            for event in events:
                if event["type"] == "content_block_start":
                    blocks.append({"text": "", "citations": []})
                elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                    blocks[-1]["text"] += event["delta"]["text"]
                elif event["type"] == "content_block_delta" and event["delta"]["type"] == "citations_delta":
                    blocks[-1]["citations"].append(event["delta"]["citation"])
            return found({"content": blocks}, dialect)
        case "gemini":
            rows = [event["candidates"][0] for event in events]
            text = "".join(part["text"] for row in rows for part in row["content"]["parts"])
            return in_grounding([text.encode()], rows[-1].get("groundingMetadata", {}))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_whole_reply(source: Spoken, target: Spoken) -> None:
    body, changed = replied(CITING[source], source, target)
    assert found(body, target) == [CITATION]
    assert changed == ({"reply.citations.cited_text"} if source == "anthropic" else set())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_stream(source: Spoken, target: Spoken) -> None:
    """Into Anthropic's a citation is of the open block, as long as it is: others tell it later than the words."""
    words = {"openai-responses": FIRST + BEFORE + CITED}.get(source, TEXT) if target == "anthropic" else CITED
    got = found_in_stream(streamed(CITING_STREAMS[source], source, target), target)
    assert got == [(words, *CITATION[1:])]


@pytest.mark.parametrize("source", ["openai-chat", "openai-responses", "anthropic", "gemini"])
def test_there_and_back_through_anthropic(source: Spoken) -> None:
    """Whose blocks are cut where the cited words begin and end, so that nothing is lost."""
    body, _ = replied(CITING[source], source, "anthropic")
    assert "".join(block.get("text", "") for block in body["content"]) == TEXT
    back, _ = replied(body, "anthropic", "openai-chat")
    assert found(back, "openai-chat") == [CITATION]


def test_events_of_responses() -> None:
    events = streamed(CITING_STREAMS["anthropic"], "anthropic", "openai-responses")
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


def test_what_is_cited_of_a_closed_text_is_in_the_whole_response() -> None:
    call = {"functionCall": {"name": "f", "args": {}}}
    parts = [{"text": FIRST}, call, {"text": CITED}, call]
    last = {"content": {"parts": parts}, "finishReason": "STOP", "groundingMetadata": grounding(len(FIRST.encode()))}
    stream = data({"candidates": [last]})
    assert found_in_stream(streamed(stream, "gemini", "openai-responses"), "openai-responses") == [CITATION]


def test_a_block_cites_a_page_once() -> None:
    """However many of its words rest on it: in a stream the block is all that can be named."""
    supports = [grounding(at)["groundingSupports"][0] for at in (0, 1)]
    stream = data(
        grounded(groundingMetadata={"groundingChunks": CHUNKS, "groundingSupports": supports}, finishReason="STOP")
    )
    assert found_in_stream(streamed(stream, "gemini", "anthropic"), "anthropic") == [CITATION]


def test_several_answers_cite_their_own() -> None:
    row = {"type": "url_citation", "url_citation": {"url": "https://x", "start_index": 1, "end_index": 2}}
    chunks = [{"id": "i", "choices": [{"index": at, "delta": {"content": "éa"}}]} for at in (0, 1)]
    chunks += [{"choices": [{"index": 1, "delta": {"annotations": [row]}, "finish_reason": "stop"}]}]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    late = {"choices": [{"index": 1, "delta": {"annotations": [row]}}]}  # is no reason to break the stream
    events = streamed(data(*chunks, late, b"[DONE]"), "openai-chat", "gemini")
    first, second = events[-1]["candidates"]
    assert "groundingMetadata" not in first
    assert in_grounding(["éa".encode()], second["groundingMetadata"]) == [("a", "https://x", "")]


def test_a_sealed_citation_is_kept_by_its_own_dialect() -> None:
    """As where a broken stream is continued: it is read and written anew."""
    events = streamed(CITING_STREAMS["anthropic"], "anthropic", "anthropic")
    assert [e["delta"]["citation"] for e in events if e.get("delta", {}).get("type") == "citations_delta"] == [LOCATION]
    opened = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert opened == [0, 1]  # what comes after a cited text is another


# -- what has no counterpart -------------------------------------------------------------------------------------------

DOCUMENT = {"type": "char_location", "cited_text": "x", "document_index": 0, "document_title": "d"}
RESULT = {"type": "search_result_location", "cited_text": "", "search_result_index": 0, "title": None}
FILE = {"type": "file_citation", "file_id": "f", "filename": "f.txt", "index": 3}
RETRIEVED = {"retrievedContext": {"title": "d", "text": "x"}}


def blocks(*citations: Any) -> dict[str, Any]:
    return {**CITING["anthropic"], "content": [{"type": "text", "text": CITED, "citations": list(citations)}]}


def grounded(**metadata: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": [{"text": CITED}]}, **metadata}]}


def annotated(*annotations: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": CITED, "annotations": list(annotations)}]
    return {**CITING["openai-responses"], "output": [{"type": "message", "role": "assistant", "content": content}]}


NO_PAGES: list[tuple[Spoken, Any, set[str]]] = [
    ("anthropic", blocks(DOCUMENT), {"reply.citations"}),
    ("anthropic", blocks({**RESULT, "source": "shelf 4"}), {"reply.citations"}),
    ("openai-responses", annotated(FILE), {"reply.annotations"}),
    (
        "gemini",
        grounded(groundingMetadata={"webSearchQueries": ["x"], "searchEntryPoint": {"renderedContent": "<b>"}}),
        {"reply.groundingMetadata.webSearchQueries", "reply.groundingMetadata.searchEntryPoint"},
    ),
    (
        "gemini",
        grounded(groundingMetadata=grounding(0) | {"groundingChunks": [RETRIEVED]}),
        {"reply.groundingMetadata.groundingChunks"},
    ),
    ("gemini", grounded(citationMetadata={"citationSources": [{"endIndex": 3}]}), {"reply.citationMetadata"}),
]


@pytest.mark.parametrize(("source", "reply", "told"), NO_PAGES)
def test_what_names_no_page_is_told(source: Spoken, reply: Any, told: set[str]) -> None:
    for target in [target for other, target in PAIRS if other == source]:
        body, changed = replied(reply, source, target)
        assert changed == told and not found(body, target)


def test_one_of_two_has_a_page() -> None:
    body, changed = replied(blocks(DOCUMENT, LOCATION), "anthropic", "openai-chat")
    assert found(body, "openai-chat") == [CITATION]
    assert changed == {"reply.citations", "reply.citations.cited_text"}
    body, changed = replied(grounded(groundingMetadata=grounding(0) | {"groundingChunks": [*CHUNKS, CHUNKS[0]]}),
                            "gemini", "openai-chat")  # fmt: skip
    assert found(body, "openai-chat") == [CITATION] and not changed


def test_other_names_of_pages() -> None:
    body, _ = replied(blocks({**RESULT, "source": PAGE["url"], "title": PAGE["title"]}), "anthropic", "gemini")
    assert found(body, "gemini") == [CITATION]
    for rows in ("citationSources", "citations"):
        row = {"startIndex": 0, "endIndex": 4, "uri": "https://x", "license": "MIT"}
        body, changed = replied(grounded(citationMetadata={rows: [row]}), "gemini", "anthropic")
        assert found(body, "anthropic") == [("Oslo", "https://x", None)] and not changed
    quoted = grounding(0) | {"groundingChunks": [{"retrievedContext": {"uri": "gs://b/x", "text": "il pleut"}}]}
    body, _ = replied(grounded(groundingMetadata=quoted), "gemini", "anthropic")
    assert body["content"][0]["citations"][0]["cited_text"] == "il pleut"


ODD: list[Any] = [None, 5, "x", [1], [{}], [{"type": "url_citation"}], [{"type": "url_citation", "url_citation": {}}]]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_citation_breaks_no_reply(odd: Any) -> None:
    chat = json.loads(json.dumps(CITING["openai-chat"]))
    chat["choices"][0]["message"]["annotations"] = odd
    replies: list[tuple[Spoken, Any]] = [
        ("openai-chat", chat),
        ("openai-responses", annotated() | {"output": [{"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "x", "annotations": odd}]}]}),
        ("anthropic", {**CITING["anthropic"], "content": [{"type": "text", "text": "x", "citations": odd}]}),
        ("gemini", grounded(groundingMetadata=odd, citationMetadata=odd)),
        ("gemini", grounded(groundingMetadata={"groundingChunks": odd, "groundingSupports": odd})),
        ("gemini", grounded(groundingMetadata={"groundingChunks": CHUNKS, "groundingSupports": [
            {"segment": {"startIndex": odd, "partIndex": odd}, "groundingChunkIndices": [odd, -1, 7]}]})),
    ]  # fmt: skip
    for source, reply in replies:
        for target in [target for other, target in PAIRS if other == source]:
            assert not found(replied(reply, source, target)[0], target)


@pytest.mark.parametrize("place", [{}, {"start_index": None, "end_index": 3}, {"start_index": 9, "end_index": 2}])
def test_a_page_without_a_place_is_kept(place: Any) -> None:
    body, _ = replied(annotated({"type": "url_citation", "url": "https://x", **place}), "openai-responses", "anthropic")
    assert found(body, "anthropic") == [(CITED, "https://x", None)]


# -- streams of Gemini's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anew", [True, False])
def test_chunks_of_several_events(anew: bool) -> None:
    """Their indices go on from event to event, whether or not each tells them all."""
    one, two = CHUNKS[0], {"web": {"uri": "https://two", "title": "Two"}}
    first = grounding(0)
    second = {**grounding(0), "groundingChunks": [one, two] if anew else [two]}
    second["groundingSupports"] = [{**second["groundingSupports"][0], "groundingChunkIndices": [0, 1]}]
    stream = data(
        grounded(groundingMetadata=first),
        {"candidates": [{"content": {"parts": []}, "groundingMetadata": second, "finishReason": "STOP"}]},
    )
    got = found_in_stream(streamed(stream, "gemini", "openai-chat"), "openai-chat")
    assert got == [CITATION, (CITED, "https://two", "Two")]


# -- turns before ------------------------------------------------------------------------------------------------------


def turns(source: Spoken) -> dict[str, Any]:
    user = {"role": "user", "content": "so?"}
    if source == "openai-chat":
        return {"model": "m", "messages": [CITING[source]["choices"][0]["message"], user]}
    if source == "anthropic":
        said = {"role": "assistant", "content": CITING[source]["content"]}
        return {"model": "m", "max_tokens": 9, "messages": [said, user]}
    return {"model": "m", "input": [*CITING[source]["output"], user]}


def requested(source: Spoken, target: Spoken) -> tuple[Any, set[str]]:
    body, changed = translate_request(json.dumps(turns(source)).encode(), source, target, Recipient(MODELS[target]))
    return json.loads(body), {change.field for change in changed if "annot" in change.field or "cit" in change.field}


@pytest.mark.parametrize("source", ["openai-chat", "anthropic"])
def test_responses_take_what_was_cited_before(source: Spoken) -> None:
    body, changed = requested(source, "openai-responses")
    parts = body["input"][0]["content"]
    assert [each for part in parts for each in in_annotations(part["text"], part.get("annotations", []))] == [CITATION]
    assert changed == ({"messages[].citations.cited_text"} if source == "anthropic" else set())


BEFORE_TOLD: list[tuple[Spoken, Spoken, str]] = [
    ("openai-chat", "anthropic", "messages[].annotations"),
    ("openai-chat", "gemini", "messages[].annotations"),
    ("openai-responses", "openai-chat", "input[].content[].annotations"),
    ("openai-responses", "anthropic", "input[].content[].annotations"),
    ("anthropic", "openai-chat", "messages[].content[].citations"),
    ("anthropic", "gemini", "messages[].content[].citations"),
]


@pytest.mark.parametrize(("source", "target", "told"), BEFORE_TOLD)
def test_others_do_not_and_it_is_told(source: Spoken, target: Spoken, told: str) -> None:
    body, changed = requested(source, target)
    assert changed == {told} and PAGE["url"] not in json.dumps(body)


# -- places ------------------------------------------------------------------------------------------------------------

texts = st.text(st.sampled_from("aé🙂 \n"), max_size=8)


@given(st.lists(texts, min_size=1, max_size=3), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_every_citation_keeps_its_words(said: list[str], spans: list[tuple[int, int]]) -> None:
    """Handed out to several texts and cut into blocks: all words stay, no block is blank, no citation is lost."""
    whole = "".join(said)
    parts = [Text(text) for text in said]
    given = [Citation(f"https://{at}", start=min(span), end=max(span)) for at, span in enumerate(spans)]
    spread(parts, given)
    assert all(0 <= each.start <= each.end <= len(part.text) for part in parts for each in part.citations)
    blocks = [block for part in parts for block in pieces(part)]
    assert "".join(text for text, _ in blocks) == whole
    for part in parts:
        assert all(text.strip() for text, _ in pieces(part)) or not part.text.strip()
    for citation in given if whole else ():
        words = "".join(text for text, cited in blocks if citation.url in [each.url for each in cited])
        assert words and whole[citation.start : citation.end].strip() in words


def test_pieces_of_overlapping_citations() -> None:
    one, two = Citation("https://1", start=0, end=4), Citation("https://2", start=2, end=6)
    assert pieces(Text("abcdef", citations=[one, two])) == [("ab", [one]), ("cd", [one, two]), ("ef", [two])]
    assert pieces(Text("  ab  ", citations=[Citation("https://1", start=2, end=4)]))[0][0] == "  ab  "
