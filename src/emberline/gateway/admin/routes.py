"""RouteEndpoints: dynamic routes.

A route is a named graph of models and conditions with immutable versions. Requests use the deployed version. A rollback
deploys the version that was deployed before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest, NotFound
from emberline.gateway.admin.admin_context import AdminContext, document_with_body
from emberline.gateway.admin.admin_request import AdminRequest, check_name, decode_json
from emberline.gateway.admin.document_endpoints import Listing
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.schemas import Deployment, DeployRequest, RouteSpec, RouteVersion, StoredRoute
from emberline.gateway.core.errors import Conflict
from emberline.gateway.core.request import POOL
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG
from emberline.gateway.routes.graph import ModelElement, RouteGraph
from emberline.gateway.settings_checks import CUSTOM_PREFIX
from emberline.gateway.store.base import Document

MAX_DEPLOYMENTS = 50  # kept for rollbacks


class RouteView(msgspec.Struct, frozen=True):
    name: str
    latest: int
    deployed: int | None
    history: tuple[int, ...]


class RouteEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def endpoints(self) -> list[AdminEndpoint]:
        many = "/admin/accounts/{account}/routes"
        one = many + "/{route}"
        paging = ("after", "limit")
        return [
            AdminEndpoint("GET", many, "List routes", self.list, reply=Listing, query=paging),
            AdminEndpoint("GET", one, "Get a route", self.get, reply=RouteView),
            AdminEndpoint("DELETE", one, "Delete a route and its versions", self.delete),
            AdminEndpoint(
                "GET", one + "/versions", "List a route's versions", self.list_versions, reply=Listing, query=paging
            ),
            AdminEndpoint(
                "POST",
                one + "/versions",
                "Add a version to a route",
                self.add_version,
                RouteSpec,
                RouteVersion,
                status=201,
            ),
            AdminEndpoint("POST", one + "/check", "Check a version without adding it", self.check_route, RouteSpec),
            AdminEndpoint(
                "GET", one + "/versions/{number}", "Get a version of a route", self.get_version, reply=RouteVersion
            ),
            AdminEndpoint(
                "POST", one + "/deploy", "Deploy a version of a route", self.deploy, DeployRequest, RouteView
            ),
            AdminEndpoint(
                "POST", one + "/rollback", "Deploy the previously deployed version", self.rollback, reply=RouteView
            ),
        ]

    async def list(self, request: AdminRequest) -> Listing:
        found, cursor = await self._context.list_document_page("route", request)
        return Listing([_build_route_view(each.id, decode_route(each)) for each in found], cursor)

    async def get(self, request: AdminRequest) -> RouteView:
        document = await self.get_document(request)
        return _build_route_view(document.id, decode_route(document))

    async def list_versions(self, request: AdminRequest) -> Listing:
        name = (await self.get_document(request)).id
        found, cursor = await self._context.list_document_page("route_version", request, prefix=f"{name}/")
        return Listing([decode_json(each.body, RouteVersion) for each in found], cursor)

    async def get_version(self, request: AdminRequest) -> RouteVersion:
        return await self._load_version(request, _read_version_number(request.path_parameters["number"]))

    async def check_route(self, request: AdminRequest) -> dict[str, Any]:
        name, spec = await self._read_route_spec(request)
        return {"id": name, "valid": True, "elements": len(spec.elements)}

    async def add_version(self, request: AdminRequest) -> RouteVersion:
        name, spec = await self._read_route_spec(request)
        old = await self._context.store.get("route", request.account, name)
        route = decode_route(old) if old else StoredRoute(latest=0)
        version = RouteVersion(
            number=route.latest + 1,
            created=self._context.now_ms(),
            by=request.identity.key_id,
            elements=spec.elements,
            gateways=spec.gateways,
            description=spec.description,
        )
        head = document_with_body(
            old or Document("route", request.account, name, b""), msgspec.structs.replace(route, latest=version.number)
        )
        document = Document(
            "route_version", request.account, version_document_id(name, version.number), msgspec.json.encode(version)
        )
        await self._context.commit(request, "route.version", document.id, put=[head, document], after=version)
        return version

    async def deploy(self, request: AdminRequest) -> RouteView:
        number = request.decode_body(DeployRequest).version
        await self._load_version(request, number)
        document = await self.get_document(request)
        route = decode_route(document)
        history = route.history if route.deployed is None else (*route.history, route.deployed)[-MAX_DEPLOYMENTS:]
        return await self._save_deployment(request, document, route, "route.deploy", number, history)

    async def rollback(self, request: AdminRequest) -> RouteView:
        document = await self.get_document(request)
        route = decode_route(document)
        if not route.history:
            raise Conflict(
                f"route {document.id!r} cannot be rolled back because no earlier version was deployed",
                hint="deploy a version with POST /deploy",
            )
        version, history = route.history[-1], route.history[:-1]
        return await self._save_deployment(request, document, route, "route.rollback", version, history)

    async def delete(self, request: AdminRequest) -> dict[str, Any]:
        document = await self.get_document(request)
        route = decode_route(document)
        numbers = range(1, route.latest + 1)
        found = [
            await self._context.store.get("route_version", request.account, version_document_id(document.id, n))
            for n in numbers
        ]
        deleted = [document, *(each for each in found if each is not None)]
        await self._context.commit(
            request, "route.delete", document.id, delete=deleted, before=_build_route_view(document.id, route)
        )
        return {"id": document.id, "deleted": True}

    async def _read_route_spec(self, request: AdminRequest) -> tuple[str, RouteSpec]:
        """Return the route's name from the path, and the new version of the route from the request's body.

        Raise InvalidRequest if the version is invalid.
        """
        name, spec = check_name(request.path_parameters["route"], "route"), request.decode_body(RouteSpec)
        RouteGraph(elements=spec.elements).validate()
        known = await self._list_account_providers(request.account)
        for element in spec.elements:
            slug = element.properties.provider if isinstance(element, ModelElement) else POOL
            if slug not in known and not slug.startswith(CUSTOM_PREFIX):
                hint = f"known providers: {', '.join(sorted(known))}"
                raise InvalidRequest(
                    f"element {element.id!r} names an unknown provider {slug[:80]!r}", param="elements", hint=hint
                )
        return name, spec

    async def _list_account_providers(self, account: str) -> set[str]:
        """Return the slugs of all known providers and of the providers that a gateway of the account defines."""
        stored = [
            decode_json(each.body, GatewaySettings)
            for each in await self._context.list_all_documents("gateway", account)
        ]
        configured = [settings for (owner, _), settings in self._context.configured.items() if owner == account]
        return {POOL, *PROVIDERS_BY_SLUG, *(slug for each in (*stored, *configured) for slug in each.providers)}

    async def _save_deployment(
        self,
        request: AdminRequest,
        document: Document,
        route: StoredRoute,
        action: str,
        version: int,
        history: tuple[int, ...],
    ) -> RouteView:
        deployments = append_deployment(route, version, self._context.now_ms())
        new = msgspec.structs.replace(route, deployed=version, history=history, deployments=deployments)
        before, after = _build_route_view(document.id, route), _build_route_view(document.id, new)
        await self._context.commit(
            request, action, document.id, put=[document_with_body(document, new)], before=before, after=after
        )
        return after

    async def get_document(self, request: AdminRequest) -> Document:
        return await self._context.get_document("route", request.account, request.path_parameters["route"])

    async def _load_version(self, request: AdminRequest, number: int) -> RouteVersion:
        document = await self._context.store.get(
            "route_version", request.account, version_document_id(request.path_parameters["route"], number)
        )
        if document is None:
            raise NotFound(
                f"route {request.path_parameters['route'][:80]!r} has no version {number}",
                hint="GET /versions lists the route's versions",
            )
        return decode_json(document.body, RouteVersion)


def append_deployment(route: StoredRoute, version: int, now: int) -> tuple[Deployment, ...]:
    """Return the route's deployments with a new deployment of `version` appended."""
    number = route.deployments[-1].number + 1 if route.deployments else len(route.history) + 1
    return (*route.deployments, Deployment(number=number, version=version, at=now))[-MAX_DEPLOYMENTS:]


def version_document_id(name: str, number: int) -> str:
    return f"{name}/{number:08d}"  # leading zeros, so that ids sort by number


def _read_version_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 8:
        raise InvalidRequest(f"version must be a version number from 1, not {text[:80]!r}", param="version")
    return int(text)


def decode_route(document: Document) -> StoredRoute:
    return decode_json(document.body, StoredRoute)


def _build_route_view(name: str, route: StoredRoute) -> RouteView:
    return RouteView(name, route.latest, route.deployed, route.history)
