"""RouteEndpoints: routes, which are named graphs with immutable versions.

A deployment sets the number of the version in use; a rollback sets the number that was deployed before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest, NotFound
from emberline.gateway.admin.ask import Ask, decoded, named
from emberline.gateway.admin.desk import Desk, changed
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import Deploy, Deployment, Route, RouteVersion, RouteWish
from emberline.gateway.admin.shelf import Listing
from emberline.gateway.call import POOL
from emberline.gateway.checked import CUSTOM
from emberline.gateway.errors import Conflict
from emberline.gateway.providers.registry import KNOWN
from emberline.gateway.routes.graph import Graph, ModelElement
from emberline.gateway.settings import Settings
from emberline.gateway.store.base import Document

HISTORY = 50  # kept for rollbacks


class RouteView(msgspec.Struct, frozen=True):
    name: str
    latest: int
    deployed: int | None
    history: tuple[int, ...]


class RouteDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context

    def endpoints(self) -> list[Endpoint]:
        many = "/admin/accounts/{account}/routes"
        one = many + "/{route}"
        paging = ("after", "limit")
        return [
            Endpoint("GET", many, "List routes", self.list, reply=Listing, query=paging),
            Endpoint("GET", one, "Get a route", self.get, reply=RouteView),
            Endpoint("DELETE", one, "Delete a route and its versions", self.delete),
            Endpoint("GET", one + "/versions", "List a route's versions", self.versions, reply=Listing, query=paging),
            Endpoint(
                "POST", one + "/versions", "Add a version to a route", self.add, RouteWish, RouteVersion, status=201
            ),
            Endpoint("POST", one + "/check", "Check a version without adding it", self.check, RouteWish),
            Endpoint("GET", one + "/versions/{number}", "Get a version of a route", self.version, reply=RouteVersion),
            Endpoint("POST", one + "/deploy", "Deploy a version of a route", self.deploy, Deploy, RouteView),
            Endpoint(
                "POST", one + "/rollback", "Deploy the previously deployed version", self.rollback, reply=RouteView
            ),
        ]

    async def list(self, request: Ask) -> Listing:
        found, cursor = await self._context.listed("route", request)
        return Listing([_view(each.id, route_of(each)) for each in found], cursor)

    async def get(self, request: Ask) -> RouteView:
        document = await self.document(request)
        return _view(document.id, route_of(document))

    async def versions(self, request: Ask) -> Listing:
        name = (await self.document(request)).id
        found, cursor = await self._context.listed("route_version", request, prefix=f"{name}/")
        return Listing([decoded(each.body, RouteVersion) for each in found], cursor)

    async def version(self, request: Ask) -> RouteVersion:
        return await self._version(request, _read_version_number(request.parts["number"]))

    async def check(self, request: Ask) -> dict[str, Any]:
        name, spec = await self._read_spec(request)
        return {"id": name, "valid": True, "elements": len(spec.elements)}

    async def add(self, request: Ask) -> RouteVersion:
        name, spec = await self._read_spec(request)
        old = await self._context.store.get("route", request.account, name)
        route = route_of(old) if old else Route(latest=0)
        version = RouteVersion(
            number=route.latest + 1,
            created=self._context.now(),
            by=request.identity.key_id,
            elements=spec.elements,
            gateways=spec.gateways,
            description=spec.description,
        )
        head = changed(
            old or Document("route", request.account, name, b""), msgspec.structs.replace(route, latest=version.number)
        )
        document = Document(
            "route_version", request.account, version_id(name, version.number), msgspec.json.encode(version)
        )
        await self._context.change(request, "route.version", document.id, put=[head, document], after=version)
        return version

    async def deploy(self, request: Ask) -> RouteView:
        number = request.read(Deploy).version
        await self._version(request, number)
        document = await self.document(request)
        route = route_of(document)
        history = route.history if route.deployed is None else (*route.history, route.deployed)[-HISTORY:]
        return await self._set_deployed(request, document, route, "route.deploy", number, history)

    async def rollback(self, request: Ask) -> RouteView:
        document = await self.document(request)
        route = route_of(document)
        if not route.history:
            raise Conflict(
                f"route {document.id!r} cannot be rolled back: it has no earlier deployment",
                hint="deploy a version with POST /deploy",
            )
        version, history = route.history[-1], route.history[:-1]
        return await self._set_deployed(request, document, route, "route.rollback", version, history)

    async def delete(self, request: Ask) -> dict[str, Any]:
        document = await self.document(request)
        route = route_of(document)
        numbers = range(1, route.latest + 1)
        found = [
            await self._context.store.get("route_version", request.account, version_id(document.id, n)) for n in numbers
        ]
        deleted = [document, *(each for each in found if each is not None)]
        await self._context.change(
            request, "route.delete", document.id, delete=deleted, before=_view(document.id, route)
        )
        return {"id": document.id, "deleted": True}

    async def _read_spec(self, request: Ask) -> tuple[str, RouteWish]:
        """Return the route's name and the checked new version. Raise InvalidRequest if it is invalid."""
        name, spec = named(request.parts["route"], "route"), request.read(RouteWish)
        Graph(elements=spec.elements).check()
        known = await self._providers(request.account)
        for element in spec.elements:
            slug = element.properties.provider if isinstance(element, ModelElement) else POOL
            if slug not in known and not slug.startswith(CUSTOM):
                hint = f"known providers: {', '.join(sorted(known))}"
                raise InvalidRequest(
                    f"element {element.id!r} names an unknown provider {slug[:80]!r}", param="elements", hint=hint
                )
        return name, spec

    async def _providers(self, account: str) -> set[str]:
        """Return the providers that at least one gateway of the account has."""
        stored = [decoded(each.body, Settings) for each in await self._context.all("gateway", account)]
        configured = [settings for (owner, _), settings in self._context.fixed.items() if owner == account]
        return {POOL, *KNOWN, *(slug for each in (*stored, *configured) for slug in each.providers)}

    async def _set_deployed(
        self, request: Ask, document: Document, route: Route, action: str, version: int, history: tuple[int, ...]
    ) -> RouteView:
        deployments = next_deployments(route, version, self._context.now())
        new = msgspec.structs.replace(route, deployed=version, history=history, deployments=deployments)
        before, after = _view(document.id, route), _view(document.id, new)
        await self._context.change(
            request, action, document.id, put=[changed(document, new)], before=before, after=after
        )
        return after

    async def document(self, request: Ask) -> Document:
        return await self._context.found("route", request.account, request.parts["route"])

    async def _version(self, request: Ask, number: int) -> RouteVersion:
        document = await self._context.store.get(
            "route_version", request.account, version_id(request.parts["route"], number)
        )
        if document is None:
            raise NotFound(
                f"route {request.parts['route'][:80]!r} has no version {number}",
                hint="GET /versions lists the route's versions",
            )
        return decoded(document.body, RouteVersion)


def next_deployments(route: Route, version: int, now: int) -> tuple[Deployment, ...]:
    """Return the route's deployments with a new one at the end."""
    number = route.deployments[-1].number + 1 if route.deployments else len(route.history) + 1
    return (*route.deployments, Deployment(number=number, version=version, at=now))[-HISTORY:]


def version_id(name: str, number: int) -> str:
    return f"{name}/{number:08d}"  # leading zeros, so that ids sort by number


def _read_version_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 8:
        raise InvalidRequest(f"version {text[:80]!r} is not a version number", param="version")
    return int(text)


def route_of(document: Document) -> Route:
    return decoded(document.body, Route)


def _view(name: str, route: Route) -> RouteView:
    return RouteView(name, route.latest, route.deployed, route.history)
