"""Client: asks the router as its users do, and says how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from emberline.chaos.answer import Answer
from emberline.chaos.case import Case
from emberline.chaos.sight import Sight, Sights

MARGIN = 15.0  # seconds beyond its deadline after which a request hangs


class Verdict(StrEnum):
    ANSWERED = "answered"
    ERROR = "errors"  # typed
    CUT = "cut"  # by the death of the router, which nobody can report
    LEFT = "left"  # by the client
    HUNG = "hung"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Ending:
    verdict: Verdict
    why: str
    began: float
    seconds: float


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, sights: Sights, deadline: float) -> None:
        self._session = session
        self._url = url
        self._sights = sights
        self._deadline = deadline

    async def run(self, case: Case, sight: Sight, session: str = "") -> Ending:
        """A request from beginning to end. To leave it early, cancel."""
        began = asyncio.get_running_loop().time()
        raw = bytearray()
        headers = {"content-type": "application/json"} | ({"x-session-affinity": session} if session else {})
        try:
            async with asyncio.timeout(self._deadline + MARGIN):
                body = case.marked(sight.name)
                async with self._session.post(self._url + case.path, data=body, headers=headers) as reply:
                    async for part in reply.content.iter_any():
                        raw += part
            verdict, why = judged(case, reply.status, bytes(raw))
        except TimeoutError:
            verdict, why = Verdict.HUNG, f"at {sight.stage}, after {len(raw)} bytes"
        except (aiohttp.ClientError, OSError) as e:
            wrong = Answer.of_stream(case.path, bytes(raw)).against(case.right) if case.stream and raw else ""
            verdict, why = (Verdict.WRONG, wrong) if wrong else (Verdict.CUT, repr(e))
        finally:
            self._sights.forget(sight)
        return Ending(verdict, why, began, asyncio.get_running_loop().time() - began)


def judged(case: Case, status: int, raw: bytes) -> tuple[Verdict, str]:
    streamed = case.stream and status == 200
    answer = Answer.of_stream(case.path, raw) if streamed else Answer.of_body(status, raw)
    if wrong := answer.against(case.right):
        return Verdict.WRONG, wrong
    if streamed and answer.endings != 1:
        return Verdict.WRONG, f"a stream that ended {answer.endings} times"
    if answer.error:
        return Verdict.ERROR, answer.error
    return (Verdict.ANSWERED, "") if answer.whole else (Verdict.WRONG, f"neither answer nor error: {raw[-100:]!r}")
