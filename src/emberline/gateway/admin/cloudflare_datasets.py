"""Datasets of a gateway, as Cloudflare's clients speak of them: filters over its log that are kept under a name.

The log is read through one with `dataset=ID`."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import msgspec

from emberline.gateway.admin import logquery
from emberline.gateway.admin.ask import Ask, decoded
from emberline.gateway.admin.cloudflare import PAGES, ROOT, Paged, iso, numbered
from emberline.gateway.admin.desk import Desk, changed
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.gateways import Gateways
from emberline.gateway.admin.shapes import Label, Strict
from emberline.gateway.store.base import Document

Json = dict[str, Any]


class DatasetWish(Strict, frozen=True, kw_only=True):
    name: Label
    enable: bool
    filters: list[logquery.Asked]


class Dataset(DatasetWish, frozen=True, kw_only=True):
    created: int  # ms


class Datasets:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._gateways = Gateways(desk)

    def endpoints(self) -> list[Endpoint]:
        many = f"{ROOT}/gateways/{{gateway}}/datasets"
        one = many + "/{dataset}"
        listed = (*PAGES, "enable", "name", "search")
        found = [
            Endpoint("GET", many, "Datasets of a gateway", self.list, query=listed),
            Endpoint("POST", many, "Make a dataset", self.create, DatasetWish),
            Endpoint("GET", one, "One dataset", self.get),
            Endpoint("PUT", one, "Replace a dataset", self.put, DatasetWish),
            Endpoint("DELETE", one, "Delete a dataset; the log stays", self.delete),
        ]
        return [replace(each, cloudflare=True) for each in found]

    async def list(self, ask: Ask) -> Paged:
        gateway = (await self._gateways.get(ask)).id
        every = await self._desk.all("dataset", ask.account)
        shown = [_view(each) for each in every if each.id.startswith(f"{gateway}/")]
        if (wanted := ask.flag("enable")) is not None:
            shown = [each for each in shown if each["enable"] == wanted]
        if name := ask.query.get("name"):
            shown = [each for each in shown if each["name"] == name]
        search = ask.query.get("search", "").lower()
        return numbered(ask, [each for each in shown if search in _searched(each)])

    async def get(self, ask: Ask) -> Json:
        return _view(await self.document(ask, ask.parts["dataset"]))

    async def create(self, ask: Ask) -> Json:
        gateway, wish = (await self._gateways.get(ask)).id, _wished(ask)
        document = Document("dataset", ask.account, f"{gateway}/{uuid.uuid4().hex}", b"")
        return await self._save(ask, document, wish, self._desk.now())

    async def put(self, ask: Ask) -> Json:
        old, wish = await self.document(ask, ask.parts["dataset"]), _wished(ask)
        return await self._save(ask, old, wish, decoded(old.body, Dataset).created)

    async def delete(self, ask: Ask) -> Json:
        old = await self.document(ask, ask.parts["dataset"])
        await self._desk.change(ask, "dataset.delete", old.id, delete=[old], before=_view(old))
        return _view(old)

    async def document(self, ask: Ask, id: str) -> Document:
        gateway = (await self._gateways.get(ask)).id
        return await self._desk.found("dataset", ask.account, f"{gateway}/{id}")

    async def _save(self, ask: Ask, old: Document, wish: DatasetWish, created: int) -> Json:
        new = changed(old, Dataset(**msgspec.structs.asdict(wish), created=created))
        shown = _view(replace(new, updated=self._desk.now()))
        before = _view(old) if old.version else None
        action = f"dataset.{'update' if old.version else 'create'}"
        await self._desk.change(ask, action, old.id, put=[new], before=before, after=shown)
        return shown


def _wished(ask: Ask) -> DatasetWish:
    wish = ask.read(DatasetWish)
    logquery.check(wish.filters)
    return wish


def _view(document: Document) -> Json:
    found = decoded(document.body, Dataset)
    gateway, _, id = document.id.partition("/")
    return {
        "id": id,
        "gateway_id": gateway,
        "name": found.name,
        "enable": found.enable,
        "filters": msgspec.to_builtins(found.filters),
        "created_at": iso(found.created),
        "modified_at": iso(document.updated),
    }


def _searched(shown: Json) -> str:
    return f"{shown['id']} {shown['name']} {msgspec.json.encode(shown['filters']).decode()}".lower()
