"""Endpoints for gateway keys and provider keys. A secret is shown or received only once."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.ask import Ask, converted, decoded, named
from emberline.gateway.admin.desk import Desk, based_on, changed
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import KeyView, KeyWish, ProviderKeyView, ProviderKeyWish
from emberline.gateway.admin.shelf import Listing, merge
from emberline.gateway.keys.keys import Key, hash_of, new_secret, shown_of
from emberline.gateway.keys.vault import Place, Sealed
from emberline.gateway.store.base import Document

_CHANGEABLE = tuple(name for name in KeyWish.__struct_fields__ if name != "kind")


class KeyDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context

    def endpoints(self) -> list[Endpoint]:
        many, one = "/admin/accounts/{account}/keys", "/admin/accounts/{account}/keys/{key}"
        return [
            Endpoint("GET", many, "List keys, without secrets", self.list, reply=Listing, query=("after", "limit")),
            Endpoint("POST", many, "Create a key; its secret is shown once", self.create, KeyWish, KeyView, status=201),
            Endpoint("GET", one, "Get a key", self.get, reply=KeyView),
            Endpoint("PATCH", one, "Change what a key may do, or disable it", self.patch, reply=KeyView),
            Endpoint("DELETE", one, "Revoke a key permanently", self.delete),
        ]

    async def list(self, request: Ask) -> Listing:
        found, cursor = await self._context.listed("key", request)
        return Listing([KeyView.of(_key(each)) for each in found], cursor)

    async def get(self, request: Ask) -> KeyView:
        return KeyView.of(_key(await self._context.found("key", request.account, request.parts["key"])))

    async def create(self, request: Ask) -> KeyView:
        spec = request.read(KeyWish)
        self._check(spec)
        secret = new_secret(spec.kind)
        fields = msgspec.structs.asdict(spec)
        key = Key(
            hash=hash_of(secret), shown=shown_of(secret), account=request.account, created=self._context.now(), **fields
        )
        document = Document("key", request.account, key.id, msgspec.json.encode(key))
        await self._context.change(request, "key.create", key.id, put=[document], after=KeyView.of(key))
        return KeyView.of(key, secret)

    async def patch(self, request: Ask) -> KeyView:
        document = await self._context.found("key", request.account, request.parts["key"])
        old = _key(document)
        patch = request.read(dict[str, Any])
        if unchangeable := [name for name in patch if name not in _CHANGEABLE]:
            raise InvalidRequest(
                f"field {unchangeable[0][:80]!r} of key {old.id!r} cannot be changed",
                param=unchangeable[0],
                hint=f"fields that can be changed: {', '.join(_CHANGEABLE)}",
            )
        current = {name: getattr(old, name) for name in KeyWish.__struct_fields__}
        spec = converted(merge(msgspec.to_builtins(current), patch), KeyWish)
        self._check(spec)
        new = msgspec.structs.replace(old, **msgspec.structs.asdict(spec))
        before, after = KeyView.of(old), KeyView.of(new)
        await self._context.change(
            request, "key.update", old.id, put=[changed(document, new)], before=before, after=after
        )
        return after

    async def delete(self, request: Ask) -> dict[str, Any]:
        document = await self._context.found("key", request.account, request.parts["key"])
        await self._context.change(
            request, "key.delete", document.id, delete=[document], before=KeyView.of(_key(document))
        )
        return {"id": document.id, "deleted": True}

    def _check(self, spec: KeyWish) -> None:
        if spec.expires is not None and spec.expires <= self._context.now():
            raise InvalidRequest(
                f"expires is {spec.expires}, which is in the past",
                param="expires",
                hint="give a future time in milliseconds since 1970",
            )


class ProviderKeyDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context

    def endpoints(self) -> list[Endpoint]:
        many = "/admin/accounts/{account}/provider-keys"
        one = many + "/{provider}/{alias}"
        return [
            Endpoint(
                "GET",
                many,
                "List stored provider keys, without secrets",
                self.list,
                reply=Listing,
                query=("after", "limit"),
            ),
            Endpoint("PUT", one, "Store a provider key, encrypted", self.put, ProviderKeyWish, ProviderKeyView),
            Endpoint("DELETE", one, "Delete a provider key", self.delete),
        ]

    async def list(self, request: Ask) -> Listing:
        found, cursor = await self._context.listed("provider_key", request)
        return Listing([provider_key_view(each) for each in found], cursor)

    async def put(self, request: Ask) -> ProviderKeyView:
        key_id, secret = _provider_key_id(request), request.read(ProviderKeyWish).secret
        if not secret.isascii() or not secret.isprintable() or secret != secret.strip():
            raise InvalidRequest(
                f"the key for {key_id.id!r} has spaces around it, line breaks or characters that are not ASCII",
                param="secret",
                hint="copy the key again, without spaces and line breaks",
            )
        document = await self._context.vault.document(key_id, secret, self._context.now())
        action = f"provider_key.{'update' if document.version else 'create'}"
        await self._context.change(request, action, document.id, put=[document], after=provider_key_view(document))
        return provider_key_view(document)

    async def delete(self, request: Ask) -> dict[str, Any]:
        document = based_on(
            await self._context.found("provider_key", request.account, _provider_key_id(request).id), request
        )
        await self._context.change(
            request, "provider_key.delete", document.id, delete=[document], before=provider_key_view(document)
        )
        return {"id": document.id, "deleted": True}


def _key(document: Document) -> Key:
    return decoded(document.body, Key)


def _provider_key_id(request: Ask) -> Place:
    return Place(request.account, named(request.parts["provider"], "provider"), named(request.parts["alias"], "alias"))


def provider_key_view(document: Document) -> ProviderKeyView:
    key_id, encrypted = Place.of(document), decoded(document.body, Sealed)
    return ProviderKeyView(
        provider=key_id.provider, alias=key_id.alias, created=encrypted.created, master_key=encrypted.master
    )
