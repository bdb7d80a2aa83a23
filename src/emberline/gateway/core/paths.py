"""RequestTarget: the account, gateway, provider and endpoint that a URL path names.

A plain path is the path of a protocol itself, such as /v1/chat/completions. All other paths are Cloudflare's, which
contain an account, a gateway and a provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from urllib.parse import unquote

import msgspec

from emberline.core.errors import InvalidRequest, NotFound
from emberline.gateway.core.request import Dialect
from emberline.gateway.core.request_body import MAX_MODEL_NAME_CHARS

PathKind = Literal["plain", "native", "compat", "universal"]
DEFAULT_NAME = "default"
MAX_DECODINGS = 4  # levels of percent-encoding within percent-encoding
COUNT_TOKENS_ENDPOINT = "messages/count_tokens"
ARN_PROVIDER = "aws-bedrock"  # its clients name models by ARNs with encoded slashes

GEMINI_ACTIONS = {":generateContent": False, ":streamGenerateContent": True}  # action -> whether it streams

# Endpoint under /v1 (and under /ai/v1 and /compat) -> dialect. The model's name decides the provider.
DIALECT_ENDPOINTS: dict[str, Dialect] = {
    "chat/completions": "openai-chat",
    "responses": "openai-responses",
    "embeddings": "openai-embeddings",
    "messages": "anthropic",
    "completions": "raw",
    COUNT_TOKENS_ENDPOINT: "raw",
}


class RequestTarget(msgspec.Struct, frozen=True):
    kind: PathKind
    account: str = DEFAULT_NAME
    gateway: str | None = None  # None: set by the header cf-aig-gateway-id
    provider: str = ""  # "": set by the model's name
    endpoint: str = ""
    dialect: Dialect = "raw"  # of a native path: the provider decides
    model: str = ""  # only if the path has it, as in Gemini's protocol
    stream: bool = False  # only if the path has it


def parse_path(path: str) -> RequestTarget:
    """Return the target of a percent-encoded path.

    Raise NotFound if the gateway has no such path. Raise InvalidRequest if a different server could interpret the path
    differently.
    """
    plain = path.split("?")[0]
    if "%" in plain or "\\" in plain or "/." in plain:
        segments = plain.strip("/").split("/")
        native = segments[0] == "v1" and segments[3:4] == [ARN_PROVIDER]
        check_path(plain, segments[4:] if native else ())
    match plain.strip("/").split("/"):
        case ["v1", *rest] if "/".join(rest) in DIALECT_ENDPOINTS:
            return _make_plain_target("/".join(rest))
        case ["client", "v4", "accounts", account, "ai", "v1", *rest] if "/".join(rest) in DIALECT_ENDPOINTS:
            return _make_plain_target("/".join(rest), account)
        case ["accounts", account, "ai", "v1", *rest] if "/".join(rest) in DIALECT_ENDPOINTS:
            return _make_plain_target("/".join(rest), account)
        case ["v1" | "v1beta" as version, "models", *rest] if rest and rest[-1].endswith(tuple(GEMINI_ACTIONS)):
            return _make_gemini_target(version, "/".join(rest))
        case ["v1", account, gateway]:
            return RequestTarget("universal", account, gateway)
        case ["v1", account, gateway, "compat", *rest]:
            endpoint = "/".join(rest[1:] if rest[:1] == ["v1"] else rest)
            if endpoint in DIALECT_ENDPOINTS:
                return RequestTarget("compat", account, gateway, "", endpoint, DIALECT_ENDPOINTS[endpoint])
        case ["v1", account, gateway, provider, *rest] if rest:
            return RequestTarget("native", account, gateway, provider, "/".join(rest))
    raise NotFound(
        f"the path {path[:200]!r} does not exist",
        hint="use /v1/chat/completions, /v1/ACCOUNT/GATEWAY/PROVIDER/... or"
        " /v1/ACCOUNT/GATEWAY/compat/chat/completions",
    )


def is_native_path(path: str) -> bool:
    """Return whether the path is a provider's own endpoint, which accepts bodies of any type."""
    match path.split("?")[0].strip("/").split("/"):
        case ["v1", "models", *rest] if rest and rest[-1].endswith(tuple(GEMINI_ACTIONS)):
            return False
        case ["v1", _, _, provider, _, *_]:
            return provider != "compat"
    return False


def parse_models_path(path: str) -> tuple[RequestTarget, str] | None:
    """Return the target and the model name of a path that lists models or describes one model, else None.

    The name is empty if the path lists all models.
    """
    match path.strip("/").split("/"):
        case ["v1", "models", *name]:
            return RequestTarget("plain"), "/".join(name)
        case ["client", "v4", "accounts", account, "ai", "v1", "models", *name]:
            return RequestTarget("plain", account), "/".join(name)
        case ["accounts", account, "ai", "v1", "models", *name]:
            return RequestTarget("plain", account), "/".join(name)
        case ["v1", account, gateway, "compat", "v1", "models", *name]:
            return RequestTarget("compat", account, gateway), "/".join(name)
        case ["v1", account, gateway, "compat", "models", *name]:
            return RequestTarget("compat", account, gateway), "/".join(name)
    return None


def check_path(path: str, arn_segments: Sequence[str] = (), param: str | None = None) -> None:
    """Raise InvalidRequest for a path that two servers may interpret differently.

    Such a path contains a dot segment, a backslash or an encoded slash, at any level of encoding. `arn_segments`:
    segments that may be Amazon resource names (ARNs) with encoded slashes.
    """
    decoded = _decode_fully(path)
    if "\\" in decoded or any(segment in (".", "..") for segment in decoded.split("/")):
        what = "a backslash" if "\\" in decoded else "a dot segment"
    elif decoded.count("/") != path.count("/") + sum(map(_count_arn_slashes, arn_segments)):
        what = "an encoded slash"
    else:
        return
    raise InvalidRequest(
        f"the path {path[:200]!r} is not allowed because the path contains {what}",
        param=param,
        hint="write the path without dot segments, backslashes and encoded slashes",
    )


def _decode_fully(path: str) -> str:
    for _ in range(MAX_DECODINGS):
        path, before = unquote(path), path
        if path == before:
            break
    return path


def _count_arn_slashes(segment: str) -> int:
    """Return the number of slashes in an ARN that is percent-encoded once, and 0 for any other segment."""
    name = unquote(segment)
    return name.count("/") if name.startswith("arn:") else 0


def _make_gemini_target(version: str, path_rest: str) -> RequestTarget:
    name, _, action = path_rest.rpartition(":")
    model = unquote(name)
    if not 0 < len(model) <= MAX_MODEL_NAME_CHARS:
        raise InvalidRequest(
            f"the model name in the path must have 1 to {MAX_MODEL_NAME_CHARS} characters, not {len(model)}",
            param="model",
        )
    streams = GEMINI_ACTIONS[f":{action}"]
    return RequestTarget(
        "plain", endpoint=f"{version}/models/{path_rest}", dialect="gemini", model=model, stream=streams
    )


def _make_plain_target(endpoint: str, account: str = DEFAULT_NAME) -> RequestTarget:
    return RequestTarget("plain", account, None, "", endpoint, DIALECT_ENDPOINTS[endpoint])
