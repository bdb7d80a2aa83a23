"""Azure OpenAI: every deployment has its own path, and every request names an API version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import quote

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import AUDIO, IMAGES, OPENAI_INFERENCE, TEXT, InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest

API_VERSION = "2024-10-21"  # latest version that is generally available


class AzureOpenAI(Provider):
    """Azure OpenAI, whose paths and model names start with RESOURCE/DEPLOYMENT.

    If base_url is the URL of a resource, a model name without a slash is a deployment of that resource.
    """

    slug = "azure-openai"
    base_url = "https://{resource}.openai.azure.com"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "{model}/chat/completions",
        "openai-embeddings": "{model}/embeddings",
    }
    unified_families = AUDIO | IMAGES | TEXT
    inference_paths = InferencePaths(f"{{}}/{{model}}/{endpoint}" for endpoint in OPENAI_INFERENCE)

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        for dialect, path in self.paths.items():
            if endpoint.endswith(path.removeprefix("{model}")) and endpoint.count("/") == path.count("/") + 1:
                return dialect
        return "raw"

    def model_from_path(self, endpoint: str) -> str:
        return endpoint.split("/")[1] if "/" in endpoint else ""

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        return self._deployment_path(model, self.endpoints[dialect].removeprefix("{model}/"))

    def unified_path(self, endpoint: str, family: str, model: str) -> str:
        return self._deployment_path(model, super().unified_path(endpoint, family, model))

    def _deployment_path(self, model: str, endpoint: str) -> str:
        resource, slash, deployment = model.rpartition("/")
        if not slash and "{resource}" in self._base_url:
            raise InvalidRequest(
                f"model is {model[:100]!r}, but {self.slug} requires RESOURCE/DEPLOYMENT",
                param="model",
                hint="write RESOURCE/DEPLOYMENT, or set the provider's base_url to https://RESOURCE.openai.azure.com",
            )
        return f"{quote(resource, safe='') or '-'}/{quote(deployment, safe='')}/{endpoint}"

    def build_url(self, endpoint: str, query: str) -> str:
        resource, _, rest = endpoint.partition("/")
        if not resource.replace("-", "").isalnum() and "{resource}" in self._base_url:
            raise InvalidRequest(
                f"{resource[:80]!r} is not a valid name of an Azure resource", hint="use letters, digits and hyphens"
            )
        deployment, _, action = rest.partition("/")
        if "api-version=" not in query:
            query = f"{query}&api-version={API_VERSION}".lstrip("&")
        base = self._base_url.replace("{resource}", resource)
        return f"{base}/openai/deployments/{deployment}/{action}?{query}"

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        """Send a key in the header api-key, or a Microsoft Entra token (a JWT) as a bearer token."""
        if key.startswith("eyJ"):
            headers["authorization"] = f"Bearer {key}"
        else:
            headers["api-key"] = key

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        request = super().build_request(call, key)
        if key is None and "api-key" in request.headers:
            request.headers.pop("authorization", None)  # OpenAI's clients send the key in both headers
        return request
