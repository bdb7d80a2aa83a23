"""GuardrailLayer: checks requests and replies against the guardrails of the gateway.

A blocked call is answered with an error, and billed for what it had cost until then."""

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
LONGEST_HEADER = 20
EVENTS = "text/event-stream"
PACKED = "content-encoding"
Side = Literal["prompt", "reply"]
_CHECKS: dict[Side, Check] = {"prompt": "REQUEST", "reply": "RESPONSE"}


class Guarded:
    def __init__(self, ask: Handler, clock: Clock) -> None:
        """`judge_handler` sends a judge's question to its model."""
        self._judges = Judges(ask, clock)

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            guardrails = call.settings.guardrails
            if not guardrails or (call.method != "POST" and not (call.body or call.query)):
                return inner(call)
            return Watch(call, guardrails, self._judges).run(inner)

        return handle


class Watch:
    """One call whose request and reply are checked."""

    def __init__(self, call: Call, rails: Guardrails, judges: Judges) -> None:
        self._call, self._rails, self._judges = call, rails, judges
        self._beside = Beside()
        self._reply: Reply | None = None

    async def run(self, inner: Handler) -> Reply:
        try:
            call, text = await self._prompt()
        except RecursionError as e:
            raise InvalidRequest("the request's JSON is nested too deeply for guardrails to check it") from e
        finding = self._stopping() or await self._judged("prompt", text)
        self._tell()
        if finding is not None:
            reply = error_reply(call.dialect, _blocked(finding))
            reply.provider, reply.model, reply.micros = call.provider, call.model, 0
        else:
            reply = self._reply = await inner(call)
            try:
                if reply.status < 400 and call.method == "POST":
                    await self._looked(reply)
            except BaseException:  # the client may leave while a judge is asked
                await reply.close()
                raise
        reply.endings.append(self._beside.add)
        return reply

    # -- the prompt ----------------------------------------------------------------------------------------------------

    async def _prompt(self) -> tuple[Call, str]:
        """Return the call with redactions applied, and the text that judges are to read."""
        call, rules = self._call, self._rules("prompt")
        if rules and call.query:
            query, findings = inspect_query(call.query, rules)
            self._note_all(findings)
            call = call if query is call.query else call.moved(query=query)
        if not any(step.body is not None for step in call.steps):
            result = await self._inspected(call.body, rules, call.headers)
            if result.body is None:
                return call, result.said
            call.redacted.append(result.body)
            headers = {name: value for name, value in call.headers.items() if name != PACKED}
            changed = call.moved(body=result.body, headers=headers)
            if len(result.body) >= WORK_LARGE:
                changed.surveyed = await offload.run(len(result.body), survey, result.body)
                changed.seen = changed.surveyed.seen
            return changed, result.said
        results = [None if s.body is None else await self._inspected(s.body, rules, {}) for s in call.steps]
        text = "\n".join(each.said for each in results if each is not None and each.said)
        if all(each is None or each.body is None for each in results):
            return call, text
        bodies = [s.body if each is None or each.body is None else each.body
                  for s, each in zip(call.steps, results, strict=True)]  # fmt: skip
        call.redacted.append(b"[%b]" % b",".join(body for body in bodies if body is not None))
        steps = [await _with_body(s, body) for s, body in zip(call.steps, bodies, strict=True)]
        return call.moved(steps=tuple(steps)), text

    async def _inspected(self, body: bytes, rules: tuple[PatternRule, ...], headers: Mapping[str, str]) -> Inspected:
        if not rules and not self._judging("prompt"):
            return Inspected()
        content_type, encoding = headers.get("content-type", ""), headers.get(PACKED, "")
        try:
            if len(body) < LARGE and not encoding:
                result = inspect_request(body, rules, content_type)
            else:
                result = await offload.run(len(body), inspect_request, body, rules, content_type, encoding)
        except Unreadable as e:
            return self._unreadable(rules, encoding, e)
        self._note_all(result.findings)
        return result

    def _unreadable(self, rules: tuple[PatternRule, ...], encoding: str, error: Unreadable) -> Inspected:
        """Let an unreadable body pass with a finding. Raises InvalidRequest if a rule redacts or blocks."""
        if strict := next((rule.name for rule in rules if rule.action != "flag"), ""):
            raise InvalidRequest(
                f"guardrail {strict!r} cannot read the body with content-encoding {encoding[:40]!r}: {error}",
                hint="send the body without content-encoding, or with gzip or deflate",
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
                result = inspect_reply(body, rules)
            else:
                result = await offload.run(len(body), inspect_reply, body, rules)
        except (RecursionError, WorkTooLarge):  # nested too deeply, or too large
            if strict := self._strictest(scanner, judges):
                self._unread(reply, strict)
            return
        self._note_all(result.findings)
        reply.body, text = body if result.body is None else result.body, result.said
        finding = self._stopping() or await self.judge(text)
        self._tell()
        if finding is not None:
            self._refuse(reply, finding)

    @staticmethod
    def _strictest(scanner: Scanner, judges: list[Judge]) -> str:
        """Return the name of a rule or judge that may redact or block a reply, or "" if there is none."""
        return scanner.strictest or next((each.name for each in judges if each.blocks("reply")), "")

    def _unread(self, reply: Reply, policy: str) -> None:
        """Block a reply that cannot be checked: a stream without events, or JSON nested too deeply."""
        finding = Finding(policy, "unchecked", "RESPONSE", "block")
        self.note(finding)
        self._tell()
        self._refuse(reply, finding)

    def _refuse(self, reply: Reply, stop: Finding) -> None:
        """Replace the reply by an error. Its usage and cost stay, because the provider did answer."""
        error = error_reply(self._call.dialect, _blocked(stop))
        reply.status, reply.headers, reply.body = error.status, error.headers, error.body
        reply.ended, reply.error = error.ended, error.error

    # -- ReplyGuard, for GuardedStream ---------------------------------------------------------------------------------

    def note(self, finding: Finding) -> None:
        if finding not in self._call.findings:
            self._call.findings.append(finding)

    async def judge(self, said: str) -> Finding | None:
        return await self._judged("reply", said)

    def last_words(self, finding: Finding) -> bytes:
        """End the stream and return its error event. Raises Blocked if the dialect has no error events."""
        assert self._reply is not None
        error = _blocked(finding)
        self._reply.ended, self._reply.error = "cut", error.code
        event = last_words(self._call.dialect, error)
        if event is None:
            raise error
        return event

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
            categories = await self._judges.verdict(judge, said, self._call, self._beside)
            for entry, action in decided(judge.asked(side), categories):
                finding = Finding(judge.name, entry, _CHECKS[side], action)
                self.note(finding)
                if action == "block":
                    return finding
        return None

    def _tell(self) -> None:
        """Put the findings known so far into the reply's header."""
        findings = self._call.findings
        if findings:
            action = (worst(findings) or "").upper()
            value = {"findings": [_shown(each) for each in findings[:LONGEST_HEADER]], "action": action}
            self._call.notes[HEADER] = json.dumps(value)  # ASCII only, as a header requires


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
    why = "it could not be checked" if finding.entry == "unchecked" else f"it contains {finding.entry}"
    return Blocked(f"the {what} was blocked by guardrail {finding.policy!r}: {why}", reply=reply, number=number)
