"""POST /tokenize and POST /detokenize, in the formats of vLLM and llama.cpp.

A tokenize request with `content` is in llama.cpp's format.

call = parse(body);             reply = render(call, ids, strings, max_context)
call = parse_detokenize(body);  reply = render_detokenized(call, text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import ChatCall, CommonFields
from emberline.api.fields import IgnoredFields, accepts_only
from emberline.api.openai.messages import Message, add_text_only_hint, to_template_messages
from emberline.api.openai.sampling import ModelName, TokenId
from emberline.api.openai.template import build_template_args, continues_last_message, list_template_settings
from emberline.api.openai.tools import Tools, select_tools
from emberline.api.parse import WireStruct, decode_request
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams


class TokenizeRequest(WireStruct):
    """A request with a text (`prompt` or `content`), or with `messages` and their rendering options."""

    model: ModelName | None = None  # None: the server's only model
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt; false for messages: templates write their own
    return_token_strs: bool | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    mm_processor_kwargs: None = None
    # llama.cpp's fields
    content: str | None = None  # a text like `prompt`, by default without special tokens
    add_special: bool | None = None
    parse_special: Annotated[Any, accepts_only(True)] = None
    with_pieces: bool | None = None  # the reply has each token's text


class DetokenizeRequest(WireStruct):
    tokens: list[TokenId]
    model: ModelName | None = None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    model: str | None
    prompt: str | ChatCall
    ignored: IgnoredFields
    add_special_tokens: bool  # for a text; a ChatCall has its own field
    returns_strings: bool  # the reply includes the tokens' texts
    returns_pieces: bool = False  # the reply has objects with id and text in place of ids


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str | None
    ids: Sequence[int]
    ignored: IgnoredFields


def parse(body: bytes) -> TokenizeCall:
    try:
        request, ignored = decode_request(body, TokenizeRequest)
    except InvalidRequest as error:
        raise add_text_only_hint(error) from None
    given = [name for name in ("prompt", "content", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        what = (
            f"exactly one of prompt, content and messages is required; the request has {' and '.join(given) or 'none'}"
        )
        raise InvalidRequest(what, param="prompt", hint="send one of them")
    if request.content is not None:
        _select_text(request)
        return TokenizeCall(
            request.model,
            request.content,
            ignored,
            bool(request.add_special),
            bool(request.with_pieces),
            bool(request.with_pieces),
        )
    for param in ("add_special", "with_pieces"):
        if getattr(request, param) is not None:
            raise InvalidRequest(
                f"{param} is only valid together with `content`", param=param, hint="send content in place of prompt"
            )
    prompt = _build_chat_call(request, request.messages) if request.messages is not None else _select_text(request)
    returns_strings = bool(request.return_token_strs)
    return TokenizeCall(request.model, prompt, ignored, request.add_special_tokens is not False, returns_strings)


def parse_detokenize(body: bytes) -> DetokenizeCall:
    request, ignored = decode_request(body, DetokenizeRequest)
    return DetokenizeCall(request.model, request.tokens, ignored)


def render(call: TokenizeCall, ids: Sequence[int], strings: Sequence[str], max_context: int) -> dict[str, Any]:
    pieces = (
        [{"id": id_, "piece": piece} for id_, piece in zip(ids, strings, strict=True)] if call.returns_pieces else None
    )
    return {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": list(ids) if pieces is None else pieces,
        "token_strs": list(strings) if call.returns_strings else None,
    }


def render_detokenized(call: DetokenizeCall, text: str) -> dict[str, Any]:
    """Return the reply in vLLM's format; if the request names no model, add llama.cpp's `content`."""
    return {"prompt": text} if call.model else {"prompt": text, "content": text}


def _select_text(request: TokenizeRequest) -> str:
    """Return the text to tokenize. Raises InvalidRequest for a field that applies only to messages."""
    for param in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(request, param) is not None:
            raise InvalidRequest(f"{param} applies to messages, not to a prompt", param=param, hint=f"remove {param}")
    return request.prompt or ""


def _build_chat_call(request: TokenizeRequest, messages: list[Message]) -> ChatCall:
    tools = select_tools(request.tools, None, None)
    continue_last = continues_last_message(messages, request.continue_final_message, request.add_generation_prompt)
    return ChatCall(
        common=CommonFields(request.model or ""),
        messages=to_template_messages(messages),
        params=SamplingParams(),
        tools=tools.tools,
        template_args=build_template_args(request.chat_template_kwargs),
        template_settings=list_template_settings(request.chat_template_kwargs),
        continues_last_message=continue_last,
        adds_generation_prompt=request.add_generation_prompt is not False and not continue_last,
        add_special_tokens=bool(request.add_special_tokens),
    )
