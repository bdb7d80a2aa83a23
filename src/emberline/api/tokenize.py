"""POST /tokenize and POST /detokenize, in vLLM's shapes and, where a request has `content`, in llama.cpp's.

call = parse(body);             reply = render(call, ids, strings, max_context)
call = parse_detokenize(body);  reply = render_detokenized(call, text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import Caller, ChatCall
from emberline.api.fields import ignored_fields, only
from emberline.api.openai.messages import Message, explain_parts, for_template
from emberline.api.openai.sampling import Name, TokenId
from emberline.api.openai.template import continues_last, template_args, wishes
from emberline.api.openai.tools import Tools, toolbox
from emberline.api.parse import Wire, decode
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams


class TokenizeRequest(Wire):
    """A prompt, or messages with what belongs to them."""

    model: Name | None = None  # None: the one that is served
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # of a prompt true, of messages false: templates write their own
    return_token_strs: bool | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    mm_processor_kwargs: None = None
    # llama.cpp's
    content: str | None = None  # as `prompt`, without special tokens unless asked for
    add_special: bool | None = None
    parse_special: Annotated[Any, only(True)] = None
    with_pieces: bool | None = None  # each token with its text


class DetokenizeRequest(Wire):
    tokens: list[TokenId]
    model: Name | None = None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    model: str | None
    prompt: str | ChatCall
    add_special_tokens: bool  # of a text; a ChatCall has its own
    strings: bool  # the tokens' texts are wanted too
    pieces: bool = False  # as objects, in place of the ids


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str | None
    ids: Sequence[int]


def parse(body: bytes) -> TokenizeCall:
    try:
        asked = decode(body, TokenizeRequest)
    except InvalidRequest as error:
        raise explain_parts(error) from None
    ignored_fields(asked)
    if sum(each is not None for each in (asked.prompt, asked.content, asked.messages)) != 1:
        raise InvalidRequest("exactly one of prompt, content and messages is needed", param="prompt")
    if asked.content is not None:
        _plain(asked)
        return TokenizeCall(
            asked.model, asked.content, bool(asked.add_special), bool(asked.with_pieces), bool(asked.with_pieces)
        )
    for param in ("add_special", "with_pieces"):
        if getattr(asked, param) is not None:
            raise InvalidRequest(f"{param} goes with content", param=param, hint="send content in place of prompt")
    prompt = _chat(asked, asked.messages) if asked.messages is not None else _plain(asked)
    return TokenizeCall(asked.model, prompt, asked.add_special_tokens is not False, bool(asked.return_token_strs))


def parse_detokenize(body: bytes) -> DetokenizeCall:
    asked = decode(body, DetokenizeRequest)
    return DetokenizeCall(asked.model, asked.tokens)


def render(call: TokenizeCall, ids: Sequence[int], strings: Sequence[str], max_context: int) -> dict[str, Any]:
    pieces = [{"id": id_, "piece": piece} for id_, piece in zip(ids, strings, strict=True)] if call.pieces else None
    return {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": list(ids) if pieces is None else pieces,
        "token_strs": list(strings) if call.strings else None,
    }


def render_detokenized(call: DetokenizeCall, text: str) -> dict[str, Any]:
    """llama.cpp's clients read `content` and name no model; vLLM's reply has `prompt` alone."""
    return {"prompt": text} if call.model else {"prompt": text, "content": text}


def _plain(asked: TokenizeRequest) -> str:
    """The text, if no field is given that goes with messages."""
    for param in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(asked, param) is not None:
            raise InvalidRequest(f"{param} goes with messages, not with a prompt", param=param)
    return asked.prompt or ""


def _chat(asked: TokenizeRequest, messages: list[Message]) -> ChatCall:
    tools = toolbox(asked.tools, None, None)
    continue_last = continues_last(messages, asked.continue_final_message, asked.add_generation_prompt)
    return ChatCall(
        caller=Caller(asked.model or ""),
        messages=for_template(messages),
        params=SamplingParams(),
        tools=tools.tools,
        template_args=template_args(asked.chat_template_kwargs),
        wishes=wishes(asked.chat_template_kwargs),
        continue_last=continue_last,
        generation_prompt=asked.add_generation_prompt is not False and not continue_last,
        add_special_tokens=bool(asked.add_special_tokens),
    )
