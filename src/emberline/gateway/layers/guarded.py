"""Guarded: a layer that looks at what goes to a model and at what comes back, by the gateway's guardrails. What it
blocks is answered with an error, and billed for what it had cost by then."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable
from typing import Any, Literal

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.key import canonical
from emberline.gateway.call import Call, Handler, Reply
from emberline.gateway.costs.beside import Beside
from emberline.gateway.errors import Blocked
from emberline.gateway.guardrails.finding import Check, Finding
from emberline.gateway.guardrails.judge import Judges, decided
from emberline.gateway.guardrails.policy import Guardrails, Judge
from emberline.gateway.guardrails.scanner import Scanner, redacted, worst
from emberline.gateway.guardrails.stream import GuardedStream
from emberline.gateway.guardrails.texts import Text, conversation, request_texts, silence, texts_of
from emberline.gateway.refusal import error_reply, last_words

HEADER = "cf-aig-dlp"
LONGEST_HEADER = 20  # findings told in it
EVENTS = "text/event-stream"
Side = Literal["prompt", "reply"]
_CHECKS: dict[Side, Check] = {"prompt": "REQUEST", "reply": "RESPONSE"}


class Guarded:
    def __init__(self, ask: Handler, clock: Clock) -> None:
        """`ask`: who answers a judge's question."""
        self._judges = Judges(ask, clock)

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            rails = call.settings.guardrails
            if not rails or call.method != "POST":
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
            call = self._prompt()
            said = _said(call)
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
                if reply.status < 400:
                    await self._looked(reply)
            except BaseException:  # the client left while it was judged
                await reply.close()
                raise
        reply.endings.append(self._beside.add)
        return reply

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def _prompt(self) -> Call:
        """The call without what is to be redacted."""
        call, scanner = self._call, self._scanner("prompt")
        if not scanner:
            return call
        if not any(step.body is not None for step in call.steps):
            body = self._scanned(scanner, call.body)
            if body is call.body:
                return call
            call.redacted.append(body)
            return call.moved(body=body)
        bodies = [None if step.body is None else self._scanned(scanner, step.body) for step in call.steps]
        if all(body is step.body for body, step in zip(bodies, call.steps, strict=True)):
            return call
        call.redacted.append(b"[%b]" % b",".join(body for body in bodies if body is not None))
        steps = tuple(msgspec.structs.replace(s, body=body) for s, body in zip(call.steps, bodies, strict=True))
        return call.moved(steps=steps)

    def _scanned(self, scanner: Scanner, body: bytes) -> bytes:
        """The same object, if nothing of it was redacted. What could be read in two ways is sent as it was read."""
        found = _decoded(body)
        if found is None:
            return self._scanned_text(scanner, body)
        changed = self._redacted(scanner, request_texts(found))
        ambiguous = not canonical(body).startswith(b"json:")
        return msgspec.json.encode(found) if changed or ambiguous else body

    def _scanned_text(self, scanner: Scanner, body: bytes) -> bytes:
        """Of what is no JSON. What is no text either is not looked into."""
        try:
            holder = [body.decode()]
        except UnicodeDecodeError:
            return body
        return holder[0].encode() if self._redacted(scanner, [Text(holder, 0, holder[0], ())]) else body

    def _redacted(self, scanner: Scanner, texts: Iterable[Text]) -> bool:
        """In place; False: there was nothing to redact."""
        changed = False
        for text in list(texts):
            spans = scanner.find(text.text)
            for span in spans:
                self.note(scanner.finding(span))
            made = redacted(text.text, spans)
            if made != text.text:
                text.holder[text.key], changed = made, True
        return changed

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
        try:
            said = self._whole(scanner, reply, reply.body)
        except RecursionError:  # nested too deep
            if strict := self._strictest(scanner, judges):
                self._unread(reply, strict)
            return
        stop = self._stopping() or await self.judge(said)
        self._tell()
        if stop is not None:
            self._refuse(reply, stop)

    def _whole(self, scanner: Scanner, reply: Reply, body: bytes) -> str:
        """What it said, before anything was redacted."""
        found = _decoded(body)
        if found is None:
            reply.body = self._scanned_text(scanner, body)
            return body.decode("utf-8", "ignore")
        said = "\n".join(text.text for text in texts_of(found) if text.grows)
        if self._redacted(scanner, texts_of(found)):
            silence(found)
            reply.body = msgspec.json.encode(found)
        return said

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

    def _scanner(self, side: Side) -> Scanner:
        return Scanner((rule for rule in self._rails.patterns if rule.looks_at(side)), _CHECKS[side])

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


def _shown(finding: Finding) -> dict[str, Any]:
    profile = {"context": {}, "entry_ids": [finding.entry], "profile_id": finding.policy}
    return {"profile": profile, "policy_ids": [finding.policy], "check": finding.check}


def _blocked(finding: Finding) -> Blocked:
    reply, judged = finding.check == "RESPONSE", finding.entry[:1] == "S" or finding.entry == "unchecked"
    what = "response" if reply else "request"
    number = (2017 if reply else 2016) if judged else (2030 if reply else 2029)
    why = "it could not be checked" if finding.entry == "unchecked" else f"it has {finding.entry}"
    return Blocked(f"the {what} was blocked by guardrail {finding.policy!r}: {why}", reply=reply, number=number)


def _said(call: Call) -> str:
    bodies = [step.body for step in call.steps if step.body is not None] or [call.body]
    return "\n".join(filter(None, (conversation(_decoded(body)) for body in bodies)))


def _decoded(body: bytes) -> Any:
    """None: it is no JSON. What is no UTF-8 in it is read as lenient readers would. RecursionError: it is nested too
    deep, which must not pass for none."""
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        return _decoded(body.decode("utf-8", "replace").encode())
    except msgspec.MsgspecError:
        return None
