"""Replicate: a chat request becomes a prediction, which is polled or streamed from its own URL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Call, Dialect
from emberline.gateway.errors import Broken, TimedOut
from emberline.gateway.providers.base import Provider, near, report
from emberline.gateway.providers.replicate_reply import Predicted
from emberline.gateway.upstream.decoder import Given
from emberline.gateway.upstream.outgoing import Outgoing, decoded
from emberline.gateway.upstream.upstream import Incoming, Upstream
from emberline.net.notjson import NOT_JSON

Json = dict[str, Any]
LARGEST = 8 << 20
PAUSES = (0.2, 0.4, 0.8, 1.5)  # the last one repeats
_SAME = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "max_tokens")
_READ = {*_SAME, "model", "messages", "stream", "stream_options", "max_completion_tokens", "stop", "n"}
_RUNNING = ("starting", "processing")


class _Prediction(msgspec.Struct):
    id: str = ""
    status: str = ""
    urls: dict[str, str] = {}


class Replicate(Provider):
    slug = "replicate"
    base_url = "https://api.replicate.com/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "models/{model}/predictions"}

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        return "raw"

    def model_in(self, endpoint: str) -> str:
        return endpoint.removeprefix("models/").removesuffix("/predictions") if endpoint.startswith("models/") else ""

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        return "predictions" if ":" in model else f"models/{quote(model)}/predictions"

    def request(self, call: Call, key: str | None) -> Outgoing:
        if not call.plain or call.dialect != "openai-chat":
            return super().request(call, key)
        fields: Json = msgspec.json.decode(call.body)
        body: Json = {"input": prompted(fields, call), "stream": call.stream}
        if ":" in call.model:
            body["version"] = call.model.partition(":")[2]
        request = super().request(call.moved(body=msgspec.json.encode(body)), key)
        return msgspec.structs.replace(request, decoder=partial(Predicted, call.model, call.id))

    async def ask(self, request: Outgoing, upstream: Upstream, seconds: float, now: float) -> Incoming:
        if request.decoder is None:
            return await upstream.send(request, seconds)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        headers = {
            **request.headers,
            "cancel-after": f"{max(5, int(seconds))}s",
        }  # a client that disconnects cannot cancel the prediction
        streams = b'"stream":true' in request.body
        if not streams:
            headers["prefer"] = f"wait={max(1, min(60, int(seconds)))}"
        reply = await self._whole(msgspec.structs.replace(request, headers=headers), upstream, seconds)
        if reply.status >= 400:
            return reply
        prediction = _prediction(reply.body)
        if streams:
            asked = self._streaming(request, prediction)
            return decoded(asked, await upstream.send(asked, until - loop.time()))
        for pause in (*PAUSES, *(PAUSES[-1] for _ in range(int(seconds)))):
            if prediction.status not in _RUNNING:
                return decoded(request, reply)
            if loop.time() + pause >= until:
                break
            await asyncio.sleep(pause)
            url = f"{self._base_url}/predictions/{quote(prediction.id, safe='')}"
            look = Outgoing("GET", url, _quiet(request.headers), b"", request.public)
            reply = await self._whole(look, upstream, until - loop.time())
            if reply.status >= 400:
                return reply
            prediction = _prediction(reply.body)
        raise TimedOut(f"the Replicate prediction did not end within {seconds:.3g} s")

    async def _whole(self, request: Outgoing, upstream: Upstream, seconds: float) -> Given:
        incoming = await upstream.send(request, seconds)
        try:
            return Given(incoming.status, incoming.headers, await incoming.whole(seconds, LARGEST), incoming.kind)
        finally:
            incoming.close()

    def _streaming(self, request: Outgoing, prediction: _Prediction) -> Outgoing:
        url = prediction.urls.get("stream", "")
        if not url:
            raise InvalidRequest(
                "this Replicate model does not support streaming", param="stream", hint="set stream to false"
            )
        if not near(url, self._base_url, "replicate.com"):
            raise Broken(f"the stream URL of the prediction is not a Replicate server: {url[:200]!r}")
        headers = {**_quiet(request.headers), "accept": "text/event-stream", "cache-control": "no-store"}
        return Outgoing("GET", url, headers, b"", request.public, request.decoder)


def _quiet(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "content-type"}


def _prediction(body: bytes) -> _Prediction:
    try:
        return msgspec.json.decode(body, type=_Prediction)
    except NOT_JSON as e:
        raise Broken(f"Replicate's reply is not a prediction: {e}") from e


def prompted(fields: Json, call: Call) -> Json:
    """Return the model input: one prompt, a system prompt, and the sampling fields."""
    if fields.get("tools"):
        raise InvalidRequest("replicate's models do not support tools", param="tools", hint="use another provider")
    if (fields.get("n") or 1) != 1:
        raise InvalidRequest(
            f"n is {fields['n']}, but replicate returns one choice per request", param="n", hint="set n to 1"
        )
    turns = [(str(each.get("role")), _text(each.get("content"))) for each in fields.get("messages") or ()]
    system = "\n\n".join(text for role, text in turns if role in ("system", "developer"))
    talk = [(role, text) for role, text in turns if role not in ("system", "developer")]
    result = {name: fields[name] for name in _SAME if fields.get(name) is not None}
    if fields.get("max_completion_tokens") is not None:
        result["max_tokens"] = fields["max_completion_tokens"]
    if stop := fields.get("stop"):
        result["stop_sequences"] = stop if isinstance(stop, str) else ",".join(stop)
    if system:
        result["system_prompt"] = system
    if len(talk) == 1:
        result["prompt"] = talk[0][1]
    else:
        result["prompt"] = "\n\n".join(f"{role.capitalize()}: {text}" for role, text in talk) + "\n\nAssistant:"
        report(call, "messages", "replicate accepts one prompt, so the messages were joined")
    for name in sorted(fields.keys() - _READ):
        if fields[name] is not None:
            report(call, name, "replicate has no such field")
    return result


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise InvalidRequest(
            "messages contain parts that are not text, which replicate's models do not accept",
            param="messages",
            hint="send text only",
        )
    return "".join(str(part.get("text") or "") for part in content)
