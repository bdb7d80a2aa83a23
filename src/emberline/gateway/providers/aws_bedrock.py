"""Amazon Bedrock. Claude is called in Anthropic's wire format, all other models by Converse.

Requests are signed with an AWS key, or carry a Bedrock API key. A path is SERVICE/REGION/..., as in AWS's host names.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar
from urllib.parse import quote, unquote

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.core.offload import LARGE
from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.base import Provider, report
from emberline.gateway.providers.bedrock_reply import Conversed, Unwrapped
from emberline.gateway.providers.converse import converse
from emberline.gateway.providers.hosted import hosted
from emberline.gateway.providers.sigv4 import ALGORITHM, Credentials, signed
from emberline.gateway.upstream.decoder import Decoder
from emberline.gateway.upstream.outgoing import Outgoing, decoded
from emberline.gateway.upstream.upstream import Incoming, Upstream
from emberline.net.notjson import NOT_JSON

RUNTIME, MANTLE = "bedrock-runtime", "bedrock-mantle"
HOSTS = {RUNTIME: "https://bedrock-runtime.{region}.amazonaws.com", MANTLE: "https://bedrock-mantle.{region}.api.aws"}
SIGNED_AS = {RUNTIME: "bedrock", MANTLE: MANTLE}
REGION = "us-east-1"
VERSION = "bedrock-2023-05-31"
_PLACE = re.compile(r"(?P<service>bedrock[a-z-]*)/(?P<region>[a-z0-9-]+)/(?P<rest>.*)", re.DOTALL)
_SIGNED = ("content-type", "accept")  # headers that no proxy changes on the way
_MINE = ("anthropic-beta", "anthropic-version")


class _Key(msgspec.Struct, rename="camel"):
    access_key_id: str
    secret_access_key: str
    session_token: str = ""
    region: str = REGION


class Bedrock(Provider):
    slug = "aws-bedrock"
    paths: ClassVar[Mapping[Dialect, str]] = {"anthropic": "model/{model}"}

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        claude = "claude" in endpoint and endpoint.endswith("/invoke")
        return "anthropic" if claude or endpoint.endswith("/anthropic/v1/messages") else "raw"

    def model_in(self, endpoint: str) -> str:
        _, _, rest = endpoint.partition("/model/")
        return unquote(rest.rpartition("/")[0])

    def streams_at(self, endpoint: str, query: str = "") -> bool:
        return endpoint.endswith("-stream")

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        if is_claude(model):
            action = "invoke-with-response-stream" if stream else "invoke"
        else:
            action = "converse-stream" if stream else "converse"
        return f"model/{quote(model, safe='')}/{action}"

    def request(self, call: Call, key: str | None) -> Outgoing:
        if not call.plain:
            return super().request(call, key)
        decoder: Callable[[], Decoder]
        if is_claude(call.model):
            body, decoder = hosted(call, VERSION, "stream"), Unwrapped
        else:
            fields = msgspec.json.decode(call.body)
            body, decoder = msgspec.json.encode(converse(fields, partial(report, call))), partial(Conversed, call.model)
        given = _key(key or "")
        region = given.region if given else REGION
        headers = {name: value for name, value in call.headers.items() if name not in _MINE}
        moved = call.moved(body=body, endpoint=f"{RUNTIME}/{region}/{call.endpoint}", headers=headers)
        return msgspec.structs.replace(super().request(moved, key), decoder=decoder)

    def url(self, endpoint: str, query: str) -> str:
        """Return the URL for SERVICE/REGION/REST; a configured base_url replaces AWS's host."""
        place = _PLACE.fullmatch(endpoint)
        if place is None or place["service"] not in HOSTS:
            raise InvalidRequest(
                f"{endpoint[:100]!r} is not a path of aws-bedrock", hint=f"use {RUNTIME}/REGION/model/MODEL/invoke"
            )
        base = self._base_url or HOSTS[place["service"]].format(region=place["region"])
        return f"{base}/{place['rest']}" + (f"?{query}" if query else "")

    async def ask(self, request: Outgoing, upstream: Upstream, seconds: float, now: float) -> Incoming:
        text = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not text.startswith(ALGORITHM) and (key := _key(text)) is not None:
            # Hashing 30 MB takes 80 ms and releases the GIL, so a thread keeps the event loop free.
            sign = partial(_signed, request, key, now)
            headers = sign() if len(request.body) < LARGE else await asyncio.to_thread(sign)
            request = msgspec.structs.replace(request, headers=headers)
        elif MANTLE in request.url and not text.startswith(ALGORITHM):
            others = {name: value for name, value in request.headers.items() if name != "authorization"}
            request = msgspec.structs.replace(request, headers={"x-api-key": text, **others})
        return decoded(request, await upstream.send(request, seconds))


def is_claude(model: str) -> bool:
    return "anthropic.claude" in model


def _signed(request: Outgoing, key: _Key, now: float) -> dict[str, str]:
    match = re.search(r"//(bedrock[a-z-]*)\.([a-z0-9-]+)\.", request.url)
    service, region = (match[1], match[2]) if match else (RUNTIME, key.region)
    some = {name: value for name, value in request.headers.items() if name in _SIGNED}
    credentials = Credentials(key.access_key_id, key.secret_access_key, key.session_token)
    result = signed(
        request.method, request.url, some, request.body, credentials, region=region, service=SIGNED_AS[service], now=now
    )
    result.pop("host")  # the HTTP client adds it
    return {name: value for name, value in request.headers.items() if name != "authorization"} | result


def _key(text: str) -> _Key | None:
    """Parse an AWS key, given as JSON or as ID:SECRET[:TOKEN]; None for a Bedrock API key."""
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=_Key)
        except NOT_JSON as e:
            raise InvalidRequest(
                f"the aws-bedrock key is not valid JSON: {e}", hint="set accessKeyId, secretAccessKey and region"
            ) from None
    id, _, rest = text.partition(":")
    secret, _, token = rest.partition(":")
    return _Key(id, secret, token) if re.fullmatch(r"A[KS]IA[A-Z0-9]{12,}", id) and secret else None
