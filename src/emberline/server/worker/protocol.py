"""Protocol: one way to ask for a reply, by its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emberline.api.anthropic import request as anthropic
from emberline.api.anthropic import stream as anthropic_stream
from emberline.api.call import ChatCall, CompletionCall
from emberline.api.deltas import Renderer
from emberline.api.openai import chat, chat_stream, completions, completions_stream
from emberline.api.responses import request as responses
from emberline.api.responses import stream as responses_stream


@dataclass(frozen=True, slots=True)
class Protocol:
    parse: Callable[[bytes], ChatCall | CompletionCall]
    renderer: Callable[[Any, str, int, str], Renderer]  # of a call that `parse` made, id, time and fingerprint
    prefix: str  # of its replies' ids


PROTOCOLS = {
    "/v1/chat/completions": Protocol(chat.parse, chat_stream.Renderer, "chatcmpl-"),
    "/v1/completions": Protocol(completions.parse, completions_stream.Renderer, "cmpl-"),
    "/v1/responses": Protocol(responses.parse, responses_stream.Renderer, "resp_"),
    "/v1/messages": Protocol(anthropic.parse, anthropic_stream.Renderer, "msg_"),
}
