"""Guarded: a layer that looks at what goes to a model and at what comes back, by the gateway's guardrails. What it
blocks is answered with an error, and billed for what it had cost by then."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import InvalidRequest, WorkTooLarge
from emberline.core.offload import LARGE as WORK_LARGE
from emberline.core.offload import offload
from emberline.gateway.call import Call, Handler, Reply, Step
from emberline.gateway.costs.beside import Beside
from emberline.gateway.errors import Blocked
from emberline.gateway.guardrails.finding import Check, Finding
from emberline.gateway.guardrails.inspection import (
    LARGE,
    Inspected,
    Unreadable,
    inspect_query,
    inspect_reply,
    inspect_request,
)
from emberline.gateway.guardrails.judge import Judges, decided
from emberline.gateway.guardrails.policy import Guardrails, Judge, PatternRule
from emberline.gateway.guardrails.scanner import Scanner, worst
from emberline.gateway.guardrails.stream import GuardedStream
from emberline.gateway.refusal import error_reply, last_words
from emberline.gateway.survey import survey

HEADER = "cf-aig-dlp"
LONGEST_HEADER = 20  # findings told in it
EVENTS = "text/event-stream"
PACKED = "content-encoding"
Side = Literal["prompt", "reply"]
_CHECKS: dict[Side, Check] = {"prompt": "REQUEST", "reply": "RESPONSE"}


class Guarded:
    def __init__(self, ask: Handler, clock: Clock) -> None:
        """`ask`: who answers a judge's question."""
        self._judges = Judges(ask, clock)

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            rails = call.settings.guardrails
            if not rails or (call.method != "POST" and not (call.body or call.query)):
                return inner(call)
            return Watch(call, rails, self._judges).run(inner)

        return handle


class Watch:
    """One call, looked at on its way there and back."""

    def __init__(self, call: Call, rails: Guardrails, judges: Judges) -> None:
        self._call, self._rails, self._judges = call, rails, judges
        self._beside = Beside()
        self._reply: Reply | None = None

    async def run(self, inner: Handler) -> Reply:
        try:
            call, said = await self._prompt()
        except RecursionError as e:
            raise InvalidRequest("the request is nested too deep for guardrails to look into it") from e
        stop = self._stopping() or await self._judged("prompt", said)
        self._tell()
        if stop is not None:
            reply = error_reply(call.dialect, _blocked(stop))
            reply.provider, reply.model, reply.micros = call.provider, call.model, 0
        else:
            reply = self._reply = await inner(call)
            try:
                if reply.status < 400 and call.method == "POST":
                    await self._looked(reply)
            except BaseException:  # the client left while it was judged
                await reply.close()
                raise
        reply.endings.append(self._beside.add)
        return reply

    # -- the prompt ----------------------------------------------------------------------------------------------------

    async def _prompt(self) -> tuple[Call, str]:
        """The call without what is to be redacted, and what it says for judges."""
        call, rules = self._call, self._rules("prompt")
        if rules and call.query:
            query, found = inspect_query(call.query, rules)
            self._note_all(found)
            call = call if query is call.query else call.moved(query=query)
        if not any(step.body is not None for step in call.steps):
            seen = await self._inspected(call.body, rules, call.headers)
            if seen.body is None:
                return call, seen.said
            call.redacted.append(seen.body)
            headers = {name: value for name, value in call.headers.items() if name != PACKED}
            moved = call.moved(body=seen.body, headers=headers)
            if len(seen.body) >= WORK_LARGE:
                moved.surveyed = await offload.run(len(seen.body), survey, seen.body)
                moved.seen = moved.surveyed.seen
            return moved, seen.said
        all_seen = [None if s.body is None else await self._inspected(s.body, rules, {}) for s in call.steps]
        said = "\n".join(seen.said for seen in all_seen if seen is not None and seen.said)
        if all(seen is None or seen.body is None for seen in all_seen):
            return call, said
        bodies = [s.body if seen is None or seen.body is None else seen.body
                  for s, seen in zip(call.steps, all_seen, strict=True)]  # fmt: skip
        call.redacted.append(b"[%b]" % b",".join(body for body in bodies if body is not None))
        steps = [await _with_body(s, body) for s, body in zip(call.steps, bodies, strict=True)]
        return call.moved(steps=tuple(steps)), said

    async def _inspected(self, body: bytes, rules: tuple[PatternRule, ...], headers: Mapping[str, str]) -> Inspected:
        if not rules and not self._judging("prompt"):
            return Inspected()
        kind, coding = headers.get("content-type", ""), headers.get(PACKED, "")
        try:
            if len(body) < LARGE and not coding:
                seen = inspect_request(body, rules, kind)
            else:
                seen = await offload.run(len(body), inspect_request, body, rules, kind, coding)
        except Unreadable as e:
            return self._unreadable(rules, coding, e)
        self._note_all(seen.findings)
        return seen

    def _unreadable(self, rules: tuple[PatternRule, ...], coding: str, error: Unreadable) -> Inspected:
        """What cannot be read does not pass rules that would keep something back."""
        if strict := next((rule.name for rule in rules if rule.action != "flag"), ""):
            raise InvalidRequest(
                f"guardrail {strict!r} cannot read the body: its content-encoding is {coding[:40]!r} ({error})",
                hint="send it without content-encoding, or with gzip or deflate",
            )
        self.note(Finding(rules[0].name, "unchecked", "REQUEST", "flag"))
        return Inspected()

    def _note_all(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.note(finding)

    # -- the reply -----------------------------------------------------------------------------------------------------

    async def _looked(self, reply: Reply) -> None:
        scanner, judges = self._scanner("reply"), self._judging("reply")
        if not scanner and not judges:
            return
        if not isinstance(reply.body, bytes):
            if reply.headers.get("content-type", "").startswith(EVENTS):
                hold = any(judge.blocks("reply") for judge in judges)
                reply.body = GuardedStream(reply.body, scanner, self, judged=bool(judges), hold=hold)
            elif strict := self._strictest(scanner, judges):
                await reply.body.aclose()
                self._unread(reply, strict)
            return
        body, rules = reply.body, self._rules("reply")
        try:
            if len(body) < LARGE:
                seen = inspect_reply(body, rules)
            else:
                seen = await offload.run(len(body), inspect_reply, body, rules)
        except (RecursionError, WorkTooLarge):  # nested too deep, or too much to look at
            if strict := self._strictest(scanner, judges):
                self._unread(reply, strict)
            return
        self._note_all(seen.findings)
        reply.body, said = body if seen.body is None else seen.body, seen.said
        stop = self._stopping() or await self.judge(said)
        self._tell()
        if stop is not None:
            self._refuse(reply, stop)

    @staticmethod
    def _strictest(scanner: Scanner, judges: list[Judge]) -> str:
        """Of those who would block a reply, one; empty: nobody would."""
        return scanner.strictest or next((each.name for each in judges if each.blocks("reply")), "")

    def _unread(self, reply: Reply, policy: str) -> None:
        """Nobody can look into it: a stream that is none of events, or what is nested too deep."""
        stop = Finding(policy, "unchecked", "RESPONSE", "block")
        self.note(stop)
        self._tell()
        self._refuse(reply, stop)

    def _refuse(self, reply: Reply, stop: Finding) -> None:
        """What it cost stays: it was answered, only not shown."""
        told = error_reply(self._call.dialect, _blocked(stop))
        reply.status, reply.headers, reply.body = told.status, told.headers, told.body
        reply.ended, reply.error = told.ended, told.error

    # -- as GuardedStream sees it --------------------------------------------------------------------------------------

    def note(self, finding: Finding) -> None:
        if finding not in self._call.findings:
            self._call.findings.append(finding)

    async def judge(self, said: str) -> Finding | None:
        return await self._judged("reply", said)

    def last_words(self, finding: Finding) -> bytes:
        assert self._reply is not None
        error = _blocked(finding)
        self._reply.ended, self._reply.error = "cut", error.code
        words = last_words(self._call.dialect, error)
        if words is None:
            raise error
        return words

    # ------------------------------------------------------------------------------------------------------------------

    def _rules(self, side: Side) -> tuple[PatternRule, ...]:
        return tuple(rule for rule in self._rails.patterns if rule.looks_at(side))

    def _scanner(self, side: Side) -> Scanner:
        return Scanner(self._rules(side), _CHECKS[side])

    def _judging(self, side: Side) -> list[Judge]:
        return [judge for judge in self._rails.judges if judge.asked(side)]

    def _stopping(self) -> Finding | None:
        return next((each for each in self._call.findings if each.action == "block"), None)

    async def _judged(self, side: Side, said: str) -> Finding | None:
        if not said.strip():
            return None
        for judge in self._judging(side):
            found = await self._judges.verdict(judge, said, self._call, self._beside)
            for entry, action in decided(judge.asked(side), found):
                finding = Finding(judge.name, entry, _CHECKS[side], action)
                self.note(finding)
                if action == "block":
                    return finding
        return None

    def _tell(self) -> None:
        """In the reply's header, as far as it is known before its first byte."""
        found = self._call.findings
        if found:
            action = worst(found)
            told = {"findings": [_shown(each) for each in found[:LONGEST_HEADER]], "action": (action or "").upper()}
            self._call.notes[HEADER] = json.dumps(told)  # with nothing but ASCII, as headers want it


async def _with_body(step: Step, body: bytes | None) -> Step:
    if body is step.body or body is None:
        return step
    surveyed = await offload.run(len(body), survey, body) if len(body) >= WORK_LARGE else None
    seen = None if surveyed is None else surveyed.seen
    return msgspec.structs.replace(step, body=body, seen=seen, surveyed=surveyed)


def _shown(finding: Finding) -> dict[str, Any]:
    profile = {"context": {}, "entry_ids": [finding.entry], "profile_id": finding.policy}
    return {"profile": profile, "policy_ids": [finding.policy], "check": finding.check}


def _blocked(finding: Finding) -> Blocked:
    reply, judged = finding.check == "RESPONSE", finding.entry[:1] == "S" or finding.entry == "unchecked"
    what = "response" if reply else "request"
    number = (2017 if reply else 2016) if judged else (2030 if reply else 2029)
    why = "it could not be checked" if finding.entry == "unchecked" else f"it has {finding.entry}"
    return Blocked(f"the {what} was blocked by guardrail {finding.policy!r}: {why}", reply=reply, number=number)
