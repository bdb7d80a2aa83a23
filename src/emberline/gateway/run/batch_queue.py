"""BatchQueue: processes queued batches while the gateway has spare capacity.

A few requests of a batch are sent at a time. Results are saved regularly, so that a different process can continue the
batch if this process stops. Requests without a saved result are then sent again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest, NotFound, Overloaded
from emberline.gateway.core.errors import LimitExceeded, StoreFailed
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.gateway import InboundRequest
from emberline.gateway.run.batch_store import BatchStore, PackedRequests, RunBatch, decode_batch, pack_rows
from emberline.gateway.run.run_replies import FAILED_CODE, build_failure_envelope, is_provider_busy, read_envelope
from emberline.gateway.run.run_request import encode_request, translate_request
from emberline.gateway.store.base import Document, GatewayStore
from emberline.wire import sse

log = logging.getLogger("emberline.gateway")

Json = dict[str, Any]
SendRequest = Callable[[InboundRequest, str], Awaitable[GatewayReply]]  # takes a request and the id of the caller's key
MAX_BATCH_REQUESTS = 10_000
MAX_WAITING_BATCHES = 100  # per account
MAX_CONCURRENT_REQUESTS = 4
LEASE_S = 60.0  # time that a process owns a batch without renewing
SAVE_INTERVAL_S = 20.0
POLL_INTERVAL_S = 5.0  # for batches that other processes have queued
MAX_YIELD_S = 30.0  # time that a queued request waits for interactive ones
NESTING_MARGIN = 100  # levels of nesting that are added around a result when it is stored and sent
RESULTS_KEPT_S = 86_400.0  # also the time after which a batch gives up retrying
RETRY_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # while a provider is out of capacity; the last one repeats
_RETRIED_ERRORS = (LimitExceeded.code, StoreFailed.code)  # temporary failures of the gateway itself


class BatchQueue:
    def __init__(
        self, store: GatewayStore, send_request: SendRequest, count_open_requests: Callable[[], int], wall_clock: Clock
    ) -> None:
        """Create the queue.

        `count_open_requests` returns how many requests the gateway is serving, including those of this queue.
        """
        self._batches = BatchStore(store)
        self._send_request = send_request
        self._open_requests = count_open_requests
        self._wall_clock = wall_clock
        self._owner = os.urandom(8).hex()  # names this process in leases
        self._in_progress = 0  # requests
        self._batch_added = asyncio.Event()
        self._listed_version, self._next_expiry_ms = -1, math.inf  # of the store when no batch was left to process

    # -- interface -----------------------------------------------------------------------------------------------------

    async def add(
        self,
        account: str,
        gateway: str,
        model: str,
        key_id: str,
        requests: PackedRequests,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> RunBatch:
        """Queue a batch. Raise Overloaded if the account has too many unfinished batches.

        `key_id`: the caller's key, whose permissions are checked when each request is sent. `headers` are sent with
        each request.
        """
        if (waiting := await self._count_unfinished(account)) >= MAX_WAITING_BATCHES:
            raise Overloaded(
                f"account {account[:80]!r} has {waiting} unfinished batches, at most {MAX_WAITING_BATCHES} are allowed",
                retry_after=60,
                hint="wait until a batch is done",
            )
        batch = RunBatch.new(account, gateway, model, key_id, headers, requests.count, self._now_ms())
        await self._batches.add_batch(batch, requests)
        self._batch_added.set()
        return batch

    async def _count_unfinished(self, account: str) -> int:
        """Return the number of the account's unfinished batches.

        Counting stops soon after the limit is reached.
        """
        count, after = 0, ("", "")
        while count < MAX_WAITING_BATCHES and (page := await self._batches.list_batches(account, after)):
            count += sum(decode_batch(each).status != "done" for each in page)
            after = (page[-1].id, page[-1].account)
        return count

    async def read_result(self, account: str, batch_id: str, identity: Identity) -> Json:
        """Return the batch's status, or its results if it is done.

        Raise NotFound if the batch does not exist or was queued with a different key.
        """
        found = await self._batches.find_batch(account, batch_id)
        if found is None or not (identity.is_admin or found[0].key_id == identity.key_id):
            raise NotFound(
                f"account {account[:80]!r} has no batch {batch_id[:80]!r} that this key queued",
                hint="use the key that queued the batch; results are deleted after a day",
            )
        batch = found[0]
        if batch.status != "done":
            return batch.summary
        results, _ = await self._batches.read_part(batch, "out")
        return {"responses": results, "usage": _sum_usage(results)}

    async def encode(self, account: str, identity: Identity, result: Json) -> bytes:
        """Return a batch's result as JSON. It may be large, so a thread of the batches encodes it."""
        return await self._batches.run_in_thread((account, identity.key_id), sse.dumps, result)

    @asynccontextmanager
    async def run_in_background(self) -> AsyncIterator[BatchQueue]:
        """Process batches in the background while this context is open."""
        task = asyncio.create_task(self._process_batches())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._batches.close()

    # -- background work -----------------------------------------------------------------------------------------------

    async def _process_batches(self) -> None:
        while True:
            try:
                found_batch = await self._process_oldest_batch()
            except EmberlineError as e:  # the store failed, or another process took the batch first
                log.warning("Processing a batch failed, retrying: error=%s", e)
                found_batch = False
            except Exception:
                log.exception("Processing a batch failed with an internal error, retrying")
                found_batch = False
            if not found_batch:
                self._batch_added.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._batch_added.wait(), POLL_INTERVAL_S)

    async def _process_oldest_batch(self) -> bool:
        """Process the oldest batch that no process is working on, and delete expired results.

        Return whether a batch was processed. The batches are listed only if the store has changed since the last time,
        or if results or another process's lease have expired.
        """
        version = await self._batches.store_version()
        if version == self._listed_version and self._now_ms() <= self._next_expiry_ms:
            return False
        after, next_expiry_ms = ("", ""), math.inf
        while page := await self._batches.list_batches(after=after):
            for document in page:
                batch = decode_batch(document)
                expires_ms = batch.until if batch.status != "done" else batch.finished + RESULTS_KEPT_S * 1e3
                if self._now_ms() <= expires_ms:
                    next_expiry_ms = min(next_expiry_ms, expires_ms)
                elif batch.status == "done":
                    await self._batches.remove_batch(document, self._now_ms())
                else:
                    await self._complete_batch(batch, document)
                    return True
            after = (page[-1].id, page[-1].account)
        self._listed_version, self._next_expiry_ms = version, next_expiry_ms
        return False

    async def _complete_batch(self, batch: RunBatch, document: Document) -> None:
        requests, _ = await self._batches.read_part(batch, "in")
        results, stored = await self._batches.read_part(batch, "out")
        progress = _BatchProgress(batch, document.version, results, 0 if stored is None else stored.version)
        await self._save_progress(progress)
        done = {result["id"] for result in results}
        remaining = iter([(index, each) for index, each in enumerate(requests) if index not in done])
        tasks = [
            asyncio.create_task(self._answer_requests(progress, remaining)) for _ in range(MAX_CONCURRENT_REQUESTS)
        ]
        try:
            pending = set(tasks)
            while pending:
                finished, pending = await asyncio.wait(pending, timeout=SAVE_INTERVAL_S)
                for task in finished:
                    task.result()
                if pending:
                    await self._save_progress(progress)
            batch.status, batch.finished = "done", self._now_ms()
            await self._save_progress(progress)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(EmberlineError, TimeoutError):  # give up the lease: any process may continue
                batch.until = -1
                await asyncio.wait_for(self._save_progress(progress), 5.0)
            raise

    async def _save_progress(self, progress: _BatchProgress) -> None:
        """Store new results and renew this process's lease on the batch.

        If the batch's field `until` is negative, end the lease instead.
        """
        batch, now = progress.batch, self._now_ms()
        if batch.status != "done":
            batch.status, batch.owner = "running", self._owner
        batch.until = 0 if batch.until < 0 else now + round(LEASE_S * 1e3)
        has_new = len(progress.results) > progress.saved or batch.status == "done"
        results = sorted(progress.results, key=lambda each: each["id"])
        await self._batches.save_batch(
            batch, progress.version, now, (results, progress.results_version) if has_new else None
        )
        progress.version, progress.saved = progress.version + 1, len(results)
        progress.results_version += has_new

    async def _answer_requests(self, progress: _BatchProgress, numbered_requests: Any) -> None:
        for index, request in numbered_requests:
            progress.results.append(await self._answer_request(progress.batch, index, request))

    async def _answer_request(self, batch: RunBatch, index: int, request: Json) -> Json:
        row = {"id": index, "success": False, "external_reference": request.get("external_reference")}
        try:
            envelope = await self._send_with_retries(batch, request)
            _check_nesting(envelope)
        except Exception as e:  # fails this request only: a retry would fail, too, and cost again
            log.exception("Request of a batch failed with an internal error: batch=%s request=%d", batch.id, index)
            envelope = build_failure_envelope(
                FAILED_CODE, f"the request failed with an internal error: {type(e).__name__}"
            )
        if envelope["success"]:
            return {**row, "success": True, "result": envelope["result"]}
        return {**row, "error": envelope["errors"][0]}

    async def _send_with_retries(self, batch: RunBatch, request: Json) -> Json:
        """Return the reply in the envelope of Workers AI. Retry for up to a day while there is no capacity."""
        until = batch.created + RESULTS_KEPT_S * 1e3
        retries = 0
        while True:
            await self._wait_while_busy()
            envelope, is_temporary = await self._send_once(batch, request)
            if not is_temporary or self._now_ms() > until:
                return envelope
            await asyncio.sleep(RETRY_DELAYS_S[min(retries, len(RETRY_DELAYS_S) - 1)])
            retries += 1

    async def _send_once(self, batch: RunBatch, request: Json) -> tuple[Json, bool]:
        """Return the reply in the envelope of Workers AI, and whether it is a temporary failure."""
        encoded = encode_request(batch.model, _extract_request_input(request))
        path = f"/accounts/{batch.account}/ai{encoded.path}"
        headers = {**batch.asked, "content-type": "application/json", "cf-aig-gateway-id": batch.gateway}
        self._in_progress += 1
        try:
            reply = await self._send_request(InboundRequest("POST", path, "", headers, encoded.body), batch.key_id)
            try:
                return await read_envelope(encoded, reply), is_provider_busy(reply) or reply.error in _RETRIED_ERRORS
            finally:
                await reply.close()
        finally:
            self._in_progress -= 1

    async def _wait_while_busy(self) -> None:
        """Wait while the gateway is busy with requests that are not from this queue, for at most MAX_YIELD_S."""
        for _ in range(int(MAX_YIELD_S / 0.25)):
            if self._open_requests() - self._in_progress < MAX_CONCURRENT_REQUESTS:
                return
            await asyncio.sleep(0.25)

    def _now_ms(self) -> int:
        return round(self._wall_clock.now() * 1e3)


class _BatchProgress(msgspec.Struct):
    """The progress of the batch that this process works on."""

    batch: RunBatch
    version: int  # of the stored batch
    results: list[Json]
    results_version: int  # of the stored results; 0: none are stored
    saved: int = 0  # number of stored results


def check_requests(model: str, requests: Any) -> PackedRequests:
    """Return a batch's requests in their stored form. Raise InvalidRequest if a request is invalid."""
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise InvalidRequest(
            "requests must be a list of objects, one for each input",
            param="requests",
            hint='send {"requests": [{"prompt": "..."}, ...]}',
        )
    if not 1 <= len(requests) <= MAX_BATCH_REQUESTS:
        raise InvalidRequest(
            f"requests must have 1 to {MAX_BATCH_REQUESTS} entries, not {len(requests)}",
            param="requests",
            hint="split the batch",
        )
    for each in requests:
        if each.get("stream"):
            raise InvalidRequest(
                "requests[].stream must not be true, because queued requests cannot be streamed",
                param="requests[].stream",
                hint="remove stream",
            )
        translate_request(model, _extract_request_input(each))
    return PackedRequests(len(requests), pack_rows(requests))


def _extract_request_input(request: Json) -> Json:
    return {name: value for name, value in request.items() if name != "external_reference"}


def _check_nesting(envelope: Json) -> None:
    """Raise RecursionError if the reply is nested too deeply to be stored and sent with other results."""
    nested: Any = envelope
    for _ in range(NESTING_MARGIN):
        nested = [nested]
    msgspec.json.encode(nested)


def _sum_usage(results: list[Json]) -> Json:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usages = [(each.get("result") or {}).get("usage") or {} for each in results]
    return {name: sum(each.get(name) or 0 for each in usages) for name in names}
