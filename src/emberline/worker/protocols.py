"""The API protocols by the path of their endpoint: how to parse a request and how to write the reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from emberline.api.anthropic import reply as anthropic_reply
from emberline.api.anthropic import request as anthropic
from emberline.api.call import ChatCall, CompletionCall, Tool
from emberline.api.ollama import reply as ollama_reply
from emberline.api.ollama import request as ollama
from emberline.api.openai import chat, chat_reply, completions, completions_stream
from emberline.api.responses import request as responses
from emberline.api.responses import stream as responses_stream
from emberline.core.errors import ContextLengthExceeded, WorkTooLarge
from emberline.core.pickle_cost import check_pickle_cost
from emberline.server.exchange import EVENT_STREAM_TYPE
from emberline.wire.deltas import Finish, ReplyStart, ReplyWriter, StreamEnd, StreamStart, TextDelta, UsageUpdate
from emberline.wire.usage import Usage


@dataclass(frozen=True, slots=True)
class WireProtocol:
    parse: Callable[[bytes], ChatCall | CompletionCall]
    make_writer: Callable[[Any, str, int, str], ReplyWriter]  # takes the parsed call, id, creation time and fingerprint
    id_prefix: str  # of the ids of its replies
    smallest_body: bytes  # a minimal valid request
    stream_media_type: str = EVENT_STREAM_TYPE


T = TypeVar("T")

OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH = "/api/chat", "/api/generate"
MAX_SETTINGS_WEIGHT = 100_000  # of everything but the prompt, in units of `core/pickle_cost.py`
MAX_MESSAGES = 20_000  # of a large body; a template takes about 10 us for each
SAMPLE_MESSAGE = b'{"role":"user","content":"a"}'
MAX_CHARS_PER_TOKEN = 128  # a text with more characters per token of the context is rejected without tokenizing it


def parse_large_body(path: str, body: bytes, max_contexts_by_model: Mapping[str, int]) -> ChatCall | CompletionCall:
    """Return the parsed body. This runs in a child process.

    A prompt that is longer than the model's context is rejected here, before it is sent back to the server process.
    `max_contexts_by_model` has the context length in tokens of each model.
    """
    call = PROTOCOLS[path].parse(body)
    settings = replace(call, prompts=[]) if isinstance(call, CompletionCall) else replace(call, messages=[])
    check_pickle_cost(settings, MAX_SETTINGS_WEIGHT, "the request without its prompt")
    context = max_contexts_by_model.get(call.common.model, max(max_contexts_by_model.values(), default=0))
    if isinstance(call, CompletionCall):
        for prompt in call.prompts:
            max_size = context * MAX_CHARS_PER_TOKEN if isinstance(prompt, str) else context
            _check_size(len(prompt), max_size, prompt, "prompt")
        return call
    if len(call.messages) > MAX_MESSAGES:
        found = len(call.messages)
        what = f"messages has {found} items; the limit is {MAX_MESSAGES}"
        raise WorkTooLarge(what, param="messages", hint="send fewer messages")
    size = sum(len(text) for given in (call.messages, call.tools) for text in _iterate_texts(given))
    _check_size(size, context * MAX_CHARS_PER_TOKEN, "", "messages")
    _check_size(len(call.prediction or ""), context * MAX_CHARS_PER_TOKEN, "", "prediction.content")
    return call


def _check_size(size: int, max_size: int, prompt: str | list[int], param: str) -> None:
    if size > max_size:
        what = "characters" if isinstance(prompt, str) else "tokens"
        message = f"{param} has {size} {what}; the model's context holds at most {max_size}"
        raise ContextLengthExceeded(message, param=param, hint=f"shorten {param}")


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Tool):
        yield from _iterate_texts([value.name, value.description, value.parameters])
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _iterate_texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _iterate_texts(inner)


def parse_with_result_limit(parse: Callable[[bytes], T], body: bytes) -> T:
    """Return the parsed body. This runs in a child process.

    Raises WorkTooLarge if sending the result back to the server process would take too long.
    """
    call = parse(body)
    check_pickle_cost(call)
    return call


PROTOCOLS = {
    "/v1/chat/completions": WireProtocol(
        chat.parse, chat_reply.make_writer, "chatcmpl-", b'{"stream":true,"messages":[%b]}' % SAMPLE_MESSAGE
    ),
    "/v1/completions": WireProtocol(
        completions.parse, completions_stream.CompletionReplyWriter, "cmpl-", b'{"stream":true,"prompt":"a"}'
    ),
    "/v1/responses": WireProtocol(
        responses.parse, responses_stream.ResponsesReplyWriter, "resp_", b'{"stream":true,"input":"a"}'
    ),
    "/v1/messages": WireProtocol(
        anthropic.parse,
        anthropic_reply.make_writer,
        "msg_",
        b'{"stream":true,"max_tokens":1,"messages":[%b]}' % SAMPLE_MESSAGE,
    ),
    OLLAMA_CHAT_PATH: WireProtocol(
        ollama.parse_chat,
        ollama_reply.make_chat_writer,
        "",
        b'{"messages":[%b]}' % SAMPLE_MESSAGE,
        ollama_reply.STREAM_MEDIA_TYPE,
    ),
    OLLAMA_GENERATE_PATH: WireProtocol(
        ollama.parse_generate,
        ollama_reply.make_generate_writer,
        "",
        b'{"prompt":"a"}',
        ollama_reply.STREAM_MEDIA_TYPE,
    ),
}


def warm_up_protocols() -> None:
    """Parse a request and write a reply of each protocol once, because the first use takes 10 to 30 ms."""
    for protocol in PROTOCOLS.values():
        writer = protocol.make_writer(protocol.parse(protocol.smallest_body), protocol.id_prefix, 0, "")
        content = (TextDelta("a"), TextDelta("a"), Finish("stop"), UsageUpdate(Usage(input=1, output=2)))
        for delta in (StreamStart(), ReplyStart(1), *content, StreamEnd()):
            writer.write(delta)
