"""The base class of all providers.

Most providers differ only in data: their URL, the paths of the wire formats they support, the header for the key. Other
providers override `build_url`, `set_auth_headers` or `build_request`. A provider that signs requests, or needs more
than one HTTP request, overrides `send`. A provider with its own reply format sets a ReplyDecoder in the
ProviderRequest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.assistant_prefill import AssistantPrefill
from emberline.gateway.core.errors import UpstreamFailed
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.core.request_body import BodyFields
from emberline.gateway.dialects.target_model import TargetModel
from emberline.gateway.providers.inference_paths import TEXT, InferencePaths
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest, decode_reply
from emberline.net.client_response import HTTPClientResponse
from emberline.trace.context import TRACE_HEADERS

# Hop-by-hop headers, and headers meant for the gateway: never forwarded.
NOT_FORWARDED_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
        "cookie",
        "x-auth-token",
        "x-http-method",  # these three would make some servers treat a POST as another method
        "x-http-method-override",
        "x-method-override",
        "x-original-url",  # these two would make some servers use another path
        "x-rewrite-url",
        "forwarded",
        "x-real-ip",
        "cf-cache-ttl",
        "cf-skip-cache",
        *TRACE_HEADERS,
    }
)
GATEWAY_HEADER_PREFIXES = ("cf-aig-", "x-emberline-", "x-forwarded-")
CHANGED_HEADER = "x-emberline-changed"
CREDENTIAL_HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "xi-api-key")


def caller_key(request: GatewayRequest) -> str | None:
    """Return the provider key that the caller sent with the request, or None."""
    for name in CREDENTIAL_HEADERS:
        if value := request.headers.get(name, ""):
            return value.removeprefix("Bearer ")
    if request.provider == "google-ai-studio":  # its clients may send the key in the URL
        return next((each[4:] for each in request.query.split("&") if each.startswith("key=")), None)
    return None


def list_credentials(headers: Mapping[str, str]) -> list[str]:
    """Return the keys in the headers of a request."""
    values = (headers.get(name, "") for name in CREDENTIAL_HEADERS)
    return [value.removeprefix("Bearer ") for value in values if value]


class Provider:
    """One provider with its address and headers, as a gateway's settings configure it."""

    slug: str  # name in URLs and settings
    base_url: ClassVar[str] = ""
    prefix: ClassVar[str] = ""  # put before endpoints in none of the supported wire formats
    paths: ClassVar[Mapping[Dialect, str]] = {}  # wire format -> endpoint, which may contain {model}
    needs_key: ClassVar[bool] = True
    has_own_error_format: ClassVar[bool] = False  # errors do not follow the wire format
    supports_include_usage: ClassVar[bool] = True  # accepts stream_options.include_usage
    accepts_reasoning: ClassVar[bool] = False  # accepts other models' reasoning in the history
    realtime_path: ClassVar[str] = ""  # path of its WebSocket
    prefill: AssistantPrefill = ""  # how its chat continues the assistant's last message
    max_tokens_field: ClassVar[str] = "max_completion_tokens"  # chat field; older APIs know only max_tokens
    inference_paths: ClassVar[InferencePaths] = InferencePaths(())  # as `normalize_endpoint` returns them
    realtime_paths: ClassVar[InferencePaths] = InferencePaths(())  # the same for WebSockets
    is_gemini_api: ClassVar[bool] = False  # Google's Gemini API, whose embeddings and counts differ from Vertex AI's
    unified_families: ClassVar[frozenset[str]] = TEXT  # unified endpoints without a dialect that it has

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public_only: bool = False
    ) -> None:
        """Create a provider. `public_only`: refuse connections to private IP addresses."""
        self._base_url = (base_url or self.base_url).rstrip("/")
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.public_only = public_only
        self.endpoints = self.paths

    @property
    def has_configured_headers(self) -> bool:
        """Whether the operator's settings add headers, which may be credentials, to each request."""
        return bool(self._headers)

    @property
    def origin(self) -> str:
        """The provider's name and address. Failures are counted separately for each origin."""
        return f"{self.slug} {self._base_url}"

    def supports(self, dialect: Dialect, model: str = "") -> bool:
        return dialect == "raw" or dialect in self.endpoints

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        """Return the wire format at a path of this provider, or "raw" if the path is unknown."""
        for dialect, path in self.endpoints.items():
            if self._strip_version_prefix(path) == self._strip_version_prefix(endpoint):
                return dialect
        return "raw"

    def model_from_path(self, endpoint: str) -> str:
        """Return the model that the path names, or "". This model takes precedence over the body's model."""
        return ""

    def normalize_endpoint(self, endpoint: str) -> str:
        """Return the endpoint in the form in which `inference_paths` has it, if it is one of them."""
        if self._base_url.endswith(f"/{self.prefix[:-1]}") and not endpoint.startswith(self.prefix):
            return self.prefix + endpoint
        return endpoint

    def inference_model(self, endpoint: str, body_model: str) -> str | None:
        """Return the model that a POST to a path of this provider runs, or None if the path is not for inference."""
        return self.inference_paths.find_model(self.normalize_endpoint(endpoint), body_model)

    def other_models(self, fields: BodyFields) -> list[str]:
        """Return the models that the body names beside the field `model`, and that the provider may run instead."""
        return []

    def model_of(self, endpoint: str, body_model: str) -> str:
        """Return the model that a request to this provider's own path uses, as far as path and body tell."""
        model = self.inference_model(endpoint, body_model)
        return model if model is not None else self.model_from_path(endpoint) or body_model

    def realtime_model(self, endpoint: str, query_model: str) -> str | None:
        """Return the model of a WebSocket at a path of this provider, or None if the path is not for inference."""
        return self.realtime_paths.find_model(self.normalize_endpoint(endpoint or self.realtime_path), query_model)

    def unified_path(self, endpoint: str, family: str, model: str) -> str:
        """Return this provider's own path for a unified endpoint, such as files/ID, of the family files.

        Raise InvalidRequest if the provider has no such endpoint.
        """
        if family not in self.unified_families:
            raise InvalidRequest(
                f"provider {self.slug!r} has no endpoint {family!r}",
                param="model",
                hint="docs/gateway-providers.md lists which providers have which endpoints",
            )
        return self.prefix + endpoint

    def is_stream_path(self, endpoint: str, query: str = "") -> bool:
        """Return whether the path itself asks for a streamed reply."""
        return False

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        return self.endpoints[dialect].format(model=model)

    def target_model(self, model: str, max_output: int | None) -> TargetModel:
        """Return the properties of a model that are needed to translate a request for it."""
        return TargetModel(model, max_output, self.accepts_reasoning, self.max_tokens_field)

    def build_url(self, endpoint: str, query: str) -> str:
        return f"{self._base_url}/{self._strip_version_prefix(endpoint)}" + (f"?{query}" if query else "")

    def _strip_version_prefix(self, endpoint: str) -> str:
        """Return the endpoint without its version prefix if base_url already ends with that version."""
        return endpoint.removeprefix(self.prefix) if self._base_url.endswith(f"/{self.prefix[:-1]}") else endpoint

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Bearer {key}"

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        """Return the HTTP request for `call`, whose body is already in one of the provider's wire formats.

        If `key` is None, the credentials in the caller's headers are forwarded.
        """
        headers = {**select_forwardable_headers(call.headers), **call.trace_headers, **self._headers}
        if key is not None:
            for name in CREDENTIAL_HEADERS:
                headers.pop(name, None)
            self.set_auth_headers(headers, key)
        return ProviderRequest(
            call.method,
            self.build_url(call.endpoint, call.query),
            headers,
            call.body,
            self.public_only,
            call.settings.timeouts.connect,
        )

    async def send(
        self, request: ProviderRequest, upstream: UpstreamClient, timeout_s: float, now: float
    ) -> HTTPClientResponse:
        """Send the request and return the response once its headers have arrived.

        `now` is Unix time in seconds.
        """
        return decode_reply(request, await upstream.send(request, timeout_s))

    def convert_error(self, error: UpstreamFailed, *, is_caller_key: bool) -> UpstreamFailed:
        """Return the error that the caller gets for an error of this provider.

        `is_caller_key`: the caller sent the provider key. If false, the gateway sent its own key or no key.
        """
        return error


def report_change(call: GatewayRequest, field: str, reason: str) -> None:
    """Record in the reply header x-emberline-changed that a field of the request was changed or dropped."""
    call.reply_headers[CHANGED_HEADER] = ", ".join(
        filter(None, (call.reply_headers.get(CHANGED_HEADER), f"{field}={reason}"))
    )


def is_trusted_url(url: str, base_url: str, domain: str) -> bool:
    """Return whether credentials may be sent to a URL.

    The URL must be on the same server as `base_url`, or use HTTPS and be in `domain`.
    """
    target, base = urlsplit(url), urlsplit(base_url)
    if (target.scheme, target.netloc) == (base.scheme, base.netloc):
        return True
    return target.scheme == "https" and f".{target.hostname}".endswith(f".{domain}") and "@" not in target.netloc


def select_forwardable_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if name not in NOT_FORWARDED_HEADERS and not name.startswith(GATEWAY_HEADER_PREFIXES)
    }
