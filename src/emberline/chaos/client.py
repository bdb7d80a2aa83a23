"""ChaosClient: sends a request to the router, and compares the reply with the known answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from emberline.chaos.observed_reply import ObservedReply
from emberline.chaos.reference_case import ReferenceCase
from emberline.chaos.request_progress import RequestObserver, RequestProgress
from emberline.chaos.resuming_client import ResumedReply, fetch_with_resumption
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
    resumptions: int = 0  # connections that continued the stream, after an earlier one broke


class ChaosClient:
    def __init__(
        self,
        pool: HTTPConnectionPool,
        url: str,
        observer: RequestObserver,
        deadline: float,
        *,
        reconnects: bool = False,
    ) -> None:
        """`reconnects`: continue a stream with Last-Event-ID when its connection breaks."""
        self._reconnects = reconnects
        self._pool = pool
        self._url = url  # without a path
        self._observer = observer
        self._deadline_s = deadline

    async def run(self, case: ReferenceCase, progress: RequestProgress, session: str = "") -> RequestOutcome:
        """Send a request and return its outcome. Cancelling this coroutine closes the client's connection."""
        started_at = asyncio.get_running_loop().time()
        reply = ResumedReply()
        headers = {"content-type": "application/json"} | ({"x-session-affinity": session} if session else {})
        try:
            async with asyncio.timeout(self._deadline_s + HANG_MARGIN_S):
                body = case.encode_with_request_marker(progress.marker_text)
                await fetch_with_resumption(
                    self._pool, self._url, case.path, headers, body, reply, reconnects=self._reconnects
                )
            verdict, detail = judge_reply(case, reply.status, reply.body)
        except TimeoutError:
            verdict, detail = Verdict.HUNG, f"at stage {progress.stage}, after {len(reply.body)} bytes"
        except UpstreamFailed as e:
            difference = (
                ObservedReply.from_stream(case.path, reply.body).describe_difference_from(case.expected)
                if case.is_stream and reply.body
                else ""
            )
            verdict, detail = (Verdict.WRONG, difference) if difference else (Verdict.CUT, repr(e))
        finally:
            self._observer.stop_tracking(progress)
        duration_s = asyncio.get_running_loop().time() - started_at
        return RequestOutcome(verdict, detail, started_at, duration_s, reply.resumptions)


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
