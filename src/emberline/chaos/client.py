"""ChaosClient: sends requests to the router as users do, and judges the replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from emberline.chaos.answer import Answer
from emberline.chaos.case import Case
from emberline.chaos.sight import Sight, Sights

MARGIN = 15.0  # beyond its deadline, after which a request counts as hung


class Verdict(StrEnum):
    ANSWERED = "answered"
    ERROR = "errors"  # an error in the API's format
    CUT = "cut"  # the connection broke, as when the router dies
    LEFT = "left"  # the client disconnected
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
        """Send a request and return its outcome. Cancelling it disconnects the client."""
        started_at = asyncio.get_running_loop().time()
        raw = bytearray()
        headers = {"content-type": "application/json"} | ({"x-session-affinity": session} if session else {})
        try:
            async with asyncio.timeout(self._deadline + MARGIN):
                body = case.marked(sight.name)
                async with self._session.post(self._url + case.path, data=body, headers=headers) as reply:
                    async for part in reply.content.iter_any():
                        raw += part
            verdict, detail = judged(case, reply.status, bytes(raw))
        except TimeoutError:
            verdict, detail = Verdict.HUNG, f"at stage {sight.stage}, after {len(raw)} bytes"
        except (aiohttp.ClientError, OSError) as e:
            difference = Answer.of_stream(case.path, bytes(raw)).against(case.right) if case.stream and raw else ""
            verdict, detail = (Verdict.WRONG, difference) if difference else (Verdict.CUT, repr(e))
        finally:
            self._sights.forget(sight)
        return Ending(verdict, detail, started_at, asyncio.get_running_loop().time() - started_at)


def judged(case: Case, status: int, raw: bytes) -> tuple[Verdict, str]:
    is_stream = case.stream and status == 200
    reply = Answer.of_stream(case.path, raw) if is_stream else Answer.of_body(status, raw)
    if difference := reply.against(case.right):
        return Verdict.WRONG, difference
    if is_stream and reply.endings != 1:
        return Verdict.WRONG, f"the stream ended {reply.endings} times"
    if reply.error:
        return Verdict.ERROR, reply.error
    return (Verdict.ANSWERED, "") if reply.whole else (Verdict.WRONG, f"neither answer nor error: {raw[-100:]!r}")
