"""BudgetUsageEndpoints: how much of each budget is used now, as counted by the limiter.

Every gateway has its own count of a budget. A budget with `split` has a separate count for each value of the split
attribute, for example for each user. The limiter cannot list these values. For one attribute that rollups have, they
are the values with the highest cost in the budget's window; for other attributes, those of the newest records there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec

from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, decode_json
from emberline.gateway.admin.document_endpoints import Listing
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.schemas import AccountBudget
from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.limits.base import BucketUsage
from emberline.gateway.limits.rule import Claim, LimitRule, LimitUnit
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.rollup import DIMENSION_UNITS, OTHER_USERS, UNIT_MS, Dimension, RollupQuery

MAX_SCANNED_RECORDS, SCAN_TIMEOUT_S = 10_000, 0.5  # searched for values of `split`, for each rule
MAX_SPLIT_VALUES = 100  # per rule
_ROLLUP_DIMENSIONS: dict[str, Dimension] = {"key": "key", "user": "user", "model": "model", "provider": "provider"}


class BudgetUsageView(msgspec.Struct, frozen=True, kw_only=True):
    budget: str
    gateway: str
    split: dict[str, str]  # dimension -> value; empty without `split`
    amount: LimitUnit
    used: int  # includes reservations of requests in progress
    limit: int
    ends: int | None  # ms since 1970: start of the next window; None: a sliding window


class BudgetUsageEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def endpoints(self) -> list[AdminEndpoint]:
        path = "/admin/accounts/{account}/spent"
        return [
            AdminEndpoint(
                "GET", path, "List how much of each budget is used", self.list_usage, reply=Listing, query=("gateway",)
            )
        ]

    async def list_usage(self, request: AdminRequest) -> Listing:
        """Return the usage of all budgets, sorted by the used share, highest first."""
        now, only_gateway = self._context.now_ms(), request.query.get("gateway", "")
        rules = {gateway: rules for gateway, rules in (await self._rules_by_gateway(request.account)).items() if rules}
        views: list[BudgetUsageView] = []
        for gateway, of_gateway in rules.items():
            if only_gateway in ("", gateway):
                views += await self._build_budget_views(request.account, gateway, of_gateway, now)
        return Listing(sorted(views, key=lambda view: view.used / max(1, view.limit), reverse=True))

    async def _rules_by_gateway(self, account: str) -> dict[str, list[LimitRule]]:
        """Return the budget rules of each gateway: its own rules, and the rules of the account's budgets."""
        found = {name: settings for (owner, name), settings in self._context.configured.items() if owner == account}
        for document in await self._context.list_all_documents("gateway", account):
            found.setdefault(document.id, decode_json(document.body, GatewaySettings))
        budgets = [
            decode_json(each.body, AccountBudget) for each in await self._context.list_all_documents("budget", account)
        ]
        return {
            name: [*LimitRule.parse(settings.budgets, "micros", "budgets"), *_budget_rules_for_gateway(budgets, name)]
            for name, settings in found.items()
        }

    async def _build_budget_views(
        self, account: str, gateway: str, rules: Iterable[LimitRule], now: int
    ) -> list[BudgetUsageView]:
        """Return the usage of one gateway's budgets."""
        full_name = f"{account}/{gateway}"  # as limits name it
        claims: list[Claim] = []
        splits: list[dict[str, str]] = []
        for rule in rules:
            for split in await self._list_splits(account, gateway, rule, now):
                claims.append(rule.make_claim({**split, "gateway": full_name}, 0))
                splits.append(split)
        spent = await self._context.limiter.read_bucket_usage(claims, now / 1e3) if claims else []
        views = [_build_budget_view(*each, gateway, now) for each in zip(claims, splits, spent, strict=True)]
        return [view for view in views if view.used or not view.split]

    async def _list_splits(self, account: str, gateway: str, rule: LimitRule, now: int) -> list[dict[str, str]]:
        """Return the combinations of split attribute values that may have used the budget; [{}] without `split`."""
        if not rule.split:
            return [{}]
        since = rule.make_claim({}, 0).window.usage_start_ms(now)
        if len(rule.split) == 1 and (dimension := _ROLLUP_DIMENSIONS.get(rule.split[0])) is not None:
            unit = DIMENSION_UNITS[dimension][0]
            if since % UNIT_MS[unit] == 0:  # otherwise the cells also contain the time before the window
                query = RollupQuery(
                    account, unit, since, now + 1, gateway, dimension, over_time=False, limit=MAX_SPLIT_VALUES
                )
                cells = await self._context.store.read_rollups(query)
                values = dict.fromkeys(_attribute_value(dimension, cell.value) for cell in cells)
                return [{rule.split[0]: value} for value in (*values, "") if value != OTHER_USERS]
        filters = LogFilters(account, gateway, since=since)
        page = await self._context.store.read_page(filters, limit=MAX_SCANNED_RECORDS, timeout_s=SCAN_TIMEOUT_S)
        return _split_combinations(rule, f"{account}/{gateway}", page.records)


def _attribute_value(dimension: Dimension, cell_value: str) -> str:
    return cell_value.partition("/")[2] if dimension == "model" else cell_value  # PROVIDER/MODEL


def _budget_rules_for_gateway(budgets: Iterable[AccountBudget], gateway: str) -> list[LimitRule]:
    return [b.rule for b in budgets if b.enabled and any(fnmatchcase(gateway, each) for each in b.gateways)]


def _split_combinations(rule: LimitRule, full_name: str, records: Sequence[LogRecord]) -> list[dict[str, str]]:
    """Return the distinct combinations of split attribute values in the records, newest first.

    The attributes are those that the rule's `split` names.
    """
    found: dict[tuple[str, ...], None] = {}
    for record in records:
        attributes = _record_attributes(record, full_name)
        if all(attributes.get(name, "") in values for name, values in rule.only.items()):
            found.setdefault(tuple(attributes.get(name, "") for name in rule.split))
    return [dict(zip(rule.split, values, strict=True)) for values in list(found)[:MAX_SPLIT_VALUES]]


def _record_attributes(record: LogRecord, full_name: str) -> dict[str, str]:
    """Return the attributes of a log record that rules can split by, under the names that rules use."""
    attributes = {"gateway": full_name, "key": record.key_id, "user": record.user}
    attributes |= {"model": record.model, "provider": record.provider}
    for name, value in record.metadata.items():
        attributes[f"metadata.{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return attributes


def _build_budget_view(
    claim: Claim, split_values: dict[str, str], bucket_usage: BucketUsage, gateway: str, now: int
) -> BudgetUsageView:
    rule = claim.rule
    return BudgetUsageView(
        budget=rule.name,
        gateway=gateway,
        split=split_values,
        amount=rule.amount,
        used=bucket_usage.used,
        limit=rule.limit,
        ends=now + bucket_usage.resets_in_ms if rule.technique == "fixed" else None,
    )
