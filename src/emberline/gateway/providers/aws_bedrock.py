"""Amazon Bedrock.

Claude models are called in Anthropic's wire format, other models through the Converse API. Requests are signed with an
AWS key, or contain a Bedrock API key. A path is SERVICE/REGION/..., as in AWS's host names.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar
from urllib.parse import quote, unquote

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.core.offload import LARGE_INPUT_BYTES
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider, report_change
from emberline.gateway.providers.bedrock_reply import ConverseReplyDecoder, InvokeReplyDecoder
from emberline.gateway.providers.converse import render_converse_request
from emberline.gateway.providers.hosted_claude import build_hosted_claude_body
from emberline.gateway.providers.inference_paths import InferencePaths
from emberline.gateway.providers.sigv4 import ALGORITHM, AwsCredentials, sign_headers
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest, decode_reply
from emberline.gateway.upstream.reply_decoder import ReplyDecoder
from emberline.net.client_response import HTTPClientResponse
from emberline.net.json_errors import JSON_DECODE_ERRORS

RUNTIME, MANTLE = "bedrock-runtime", "bedrock-mantle"
HOSTS = {RUNTIME: "https://bedrock-runtime.{region}.amazonaws.com", MANTLE: "https://bedrock-mantle.{region}.api.aws"}
SIGNING_SERVICES = {RUNTIME: "bedrock", MANTLE: MANTLE}
DEFAULT_REGION = "us-east-1"
ANTHROPIC_VERSION = "bedrock-2023-05-31"
_ENDPOINT = re.compile(r"(?P<service>bedrock[a-z-]*)/(?P<region>[a-z0-9-]+)/(?P<rest>.*)", re.DOTALL)
_SIGNED_HEADERS = ("content-type", "accept")  # headers that no proxy changes on the way
_ANTHROPIC_HEADERS = ("anthropic-beta", "anthropic-version")


class _AwsKey(msgspec.Struct, rename="camel"):
    access_key_id: str
    secret_access_key: str
    session_token: str = ""
    region: str = DEFAULT_REGION


SIGNING_THREADS = 2
# Threads of their own: in the default executor, large bodies would delay other work. They are not a field of the
# provider, which is sent to child processes.
_signers = ThreadPoolExecutor(SIGNING_THREADS, thread_name_prefix="aws-signing")


class Bedrock(Provider):
    slug = "aws-bedrock"
    paths: ClassVar[Mapping[Dialect, str]] = {"anthropic": "model/{model}"}
    inference_paths = InferencePaths(
        (
            *(f"{RUNTIME}/{{}}/model/{{model}}/{action}" for action in ("invoke", "invoke-with-response-stream")),
            *(f"{RUNTIME}/{{}}/model/{{model}}/{action}" for action in ("converse", "converse-stream")),
            f"{MANTLE}/{{}}/anthropic/v1/messages",
            f"{MANTLE}/{{}}/v1/chat/completions",
        )
    )

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        claude = "claude" in endpoint and endpoint.endswith("/invoke")
        return "anthropic" if claude or endpoint.endswith("/anthropic/v1/messages") else "raw"

    def model_from_path(self, endpoint: str) -> str:
        _, _, rest = endpoint.partition("/model/")
        return unquote(rest.rpartition("/")[0])

    def is_stream_path(self, endpoint: str, query: str = "") -> bool:
        return endpoint.endswith("-stream")

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        if is_claude(model):
            action = "invoke-with-response-stream" if stream else "invoke"
        else:
            action = "converse-stream" if stream else "converse"
        return f"model/{quote(model, safe='')}/{action}"

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if not call.is_dialect_endpoint:
            return super().build_request(call, key)
        decoder: Callable[[], ReplyDecoder]
        if is_claude(call.model):
            body, decoder = build_hosted_claude_body(call, ANTHROPIC_VERSION, "stream"), InvokeReplyDecoder
        else:
            fields = msgspec.json.decode(call.body)
            body, decoder = (
                msgspec.json.encode(render_converse_request(fields, partial(report_change, call))),
                partial(ConverseReplyDecoder, call.model),
            )
        aws_key = _parse_key(key or "")
        region = aws_key.region if aws_key else DEFAULT_REGION
        headers = {name: value for name, value in call.headers.items() if name not in _ANTHROPIC_HEADERS}
        changed_call = call.with_changes(body=body, endpoint=f"{RUNTIME}/{region}/{call.endpoint}", headers=headers)
        return msgspec.structs.replace(super().build_request(changed_call, key), decoder=decoder)

    def build_url(self, endpoint: str, query: str) -> str:
        """Return the URL for a path SERVICE/REGION/REST. A configured base_url replaces AWS's host."""
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or match["service"] not in HOSTS:
            raise InvalidRequest(
                f"provider aws-bedrock has no path {endpoint[:100]!r}", hint=f"use {RUNTIME}/REGION/model/MODEL/invoke"
            )
        base = self._base_url or HOSTS[match["service"]].format(region=match["region"])
        return f"{base}/{match['rest']}" + (f"?{query}" if query else "")

    async def send(
        self, request: ProviderRequest, upstream: UpstreamClient, timeout_s: float, now: float
    ) -> HTTPClientResponse:
        text = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not text.startswith(ALGORITHM) and (key := _parse_key(text)) is not None:
            # Hashing 30 MB takes 80 ms and releases the GIL, so a thread keeps the event loop free.
            sign = partial(_sign_request, request, key, now)
            is_small = len(request.body) < LARGE_INPUT_BYTES
            headers = sign() if is_small else await asyncio.get_running_loop().run_in_executor(_signers, sign)
            request = msgspec.structs.replace(request, headers=headers)
        elif MANTLE in request.url and not text.startswith(ALGORITHM):
            others = {name: value for name, value in request.headers.items() if name != "authorization"}
            request = msgspec.structs.replace(request, headers={"x-api-key": text, **others})
        return decode_reply(request, await upstream.send(request, timeout_s))


def is_claude(model: str) -> bool:
    return "anthropic.claude" in model


def _sign_request(request: ProviderRequest, key: _AwsKey, now: float) -> dict[str, str]:
    match = re.search(r"//(bedrock[a-z-]*)\.([a-z0-9-]+)\.", request.url)
    service, region = (match[1], match[2]) if match else (RUNTIME, key.region)
    signed_headers = {name: value for name, value in request.headers.items() if name in _SIGNED_HEADERS}
    credentials = AwsCredentials(key.access_key_id, key.secret_access_key, key.session_token)
    result = sign_headers(
        request.method,
        request.url,
        signed_headers,
        request.body,
        credentials,
        region=region,
        service=SIGNING_SERVICES[service],
        now=now,
    )
    result.pop("host")  # the HTTP client adds it
    return {name: value for name, value in request.headers.items() if name != "authorization"} | result


def _parse_key(text: str) -> _AwsKey | None:
    """Parse an AWS key, given as JSON or as ID:SECRET[:TOKEN]. Return None for a Bedrock API key."""
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=_AwsKey)
        except JSON_DECODE_ERRORS as e:
            raise InvalidRequest(
                f"the aws-bedrock key is not valid JSON: {e}", hint="set accessKeyId, secretAccessKey and region"
            ) from None
    id, _, rest = text.partition(":")
    secret, _, token = rest.partition(":")
    return _AwsKey(id, secret, token) if re.fullmatch(r"A[KS]IA[A-Z0-9]{12,}", id) and secret else None
