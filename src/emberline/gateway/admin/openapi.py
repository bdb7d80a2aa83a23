"""build_openapi_document: the management API's OpenAPI document, made from its endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.gateway.admin.endpoint import AdminEndpoint

Json = dict[str, Any]

_ERRORS = {
    400: "A field or parameter is invalid",
    401: "The key is missing, unknown, expired or revoked",
    403: "The key may not manage this account",
    404: "The path or the object does not exist",
    409: "The object exists already, or was changed concurrently",
    503: "The gateway's store is unavailable",
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}
_ENVELOPE: Json = {
    "type": "object",
    "required": ["success", "errors", "messages", "result"],
    "properties": {
        "success": {"type": "boolean"},
        "errors": {"type": "array", "items": {"type": "object"}},
        "messages": {"type": "array"},
        "result": {},
        "result_info": {"type": "object"},
    },
}


def build_openapi_document(endpoints: Sequence[AdminEndpoint], version: str) -> Json:
    types = list(dict.fromkeys(t for e in endpoints for t in (e.request, e.reply) if t is not None))
    refs, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(types, refs, strict=True))
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace("*}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _build_operation(endpoint, ref_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Emberline gateway: management",
            "version": version or "0",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "Envelope": _ENVELOPE},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _build_operation(endpoint: AdminEndpoint, schema_by_type: dict[Any, Any]) -> Json:
    in_path = [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in endpoint.path_parameters
    ]
    in_query = [{"name": n, "in": "query", "schema": {"type": "string"}} for n in endpoint.query if not n.endswith("*")]
    operation: Json = {
        "operationId": endpoint.method.lower() + re.sub(r"\W+", "_", endpoint.path).rstrip("_"),
        "summary": endpoint.summary,
        "parameters": [*in_path, *in_query],
        "responses": _build_responses(endpoint, schema_by_type),
    }
    if not endpoint.path_parameters:
        operation["security"] = []
    if endpoint.request is not None or endpoint.method == "PATCH":
        schema = schema_by_type[endpoint.request] if endpoint.request is not None else {"type": "object"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _build_responses(endpoint: AdminEndpoint, schema_by_type: dict[Any, Any]) -> Json:
    error = {"$ref": f"#/components/schemas/{'Envelope' if endpoint.uses_cloudflare_envelope else 'Error'}"}
    if endpoint.uses_cloudflare_envelope:
        schema: Json = error
    else:
        schema = schema_by_type[endpoint.reply] if endpoint.reply is not None else {}
    media_type = "application/x-ndjson" if endpoint.is_export else "application/json"
    responses: Json = {
        str(endpoint.status): {"description": endpoint.summary, "content": {media_type: {"schema": schema}}}
    }
    for status, description in _ERRORS.items():
        responses[str(status)] = {"description": description, "content": {"application/json": {"schema": error}}}
    return responses
