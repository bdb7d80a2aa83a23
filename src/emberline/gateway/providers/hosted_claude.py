"""Claude models hosted by AWS or Google: the path names the model, and the body names the API version."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.core.request import GatewayRequest

_RAW_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def build_hosted_claude_body(call: GatewayRequest, version: str, *removed_fields: str) -> bytes:
    """Return the request body with the API version, and without the model and the `removed_fields`."""
    fields: dict[str, Any] = dict(_RAW_FIELDS_DECODER.decode(call.body))
    for name in ("model", *removed_fields):
        fields.pop(name, None)
    fields.setdefault("anthropic_version", version)
    if beta := call.headers.get("anthropic-beta"):
        fields.setdefault("anthropic_beta", [each.strip() for each in beta.split(",")])
    return msgspec.json.encode(fields)
