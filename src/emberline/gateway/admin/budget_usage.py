"""BudgetUsageEndpoints: how much of each budget is used now, as counted by the limiter.

Every gateway has its own count of a budget. A budget with `split` has a separate count for each value of the split
attribute, for example for each user. The limiter cannot list these values, so they are taken from the newest log
records.
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

RECENT_RECORDS = 300  # searched for values of `split`
MAX_SPLIT_VALUES = 50  # per rule


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
        has_split = any(rule.split for of_gateway in rules.values() for rule in of_gateway)
        filters = LogFilters(request.account, only_gateway)
        recent = await self._context.store.read_page(filters, limit=RECENT_RECORDS) if has_split else None
        views: list[BudgetUsageView] = []
        for gateway, of_gateway in rules.items():
            if only_gateway in ("", gateway):
                records = [each for each in recent.records if each.gateway == gateway] if recent is not None else []
                views += await self._build_budget_views(
                    f"{request.account}/{gateway}", gateway, of_gateway, records, now
                )
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
        self, full_name: str, gateway: str, rules: Iterable[LimitRule], records: Sequence[LogRecord], now: int
    ) -> list[BudgetUsageView]:
        """Return the usage of one gateway's budgets. `full_name` is ACCOUNT/GATEWAY, the name that limits use."""
        claims: list[Claim] = []
        splits: list[dict[str, str]] = []
        for rule in rules:
            for split in _split_combinations(rule, full_name, records):
                claims.append(rule.make_claim({**split, "gateway": full_name}, 0))
                splits.append(split)
        spent = await self._context.limiter.read_bucket_usage(claims, now / 1e3) if claims else []
        views = [_build_budget_view(*each, gateway, now) for each in zip(claims, splits, spent, strict=True)]
        return [view for view in views if view.used or not view.split]


def _budget_rules_for_gateway(budgets: Iterable[AccountBudget], gateway: str) -> list[LimitRule]:
    return [b.rule for b in budgets if b.enabled and any(fnmatchcase(gateway, each) for each in b.gateways)]


def _split_combinations(rule: LimitRule, full_name: str, records: Sequence[LogRecord]) -> list[dict[str, str]]:
    """Return the distinct combinations of split attribute values in the records, newest first.

    The attributes are those that the rule's `split` names. Return [{}] for a rule without `split`.
    """
    if not rule.split:
        return [{}]
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
