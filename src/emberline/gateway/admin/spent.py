"""Spent: how far each budget is used up just now, as the limiter counts it.

A budget is counted in every gateway apart, and where it splits, for each value apart. Which values there are only the
log knows: those of its newest records are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec

from emberline.gateway.admin.ask import Ask, decoded
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import Budget
from emberline.gateway.admin.shelf import Listing
from emberline.gateway.limits.base import Spent
from emberline.gateway.limits.rule import Amount, Claim, Rule
from emberline.gateway.logs.record import Record
from emberline.gateway.settings import Settings
from emberline.gateway.store.filters import Filters

RECENT = 300  # records in which values are looked for
MOST = 50  # values of a rule


class SpentView(msgspec.Struct, frozen=True, kw_only=True):
    budget: str
    gateway: str
    split: dict[str, str]  # whose: empty if all share it
    amount: Amount
    used: int  # what is reserved for calls under way among it
    limit: int
    ends: int | None  # ms: then a new window begins; None: it slides


class SpentDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context

    def endpoints(self) -> list[Endpoint]:
        path = "/admin/accounts/{account}/spent"
        return [Endpoint("GET", path, "How far budgets are used up", self.look, reply=Listing, query=("gateway",))]

    async def look(self, request: Ask) -> Listing:
        """The fullest first."""
        now, wanted = self._context.now(), request.query.get("gateway", "")
        rules = {gateway: rules for gateway, rules in (await self._rules(request.account)).items() if rules}
        split = any(rule.split for of_gateway in rules.values() for rule in of_gateway)
        recent = await self._context.store.page(Filters(request.account, wanted), limit=RECENT) if split else None
        views: list[SpentView] = []
        for gateway, of_gateway in rules.items():
            if wanted in ("", gateway):
                seen = [each for each in recent.records if each.gateway == gateway] if recent is not None else []
                views += await self._views(f"{request.account}/{gateway}", gateway, of_gateway, seen, now)
        return Listing(sorted(views, key=lambda view: view.used / max(1, view.limit), reverse=True))

    async def _rules(self, account: str) -> dict[str, list[Rule]]:
        """Of each gateway: its own budgets and those of the account that hold for it."""
        found = {name: settings for (owner, name), settings in self._context.fixed.items() if owner == account}
        for document in await self._context.all("gateway", account):
            found.setdefault(document.id, decoded(document.body, Settings))
        budgets = [decoded(each.body, Budget) for each in await self._context.all("budget", account)]
        return {
            name: [*Rule.read(settings.budgets, "micros"), *_holding(budgets, name)] for name, settings in found.items()
        }

    async def _views(
        self, place: str, gateway: str, rules: Iterable[Rule], seen: Sequence[Record], now: int
    ) -> list[SpentView]:
        claims: list[Claim] = []
        splits: list[dict[str, str]] = []
        for rule in rules:
            for split in _splits(rule, place, seen):
                claims.append(rule.claim({**split, "gateway": place}, 0))
                splits.append(split)
        spent = await self._context.limiter.spent(claims, now / 1e3) if claims else []
        views = [_view(*each, gateway, now) for each in zip(claims, splits, spent, strict=True)]
        return [view for view in views if view.used or not view.split]


def _holding(budgets: Iterable[Budget], gateway: str) -> list[Rule]:
    return [b.rule for b in budgets if b.enabled and any(fnmatchcase(gateway, each) for each in b.gateways)]


def _splits(rule: Rule, place: str, seen: Sequence[Record]) -> list[dict[str, str]]:
    """The values that a rule counts apart, the newest first; one without any if it counts all together."""
    if not rule.split:
        return [{}]
    found: dict[tuple[str, ...], None] = {}
    for record in seen:
        facts = _facts(record, place)
        if all(facts.get(name, "") in values for name, values in rule.only.items()):
            found.setdefault(tuple(facts.get(name, "") for name in rule.split))
    return [dict(zip(rule.split, values, strict=True)) for values in list(found)[:MOST]]


def _facts(record: Record, place: str) -> dict[str, str]:
    """What rules split by, as far as the log has it: see limits/claims.py."""
    facts = {"gateway": place, "key": record.key_id, "user": record.user}
    facts |= {"model": record.model, "provider": record.provider}
    for name, value in record.metadata.items():
        facts[f"metadata.{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return facts


def _view(claim: Claim, split: dict[str, str], spent: Spent, gateway: str, now: int) -> SpentView:
    rule = claim.rule
    return SpentView(
        budget=rule.name,
        gateway=gateway,
        split=split,
        amount=rule.amount,
        used=spent.used,
        limit=rule.limit,
        ends=now + spent.resets if rule.technique == "fixed" else None,
    )
