"""Endpoints for gateways, custom providers, prices and budgets, and the checks of their values."""

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
    """Gateways of the configuration file are listed, too, but cannot be changed by the API."""

    def __init__(self, context: Desk) -> None:
        super().__init__(context, "gateway", Settings, where="gateways", id="gateway", check=self._check_value)

    async def list(self, request: Ask) -> Listing:
        found = await super().list(request)
        if "after" in request.query:
            return found
        configured = [
            _configured_view(name, settings)
            for (account, name), settings in self._context.fixed.items()
            if account == request.account
        ]
        return Listing([*configured, *found.items], found.next)

    async def get(self, request: Ask) -> Stored:
        settings = self._context.fixed.get((request.account, self.key(request)))
        return _configured_view(self.key(request), settings) if settings is not None else await super().get(request)

    async def patch(self, request: Ask) -> Stored:
        self._check_not_configured(request)
        return await super().patch(request)

    async def delete(self, request: Ask) -> dict[str, Any]:
        self._check_not_configured(request)
        return await super().delete(request)

    def _check_not_configured(self, request: Ask) -> str:
        """Return the gateway's name. Raise Conflict if it is in the configuration file."""
        name = self.key(request)
        if (request.account, name) in self._context.fixed:
            raise Conflict(
                f"gateway {name!r} is defined in the configuration file, so the management API cannot change it",
                hint="change the configuration file and restart the gateway",
            )
        return name

    async def _check_value(self, value: Settings, request: Ask) -> Settings:
        name = self._check_not_configured(request)
        for field, in_path in (("account", request.account), ("gateway", name)):
            if (in_body := getattr(value, field)) not in (DEFAULT, in_path):
                raise InvalidRequest(
                    f"{field} is {in_body[:80]!r} in the body and {in_path!r} in the path",
                    param=field,
                    hint=f"leave {field} out of the body",
                )
        value = msgspec.structs.replace(value, account=request.account, gateway=name, version=0)
        check_rules(name, value, [decoded(d.body, Budget) for d in await self._context.all("budget", request.account)])
        if value.routes:
            raise InvalidRequest(
                f"the settings of gateway {name!r} cannot have routes",
                param="routes",
                hint="create and deploy routes under /admin/accounts/ACCOUNT/routes",
            )
        for slug, provider in value.providers.items():
            if not provider.key is provider.key_env is provider.key_file is None:
                raise InvalidRequest(
                    f"the settings of provider {slug!r} cannot have key, key_env or key_file",
                    param=f"providers.{slug}",
                    hint="store the key under /admin/accounts/ACCOUNT/provider-keys",
                )
        check_settings(value, allow_private=self._context.allow_private)
        return value


def _configured_view(name: str, settings: Settings) -> Stored:
    """Return a configured gateway as the API shows it, without provider keys."""
    without_keys = {slug: msgspec.structs.replace(p, key=None) for slug, p in settings.providers.items()}
    value = msgspec.structs.replace(settings, providers=without_keys)
    return Stored(id=name, version=0, updated=0, value=value)


class CustomProviders(Shelf[CustomProvider]):
    def __init__(self, context: Desk) -> None:
        super().__init__(
            context, "custom_provider", CustomProvider, where="custom-providers", id="slug", check=self._check_value
        )

    async def _check_value(self, value: CustomProvider, request: Ask) -> CustomProvider:
        if value.slug != (in_path := request.parts.get("slug", value.slug)):
            raise InvalidRequest(
                f"slug is {value.slug!r} in the body and {in_path[:80]!r} in the path",
                param="slug",
                hint="use the same slug in both",
            )
        check_headers(value.headers)
        url = checked_url(value.base_url, allow_private=self._context.allow_private)
        Compatible(value.slug, url, speaks=USUAL if value.speaks is None else value.speaks)  # raises if invalid
        return msgspec.structs.replace(value, base_url=url)


async def _check_price(value: Price, request: Ask) -> Price:
    check_price(value)
    return value


class Budgets(Shelf[Budget]):
    def __init__(self, context: Desk) -> None:
        super().__init__(context, "budget", Budget, where="budgets", id="budget", check=self._check_value)

    async def _check_value(self, value: Budget, request: Ask) -> Budget:
        if value.rule.name != (in_path := request.parts["budget"]):
            raise InvalidRequest(
                f"rule.name is {value.rule.name[:80]!r} in the body and {in_path[:80]!r} in the path",
                param="rule.name",
                hint="use the same name in both",
            )
        stored = [decoded(each.body, Budget) for each in await self._context.all("budget", request.account)]
        budgets = [*(each for each in stored if each.rule.name != value.rule.name), value]
        for document in await self._context.all("gateway", request.account):
            check_rules(document.id, decoded(document.body, Settings), budgets)
        for (account, name), settings in self._context.fixed.items():
            if account == request.account:
                check_rules(name, settings, budgets)
        return value


def check_rules(gateway: str, settings: Settings, budgets: Iterable[Budget]) -> None:
    """Raise InvalidRequest if the gateway's rules and the account's budgets are too many or share a name."""
    applying = [b.rule for b in budgets if b.enabled and any(fnmatchcase(gateway, each) for each in b.gateways)]
    rules = tuple(msgspec.to_builtins(rule) for rule in applying)
    try:
        combined = msgspec.structs.replace(settings, budgets=(*settings.budgets, *rules))
        rules_of(combined)
        warn_of_caller_splits(combined)
    except InvalidRequest as e:
        raise InvalidRequest(f"gateway {gateway!r}: {e.message}", param=e.param, hint=e.hint) from e


def endpoints(context: Desk) -> list[Endpoint]:
    groups: list[Shelf[Any]] = [
        Gateways(context),
        CustomProviders(context),
        Shelf(context, "price", Price, where="prices", id="provider/model*", check=_check_price),
        Budgets(context),
    ]
    return [endpoint for group in groups for endpoint in group.endpoints()]
