"""Going on with a broken stream: the seam, the request, and one stream out of several, cut anywhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from emberline.api import sse
from emberline.gateway.call import Call, Reply, Step
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.deltas import (
    Cited,
    Counted,
    Delta,
    Ended,
    Finished,
    Opened,
    Sealed,
    TextPiece,
    ThinkingPiece,
    ToolOpened,
    ToolPiece,
)
from emberline.gateway.dialects.events import EventSplitter
from emberline.gateway.dialects.inner import Citation, Spoken
from emberline.gateway.dialects.prefill import Prefill, marked
from emberline.gateway.dialects.translate import GRAMMARS
from emberline.gateway.errors import Broken
from emberline.gateway.guardrails.policy import Guardrails, PatternRule
from emberline.gateway.keys.identity import ANONYMOUS
from emberline.gateway.layers.continued import Continued
from emberline.gateway.options import NOTHING, Options
from emberline.gateway.providers.registry import Registry
from emberline.gateway.settings import Settings
from emberline.gateway.streams.continuation import GO_ON, claude_goes_on, continuable, continued
from emberline.gateway.streams.seam import LEAST, Seam
from emberline.gateway.streams.spliced import Spliced

DIALECTS: tuple[Spoken, ...] = get_args(Spoken)
ASKED: dict[Spoken, dict[str, Any]] = {
    "openai-chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "stream_options": {"include_usage": True},
    },
    "anthropic": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
    "openai-responses": {"input": "hi", "max_output_tokens": 100},
    "gemini": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}},
}

# -- the seam ----------------------------------------------------------------------------------------------------------


def joined(said: str, new: str, prefill: Prefill, cut: int = 1) -> str:
    seam = Seam(said, prefill)
    pieces = [new[at : at + cut] for at in range(0, len(new), cut)]
    return said + "".join(map(seam.push, pieces)) + seam.end()


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize(
    ("said", "new", "prefill", "want"),
    [
        ("One two ", "three", "", "One two three"),
        ("One two ", "two three", "", "One two three"),
        ("One two", "One two three", "", "One two three"),
        ("One two ", "One two\nthree", "", "One two \nthree"),
        ("unbeliev", "unbelievable", "", "unbelievable"),
        ("a list of a", "apples", "", "a list of aapples"),  # a letter is no repetition
        ("One two ", " three", "", "One two three"),
        ("One two three", "two", "", "One two three"),  # "two" begins "two three": it ended while it repeated
        ("One two three", "One", "", "One two three"),
        ("ha ha ", "ha ha!", "flag", "ha ha ha ha!"),  # who goes on means what it says
        ("ha ha ", " ha!", "bare", "ha ha ha!"),
        ("One\n\n", "\nTwo", "bare", "One\n\nTwo"),
        ("One two ", "One two three", "prefix", "One two three"),
        ("One two ", " three", "prefix", "One two three"),
        ("", "One", "", "One"),
    ],
)
def test_what_is_said_again_is_taken_out(said: str, new: str, prefill: Prefill, want: str, cut: int) -> None:
    assert joined(said, new, prefill, cut) == want


@given(st.integers(2, 30), st.data())
@settings(deadline=None)
def test_words_that_differ_are_said_once_wherever_it_begins_again(count: int, data: st.DataObject) -> None:
    text = " ".join(f"<{i}th-word>" for i in range(count))  # no end of a word is the beginning of another
    at = data.draw(st.integers(1, len(text) - 1))
    begins = [i for i in range(at) if (i == 0 or text[i - 1] == " ") and at - i >= LEAST + 1]
    begin = data.draw(st.sampled_from([*begins, at]))
    assert joined(text[:at], text[begin:], "", data.draw(st.integers(1, 9))) == text


# -- the request -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("prefill", ["", "bare"])
def test_what_was_said_is_the_last_turn(dialect: Spoken, prefill: Prefill) -> None:
    body = json.dumps({"model": "m", **ASKED[dialect]}).encode()
    asked = continuable(body, dialect)
    assert asked is not None
    again = continued(body, asked, "x" * 40 + " ", prefill)
    read = GRAMMARS[dialect].parse(json.loads(again))
    turns = [(message.role, getattr(message.parts[0], "text", None)) for message in read.messages]
    assert turns == [("user", "hi"), ("assistant", "x" * 40), *([] if prefill else [("user", GO_ON)])]
    assert read.max_output == 100 - 11
    assert continued(body, asked, " ", prefill) == body, "nothing was said"
    short = GRAMMARS[dialect].parse(json.loads(continued(body, asked, "x" * 4000, prefill)))
    assert short.max_output == 1


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"logprobs": True},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]},
        {"tools": [{"type": "custom", "custom": {"name": "sql"}}]},
        {"modalities": ["audio"]},
        {"messages": "none"},
    ],
    ids=str,
)
def test_what_not_anybody_could_go_on_with(more: dict[str, Any]) -> None:
    assert continuable(json.dumps({"model": "m", **ASKED["openai-chat"], **more}).encode(), "openai-chat") is None


def test_a_budget_for_thoughts_stays() -> None:
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 90}}
    body = json.dumps({"model": "m", **ASKED["anthropic"], **thinks}).encode()
    asked = continuable(body, "anthropic")
    assert asked is not None and not claude_goes_on("claude-sonnet-4-5", asked)
    assert json.loads(continued(body, asked, "x" * 400, ""))["max_tokens"] == 91


def test_which_claude_goes_on() -> None:
    asked = continuable(json.dumps({"model": "m", **ASKED["anthropic"]}).encode(), "anthropic")
    assert asked is not None
    goes = {model: claude_goes_on(model, asked) for model in ("claude-3-5-haiku", "claude-sonnet-4-5-20250929")}
    assert all(goes.values())
    assert not any(claude_goes_on(model, asked) for model in ("claude-opus-4-6", "claude-next", "some-model"))


def test_marks() -> None:
    body = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
    assert marked(body, "flag") == {"continue_final_message": True, "add_generation_prompt": False}
    assert marked(body, "prefix")["messages"][-1] == {"role": "assistant", "content": "b", "prefix": True}
    assert marked(body, "bare") == {}


# -- the stream --------------------------------------------------------------------------------------------------------


class Leg:
    """A reply that breaks, or does not, with an error of its dialect or without."""

    def __init__(self, chunks: list[bytes], error: Exception | None = None) -> None:
        self._chunks = chunks
        self._error = error
        self.closed = False
        self.reply = Reply(200, {}, self, usage=Usage(input=10, output=5), micros=7, estimated=error is not None)
        self.reply.provider, self.reply.model, self.reply.ended = "p", "m", "cut" if error else "complete"

    def __aiter__(self) -> Leg:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks:
            return self._chunks.pop(0)
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


def events(dialect: Spoken, deltas: list[Delta]) -> list[bytes]:
    writer = GRAMMARS[dialect].writer(Asked())
    return [made for delta in deltas if (made := writer.push(delta))]


def answer(id: str, *content: Delta) -> list[Delta]:
    return [Opened(id, "m"), *content, Finished("stop"), Counted(Usage(input=20, output=3)), Ended()]


def made(dialect: Spoken, settings: Settings | None = None) -> Call:
    body = json.dumps({"model": "m", **ASKED[dialect]}).encode()
    return Call("id", "a", "g", "p", "", dialect, "POST", {}, "", body, "m", True, None, NOTHING, ANONYMOUS,
                settings or Settings(), 0.0, 60.0)  # fmt: skip


def spliced(dialect: Spoken, *legs: Leg) -> tuple[bytes, Reply, list[str]]:
    """What a client gets, and what was said when others were asked."""
    asked: list[str] = []
    rest = list(legs[1:])

    async def go_on(said: str, broken: Reply) -> tuple[Reply, Seam] | None:
        asked.append(said)
        return (rest.pop(0).reply, Seam(said, "")) if rest else None

    call = made(dialect)

    async def run() -> tuple[bytes, Reply]:
        reply = Spliced(call, dialect, legs[0].reply, go_on).reply
        assert not isinstance(reply.body, bytes)
        got = b"".join([chunk async for chunk in reply.body])
        await reply.close()
        return got, reply

    got, reply = asyncio.run(run())
    assert all(leg.closed for leg in legs[: len(asked) + 1] if leg not in rest)
    return got, reply, asked


def is_watched(call: Call) -> bool:
    async def inner(call: Call) -> Reply:
        return Leg([]).reply

    return isinstance(asyncio.run(Continued(inner, Registry()).layer(inner)(call)).body, Spliced)  # type: ignore[arg-type]


def test_what_is_watched() -> None:
    on = Settings(continuation=True)
    rule = PatternRule(name="mail", find=("email",), on="prompt")
    guarded = structs.replace(on, guardrails=Guardrails(patterns=(rule,)))
    assert not is_watched(made("anthropic")) and is_watched(made("anthropic", on))
    assert is_watched(made("gemini").moved(options=Options(continuation=True)))
    assert not is_watched(made("gemini", on).moved(options=Options(continuation=False)))
    assert not is_watched(made("anthropic", guarded)), "what was said would go out unseen"
    assert not is_watched(made("anthropic", on).moved(steps=(Step("p", "m", body=b"{}"),))), "it asks something else"
    assert not is_watched(made("openai-chat", on).moved(dialect="raw"))
    assert not is_watched(made("openai-chat", on).moved(stream=False))


@pytest.mark.parametrize(("said", "prefill"), [("a ", "flag"), ("", ""), (" ", "")])
def test_what_the_same_place_is_asked_once_more(said: str, prefill: Prefill) -> None:
    first = [Opened("one", "m"), ThinkingPiece("hm"), *([TextPiece(said)] if said else [])]
    legs = [Leg(events("openai-chat", first), Broken("cut")), Leg(events("openai-chat", answer("two", TextPiece("b"))))]
    asked: list[Call] = []

    async def attempts(call: Call) -> Reply:
        asked.append(call)
        return legs[len(asked) - 1].reply

    async def run() -> bytes:
        call = made("openai-chat", Settings(continuation=True)).moved(provider="emberline")
        reply = await Continued(attempts, Registry()).layer(attempts)(call)
        assert not isinstance(reply.body, bytes)
        return b"".join([chunk async for chunk in reply.body])

    assert text_of(read("openai-chat", asyncio.run(run()))) == said + "b"
    assert asked[1].prefill == prefill and (asked[1].body == asked[0].body) == (prefill == "")


def read(dialect: Spoken, data: bytes) -> list[Delta]:
    reader = GRAMMARS[dialect].reader()
    found = [delta for event in EventSplitter().push(data) for delta in reader.read(event)]
    return [*found, *reader.end()]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextPiece))


WORDS = [f"word{i} " for i in range(14)]  # more than three legs say


def leg(dialect: Spoken, said: int, more: int, restart: bool) -> tuple[Leg, int]:
    """Goes on after that many words, or begins again, and is cut `more` events after its first word (a stream passes
    only from there); and the words that are said then."""
    begin = 0 if restart else said
    whole = events(dialect, answer(f"after-{said}", *map(TextPiece, WORDS[begin:])))
    first = next(at for at, event in enumerate(whole) if b"word" in event)
    kept = whole[: min(first + 1 + more, len(whole) - 1)]
    reader = GRAMMARS[dialect].reader()
    found = [delta for event in EventSplitter().push(b"".join(kept)) for delta in reader.read(event)]
    return Leg(kept, Broken("cut")), max(said, begin + len(text_of(found).split()))


@given(st.sampled_from(DIALECTS), st.lists(st.integers(0, 3), max_size=3), st.booleans())
@settings(deadline=None, max_examples=150)
def test_one_stream_wherever_the_others_break(dialect: Spoken, cuts: list[int], restart: bool) -> None:
    said, legs = 0, []
    for more in cuts:
        broken, said = leg(dialect, said, more, restart)
        legs.append(broken)
    legs.append(Leg(events(dialect, answer("last", *map(TextPiece, WORDS[0 if restart else said :])))))
    data, reply, asked = spliced(dialect, *legs)
    found = read(dialect, data)
    assert text_of(found) == "".join(WORDS) and len(asked) == len(cuts)
    kinds = [type(delta) for delta in found]
    assert kinds.count(Opened) == kinds.count(Finished) == kinds.count(Ended) == 1 and kinds[-1] is Ended
    assert reply.ended == "complete" and reply.error == "" and reply.micros == 7 * len(legs)
    assert reply.usage == Usage(input=10 * len(legs), output=5 * len(legs))
    counted = [delta.usage for delta in found if isinstance(delta, Counted)]
    assert counted[-1] == Usage(input=20 + 10 * len(cuts), output=3 + 5 * len(cuts))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_ids_are_of_the_first(dialect: Spoken) -> None:
    first = events(dialect, [Opened("one", "m"), TextPiece("a ")])
    data, reply, asked = spliced(
        dialect, Leg(first, Broken("cut")), Leg(events(dialect, answer("two", TextPiece("b"))))
    )
    opened = [delta for delta in read(dialect, data) if isinstance(delta, Opened)]
    assert [delta.id for delta in opened] == ["one"] and b"two" not in data
    assert asked == ["a "] and reply.continued == "p/m" and reply.estimated


@pytest.mark.parametrize("dialect", DIALECTS)
def test_thoughts_are_neither_told_on_nor_told_again(dialect: Spoken) -> None:
    first = events(dialect, [Opened("one", "m"), ThinkingPiece("hm"), TextPiece("a ")])
    second = answer("two", ThinkingPiece("once more"), Sealed("s", "anthropic"), TextPiece("b"))
    data, _, asked = spliced(dialect, Leg(first, Broken("cut")), Leg(events(dialect, second)))
    found = read(dialect, data)
    assert asked == ["a "] and text_of(found) == "a b"
    assert "".join(delta.text for delta in found if isinstance(delta, ThinkingPiece)) == "hm"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_who_goes_on_cites_is_left_out(dialect: Spoken) -> None:
    """Its places are counted from where it began."""
    first = events(dialect, [Opened("one", "m"), TextPiece("a ")])
    second = answer("two", TextPiece("b"), Cited(Citation("https://x", start=0, end=1)))
    assert b"https://x" in b"".join(events(dialect, second))
    data, _, _ = spliced(dialect, Leg(first, Broken("cut")), Leg(events(dialect, second)))
    assert text_of(read(dialect, data)) == "a b" and b"https://x" not in data


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic", "openai-responses"])  # Gemini's calls come whole
def test_half_a_call_is_not_gone_on_with(dialect: Spoken) -> None:
    half = events(dialect, [Opened("one", "m"), TextPiece("a"), ToolOpened(0, "c1", "weather"), ToolPiece(0, '{"ci')])
    data, reply, asked = spliced(dialect, Leg(half, Broken("cut")), Leg(events(dialect, answer("two", TextPiece("b")))))
    assert not asked and (reply.ended, reply.error) == ("cut", "upstream_broken") and reply.continued == ""
    assert b"cut" in data.splitlines()[-2] and sse.DONE not in data, "it must not look whole"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_who_goes_on_may_call(dialect: Spoken) -> None:
    first = events(dialect, [Opened("one", "m"), TextPiece("I look ")])
    call = answer("two", TextPiece("I look it up"), ToolOpened(0, "c1", "weather"), ToolPiece(0, '{"city":"Paris"}'))
    data, _, _ = spliced(dialect, Leg(first, Broken("cut")), Leg(events(dialect, call)))
    found = read(dialect, data)
    assert text_of(found) == "I look it up"
    assert [delta.name for delta in found if isinstance(delta, ToolOpened)] == ["weather"]
    assert "".join(delta.text for delta in found if isinstance(delta, ToolPiece)) == '{"city":"Paris"}'


def test_an_answer_that_gave_its_reason_to_stop_is_ended_here() -> None:
    done = events("openai-chat", answer("one", TextPiece("a")))[:-1]
    data, reply, asked = spliced("openai-chat", Leg(done, Broken("cut")))
    assert not asked and data.endswith(sse.DONE) and text_of(read("openai-chat", data)) == "a"
    assert reply.ended == "complete" and reply.continued == "ended here" and reply.estimated


def test_nobody_goes_on() -> None:
    first = events("anthropic", [Opened("one", "m"), TextPiece("a")])
    data, reply, asked = spliced("anthropic", Leg(first, Broken("it was cut")))
    assert asked == ["a"] and data.count(b"it was cut") == 1 and b"message_stop" not in data
    assert (reply.ended, reply.error, reply.micros) == ("cut", "upstream_broken", 7)
