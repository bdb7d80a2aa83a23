"""Replicate: a chat request becomes a prediction, which is then polled or streamed from its own URL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import UpstreamBroken, UpstreamTimeout
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider, is_trusted_url, report_change
from emberline.gateway.providers.inference_paths import InferencePaths, without_model_name
from emberline.gateway.providers.replicate_reply import ReplicateReplyDecoder
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest, decode_reply
from emberline.gateway.upstream.reply_decoder import BufferedReply
from emberline.net.client_response import HTTPClientResponse
from emberline.net.json_errors import JSON_DECODE_ERRORS

Json = dict[str, Any]
MAX_PREDICTION_BYTES = 8 << 20
POLL_INTERVALS_S = (0.2, 0.4, 0.8, 1.5)  # the last one repeats
_UNCHANGED_FIELDS = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "max_tokens")
_KNOWN_FIELDS = {
    *_UNCHANGED_FIELDS,
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_completion_tokens",
    "stop",
    "n",
}
_RUNNING_STATES = ("starting", "processing")


class _Prediction(msgspec.Struct):
    id: str = ""
    status: str = ""
    urls: dict[str, str] = {}


class Replicate(Provider):
    slug = "replicate"
    base_url = "https://api.replicate.com/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "models/{model}/predictions"}
    inference_paths = InferencePaths(
        ("models/{model...}/predictions", *without_model_name("predictions", "deployments/{}/{}/predictions"))
    )

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        return "raw"

    def model_from_path(self, endpoint: str) -> str:
        return endpoint.removeprefix("models/").removesuffix("/predictions") if endpoint.startswith("models/") else ""

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        return "predictions" if ":" in model else f"models/{quote(model)}/predictions"

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if not call.is_dialect_endpoint or call.dialect != "openai-chat":
            return super().build_request(call, key)
        fields: Json = msgspec.json.decode(call.body)
        body: Json = {"input": render_prediction_input(fields, call), "stream": call.stream}
        if ":" in call.model:
            body["version"] = call.model.partition(":")[2]
        request = super().build_request(call.with_changes(body=msgspec.json.encode(body)), key)
        return msgspec.structs.replace(request, decoder=partial(ReplicateReplyDecoder, call.model, call.id))

    async def send(
        self, request: ProviderRequest, upstream: UpstreamClient, timeout_s: float, now: float
    ) -> HTTPClientResponse:
        if request.decoder is None:
            return await upstream.send(request, timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        # The prediction would run on after the client disconnects, so it gets its own time limit.
        headers = {**request.headers, "cancel-after": f"{max(5, int(timeout_s))}s"}
        is_stream = b'"stream":true' in request.body
        if not is_stream:
            headers["prefer"] = f"wait={max(1, min(60, int(timeout_s)))}"
        reply = await self._fetch_reply(msgspec.structs.replace(request, headers=headers), upstream, timeout_s)
        if reply.status >= 400:
            return reply
        prediction = _parse_prediction(reply.body)
        if is_stream:
            stream_request = self._build_stream_request(request, prediction)
            return decode_reply(stream_request, await upstream.send(stream_request, deadline - loop.time()))
        for interval in (*POLL_INTERVALS_S, *(POLL_INTERVALS_S[-1] for _ in range(int(timeout_s)))):
            if prediction.status not in _RUNNING_STATES:
                return decode_reply(request, reply)
            if loop.time() + interval >= deadline:
                break
            await asyncio.sleep(interval)
            url = f"{self._base_url}/predictions/{quote(prediction.id, safe='')}"
            poll_request = msgspec.structs.replace(
                request, method="GET", url=url, headers=_headers_without_content_type(request.headers), body=b""
            )
            reply = await self._fetch_reply(poll_request, upstream, deadline - loop.time())
            if reply.status >= 400:
                return reply
            prediction = _parse_prediction(reply.body)
        raise UpstreamTimeout(f"the Replicate prediction did not end within {timeout_s:.3g} s")

    async def _fetch_reply(self, request: ProviderRequest, upstream: UpstreamClient, timeout_s: float) -> BufferedReply:
        incoming = await upstream.send(request, timeout_s)
        try:
            return BufferedReply(
                incoming.status,
                incoming.headers,
                await incoming.read_all(timeout_s, MAX_PREDICTION_BYTES),
                incoming.content_type,
            )
        finally:
            incoming.close()

    def _build_stream_request(self, request: ProviderRequest, prediction: _Prediction) -> ProviderRequest:
        url = prediction.urls.get("stream", "")
        if not url:
            raise InvalidRequest(
                "this Replicate model does not support streaming", param="stream", hint="set stream to false"
            )
        if not is_trusted_url(url, self._base_url, "replicate.com"):
            raise UpstreamBroken(f"the stream URL of the prediction is not on a Replicate server: {url[:200]!r}")
        headers = {
            **_headers_without_content_type(request.headers),
            "accept": "text/event-stream",
            "cache-control": "no-store",
        }
        return msgspec.structs.replace(request, method="GET", url=url, headers=headers, body=b"")


def _headers_without_content_type(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "content-type"}


def _parse_prediction(body: bytes) -> _Prediction:
    try:
        return msgspec.json.decode(body, type=_Prediction)
    except JSON_DECODE_ERRORS as e:
        raise UpstreamBroken(f"Replicate's reply is not a prediction: {e}") from e


def render_prediction_input(fields: Json, call: GatewayRequest) -> Json:
    """Return the input of a Replicate model: the prompt, the system prompt and the sampling fields."""
    if fields.get("tools"):
        raise InvalidRequest("replicate's models do not support tools", param="tools", hint="use another provider")
    if (fields.get("n") or 1) != 1:
        raise InvalidRequest(
            f"n is {fields['n']}, but replicate returns one choice per request", param="n", hint="set n to 1"
        )
    messages = [
        (str(message.get("role")), _join_text(message.get("content"))) for message in fields.get("messages") or ()
    ]
    system = "\n\n".join(text for role, text in messages if role in ("system", "developer"))
    conversation = [(role, text) for role, text in messages if role not in ("system", "developer")]
    result = {name: fields[name] for name in _UNCHANGED_FIELDS if fields.get(name) is not None}
    if fields.get("max_completion_tokens") is not None:
        result["max_tokens"] = fields["max_completion_tokens"]
    if stop := fields.get("stop"):
        result["stop_sequences"] = stop if isinstance(stop, str) else ",".join(stop)
    if system:
        result["system_prompt"] = system
    if len(conversation) == 1:
        result["prompt"] = conversation[0][1]
    else:
        result["prompt"] = "\n\n".join(f"{role.capitalize()}: {text}" for role, text in conversation) + "\n\nAssistant:"
        report_change(call, "messages", "replicate accepts one prompt, so the messages were joined")
    for name in sorted(fields.keys() - _KNOWN_FIELDS):
        if fields[name] is not None:
            report_change(call, name, "replicate has no such field")
    return result


def _join_text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise InvalidRequest(
            "messages contain parts that are not text, which replicate's models do not accept",
            param="messages",
            hint="send text only",
        )
    return "".join(str(part.get("text") or "") for part in content)
