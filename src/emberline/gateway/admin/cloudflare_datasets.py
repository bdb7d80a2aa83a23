"""DatasetEndpoints: Cloudflare's datasets. A dataset is a stored set of filters for a gateway's log.

The query parameter `dataset=ID` applies these filters when the log is read.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import msgspec

from emberline.gateway.admin import log_query
from emberline.gateway.admin.admin_context import AdminContext, document_with_body
from emberline.gateway.admin.admin_request import AdminRequest, decode_json
from emberline.gateway.admin.cloudflare import PAGE_PARAMETERS, ROOT, PagedResult, select_page, to_iso_time
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.gateways import GatewayEndpoints
from emberline.gateway.admin.schemas import Label, StrictStruct
from emberline.gateway.store.base import Document

Json = dict[str, Any]


class DatasetSpec(StrictStruct, frozen=True, kw_only=True):
    name: Label
    enable: bool
    filters: list[log_query.CloudflareFilter]


class Dataset(DatasetSpec, frozen=True, kw_only=True):
    created: int  # ms since 1970


class DatasetEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._gateways = GatewayEndpoints(context)

    def endpoints(self) -> list[AdminEndpoint]:
        many = f"{ROOT}/gateways/{{gateway}}/datasets"
        one = many + "/{dataset}"
        list_query = (*PAGE_PARAMETERS, "enable", "name", "search")
        endpoints = [
            AdminEndpoint("GET", many, "List a gateway's datasets", self.list, query=list_query),
            AdminEndpoint("POST", many, "Create a dataset", self.create, DatasetSpec),
            AdminEndpoint("GET", one, "Get a dataset", self.get),
            AdminEndpoint("PUT", one, "Replace a dataset", self.put, DatasetSpec),
            AdminEndpoint("DELETE", one, "Delete a dataset; the log records stay", self.delete),
        ]
        return [replace(each, uses_cloudflare_envelope=True) for each in endpoints]

    async def list(self, request: AdminRequest) -> PagedResult:
        gateway = (await self._gateways.get(request)).id
        documents = await self._context.list_all_documents("dataset", request.account)
        views = [_build_dataset_view(each) for each in documents if each.id.startswith(f"{gateway}/")]
        if (enable := request.bool_parameter("enable")) is not None:
            views = [each for each in views if each["enable"] == enable]
        if name := request.query.get("name"):
            views = [each for each in views if each["name"] == name]
        search = request.query.get("search", "").lower()
        return select_page(request, [each for each in views if search in _searchable_text(each)])

    async def get(self, request: AdminRequest) -> Json:
        return _build_dataset_view(await self.get_document(request, request.path_parameters["dataset"]))

    async def create(self, request: AdminRequest) -> Json:
        gateway, spec = (await self._gateways.get(request)).id, _read_dataset_spec(request)
        document = Document("dataset", request.account, f"{gateway}/{uuid.uuid4().hex}", b"")
        return await self._save_dataset(request, document, spec, self._context.now_ms())

    async def put(self, request: AdminRequest) -> Json:
        old, spec = await self.get_document(request, request.path_parameters["dataset"]), _read_dataset_spec(request)
        return await self._save_dataset(request, old, spec, decode_json(old.body, Dataset).created)

    async def delete(self, request: AdminRequest) -> Json:
        old = await self.get_document(request, request.path_parameters["dataset"])
        await self._context.commit(request, "dataset.delete", old.id, delete=[old], before=_build_dataset_view(old))
        return _build_dataset_view(old)

    async def get_document(self, request: AdminRequest, id: str) -> Document:
        gateway = (await self._gateways.get(request)).id
        return await self._context.get_document("dataset", request.account, f"{gateway}/{id}")

    async def _save_dataset(self, request: AdminRequest, old: Document, spec: DatasetSpec, created_ms: int) -> Json:
        new = document_with_body(old, Dataset(**msgspec.structs.asdict(spec), created=created_ms))
        view = _build_dataset_view(replace(new, updated=self._context.now_ms()))
        before = _build_dataset_view(old) if old.version else None
        action = f"dataset.{'update' if old.version else 'create'}"
        await self._context.commit(request, action, old.id, put=[new], before=before, after=view)
        return view


def _read_dataset_spec(request: AdminRequest) -> DatasetSpec:
    spec = request.decode_body(DatasetSpec)
    log_query.check_filters(spec.filters)
    return spec


def _build_dataset_view(document: Document) -> Json:
    found = decode_json(document.body, Dataset)
    gateway, _, id = document.id.partition("/")
    return {
        "id": id,
        "gateway_id": gateway,
        "name": found.name,
        "enable": found.enable,
        "filters": msgspec.to_builtins(found.filters),
        "created_at": to_iso_time(found.created),
        "modified_at": to_iso_time(document.updated),
    }


def _searchable_text(view: Json) -> str:
    return f"{view['id']} {view['name']} {msgspec.json.encode(view['filters']).decode()}".lower()
