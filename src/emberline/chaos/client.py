"""ChaosClient: sends a request to the router, and compares the reply with the known answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from emberline.chaos.observed_reply import ObservedReply
from emberline.chaos.reference_case import ReferenceCase
from emberline.chaos.request_progress import RequestObserver, RequestProgress
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed

HANG_MARGIN_S = 15.0  # beyond its deadline, after which a request counts as hung


class Verdict(StrEnum):
    ANSWERED = "answered"
    ERROR = "errors"  # an error in the API's format
    CUT = "cut"  # the connection broke, as when the router dies
    LEFT = "left"  # the client disconnected
    HUNG = "hung"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    verdict: Verdict
    detail: str
    started_at: float
    duration_s: float


class ChaosClient:
    def __init__(self, pool: HTTPConnectionPool, url: str, observer: RequestObserver, deadline: float) -> None:
        self._pool = pool
        self._url = url  # without a path
        self._observer = observer
        self._deadline_s = deadline

    async def run(self, case: ReferenceCase, progress: RequestProgress, session: str = "") -> RequestOutcome:
        """Send a request and return its outcome. Cancelling this coroutine closes the client's connection."""
        started_at = asyncio.get_running_loop().time()
        raw = bytearray()
        headers = {"content-type": "application/json"} | ({"x-session-affinity": session} if session else {})
        try:
            async with asyncio.timeout(self._deadline_s + HANG_MARGIN_S):
                body = case.encode_with_request_marker(progress.marker_text)
                reply = await self._pool.request(self._url, "POST", case.path, headers, body)
                try:
                    while part := await reply.read():
                        raw += part
                finally:
                    reply.close()
            verdict, detail = judge_reply(case, reply.status, bytes(raw))
        except TimeoutError:
            verdict, detail = Verdict.HUNG, f"at stage {progress.stage}, after {len(raw)} bytes"
        except UpstreamFailed as e:
            difference = (
                ObservedReply.from_stream(case.path, bytes(raw)).describe_difference_from(case.expected)
                if case.is_stream and raw
                else ""
            )
            verdict, detail = (Verdict.WRONG, difference) if difference else (Verdict.CUT, repr(e))
        finally:
            self._observer.stop_tracking(progress)
        return RequestOutcome(verdict, detail, started_at, asyncio.get_running_loop().time() - started_at)


def judge_reply(case: ReferenceCase, status: int, body: bytes) -> tuple[Verdict, str]:
    is_stream = case.is_stream and status == 200
    reply = ObservedReply.from_stream(case.path, body) if is_stream else ObservedReply.from_body(status, body)
    if difference := reply.describe_difference_from(case.expected):
        return Verdict.WRONG, difference
    if is_stream and reply.ending_count != 1:
        return Verdict.WRONG, f"the stream ended {reply.ending_count} times"
    if reply.error:
        return Verdict.ERROR, reply.error
    return (
        (Verdict.ANSWERED, "") if reply.is_complete else (Verdict.WRONG, f"neither answer nor error: {body[-100:]!r}")
    )
