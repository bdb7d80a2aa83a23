"""Requests of Ollama's /api/chat and /api/generate.

    call = parse_chat(body)
    writer = reply.make_chat_writer(call, id, created, fingerprint)

Ollama streams unless the request has `"stream": false`. A request without messages or prompt asks to load a model
(`parse_load_request`): models are loaded already, so it gets a reply without text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import ChatCall, CommonFields, CompletionCall, Tool
from emberline.api.fields import IgnoredField, IgnoredFields
from emberline.api.ollama.messages import (
    Images,
    OllamaMessage,
    Tools,
    convert_messages,
    convert_tools,
    reject_images,
)
from emberline.api.ollama.options import Options, parse_format
from emberline.api.openai.sampling import LogprobCount, ModelName
from emberline.api.openai.template import build_template_args, list_template_settings, merge_template_kwargs
from emberline.api.parse import WireStruct, decode_request
from emberline.api.template_settings import TemplateSetting
from emberline.core.errors import InvalidRequest

Think = bool | Annotated[str, Meta(max_length=32)]
THINK_LEVELS_OFF = ("", "none", "false")


class GenerationRequest(WireStruct, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    model: ModelName | None = None  # required only if the server has several models
    stream: bool | None = None  # None: true
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    # Models are loaded and removed by /api/pull and /api/delete only. The engine keeps prompts that fit its context.
    keep_alive: IgnoredField = None
    truncate: IgnoredField = None
    shift: IgnoredField = None


class OllamaChatRequest(GenerationRequest):
    messages: list[OllamaMessage] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(GenerationRequest):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is used as it is, without the chat template
    images: Images = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


@dataclass(frozen=True, slots=True)
class OllamaChatCall(ChatCall):
    requested_model: str = ""  # the name in the reply


@dataclass(frozen=True, slots=True)
class OllamaRawCall(CompletionCall):
    requested_model: str = ""


def parse_chat(body: bytes) -> OllamaChatCall:
    request, ignored = decode_request(body, OllamaChatRequest)
    messages = convert_messages(request.messages or [])
    return _build_chat_call(request, messages, ignored, convert_tools(request.tools))


def parse_generate(body: bytes) -> OllamaChatCall | OllamaRawCall:
    request, ignored = decode_request(body, OllamaGenerateRequest)
    reject_images(request.images, "images")
    for name, hint in (
        ("suffix", "write the text before and after the gap into prompt, with the model's own markers, and raw: true"),
        ("template", "render the template in the client and send raw: true, or start with --chat-template FILE"),
        ("context", "send the conversation to /api/chat"),
    ):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported", param=name, hint=hint)
    if not request.prompt:
        raise InvalidRequest("prompt is empty", param="prompt", hint="send a text")
    if not request.raw:
        system = [OllamaMessage(role="system", content=request.system)] if request.system else []
        messages = convert_messages([*system, OllamaMessage(role="user", content=request.prompt)])
        return _build_chat_call(request, messages, ignored)
    options = request.options or Options()
    return OllamaRawCall(
        common=CommonFields(request.model or ""),
        prompts=[request.prompt],
        params=options.build_sampling_params(parse_format(request.format), _resolve_top_logprobs(request)),
        unset_params=options.find_unset_params(),
        ignored=ignored,
        stream=request.stream is not False,
        requested_model=request.model or "",
    )


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request without a prompt, with which clients load a model, or unload it with `keep_alive: 0`."""

    model: str


def parse_load_request(body: bytes, *, is_chat: bool) -> LoadRequest | None:
    """Return the request to load a model, or None if the body asks for generated text."""
    if is_chat:
        chat, _ = decode_request(body, OllamaChatRequest)
        return None if chat.messages else LoadRequest(chat.model or "")
    generate, _ = decode_request(body, OllamaGenerateRequest)
    return None if generate.prompt else LoadRequest(generate.model or "")


def _build_chat_call(
    request: GenerationRequest, messages: list[dict[str, Any]], ignored: IgnoredFields, tools: tuple[Tool, ...] = ()
) -> OllamaChatCall:
    options = request.options or Options()
    continues_last = messages[-1]["role"] == "assistant"
    args, settings = _read_think(request.think)
    return OllamaChatCall(
        common=CommonFields(request.model or ""),
        messages=messages,
        params=options.build_sampling_params(parse_format(request.format), _resolve_top_logprobs(request)),
        tools=tools,
        template_args=args,
        template_settings=settings,
        continues_last_message=continues_last,
        adds_generation_prompt=not continues_last,
        unset_params=options.find_unset_params(),
        ignored=ignored,
        stream=request.stream is not False,
        requested_model=request.model or "",
    )


def _resolve_top_logprobs(request: GenerationRequest) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _read_think(think: Think | None) -> tuple[dict[str, Any], list[TemplateSetting]]:
    """Return the chat template's variables for `think`, and the settings that say where they came from."""
    if think is None:
        return {}, []
    if isinstance(think, str) and think not in THINK_LEVELS_OFF:
        return build_template_args({}, think), list_template_settings({}, think, "think")
    is_on = think is True
    setting = TemplateSetting("think", ("enable_thinking",), enables_reasoning=is_on)
    return merge_template_kwargs(None, is_on, None), [setting]
