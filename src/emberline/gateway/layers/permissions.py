"""The layers that check whether the caller may use this gateway, and its providers, endpoints and models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from emberline.gateway.core.errors import Forbidden
from emberline.gateway.core.identity import ALLOW_ALL, Identity, allows_model
from emberline.gateway.core.request import VIRTUAL_PROVIDERS, GatewayReply, GatewayRequest, Handler, Layer
from emberline.gateway.core.request_body import BodyFields
from emberline.gateway.core.unified_endpoints import find_unified_endpoint
from emberline.gateway.keys.provider_keys import uses_caller_credentials
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.registry import ProviderRegistry

ALLOW_MODEL_HINT = "use a different key, or add the model to allowed_models of the key or of the gateway"
ENDPOINT_HINT = "send a gateway token, which may use every path; docs/gateway.md#keys says what other keys may use"
# Query parameters by which some servers treat a POST as another method.
METHOD_OVERRIDES = frozenset({"_method", "method", "http_method", "httpmethod", "x-http-method-override"})
REALTIME_PARAMETERS = frozenset({"model", "intent", "alt", "key"})  # call_id, for example, joins a running session

# Returns the model that a request to a provider's own path runs, or None if the path is not for inference.
FindInferenceModel = Callable[[Provider, str, str, str, str], str | None]


def find_posted_model(provider: Provider, method: str, endpoint: str, query: str, model: str) -> str | None:
    if method != "POST" or overrides_method(query):
        return None
    return provider.inference_model(endpoint, model)


def overrides_method(query: str) -> bool:
    """Return whether some server may treat a request with this query as one of another method."""
    parameters = parse_qsl(query.replace(";", "&"), keep_blank_values=True)  # a semicolon separates for some servers
    return any(name.lower().lstrip("$").partition("[")[0] in METHOD_OVERRIDES for name, _ in parameters)


def find_realtime_model(provider: Provider, method: str, endpoint: str, query: str, model: str) -> str | None:
    if {name for name, _ in parse_qsl(query, keep_blank_values=True)} - REALTIME_PARAMETERS:
        return None
    if not endpoint and not provider.realtime_path:
        return model  # there is no such session to open
    return provider.realtime_model(endpoint, model)


def check_gateway(inner: Handler) -> Handler:
    """Return the layer that checks whether the caller may use the gateway at all."""

    def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
        identity = call.identity
        call.settings.check_caller(identity)
        if not identity.can_use_models:
            raise Forbidden(
                f"key {identity.name!r} is an admin key, which cannot be used for requests to models",
                hint="send a key that may use models",
            )
        if not identity.may_use_gateway(call.account, call.gateway):
            raise Forbidden(
                f"key {identity.name!r} may not use gateway {call.gateway!r} of account {call.account!r}",
                hint="use a different key, or add the gateway to this key",
            )
        if not identity.may_state_cost and _states_cost(call):
            raise Forbidden(
                f"{_describe_caller(identity)} may not state the cost of a request: others share its budgets",
                hint='remove the header cf-aig-custom-cost, or use a key with the scope "cost"',
            )
        return inner(call)

    return handle


def _states_cost(call: GatewayRequest) -> bool:
    """Return whether the headers of the request, or of one of its steps, state a cost."""
    if call.options.custom_cost is not None:
        return True
    return any(step.options is not None and step.options.custom_cost is not None for step in call.steps)


def _describe_caller(identity: Identity) -> str:
    return "a request without a key" if identity.kind == "anonymous" else f"key {identity.name!r}"


def check_endpoints(registry: ProviderRegistry, find_inference_model: FindInferenceModel) -> Layer:
    """Return the layer that checks whether the caller may use the endpoints and models of each step."""

    def layer(inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            for each in _requests_to_check(call):
                if each.provider not in VIRTUAL_PROVIDERS:  # a route or pool checks the models that it chooses
                    _check_request(each, registry, find_inference_model)
            return inner(call)

        return handle

    return layer


def _requests_to_check(call: GatewayRequest) -> list[GatewayRequest]:
    """Return one request for each step, with the endpoint, headers and body that are sent to its provider."""
    if not call.steps:
        return [call]
    return [
        call.with_changes(
            provider=step.provider,
            model=step.model,
            endpoint=(step.endpoint or "").partition("?")[0],
            query=f"{(step.endpoint or '').partition('?')[2]}&{call.query}",
            headers=step.headers or {},
            options=step.options or call.options,
            is_dialect_endpoint=step.is_dialect_endpoint,
            body_fields=step.body_fields,
        )
        for step in call.steps
    ]


def _check_request(call: GatewayRequest, registry: ProviderRegistry, find_inference_model: FindInferenceModel) -> None:
    unified = find_unified_endpoint(call.endpoint) if call.is_dialect_endpoint else None
    if unified is not None and unified.access == "owned":
        return  # the layer of stored objects checks the owner
    provider = registry.find_provider(call.provider, call.settings)
    model: str | None = call.model
    if not call.is_dialect_endpoint:
        model = find_inference_model(provider, call.method, call.endpoint, call.query, call.model)
    elif overrides_method(call.query) or (unified is not None and unified.access == "operator"):
        model = None
    if model is None:
        _check_unlisted_path(call, provider)
        return
    for name in (model, *provider.other_models(call.body_fields or BodyFields())):
        _check_model(call, name)


def _check_model(call: GatewayRequest, model: str) -> None:
    if not call.identity.may_use_model(call.provider, model):
        raise Forbidden(
            f"key {call.identity.name!r} may not use model {call.provider}/{model}"[:300], hint=ALLOW_MODEL_HINT
        )
    if not _is_model_allowed(call, call.provider, model):
        raise Forbidden(
            f"model {call.provider}/{model} is not allowed by this gateway or by the request's headers"[:300],
            hint="add the model to allowed_models of the gateway, or of the cf-aig-allowed-models header",
        )


def _check_unlisted_path(call: GatewayRequest, provider: Provider) -> None:
    """Raise Forbidden unless the caller may use a path that is not for inference.

    The body has no say in this: its field `model` does not tell what such a request does.
    """
    identity = call.identity
    path = f"{call.method[:20]} {call.endpoint[:200]} of provider {call.provider}"
    if not may_use_every_path(call, provider):
        raise Forbidden(
            f"a {identity.kind if identity.kind == 'virtual' else 'missing'} key does not allow {path}: only inference"
            " endpoints are allowed, with POST",
            hint=ENDPOINT_HINT,
        )
    if not (identity.may_use_model(call.provider, "") and _is_model_allowed(call, call.provider, "")):
        raise Forbidden(
            f"the key or the gateway is limited to some models, and {path} is not an inference endpoint",
            hint="use a key and a gateway whose allowed_models allow every model of the provider",
        )


def may_use_every_path(call: GatewayRequest, provider: Provider) -> bool:
    """Return whether the caller is the operator, or reaches the provider with nothing but a provider key of its own."""
    if call.identity.kind == "token":
        return True
    return call.identity.kind == "anonymous" and uses_caller_credentials(call, provider)


def is_permitted(call: GatewayRequest, provider: str, model: str) -> bool:
    return call.identity.may_use_model(provider, model) and _is_model_allowed(call, provider, model)


def _is_model_allowed(call: GatewayRequest, provider: str, model: str) -> bool:
    """Return whether both the gateway's settings and the options in the request's headers allow the model."""
    settings, options = call.settings, call.options
    return allows_model(settings.allowed_providers, settings.allowed_models, provider, model) and allows_model(
        options.allowed_providers or ALLOW_ALL, options.allowed_models or ALLOW_ALL, provider, model
    )
