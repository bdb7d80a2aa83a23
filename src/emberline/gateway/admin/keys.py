"""Keys of the gateway and of providers. Secrets come in or go out once, and are in no answer afterwards."""

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
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def endpoints(self) -> list[Endpoint]:
        many, one = "/admin/accounts/{account}/keys", "/admin/accounts/{account}/keys/{key}"
        return [
            Endpoint("GET", many, "Every key, without secrets", self.list, reply=Listing, query=("after", "limit")),
            Endpoint("POST", many, "Make a key; its secret is shown once", self.create, KeyWish, KeyView, status=201),
            Endpoint("GET", one, "One key", self.get, reply=KeyView),
            Endpoint("PATCH", one, "Change what a key may do, or disable it", self.patch, reply=KeyView),
            Endpoint("DELETE", one, "Revoke a key for good", self.delete),
        ]

    async def list(self, ask: Ask) -> Listing:
        found, cursor = await self._desk.listed("key", ask)
        return Listing([KeyView.of(_key(each)) for each in found], cursor)

    async def get(self, ask: Ask) -> KeyView:
        return KeyView.of(_key(await self._desk.found("key", ask.account, ask.parts["key"])))

    async def create(self, ask: Ask) -> KeyView:
        wish = ask.read(KeyWish)
        self._check(wish)
        secret = new_secret(wish.kind)
        given = msgspec.structs.asdict(wish)
        key = Key(hash=hash_of(secret), shown=shown_of(secret), account=ask.account, created=self._desk.now(), **given)
        document = Document("key", ask.account, key.id, msgspec.json.encode(key))
        await self._desk.change(ask, "key.create", key.id, put=[document], after=KeyView.of(key))
        return KeyView.of(key, secret)

    async def patch(self, ask: Ask) -> KeyView:
        document = await self._desk.found("key", ask.account, ask.parts["key"])
        old = _key(document)
        patch = ask.read(dict[str, Any])
        if wrong := [name for name in patch if name not in _CHANGEABLE]:
            raise InvalidRequest(f"{wrong[0][:80]!r} of a key cannot be changed", param=wrong[0])
        present = {name: getattr(old, name) for name in KeyWish.__struct_fields__}
        wish = converted(merge(msgspec.to_builtins(present), patch), KeyWish)
        self._check(wish)
        new = msgspec.structs.replace(old, **msgspec.structs.asdict(wish))
        before, after = KeyView.of(old), KeyView.of(new)
        await self._desk.change(ask, "key.update", old.id, put=[changed(document, new)], before=before, after=after)
        return after

    async def delete(self, ask: Ask) -> dict[str, Any]:
        document = await self._desk.found("key", ask.account, ask.parts["key"])
        await self._desk.change(ask, "key.delete", document.id, delete=[document], before=KeyView.of(_key(document)))
        return {"id": document.id, "deleted": True}

    def _check(self, wish: KeyWish) -> None:
        if wish.expires is not None and wish.expires <= self._desk.now():
            raise InvalidRequest("expires has passed already", param="expires", hint="it is in milliseconds since 1970")


class ProviderKeyDesk:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def endpoints(self) -> list[Endpoint]:
        many = "/admin/accounts/{account}/provider-keys"
        one = many + "/{provider}/{alias}"
        return [
            Endpoint("GET", many, "Which providers have keys", self.list, reply=Listing, query=("after", "limit")),
            Endpoint("PUT", one, "Store a provider's key, encrypted", self.put, ProviderKeyWish, ProviderKeyView),
            Endpoint("DELETE", one, "Delete a provider's key", self.delete),
        ]

    async def list(self, ask: Ask) -> Listing:
        found, cursor = await self._desk.listed("provider_key", ask)
        return Listing([provider_key_view(each) for each in found], cursor)

    async def put(self, ask: Ask) -> ProviderKeyView:
        place, secret = _place(ask), ask.read(ProviderKeyWish).secret
        if not secret.isascii() or not secret.isprintable() or secret != secret.strip():
            raise InvalidRequest("a key has no spaces around it, no line breaks and only ASCII", param="secret")
        document = await self._desk.vault.document(place, secret, self._desk.now())
        action = f"provider_key.{'update' if document.version else 'create'}"
        await self._desk.change(ask, action, document.id, put=[document], after=provider_key_view(document))
        return provider_key_view(document)

    async def delete(self, ask: Ask) -> dict[str, Any]:
        document = based_on(await self._desk.found("provider_key", ask.account, _place(ask).id), ask)
        await self._desk.change(
            ask, "provider_key.delete", document.id, delete=[document], before=provider_key_view(document)
        )
        return {"id": document.id, "deleted": True}


def _key(document: Document) -> Key:
    return decoded(document.body, Key)


def _place(ask: Ask) -> Place:
    return Place(ask.account, named(ask.parts["provider"], "provider"), named(ask.parts["alias"], "alias"))


def provider_key_view(document: Document) -> ProviderKeyView:
    place, sealed = Place.of(document), decoded(document.body, Sealed)
    return ProviderKeyView(provider=place.provider, alias=place.alias, created=sealed.created, master_key=sealed.master)
