"""Gateways, custom providers, prices and budgets: shelves, and what must hold of what is put on them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.ask import Ask, decoded
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import Budget, CustomProvider
from emberline.gateway.admin.shelf import Listing, Shelf, Stored
from emberline.gateway.checked import check_headers, check_price, check_settings
from emberline.gateway.costs.cost import Price
from emberline.gateway.errors import Conflict
from emberline.gateway.limits.claims import rules_of, warn_of_caller_splits
from emberline.gateway.paths import DEFAULT
from emberline.gateway.providers.compatible import USUAL, Compatible
from emberline.gateway.settings import Settings
from emberline.gateway.upstream.ssrf import checked_url


class Gateways(Shelf[Settings]):
    """Those of the configuration file are listed too, and cannot be changed here."""

    def __init__(self, context: Desk) -> None:
        super().__init__(context, "gateway", Settings, where="gateways", id="gateway", check=self._checked)

    async def list(self, request: Ask) -> Listing:
        found = await super().list(request)
        if "after" in request.query:
            return found
        fixed = [_fixed(name, s) for (account, name), s in self._context.fixed.items() if account == request.account]
        return Listing([*fixed, *found.items], found.next)

    async def get(self, request: Ask) -> Stored:
        settings = self._context.fixed.get((request.account, self.key(request)))
        return _fixed(self.key(request), settings) if settings is not None else await super().get(request)

    async def patch(self, request: Ask) -> Stored:
        self._refuse_fixed(request)
        return await super().patch(request)

    async def delete(self, request: Ask) -> dict[str, Any]:
        self._refuse_fixed(request)
        return await super().delete(request)

    def _refuse_fixed(self, request: Ask) -> str:
        name = self.key(request)
        if (request.account, name) in self._context.fixed:
            raise Conflict(f"gateway {name!r} is in the configuration file", hint="change it there")
        return name

    async def _checked(self, value: Settings, request: Ask) -> Settings:
        name = self._refuse_fixed(request)
        for field, own in (("account", request.account), ("gateway", name)):
            if getattr(value, field) not in (DEFAULT, own):
                raise InvalidRequest(f"the {field} is not that of the path", param=field)
        value = msgspec.structs.replace(value, account=request.account, gateway=name, version=0)
        check_rules(name, value, [decoded(d.body, Budget) for d in await self._context.all("budget", request.account)])
        if value.routes:
            raise InvalidRequest("routes are made and deployed under /routes", param="routes")
        for slug, provider in value.providers.items():
            if not provider.key is provider.key_env is provider.key_file is None:
                at, hint = f"providers.{slug}", "store it under /provider-keys"
                raise InvalidRequest("a secret has no place here", param=at, hint=hint)
        check_settings(value, allow_private=self._context.allow_private)
        return value


def _fixed(name: str, settings: Settings) -> Stored:
    hidden = {slug: msgspec.structs.replace(p, key=None) for slug, p in settings.providers.items()}
    value = msgspec.structs.replace(settings, providers=hidden)
    return Stored(id=name, version=0, updated=0, value=value)


class CustomProviders(Shelf[CustomProvider]):
    def __init__(self, context: Desk) -> None:
        super().__init__(
            context, "custom_provider", CustomProvider, where="custom-providers", id="slug", check=self._checked
        )

    async def _checked(self, value: CustomProvider, request: Ask) -> CustomProvider:
        if value.slug != request.parts.get("slug", value.slug):
            raise InvalidRequest("the slug is not that of the path", param="slug")
        check_headers(value.headers)
        url = checked_url(value.base_url, allow_private=self._context.allow_private)
        Compatible(value.slug, url, speaks=USUAL if value.speaks is None else value.speaks)  # or it says why not
        return msgspec.structs.replace(value, base_url=url)


async def _checked_price(value: Price, request: Ask) -> Price:
    check_price(value)
    return value


class Budgets(Shelf[Budget]):
    def __init__(self, context: Desk) -> None:
        super().__init__(context, "budget", Budget, where="budgets", id="budget", check=self._checked)

    async def _checked(self, value: Budget, request: Ask) -> Budget:
        if value.rule.name != request.parts["budget"]:
            raise InvalidRequest("the rule's name is not that of the path", param="rule.name")
        found = [decoded(each.body, Budget) for each in await self._context.all("budget", request.account)]
        budgets = [*(each for each in found if each.rule.name != value.rule.name), value]
        for document in await self._context.all("gateway", request.account):
            check_rules(document.id, decoded(document.body, Settings), budgets)
        for (account, name), settings in self._context.fixed.items():
            if account == request.account:
                check_rules(name, settings, budgets)
        return value


def check_rules(gateway: str, settings: Settings, budgets: Iterable[Budget]) -> None:
    """A gateway's own rules and the account's that hold for it must go together: not too many, no name twice."""
    holding = [b.rule for b in budgets if b.enabled and any(fnmatchcase(gateway, each) for each in b.gateways)]
    rules = tuple(msgspec.to_builtins(rule) for rule in holding)
    try:
        together = msgspec.structs.replace(settings, budgets=(*settings.budgets, *rules))
        rules_of(together)
        warn_of_caller_splits(together)
    except InvalidRequest as e:
        raise InvalidRequest(f"gateway {gateway!r}: {e.message}", param=e.param, hint=e.hint) from e


def endpoints(context: Desk) -> list[Endpoint]:
    shelves: list[Shelf[Any]] = [
        Gateways(context),
        CustomProviders(context),
        Shelf(context, "price", Price, where="prices", id="provider/model*", check=_checked_price),
        Budgets(context),
    ]
    return [endpoint for shelf in shelves for endpoint in shelf.endpoints()]
