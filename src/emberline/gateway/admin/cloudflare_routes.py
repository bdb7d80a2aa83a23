"""CloudflareRouteEndpoints: dynamic routes, their versions and deployments, at Cloudflare's paths.

A route belongs to the account and lists the gateways that it applies to. A path below a gateway shows only the routes
of that gateway. The name of a route is also its id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from emberline.core.errors import NotFound
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, check_name, convert_value, decode_json
from emberline.gateway.admin.cloudflare import (
    PAGE_PARAMETERS,
    ROOT,
    NamedResult,
    read_page_parameters,
    to_iso_time,
    with_path_parameters,
)
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.routes import RouteEndpoints, decode_route, version_document_id
from emberline.gateway.admin.schemas import (
    Deployment,
    DeployRequest,
    RouteSpec,
    RouteVersion,
    StoredRoute,
    StrictStruct,
)
from emberline.gateway.core.errors import Conflict
from emberline.gateway.routes.graph import Element
from emberline.gateway.store.base import Document

Json = dict[str, Any]
SORT_ORDER = {"order_by": "created_at", "order_by_direction": "desc"}
# Names of types and properties in Cloudflare's SDK -> names in Cloudflare's documentation, which are used here.
_TYPES = {"rate": "rate_limit"}
_PROPERTIES = {"conditional": {"conditions": "condition"}, "rate_limit": {"window": "interval"}}


class CloudflareVersionSpec(StrictStruct, frozen=True, kw_only=True):
    elements: list[Json]


class CloudflareRouteSpec(CloudflareVersionSpec, frozen=True, kw_only=True):
    name: str


class RouteRename(StrictStruct, frozen=True, kw_only=True):
    name: str


class DeploymentSpec(StrictStruct, frozen=True, kw_only=True):
    version_id: str


class CloudflareRouteEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._routes = RouteEndpoints(context)

    def endpoints(self) -> list[AdminEndpoint]:
        many = f"{ROOT}/gateways/{{gateway}}/routes"
        one = many + "/{route}"
        versions, deployments = one + "/versions", one + "/deployments"
        endpoints = [
            AdminEndpoint("GET", many, "List a gateway's routes", self.list, query=PAGE_PARAMETERS),
            AdminEndpoint("POST", many, "Create and deploy a route", self.create, CloudflareRouteSpec),
            AdminEndpoint("GET", one, "Get a route", self.get),
            AdminEndpoint("PATCH", one, "Rename a route", self.rename, RouteRename),
            AdminEndpoint("DELETE", one, "Delete a route", self.delete),
            AdminEndpoint(
                "GET", versions, "List a route's versions, newest first", self.list_versions, query=PAGE_PARAMETERS
            ),
            AdminEndpoint("POST", versions, "Add a version to a route", self.add_version, CloudflareVersionSpec),
            AdminEndpoint("GET", versions + "/{number}", "Get a version of a route", self.get_version),
            AdminEndpoint(
                "GET",
                deployments,
                "List a route's deployments, newest first",
                self.list_deployments,
                query=PAGE_PARAMETERS,
            ),
            AdminEndpoint("POST", deployments, "Deploy a version of a route", self.deploy, DeploymentSpec),
        ]
        return [replace(each, uses_cloudflare_envelope=True) for each in endpoints]

    async def list(self, request: AdminRequest) -> NamedResult:
        await self._check_gateway(request)
        views = []
        for document in await self._context.list_all_documents("route", request.account):
            newest = await self._load_route_version(request, document, decode_route(document).latest)
            if _applies_to(newest, request.path_parameters["gateway"]):
                views.append(await self._build_route_view(request, document))
        return _select_named_page(request, "routes", views)

    async def get(self, request: AdminRequest) -> Json:
        return await self._build_route_view(request, await self._load_route_document(request))

    async def create(self, request: AdminRequest) -> Json:
        await self._check_gateway(request)
        spec = request.decode_body(CloudflareRouteSpec)
        name = check_name(spec.name, "name")
        if await self._context.store.get("route", request.account, name) is not None:
            raise Conflict(
                f"account {request.account!r} has a route {name!r} already",
                hint="choose a different name: all gateways of an account share the names of routes",
            )
        route = RouteSpec(elements=_read_elements(spec.elements), gateways=(_gateway_in_path(request),))
        create = with_path_parameters(request, {"route": name}, route)
        await self._routes.add_version(create)
        await self._routes.deploy(with_path_parameters(create, {}, DeployRequest(version=1)))
        return await self.get(create)

    async def rename(self, request: AdminRequest) -> NamedResult:
        document, name = (
            await self._load_route_document(request),
            check_name(request.decode_body(RouteRename).name, "name"),
        )
        if name != document.id:
            if await self._context.store.get("route", request.account, name) is not None:
                raise Conflict(
                    f"account {request.account!r} has a route {name!r} already", hint="choose a different name"
                )
            await self._rename_route(request, document, name)
        return NamedResult("route", await self.get(with_path_parameters(request, {"route": name})))

    async def _rename_route(self, request: AdminRequest, document: Document, name: str) -> None:
        numbers = range(1, decode_route(document).latest + 1)
        found = [
            await self._context.store.get("route_version", request.account, version_document_id(document.id, n))
            for n in numbers
        ]
        old = [document, *(each for each in found if each is not None)]
        new = [replace(each, id=name + each.id.removeprefix(document.id), version=0) for each in old]
        await self._context.commit(request, "route.rename", name, put=new, delete=old, before=document.id, after=name)

    async def delete(self, request: AdminRequest) -> Json:
        view = await self.get(request)
        await self._routes.delete(request)
        return view

    async def list_versions(self, request: AdminRequest) -> NamedResult:
        document = await self._load_route_document(request)
        route = decode_route(document)
        numbers = range(route.latest, 0, -1)
        views = [_build_version_view(await self._load_route_version(request, document, n), route) for n in numbers]
        return _select_named_page(request, "versions", views)

    async def get_version(self, request: AdminRequest) -> Json:
        document = await self._load_route_document(request)
        found = await self._load_route_version(request, document, _read_version_id(request.path_parameters["number"]))
        return {
            **await self._build_route_view(request, document, found),
            **_build_version_view(found, decode_route(document)),
        }

    async def add_version(self, request: AdminRequest) -> Json:
        document = await self._load_route_document(request)
        before = await self._load_route_version(request, document, decode_route(document).latest)
        spec = RouteSpec(
            elements=_read_elements(request.decode_body(CloudflareVersionSpec).elements), gateways=before.gateways
        )
        added = await self._routes.add_version(with_path_parameters(request, {}, spec))
        return await self._build_route_view(request, await self._load_route_document(request), added)

    async def list_deployments(self, request: AdminRequest) -> NamedResult:
        document = await self._load_route_document(request)
        views = [_build_deployment_view(each) for each in reversed(_decode_deployments(document))]
        return _select_named_page(request, "deployments", views)

    async def deploy(self, request: AdminRequest) -> Json:
        await self._load_route_document(request)
        number = _read_version_id(request.decode_body(DeploymentSpec).version_id)
        await self._routes.deploy(with_path_parameters(request, {}, DeployRequest(version=number)))
        return await self.get(request)

    async def _build_route_view(
        self, request: AdminRequest, document: Document, version: RouteVersion | None = None
    ) -> Json:
        """Return the JSON of a route with this version.

        If `version` is None, use the deployed version, or the newest version if none is deployed.
        """
        route = decode_route(document)
        first = await self._load_route_version(request, document, 1)
        version = version or await self._load_route_version(request, document, route.deployed or route.latest)
        deployments = _decode_deployments(document)
        return {
            "id": document.id,
            "account_tag": request.account,
            "gateway_id": _gateway_in_path(request),
            "name": document.id,
            "created_at": to_iso_time(first.created),
            "modified_at": to_iso_time(document.updated),
            "elements": [_to_sdk_element(each) for each in version.elements],
            "version": _build_version_view(version, route),
            "deployment": _build_deployment_view(deployments[-1]) if deployments else None,
        }

    async def _load_route_document(self, request: AdminRequest) -> Document:
        """Return the document of the route in the path.

        Raise NotFound if the route does not apply to the gateway in the path.
        """
        document = await self._routes.get_document(request)
        if not _applies_to(
            await self._load_route_version(request, document, decode_route(document).latest), _gateway_in_path(request)
        ):
            raise NotFound(
                f"gateway {_gateway_in_path(request)!r} has no route {document.id[:80]!r}",
                hint="list the gateway's routes; a route of this name may apply to other gateways",
            )
        return document

    async def _load_route_version(self, request: AdminRequest, document: Document, number: int) -> RouteVersion:
        found = await self._context.get_document(
            "route_version", request.account, version_document_id(document.id, number)
        )
        return decode_json(found.body, RouteVersion)

    async def _check_gateway(self, request: AdminRequest) -> None:
        if (request.account, _gateway_in_path(request)) not in self._context.configured:
            await self._context.get_document("gateway", request.account, _gateway_in_path(request))


def _gateway_in_path(request: AdminRequest) -> str:
    return check_name(request.path_parameters["gateway"], "gateway")


def _applies_to(version: RouteVersion, gateway: str) -> bool:
    return any(fnmatchcase(gateway, pattern) for pattern in version.gateways)


def _select_named_page(request: AdminRequest, field_name: str, all_items: list[Json]) -> NamedResult:
    page, per_page = read_page_parameters(request, 20)
    items = all_items[(page - 1) * per_page : page * per_page]
    return NamedResult("data", {**SORT_ORDER, "page": page, "per_page": per_page, field_name: items})


def _decode_deployments(document: Document) -> tuple[Deployment, ...]:
    """Return a route's deployments, oldest first.

    Documents of earlier releases contain only the last deployment.
    """
    route = decode_route(document)
    if route.deployed is None or route.deployments:
        return route.deployments
    return (Deployment(number=len(route.history) + 1, version=route.deployed, at=document.updated),)


def _build_deployment_view(deployment: Deployment) -> Json:
    return {
        "deployment_id": str(deployment.number),
        "version_id": str(deployment.version),
        "created_at": to_iso_time(deployment.at),
    }


def _build_version_view(version: RouteVersion, route: StoredRoute) -> Json:
    return {
        "version_id": str(version.number),
        "active": "true" if version.number == route.deployed else "false",
        "created_at": to_iso_time(version.created),
        "data": msgspec.json.encode([_to_sdk_element(each) for each in version.elements]).decode(),
        "is_valid": True,  # invalid versions are never stored
    }


def _read_version_id(text: str) -> int:
    if not text.isdecimal() or not 1 <= len(text) <= 8:
        raise NotFound(
            f"version_id must be a version number from 1, not {text[:80]!r}", hint="list the route's versions"
        )
    return int(text)


def _read_elements(elements: list[Json]) -> tuple[Element, ...]:
    """Convert the elements of a route from the JSON of Cloudflare's SDK."""
    renamed = []
    for element in elements:
        kind = element.get("type")
        kind = _TYPES.get(kind, kind) if isinstance(kind, str) else kind
        renamed.append(_rename_properties({**element, "type": kind}, lambda names: names))
    return convert_value({"elements": renamed}, RouteSpec).elements


def _to_sdk_element(element: Element) -> Json:
    """Convert an element of a route to the JSON of Cloudflare's SDK."""
    view: Json = msgspec.to_builtins(element)
    view = _rename_properties(view, lambda names: {ours: sdk for sdk, ours in names.items()})
    if view["type"] == "end":
        view["outputs"] = {}
    return {**view, "type": next((sdk for sdk, ours in _TYPES.items() if ours == view["type"]), view["type"])}


def _rename_properties(element: Json, orient_names: Callable[[dict[str, str]], dict[str, str]]) -> Json:
    """Return the element with its properties renamed between Cloudflare's SDK and this API.

    `orient_names` selects the direction. It gets the table {SDK name: our name}, and returns this table or its inverse.
    """
    names = orient_names(_PROPERTIES.get(str(element.get("type")), {}))
    properties = element.get("properties")
    if not isinstance(properties, dict):
        return element
    return {**element, "properties": {names.get(name, name): value for name, value in properties.items()}}
