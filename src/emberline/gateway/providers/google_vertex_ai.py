"""Google Vertex AI: Gemini, and Claude in Anthropic's wire format, in a project and a region.

A key is a service account's key, a user's credentials, or an access token.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import quote

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.google_ai_studio import Gemini
from emberline.gateway.providers.google_token import Account, GoogleTokens
from emberline.gateway.providers.hosted import hosted
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.gateway.upstream.upstream import Incoming, Upstream

VERSION = "vertex-2023-10-16"
_WHOLE, _STREAM = "rawPredict", "streamRawPredict"
_HOST = re.compile(r"https://([a-z0-9-]+)-aiplatform\.")
_REGION = re.compile(r"(?:^|/)locations/([a-z0-9-]+)/")


class VertexAI(Gemini):
    """A model is PUBLISHER/MODEL, or MODEL for Google's; base_url may contain project and region."""

    slug = "google-vertex-ai"
    base_url = "https://{region}aiplatform.googleapis.com"
    paths: ClassVar[Mapping[Dialect, str]] = {"gemini": "", "anthropic": ""}

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public: bool = False
    ) -> None:
        super().__init__(base_url, headers, public=public)
        self._tokens = GoogleTokens(self._base_url, public=public)

    def speaks(self, dialect: Dialect, model: str = "") -> bool:
        return dialect == "raw" or dialect == ("anthropic" if "claude" in model else "gemini")

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        if endpoint.endswith("/endpoints/openapi/chat/completions"):
            return "raw"  # OpenAI's chat, but with Google's model names
        if "/publishers/anthropic/" in endpoint and endpoint.endswith((f":{_WHOLE}", f":{_STREAM}")):
            return "anthropic"
        return super().dialect_of(endpoint, query)

    def streams_at(self, endpoint: str, query: str = "") -> bool:
        return endpoint.endswith(f":{_STREAM}") or super().streams_at(endpoint, query)

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        publisher, _, name = model.rpartition("/")
        if dialect == "anthropic":
            action = f"models/{quote(name, safe='')}:{_STREAM if stream else _WHOLE}"
            return f"publishers/{quote(publisher or 'anthropic', safe='')}/{action}"
        return f"publishers/{quote(publisher or 'google', safe='')}/{self.action(name, stream)}"

    def request(self, call: Call, key: str | None) -> Outgoing:
        if call.plain:
            if call.dialect == "anthropic":
                call = call.moved(body=hosted(call, VERSION))
            call = call.moved(endpoint=self._placed(call.endpoint, key))
        return super().request(call, key)

    def _placed(self, endpoint: str, key: str | None) -> str:
        if "/projects/" in self._base_url:
            return endpoint
        account = Account.read(key or "") or Account()
        region = account.region or (match[1] if (match := _HOST.match(self._base_url)) else "")
        if not account.project or not region:
            raise InvalidRequest(
                f"the project or the region of {self.slug} is not set",
                hint="add region to the service account's JSON, or put both into the provider's base_url",
            )
        return f"v1/projects/{quote(account.project, safe='')}/locations/{quote(region, safe='')}/{endpoint}"

    def url(self, endpoint: str, query: str) -> str:
        base = self._base_url
        if "{region}" in base:
            region = match[1] if (match := _REGION.search(endpoint)) else "global"
            base = base.replace("{region}", "" if region == "global" else f"{region}-")
        elif endpoint.startswith("v1"):  # the endpoint already has project and region
            base = re.sub(r"/v1[^/]*/projects/.*", "", base)
        return f"{base}/{endpoint}" + (f"?{query}" if query else "")

    async def ask(self, request: Outgoing, upstream: Upstream, seconds: float, now: float) -> Incoming:
        account = Account.read(request.headers.get("authorization", "").removeprefix("Bearer "))
        if account is None:
            return await upstream.send(request, seconds)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        token = await self._tokens.token(account, upstream, seconds, now)
        headers = {**request.headers, "authorization": f"Bearer {token}"}
        incoming = await upstream.send(msgspec.structs.replace(request, headers=headers), until - loop.time())
        if incoming.status == 401:
            self._tokens.forget(account)
        return incoming
