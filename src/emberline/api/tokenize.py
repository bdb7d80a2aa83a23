"""POST /tokenize and POST /detokenize, in vLLM's shapes.

call = parse(body);             reply = render(call, ids, strings, max_context)
call = parse_detokenize(body);  reply = render_detokenized(text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import Caller, ChatCall
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


class DetokenizeRequest(Wire):
    tokens: list[TokenId]
    model: Name | None = None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    model: str | None
    prompt: str | ChatCall
    add_special_tokens: bool  # of a text; a ChatCall has its own
    strings: bool  # the tokens' texts are wanted too


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str | None
    ids: Sequence[int]


def parse(body: bytes) -> TokenizeCall:
    try:
        asked = decode(body, TokenizeRequest)
    except InvalidRequest as error:
        raise explain_parts(error) from None
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt")
    prompt = _chat(asked, asked.messages) if asked.messages is not None else _plain(asked)
    return TokenizeCall(asked.model, prompt, asked.add_special_tokens is not False, bool(asked.return_token_strs))


def parse_detokenize(body: bytes) -> DetokenizeCall:
    asked = decode(body, DetokenizeRequest)
    return DetokenizeCall(asked.model, asked.tokens)


def render(call: TokenizeCall, ids: Sequence[int], strings: Sequence[str], max_context: int) -> dict[str, Any]:
    return {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": list(ids),
        "token_strs": list(strings) if call.strings else None,
    }


def render_detokenized(text: str) -> dict[str, Any]:
    return {"prompt": text}


def _plain(asked: TokenizeRequest) -> str:
    for param in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(asked, param) is not None:
            raise InvalidRequest(f"{param} goes with messages, not with a prompt", param=param)
    assert asked.prompt is not None
    return asked.prompt


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
