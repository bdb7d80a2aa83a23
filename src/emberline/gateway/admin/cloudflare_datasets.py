"""DatasetEndpoints: Cloudflare's datasets, which are stored filters of a gateway's log.

The log is read through a dataset with the query parameter `dataset=ID`.
"""

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
    created: int  # ms since 1970


class Datasets:
    def __init__(self, context: Desk) -> None:
        self._context = context
        self._gateways = Gateways(context)

    def endpoints(self) -> list[Endpoint]:
        many = f"{ROOT}/gateways/{{gateway}}/datasets"
        one = many + "/{dataset}"
        list_query = (*PAGES, "enable", "name", "search")
        endpoints = [
            Endpoint("GET", many, "List a gateway's datasets", self.list, query=list_query),
            Endpoint("POST", many, "Create a dataset", self.create, DatasetWish),
            Endpoint("GET", one, "Get a dataset", self.get),
            Endpoint("PUT", one, "Replace a dataset", self.put, DatasetWish),
            Endpoint("DELETE", one, "Delete a dataset; the log records stay", self.delete),
        ]
        return [replace(each, cloudflare=True) for each in endpoints]

    async def list(self, request: Ask) -> Paged:
        gateway = (await self._gateways.get(request)).id
        documents = await self._context.all("dataset", request.account)
        views = [_view(each) for each in documents if each.id.startswith(f"{gateway}/")]
        if (enable := request.flag("enable")) is not None:
            views = [each for each in views if each["enable"] == enable]
        if name := request.query.get("name"):
            views = [each for each in views if each["name"] == name]
        search = request.query.get("search", "").lower()
        return numbered(request, [each for each in views if search in _searchable_text(each)])

    async def get(self, request: Ask) -> Json:
        return _view(await self.document(request, request.parts["dataset"]))

    async def create(self, request: Ask) -> Json:
        gateway, spec = (await self._gateways.get(request)).id, _read_spec(request)
        document = Document("dataset", request.account, f"{gateway}/{uuid.uuid4().hex}", b"")
        return await self._save(request, document, spec, self._context.now())

    async def put(self, request: Ask) -> Json:
        old, spec = await self.document(request, request.parts["dataset"]), _read_spec(request)
        return await self._save(request, old, spec, decoded(old.body, Dataset).created)

    async def delete(self, request: Ask) -> Json:
        old = await self.document(request, request.parts["dataset"])
        await self._context.change(request, "dataset.delete", old.id, delete=[old], before=_view(old))
        return _view(old)

    async def document(self, request: Ask, id: str) -> Document:
        gateway = (await self._gateways.get(request)).id
        return await self._context.found("dataset", request.account, f"{gateway}/{id}")

    async def _save(self, request: Ask, old: Document, spec: DatasetWish, created: int) -> Json:
        new = changed(old, Dataset(**msgspec.structs.asdict(spec), created=created))
        view = _view(replace(new, updated=self._context.now()))
        before = _view(old) if old.version else None
        action = f"dataset.{'update' if old.version else 'create'}"
        await self._context.change(request, action, old.id, put=[new], before=before, after=view)
        return view


def _read_spec(request: Ask) -> DatasetWish:
    spec = request.read(DatasetWish)
    logquery.check(spec.filters)
    return spec


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


def _searchable_text(view: Json) -> str:
    return f"{view['id']} {view['name']} {msgspec.json.encode(view['filters']).decode()}".lower()
