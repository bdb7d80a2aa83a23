"""RequestTarget: the account, gateway, provider and endpoint that a URL path names.

A plain path is the path of a protocol itself, such as /v1/chat/completions. All other paths are Cloudflare's, which
contain an account, a gateway and a provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from urllib.parse import unquote

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest, NotFound
from emberline.gateway.core.request import Dialect
from emberline.gateway.core.request_body import MAX_MODEL_NAME_CHARS
from emberline.gateway.core.unified_endpoints import RESERVED_SEGMENTS, UnifiedEndpoint, find_unified_endpoint

PathKind = Literal["plain", "native", "compat", "universal"]
DEFAULT_NAME = "default"
MAX_DECODINGS = 4  # levels of percent-encoding within percent-encoding
ARN_PROVIDER = "aws-bedrock"  # its clients name models by ARNs with encoded slashes

GEMINI_ACTIONS = {  # action -> whether it streams
    ":generateContent": False,
    ":streamGenerateContent": True,
    ":countTokens": False,
    ":embedContent": False,
    ":batchEmbedContents": False,
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

    @property
    def unified_endpoint(self) -> UnifiedEndpoint | None:
        """The endpoint of a plain or compat path of OpenAI's or Anthropic's API, else None."""
        return find_unified_endpoint(self.endpoint) if self.kind in ("plain", "compat") else None


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
        case ["v1", *rest] if (unified := find_unified_endpoint("/".join(rest))) is not None:
            return _make_unified_target("plain", unified, rest)
        case ["client", "v4", "accounts", account, "ai", "v1", *rest] | ["accounts", account, "ai", "v1", *rest]:
            if (unified := find_unified_endpoint("/".join(rest))) is not None:
                return _make_unified_target("plain", unified, rest, account)
        case ["v1" | "v1beta" as version, "models", *rest] if rest and rest[-1].endswith(tuple(GEMINI_ACTIONS)):
            return _make_gemini_target(version, "/".join(rest))
        case ["v1", segment, *_] if segment in RESERVED_SEGMENTS:
            raise NotFound(
                f"the gateway has no unified endpoint {path[:200]!r}",
                hint="use the provider's own path: /v1/ACCOUNT/GATEWAY/PROVIDER/...",
            )
        case ["v1", account, gateway]:
            return RequestTarget("universal", account, gateway)
        case ["v1", account, gateway, "compat", *rest]:
            rest = rest[1:] if rest[:1] == ["v1"] else rest
            if (unified := find_unified_endpoint("/".join(rest))) is not None:
                return _make_unified_target("compat", unified, rest, account, gateway)
        case ["v1", account, gateway, provider, *rest] if rest:
            return RequestTarget("native", account, gateway, provider, "/".join(rest))
    raise NotFound(
        f"the path {path[:200]!r} does not exist",
        hint="use /v1/chat/completions, /v1/ACCOUNT/GATEWAY/PROVIDER/... or"
        " /v1/ACCOUNT/GATEWAY/compat/chat/completions",
    )


def accepts_any_content_type(path: str) -> bool:
    """Return whether bodies at a path may be other than JSON: forms, audio, whatever a provider's own path takes."""
    try:
        target = parse_path(path)
    except EmberlineError:
        return False
    return target.kind == "native" or (target.unified_endpoint is not None and target.unified_endpoint.accepts_form)


def parse_models_path(path: str) -> tuple[RequestTarget, str] | None:
    """Return the target and the model name of a path that lists models or describes one model, else None.

    The name is empty if the path lists all models.
    """
    match path.strip("/").split("/"):
        case ["v1" | "v1beta", "models", *name]:
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


def _make_unified_target(
    kind: PathKind, unified: UnifiedEndpoint, rest: list[str], account: str = DEFAULT_NAME, gateway: str | None = None
) -> RequestTarget:
    return RequestTarget(kind, account, gateway, "", "/".join(rest), unified.dialect)
