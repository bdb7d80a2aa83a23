"""Endpoints for gateway keys and provider keys.

The secret of a gateway key is shown only when the key is created. The secret of a provider key is never shown.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.admin_context import AdminContext, check_version, document_with_body
from emberline.gateway.admin.admin_request import AdminRequest, check_name, convert_value, decode_json
from emberline.gateway.admin.document_endpoints import Listing, merge_patch
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.schemas import KeySpec, KeyView, ProviderKeySpec, ProviderKeyView
from emberline.gateway.keys.key_store import StoredKey, hash_secret, new_secret, visible_prefix
from emberline.gateway.keys.provider_key_vault import EncryptedKey, ProviderKeyID
from emberline.gateway.store.base import Document

_CHANGEABLE = tuple(name for name in KeySpec.__struct_fields__ if name != "kind")


class KeyEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def endpoints(self) -> list[AdminEndpoint]:
        many, one = "/admin/accounts/{account}/keys", "/admin/accounts/{account}/keys/{key}"
        return [
            AdminEndpoint(
                "GET", many, "List keys, without secrets", self.list, reply=Listing, query=("after", "limit")
            ),
            AdminEndpoint(
                "POST", many, "Create a key; its secret is shown once", self.create, KeySpec, KeyView, status=201
            ),
            AdminEndpoint("GET", one, "Get a key", self.get, reply=KeyView),
            AdminEndpoint("PATCH", one, "Change what a key may do, or disable it", self.patch, reply=KeyView),
            AdminEndpoint("DELETE", one, "Revoke a key permanently", self.delete),
        ]

    async def list(self, request: AdminRequest) -> Listing:
        found, cursor = await self._context.list_document_page("key", request)
        return Listing([KeyView.from_stored_key(_decode_key(each)) for each in found], cursor)

    async def get(self, request: AdminRequest) -> KeyView:
        return KeyView.from_stored_key(
            _decode_key(await self._context.get_document("key", request.account, request.path_parameters["key"]))
        )

    async def create(self, request: AdminRequest) -> KeyView:
        spec = request.decode_body(KeySpec)
        self._check_key_spec(spec)
        secret = new_secret(spec.kind)
        fields = msgspec.structs.asdict(spec)
        key = StoredKey(
            hash=hash_secret(secret),
            shown=visible_prefix(secret),
            account=request.account,
            created=self._context.now_ms(),
            **fields,
        )
        document = Document("key", request.account, key.id, msgspec.json.encode(key))
        await self._context.commit(request, "key.create", key.id, put=[document], after=KeyView.from_stored_key(key))
        return KeyView.from_stored_key(key, secret)

    async def patch(self, request: AdminRequest) -> KeyView:
        document = await self._context.get_document("key", request.account, request.path_parameters["key"])
        old = _decode_key(document)
        patch = request.decode_body(dict[str, Any])
        if unchangeable := [name for name in patch if name not in _CHANGEABLE]:
            raise InvalidRequest(
                f"field {unchangeable[0][:80]!r} of key {old.id!r} cannot be changed",
                param=unchangeable[0],
                hint=f"fields that can be changed: {', '.join(_CHANGEABLE)}",
            )
        current = {name: getattr(old, name) for name in KeySpec.__struct_fields__}
        spec = convert_value(merge_patch(msgspec.to_builtins(current), patch), KeySpec)
        self._check_key_spec(spec)
        new = msgspec.structs.replace(old, **msgspec.structs.asdict(spec))
        before, after = KeyView.from_stored_key(old), KeyView.from_stored_key(new)
        await self._context.commit(
            request, "key.update", old.id, put=[document_with_body(document, new)], before=before, after=after
        )
        return after

    async def delete(self, request: AdminRequest) -> dict[str, Any]:
        document = await self._context.get_document("key", request.account, request.path_parameters["key"])
        await self._context.commit(
            request, "key.delete", document.id, delete=[document], before=KeyView.from_stored_key(_decode_key(document))
        )
        return {"id": document.id, "deleted": True}

    def _check_key_spec(self, spec: KeySpec) -> None:
        if spec.expires is not None and spec.expires <= self._context.now_ms():
            raise InvalidRequest(
                f"expires must be in the future, not {spec.expires}",
                param="expires",
                hint="give a future time in milliseconds since 1970",
            )


class ProviderKeyEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def endpoints(self) -> list[AdminEndpoint]:
        many = "/admin/accounts/{account}/provider-keys"
        one = many + "/{provider}/{alias}"
        return [
            AdminEndpoint(
                "GET",
                many,
                "List stored provider keys, without secrets",
                self.list,
                reply=Listing,
                query=("after", "limit"),
            ),
            AdminEndpoint("PUT", one, "Store a provider key, encrypted", self.put, ProviderKeySpec, ProviderKeyView),
            AdminEndpoint("DELETE", one, "Delete a provider key", self.delete),
        ]

    async def list(self, request: AdminRequest) -> Listing:
        found, cursor = await self._context.list_document_page("provider_key", request)
        return Listing([build_provider_key_view(each) for each in found], cursor)

    async def put(self, request: AdminRequest) -> ProviderKeyView:
        key_id, secret = _provider_key_id(request), request.decode_body(ProviderKeySpec).secret
        if not secret.isascii() or not secret.isprintable() or secret != secret.strip():
            raise InvalidRequest(
                f"secret of provider key {key_id.id!r} must be ASCII without line breaks and surrounding spaces",
                param="secret",
                hint="copy the key again, without spaces and line breaks",
            )
        document = await self._context.vault.encrypt_to_document(key_id, secret, self._context.now_ms())
        action = f"provider_key.{'update' if document.version else 'create'}"
        await self._context.commit(
            request, action, document.id, put=[document], after=build_provider_key_view(document)
        )
        return build_provider_key_view(document)

    async def delete(self, request: AdminRequest) -> dict[str, Any]:
        document = check_version(
            await self._context.get_document("provider_key", request.account, _provider_key_id(request).id), request
        )
        await self._context.commit(
            request, "provider_key.delete", document.id, delete=[document], before=build_provider_key_view(document)
        )
        return {"id": document.id, "deleted": True}


def _decode_key(document: Document) -> StoredKey:
    return decode_json(document.body, StoredKey)


def _provider_key_id(request: AdminRequest) -> ProviderKeyID:
    return ProviderKeyID(
        request.account,
        check_name(request.path_parameters["provider"], "provider"),
        check_name(request.path_parameters["alias"], "alias"),
    )


def build_provider_key_view(document: Document) -> ProviderKeyView:
    key_id, encrypted = ProviderKeyID.from_document(document), decode_json(document.body, EncryptedKey)
    return ProviderKeyView(
        provider=key_id.provider, alias=key_id.alias, created=encrypted.created, master_key=encrypted.master
    )
