"""Endpoints for gateways, custom providers, prices and budgets. Values are checked before storing."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, decode_json
from emberline.gateway.admin.document_endpoints import DocumentEndpoints, Listing, StoredView
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.schemas import AccountBudget, CustomProvider
from emberline.gateway.core.cost import Price
from emberline.gateway.core.errors import Conflict
from emberline.gateway.core.paths import DEFAULT_NAME
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.limits.claims import parse_limit_rules, warn_about_evadable_limits
from emberline.gateway.providers.compatible import DEFAULT_DIALECTS, CompatibleProvider
from emberline.gateway.settings_checks import check_headers, check_price, check_settings
from emberline.gateway.upstream.ssrf import validate_provider_url


class GatewayEndpoints(DocumentEndpoints[GatewaySettings]):
    """Endpoints for gateways.

    Gateways of the configuration file are listed too, but the API cannot change them.
    """

    def __init__(self, context: AdminContext) -> None:
        super().__init__(
            context,
            "gateway",
            GatewaySettings,
            path_name="gateways",
            id_parameters="gateway",
            check_value=self._check_value,
        )

    async def list(self, request: AdminRequest) -> Listing:
        found = await super().list(request)
        configured = {
            name: _build_configured_view(name, settings)
            for (account, name), settings in self._context.configured.items()
            if account == request.account
        }
        stored = [view for view in found.items if view.id not in configured]  # the configuration file overrides these
        return Listing(stored if "after" in request.query else [*configured.values(), *stored], found.next)

    async def get(self, request: AdminRequest) -> StoredView:
        settings = self._context.configured.get((request.account, self.document_id(request)))
        return (
            _build_configured_view(self.document_id(request), settings)
            if settings is not None
            else await super().get(request)
        )

    async def patch(self, request: AdminRequest) -> StoredView:
        self._name_if_changeable(request)
        return await super().patch(request)

    async def delete(self, request: AdminRequest) -> dict[str, Any]:
        if self._name_if_changeable(request) == request.account == DEFAULT_NAME:
            raise Conflict(
                "the default gateway of the account 'default' cannot be deleted",
                hint="replace it with {} (PUT) to restore its default settings",
            )
        return await super().delete(request)

    def _name_if_changeable(self, request: AdminRequest) -> str:
        """Return the gateway's name. Raise Conflict if the gateway is defined in the configuration file."""
        name = self.document_id(request)
        if (request.account, name) in self._context.configured:
            raise Conflict(
                f"gateway {name!r} is defined in the configuration file, so the management API cannot change it",
                hint="change the configuration file and restart the gateway",
            )
        return name

    async def _check_value(self, value: GatewaySettings, request: AdminRequest) -> GatewaySettings:
        name = self._name_if_changeable(request)
        for field, in_path in (("account", request.account), ("gateway", name)):
            if (in_body := getattr(value, field)) not in (DEFAULT_NAME, in_path):
                raise InvalidRequest(
                    f"{field} must be equal in the body and in the path, not {in_body[:80]!r} and {in_path!r}",
                    param=field,
                    hint=f"leave {field} out of the body",
                )
        value = msgspec.structs.replace(value, account=request.account, gateway=name, version=0)
        check_limit_rules(
            name,
            value,
            [
                decode_json(d.body, AccountBudget)
                for d in await self._context.list_all_documents("budget", request.account)
            ],
        )
        if value.routes:
            raise InvalidRequest(
                f"routes must not be in the settings of gateway {name!r}",
                param="routes",
                hint="create and deploy routes under /admin/accounts/ACCOUNT/routes",
            )
        for slug, provider in value.providers.items():
            if not provider.key is provider.key_env is provider.key_file is None:
                raise InvalidRequest(
                    f"the settings of provider {slug!r} must not contain key, key_env or key_file",
                    param=f"providers.{slug}",
                    hint="store the key under /admin/accounts/ACCOUNT/provider-keys",
                )
        check_settings(value, allow_private=self._context.allow_private)
        return value


def _build_configured_view(name: str, settings: GatewaySettings) -> StoredView:
    """Return a gateway of the configuration file as the API shows it, without provider keys."""
    without_keys = {slug: msgspec.structs.replace(p, key=None) for slug, p in settings.providers.items()}
    value = msgspec.structs.replace(settings, providers=without_keys)
    return StoredView(id=name, version=0, updated=0, value=value)


class CustomProviderEndpoints(DocumentEndpoints[CustomProvider]):
    def __init__(self, context: AdminContext) -> None:
        super().__init__(
            context,
            "custom_provider",
            CustomProvider,
            path_name="custom-providers",
            id_parameters="slug",
            check_value=self._check_value,
        )

    async def _check_value(self, value: CustomProvider, request: AdminRequest) -> CustomProvider:
        if value.slug != (in_path := request.path_parameters.get("slug", value.slug)):
            raise InvalidRequest(
                f"slug must be equal in the body and in the path, not {value.slug!r} and {in_path[:80]!r}",
                param="slug",
                hint="use the same slug in both",
            )
        check_headers(value.headers)
        url = validate_provider_url(value.base_url, allow_private=self._context.allow_private)
        CompatibleProvider(
            value.slug, url, speaks=DEFAULT_DIALECTS if value.speaks is None else value.speaks
        )  # raises if invalid
        return msgspec.structs.replace(value, base_url=url)


async def _check_price(value: Price, request: AdminRequest) -> Price:
    check_price(value)
    return value


class BudgetEndpoints(DocumentEndpoints[AccountBudget]):
    def __init__(self, context: AdminContext) -> None:
        super().__init__(
            context, "budget", AccountBudget, path_name="budgets", id_parameters="budget", check_value=self._check_value
        )

    async def _check_value(self, value: AccountBudget, request: AdminRequest) -> AccountBudget:
        if value.rule.name != (in_path := request.path_parameters["budget"]):
            raise InvalidRequest(
                f"rule.name must be equal in body and path, not {value.rule.name[:80]!r} and {in_path[:80]!r}",
                param="rule.name",
                hint="use the same name in both",
            )
        stored = [
            decode_json(each.body, AccountBudget)
            for each in await self._context.list_all_documents("budget", request.account)
        ]
        budgets = [*(each for each in stored if each.rule.name != value.rule.name), value]
        for document in await self._context.list_all_documents("gateway", request.account):
            check_limit_rules(document.id, decode_json(document.body, GatewaySettings), budgets)
        for (account, name), settings in self._context.configured.items():
            if account == request.account:
                check_limit_rules(name, settings, budgets)
        return value


def check_limit_rules(gateway: str, settings: GatewaySettings, budgets: Iterable[AccountBudget]) -> None:
    """Raise InvalidRequest if a gateway has too many limit rules or two rules of the same name.

    The gateway's own rules and the account's budgets are counted together.
    """
    applying = [b.rule for b in budgets if b.enabled and any(fnmatchcase(gateway, each) for each in b.gateways)]
    rules = tuple(msgspec.to_builtins(rule) for rule in applying)
    try:
        combined = msgspec.structs.replace(settings, budgets=(*settings.budgets, *rules))
        parse_limit_rules(combined)
        warn_about_evadable_limits(combined)
    except InvalidRequest as e:
        raise InvalidRequest(f"gateway {gateway!r}: {e.message}", param=e.param, hint=e.hint) from e


def gateway_endpoints(context: AdminContext) -> list[AdminEndpoint]:
    groups: list[DocumentEndpoints[Any]] = [
        GatewayEndpoints(context),
        CustomProviderEndpoints(context),
        DocumentEndpoints(
            context, "price", Price, path_name="prices", id_parameters="provider/model*", check_value=_check_price
        ),
        BudgetEndpoints(context),
    ]
    return [endpoint for group in groups for endpoint in group.endpoints()]
