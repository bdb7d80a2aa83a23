"""Dynamic routes as Cloudflare's clients speak of them: below a gateway, with versions and deployments.

Routes belong to the account here and name the gateways they hold for; below a gateway those are seen that hold for it.
The id of a route is its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from emberline.core.errors import NotFound
from emberline.gateway.admin.ask import Ask, converted, decoded, named
from emberline.gateway.admin.cloudflare import PAGES, ROOT, Beside, iso, page_of, with_parts
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.routes import RouteDesk, route_of, version_id
from emberline.gateway.admin.shapes import Deploy, Deployment, Route, RouteVersion, RouteWish, Strict
from emberline.gateway.errors import Conflict
from emberline.gateway.routes.graph import Element
from emberline.gateway.store.base import Document

Json = dict[str, Any]
ORDER = {"order_by": "created_at", "order_by_direction": "desc"}
# The SDK's names of types and properties -> those of the documentation, which are ours.
_TYPES = {"rate": "rate_limit"}
_PROPERTIES = {"conditional": {"conditions": "condition"}, "rate_limit": {"window": "interval"}}


class VersionWish(Strict, frozen=True, kw_only=True):
    elements: list[Json]


class NewRoute(VersionWish, frozen=True, kw_only=True):
    name: str


class Rename(Strict, frozen=True, kw_only=True):
    name: str


class DeploymentWish(Strict, frozen=True, kw_only=True):
    version_id: str


class CloudflareRoutes:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._routes = RouteDesk(desk)

    def endpoints(self) -> list[Endpoint]:
        many = f"{ROOT}/gateways/{{gateway}}/routes"
        one = many + "/{route}"
        versions, deployments = one + "/versions", one + "/deployments"
        found = [
            Endpoint("GET", many, "Routes of a gateway", self.list, query=PAGES),
            Endpoint("POST", many, "Make and deploy a route", self.create, NewRoute),
            Endpoint("GET", one, "One route", self.get),
            Endpoint("PATCH", one, "Rename a route", self.rename, Rename),
            Endpoint("DELETE", one, "Delete a route", self.delete),
            Endpoint("GET", versions, "A route's versions, newest first", self.versions, query=PAGES),
            Endpoint("POST", versions, "Add a version", self.add_version, VersionWish),
            Endpoint("GET", versions + "/{number}", "One version", self.version),
            Endpoint("GET", deployments, "A route's deployments, newest first", self.deployments, query=PAGES),
            Endpoint("POST", deployments, "Deploy a version", self.deploy, DeploymentWish),
        ]
        return [replace(each, cloudflare=True) for each in found]

    async def list(self, ask: Ask) -> Beside:
        await self._check_gateway(ask)
        shown = []
        for document in await self._desk.all("route", ask.account):
            newest = await self._version(ask, document, route_of(document).latest)
            if _holds(newest, ask.parts["gateway"]):
                shown.append(await self._view(ask, document))
        return _listed(ask, "routes", shown)

    async def get(self, ask: Ask) -> Json:
        return await self._view(ask, await self._document(ask))

    async def create(self, ask: Ask) -> Json:
        await self._check_gateway(ask)
        wish = ask.read(NewRoute)
        name = named(wish.name, "name")
        if await self._desk.store.get("route", ask.account, name) is not None:
            raise Conflict(f"there is a route {name!r} already", hint="the names of routes are those of the account")
        made = with_parts(ask, {"route": name}, RouteWish(elements=_read(wish.elements), gateways=(_gateway(ask),)))
        await self._routes.add(made)
        await self._routes.deploy(with_parts(made, {}, Deploy(version=1)))
        return await self.get(made)

    async def rename(self, ask: Ask) -> Beside:
        document, name = await self._document(ask), named(ask.read(Rename).name, "name")
        if name != document.id:
            if await self._desk.store.get("route", ask.account, name) is not None:
                raise Conflict(f"there is a route {name!r} already")
            await self._move(ask, document, name)
        return Beside("route", await self.get(with_parts(ask, {"route": name})))

    async def _move(self, ask: Ask, document: Document, name: str) -> None:
        numbers = range(1, route_of(document).latest + 1)
        found = [await self._desk.store.get("route_version", ask.account, version_id(document.id, n)) for n in numbers]
        old = [document, *(each for each in found if each is not None)]
        new = [replace(each, id=name + each.id.removeprefix(document.id), version=0) for each in old]
        await self._desk.change(ask, "route.rename", name, put=new, delete=old, before=document.id, after=name)

    async def delete(self, ask: Ask) -> Json:
        shown = await self.get(ask)
        await self._routes.delete(ask)
        return shown

    async def versions(self, ask: Ask) -> Beside:
        document = await self._document(ask)
        route = route_of(document)
        numbers = range(route.latest, 0, -1)
        return _listed(ask, "versions", [_version_view(await self._version(ask, document, n), route) for n in numbers])

    async def version(self, ask: Ask) -> Json:
        document = await self._document(ask)
        found = await self._version(ask, document, _number(ask.parts["number"]))
        return {**await self._view(ask, document, found), **_version_view(found, route_of(document))}

    async def add_version(self, ask: Ask) -> Json:
        document = await self._document(ask)
        before = await self._version(ask, document, route_of(document).latest)
        wish = RouteWish(elements=_read(ask.read(VersionWish).elements), gateways=before.gateways)
        added = await self._routes.add(with_parts(ask, {}, wish))
        return await self._view(ask, await self._document(ask), added)

    async def deployments(self, ask: Ask) -> Beside:
        document = await self._document(ask)
        return _listed(ask, "deployments", [_deployment_view(each) for each in reversed(_deployments(document))])

    async def deploy(self, ask: Ask) -> Json:
        await self._document(ask)
        number = _number(ask.read(DeploymentWish).version_id)
        await self._routes.deploy(with_parts(ask, {}, Deploy(version=number)))
        return await self.get(ask)

    async def _view(self, ask: Ask, document: Document, shown: RouteVersion | None = None) -> Json:
        """With this version, and otherwise the deployed or else the newest one."""
        route = route_of(document)
        first = await self._version(ask, document, 1)
        version = shown or await self._version(ask, document, route.deployed or route.latest)
        made = _deployments(document)
        return {
            "id": document.id,
            "account_tag": ask.account,
            "gateway_id": _gateway(ask),
            "name": document.id,
            "created_at": iso(first.created),
            "modified_at": iso(document.updated),
            "elements": [_written(each) for each in version.elements],
            "version": _version_view(version, route),
            "deployment": _deployment_view(made[-1]) if made else None,
        }

    async def _document(self, ask: Ask) -> Document:
        """The route, if it holds for the gateway of the path."""
        document = await self._routes.document(ask)
        if not _holds(await self._version(ask, document, route_of(document).latest), _gateway(ask)):
            raise NotFound(f"gateway {_gateway(ask)!r} has no route {document.id[:80]!r}")
        return document

    async def _version(self, ask: Ask, document: Document, number: int) -> RouteVersion:
        found = await self._desk.found("route_version", ask.account, version_id(document.id, number))
        return decoded(found.body, RouteVersion)

    async def _check_gateway(self, ask: Ask) -> None:
        if (ask.account, _gateway(ask)) not in self._desk.fixed:
            await self._desk.found("gateway", ask.account, _gateway(ask))


def _gateway(ask: Ask) -> str:
    return named(ask.parts["gateway"], "gateway")


def _holds(version: RouteVersion, gateway: str) -> bool:
    return any(fnmatchcase(gateway, pattern) for pattern in version.gateways)


def _listed(ask: Ask, name: str, found: list[Json]) -> Beside:
    page, per_page = page_of(ask, 20)
    shown = found[(page - 1) * per_page : page * per_page]
    return Beside("data", {**ORDER, "page": page, "per_page": per_page, name: shown})


def _deployments(document: Document) -> tuple[Deployment, ...]:
    """Of a route that was deployed by an earlier release, only the last one is known."""
    route = route_of(document)
    if route.deployed is None or route.deployments:
        return route.deployments
    return (Deployment(number=len(route.history) + 1, version=route.deployed, at=document.updated),)


def _deployment_view(made: Deployment) -> Json:
    return {"deployment_id": str(made.number), "version_id": str(made.version), "created_at": iso(made.at)}


def _version_view(version: RouteVersion, route: Route) -> Json:
    return {
        "version_id": str(version.number),
        "active": "true" if version.number == route.deployed else "false",
        "created_at": iso(version.created),
        "data": msgspec.json.encode([_written(each) for each in version.elements]).decode(),
        "is_valid": True,  # others are not stored
    }


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= len(text) <= 8:
        raise NotFound(f"there is no version {text[:80]!r}")
    return int(text)


def _read(elements: list[Json]) -> tuple[Element, ...]:
    made = []
    for element in elements:
        kind = element.get("type")
        kind = _TYPES.get(kind, kind) if isinstance(kind, str) else kind
        made.append(_renamed({**element, "type": kind}, lambda theirs: theirs))
    return converted({"elements": made}, RouteWish).elements


def _written(element: Element) -> Json:
    """An element with the SDK's names."""
    shown: Json = msgspec.to_builtins(element)
    shown = _renamed(shown, lambda theirs: {ours: name for name, ours in theirs.items()})
    if shown["type"] == "end":
        shown["outputs"] = {}
    return {**shown, "type": next((theirs for theirs, ours in _TYPES.items() if ours == shown["type"]), shown["type"])}


def _renamed(element: Json, direction: Callable[[dict[str, str]], dict[str, str]]) -> Json:
    names = direction(_PROPERTIES.get(str(element.get("type")), {}))
    properties = element.get("properties")
    if not isinstance(properties, dict):
        return element
    return {**element, "properties": {names.get(name, name): value for name, value in properties.items()}}
