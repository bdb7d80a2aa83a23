"""GuardrailLayer: checks requests and replies against the guardrails of the gateway.

A blocked request is answered with an error. The cost up to that moment is billed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import InvalidRequest, WorkTooLarge
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.body_summary import summarize_body
from emberline.gateway.core.errors import BlockedByGuardrail
from emberline.gateway.core.guardrail_finding import Check, GuardrailFinding
from emberline.gateway.core.guardrail_policy import Guardrails, Judge, PatternRule
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, RequestStep
from emberline.gateway.costs.extra_cost import ExtraCost
from emberline.gateway.error_replies import error_event, error_reply
from emberline.gateway.guardrails.inspection import (
    OFFLOAD_MIN_BYTES,
    InspectionResult,
    UnreadableBody,
    inspect_path,
    inspect_query,
    inspect_reply,
    inspect_request,
)
from emberline.gateway.guardrails.judge import JudgeClient, actions_for_categories
from emberline.gateway.guardrails.scanner import PatternScanner, most_severe_action
from emberline.gateway.guardrails.stream import GuardedStream

FINDINGS_HEADER = "cf-aig-dlp"
MAX_HEADER_FINDINGS = 20
EVENT_STREAM_TYPE = "text/event-stream"
CONTENT_ENCODING = "content-encoding"
Side = Literal["prompt", "reply"]
_CHECK_OF_SIDE: dict[Side, Check] = {"prompt": "REQUEST", "reply": "RESPONSE"}


class GuardrailLayer:
    def __init__(self, judge_handler: Handler, clock: Clock) -> None:
        """Create the layer. `judge_handler` sends a prompt to a judge (a moderation model)."""
        self._judges = JudgeClient(judge_handler, clock)

    def wrap(self, inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            guardrails = call.settings.guardrails
            if not guardrails:
                return inner(call)
            return GuardedCall(call, guardrails, self._judges).run(inner)

        return handle


class GuardedCall:
    """One request whose prompt and reply are checked by guardrails."""

    def __init__(self, call: GatewayRequest, guardrails: Guardrails, judges: JudgeClient) -> None:
        self._call, self._guardrails, self._judges = call, guardrails, judges
        self._extra_cost = ExtraCost()
        self._reply: GatewayReply | None = None

    async def run(self, inner: Handler) -> GatewayReply:
        try:
            call, text = await self._inspect_prompt()
        except RecursionError as e:
            raise InvalidRequest(
                "the body's JSON is nested too deeply for guardrails to check", hint="send JSON with fewer levels"
            ) from e
        finding = self._find_blocking_finding() or await self._ask_judges("prompt", text)
        self._set_findings_header()
        if finding is not None:
            reply = error_reply(call.dialect, _make_blocked_error(finding))
            reply.provider, reply.model, reply.micros = call.provider, call.model, 0
        else:
            reply = self._reply = await inner(call)
            try:
                if reply.status < 400 and _is_reply_checked(call):
                    await self._inspect_reply(reply)
            except BaseException:  # the client may leave while a judge is asked
                await reply.close()
                raise
        reply.close_callbacks.append(self._extra_cost.add_to_reply)
        return reply

    # -- the prompt ----------------------------------------------------------------------------------------------------

    async def _inspect_prompt(self) -> tuple[GatewayRequest, str]:
        """Return the request with redactions applied, and the text that the judges must read.

        Judges are moderation models.
        """
        call, rules = self._call, self._pattern_rules("prompt")
        if rules and not call.is_dialect_endpoint:
            endpoint, findings = inspect_path(call.endpoint, rules)
            self._record_findings(findings)
            call = call if endpoint is call.endpoint else call.with_changes(endpoint=endpoint)
        if rules and call.query:
            query, findings = inspect_query(call.query, rules)
            self._record_findings(findings)
            call = call if query is call.query else call.with_changes(query=query)
        if not any(step.body is not None for step in call.steps):
            result = await self._inspect_body(call.body, rules, call.headers)
            if result.body is None:
                return call, result.judged_text
            call.redacted_bodies.append(result.body)
            headers = {name: value for name, value in call.headers.items() if name != CONTENT_ENCODING}
            changed = call.with_changes(body=result.body, headers=headers)
            if len(result.body) >= LARGE_INPUT_BYTES:
                changed.body_summary = await offload.run(len(result.body), summarize_body, result.body)
                changed.body_fields = changed.body_summary.body_fields
            return changed, result.judged_text
        results = [None if s.body is None else await self._inspect_body(s.body, rules, {}) for s in call.steps]
        text = "\n".join(each.judged_text for each in results if each is not None and each.judged_text)
        if all(each is None or each.body is None for each in results):
            return call, text
        bodies = [s.body if each is None or each.body is None else each.body
                  for s, each in zip(call.steps, results, strict=True)]  # fmt: skip
        call.redacted_bodies.append(b"[%b]" % b",".join(body for body in bodies if body is not None))
        steps = [await _step_with_body(s, body) for s, body in zip(call.steps, bodies, strict=True)]
        return call.with_changes(steps=tuple(steps)), text

    async def _inspect_body(
        self, body: bytes, rules: tuple[PatternRule, ...], headers: Mapping[str, str]
    ) -> InspectionResult:
        if not rules and not self._judges_for("prompt"):
            return InspectionResult()
        content_type, encoding = headers.get("content-type", ""), headers.get(CONTENT_ENCODING, "")
        try:
            if len(body) < OFFLOAD_MIN_BYTES and not encoding:
                result = inspect_request(body, rules, content_type)
            else:
                result = await offload.run(len(body), inspect_request, body, rules, content_type, encoding)
        except UnreadableBody as e:
            return self._pass_or_reject_unreadable(rules, encoding, e)
        self._record_findings(result.findings)
        return result

    def _pass_or_reject_unreadable(
        self, rules: tuple[PatternRule, ...], encoding: str, error: UnreadableBody
    ) -> InspectionResult:
        """Let a body that cannot be decompressed pass, and record the finding that it was not checked.

        Raise InvalidRequest instead if one of the rules redacts or blocks.
        """
        if strict := next((rule.name for rule in rules if rule.action != "flag"), ""):
            raise InvalidRequest(
                f"guardrail {strict!r} cannot read the body with content-encoding {encoding[:40]!r}: {error}",
                hint="send the body without content-encoding, or with gzip or deflate",
            )
        self.record_finding(GuardrailFinding(rules[0].name, "unchecked", "REQUEST", "flag"))
        return InspectionResult()

    def _record_findings(self, findings: Iterable[GuardrailFinding]) -> None:
        for finding in findings:
            self.record_finding(finding)

    # -- the reply -----------------------------------------------------------------------------------------------------

    async def _inspect_reply(self, reply: GatewayReply) -> None:
        scanner, judges = self._make_scanner("reply"), self._judges_for("reply")
        if not scanner and not judges:
            return
        if not isinstance(reply.body, bytes):
            if reply.headers.get("content-type", "").startswith(EVENT_STREAM_TYPE):
                hold = any(judge.can_block("reply") for judge in judges)
                reply.body = GuardedStream(reply.body, scanner, self, is_judged=bool(judges), hold_all=hold)
            elif strict := self._find_blocking_guardrail(scanner, judges):
                await reply.body.aclose()
                self._block_unchecked(reply, strict)
            return
        body, rules = reply.body, self._pattern_rules("reply")
        try:
            if len(body) < OFFLOAD_MIN_BYTES:
                result = inspect_reply(body, rules)
            else:
                result = await offload.run(len(body), inspect_reply, body, rules)
        except (RecursionError, WorkTooLarge):  # nested too deeply, or too large
            if strict := self._find_blocking_guardrail(scanner, judges):
                self._block_unchecked(reply, strict)
            return
        self._record_findings(result.findings)
        reply.body, text = body if result.body is None else result.body, result.judged_text
        finding = self._find_blocking_finding() or await self.judge_reply(text)
        self._set_findings_header()
        if finding is not None:
            self._replace_with_error(reply, finding)

    @staticmethod
    def _find_blocking_guardrail(scanner: PatternScanner, judges: list[Judge]) -> str:
        """Return the name of a rule or judge that may redact or block a reply, or "" if there is none."""
        return scanner.first_enforcing_rule or next((each.name for each in judges if each.can_block("reply")), "")

    def _block_unchecked(self, reply: GatewayReply, guardrail: str) -> None:
        """Block a reply that cannot be checked: a stream without events, or JSON nested too deeply."""
        finding = GuardrailFinding(guardrail, "unchecked", "RESPONSE", "block")
        self.record_finding(finding)
        self._set_findings_header()
        self._replace_with_error(reply, finding)

    def _replace_with_error(self, reply: GatewayReply, finding: GuardrailFinding) -> None:
        """Replace the reply by an error. The usage and the cost stay, because the provider did answer."""
        error = error_reply(self._call.dialect, _make_blocked_error(finding))
        reply.status, reply.headers, reply.body = error.status, error.headers, error.body
        reply.ended, reply.error = error.ended, error.error

    # -- ReplyGuard, for GuardedStream ---------------------------------------------------------------------------------

    def record_finding(self, finding: GuardrailFinding) -> None:
        if finding not in self._call.findings:
            self._call.findings.append(finding)

    async def judge_reply(self, text: str) -> GuardrailFinding | None:
        return await self._ask_judges("reply", text)

    def end_with_error_event(self, finding: GuardrailFinding) -> bytes:
        """End the stream and return its error event.

        Raise BlockedByGuardrail if the dialect has no error events.
        """
        assert self._reply is not None
        error = _make_blocked_error(finding)
        self._reply.ended, self._reply.error = "cut", error.code
        event = error_event(self._call.dialect, error)
        if event is None:
            raise error
        return event

    # ------------------------------------------------------------------------------------------------------------------

    def _pattern_rules(self, side: Side) -> tuple[PatternRule, ...]:
        return tuple(rule for rule in self._guardrails.patterns if rule.applies_to(side))

    def _make_scanner(self, side: Side) -> PatternScanner:
        return PatternScanner(self._pattern_rules(side), _CHECK_OF_SIDE[side])

    def _judges_for(self, side: Side) -> list[Judge]:
        return [judge for judge in self._guardrails.judges if judge.category_actions(side)]

    def _find_blocking_finding(self) -> GuardrailFinding | None:
        return next((each for each in self._call.findings if each.action == "block"), None)

    async def _ask_judges(self, side: Side, text: str) -> GuardrailFinding | None:
        if not text.strip():
            return None
        for judge in self._judges_for(side):
            categories = await self._judges.judge_text(judge, text, self._call, self._extra_cost)
            for entry, action in actions_for_categories(judge.category_actions(side), categories):
                finding = GuardrailFinding(judge.name, entry, _CHECK_OF_SIDE[side], action)
                self.record_finding(finding)
                if action == "block":
                    return finding
        return None

    def _set_findings_header(self) -> None:
        """Write the findings to a header of the reply."""
        findings = self._call.findings
        if findings:
            action = (most_severe_action(findings) or "").upper()
            value = {"findings": [_finding_to_json(each) for each in findings[:MAX_HEADER_FINDINGS]], "action": action}
            self._call.reply_headers[FINDINGS_HEADER] = json.dumps(value)  # ASCII only, as a header requires


def _is_reply_checked(call: GatewayRequest) -> bool:
    """Return whether the reply may have a model's text. That of a GET is a response that was stored unchecked."""
    return call.method == "POST" or call.is_dialect_endpoint


async def _step_with_body(step: RequestStep, body: bytes | None) -> RequestStep:
    if body is step.body or body is None:
        return step
    summary = await offload.run(len(body), summarize_body, body) if len(body) >= LARGE_INPUT_BYTES else None
    fields = None if summary is None else summary.body_fields
    return msgspec.structs.replace(step, body=body, body_fields=fields, body_summary=summary)


def _finding_to_json(finding: GuardrailFinding) -> dict[str, Any]:
    profile = {"context": {}, "entry_ids": [finding.entry], "profile_id": finding.policy}
    return {"profile": profile, "policy_ids": [finding.policy], "check": finding.check}


def _make_blocked_error(finding: GuardrailFinding) -> BlockedByGuardrail:
    reply, judged = finding.check == "RESPONSE", finding.entry[:1] == "S" or finding.entry == "unchecked"
    subject = "response" if reply else "request"
    number = (2017 if reply else 2016) if judged else (2030 if reply else 2029)
    reason = "it could not be checked" if finding.entry == "unchecked" else f"it contains {finding.entry}"
    return BlockedByGuardrail(
        f"the {subject} was blocked by guardrail {finding.policy!r}: {reason}", is_reply=reply, cloudflare_code=number
    )
