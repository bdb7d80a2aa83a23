"""Queue: batches one after the other, a few requests at a time, while nobody else is waiting. What was answered is
kept, so that another process can go on where one stopped; a request that was under way then is asked once more."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest, NotFound, Overloaded
from emberline.gateway.call import Reply
from emberline.gateway.errors import LimitExceeded, StoreFailed
from emberline.gateway.gateway import Request
from emberline.gateway.keys.identity import Identity
from emberline.gateway.run.answer import FAILED, failed, is_busy, told
from emberline.gateway.run.batch import Batch, PackedRequests, Shelf, packed_rows, read
from emberline.gateway.run.question import question, written
from emberline.gateway.store.base import Document, Store

log = logging.getLogger("emberline.gateway")

Json = dict[str, Any]
Ask = Callable[[Request, str], Awaitable[Reply]]  # a request, and the id of the key that it is asked with
MOST_REQUESTS = 10_000  # of a batch
MOST_WAITING = 100  # batches of an account
WIDTH = 4  # requests under way
LEASE = 60.0  # seconds that a batch is one process's
SAVE = 20.0  # seconds between two times that answers are kept
LOOK = 5.0  # seconds between two looks for batches of other processes
PATIENCE = 30.0  # seconds that a request lets others go first
ROOM = 100  # levels that an answer may be nested in where it is kept and told
KEPT = 86_400.0  # seconds that answers wait to be fetched, and that a batch has to become them
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before a provider without room is asked again; then always the last
_PASSES = (LimitExceeded.code, StoreFailed.code)  # as that does


class Queue:
    def __init__(self, store: Store, ask: Ask, others: Callable[[], int], wall: Clock) -> None:
        """`others`: how many requests the gateway is busy with."""
        self._shelf = Shelf(store)
        self._ask = ask
        self._others = others
        self._wall = wall
        self._me = os.urandom(8).hex()
        self._mine = 0  # requests under way
        self._woken = asyncio.Event()

    # -- from outside --------------------------------------------------------------------------------------------------

    async def add(
        self,
        account: str,
        gateway: str,
        model: str,
        key_id: str,
        requests: PackedRequests,
        asked: Mapping[str, str] = MappingProxyType({}),
    ) -> Batch:
        """`key_id`: what its key may do when a request is sent counts. `asked`: the headers that each is sent with."""
        if (waiting := await self._waiting(account)) >= MOST_WAITING:
            raise Overloaded(f"{waiting} batches are waiting already", retry_after=60)
        batch = Batch.new(account, gateway, model, key_id, asked, requests.count, self._now())
        await self._shelf.add(batch, requests)
        self._woken.set()
        return batch

    async def _waiting(self, account: str) -> int:
        """Batches of theirs that are not done, at most a little over what may."""
        count, after = 0, ("", "")
        while count < MOST_WAITING and (page := await self._shelf.open(account, after)):
            count += sum(read(each).status != "done" for each in page)
            after = (page[-1].id, page[-1].account)
        return count

    async def look(self, account: str, id: str, identity: Identity) -> Json:
        """How it stands; its answers, if it is done."""
        found = await self._shelf.find(account, id)
        if found is None or not (identity.admin or found[0].key_id == identity.key_id):
            raise NotFound(f"there is no batch {id[:80]!r}")
        batch = found[0]
        if batch.status != "done":
            return batch.brief
        answers, _ = await self._shelf.part(batch, "out")
        return {"responses": answers, "usage": _sum(answers)}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Queue]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    # -- the work ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                worked = await self._step()
            except EmberlineError as e:  # the store does not answer, or somebody else was faster
                log.warning("batches: %s", e)
                worked = False
            except Exception:
                log.exception("batches")
                worked = False
            if not worked:
                self._woken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), LOOK)

    async def _step(self) -> bool:
        """The oldest batch that nobody works on. False: there is none."""
        after = ("", "")
        while page := await self._shelf.open(after=after):
            for document in page:
                batch = read(document)
                if batch.status == "done":
                    if self._now() > batch.finished + KEPT * 1e3:
                        await self._shelf.remove(document, self._now())
                elif batch.until < self._now():
                    await self._work(batch, document)
                    return True
            after = (page[-1].id, page[-1].account)
        return False

    async def _work(self, batch: Batch, document: Document) -> None:
        requests, _ = await self._shelf.part(batch, "in")
        answers, kept = await self._shelf.part(batch, "out")
        work = _Work(batch, document.version, answers, 0 if kept is None else kept.version)
        await self._save(work)
        done = {answer["id"] for answer in answers}
        rest = iter([(at, each) for at, each in enumerate(requests) if at not in done])
        tasks = [asyncio.create_task(self._lane(work, rest)) for _ in range(WIDTH)]
        try:
            pending = set(tasks)
            while pending:
                finished, pending = await asyncio.wait(pending, timeout=SAVE)
                for task in finished:
                    task.result()
                if pending:
                    await self._save(work)
            batch.status, batch.finished = "done", self._now()
            await self._save(work)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(EmberlineError, TimeoutError):  # what is left is anybody's
                batch.until = -1
                await asyncio.wait_for(self._save(work), 5.0)
            raise

    async def _save(self, work: _Work) -> None:
        batch, now = work.batch, self._now()
        if batch.status != "done":
            batch.status, batch.owner = "running", self._me
        batch.until = 0 if batch.until < 0 else now + round(LEASE * 1e3)
        new = len(work.answers) > work.saved or batch.status == "done"
        answers = sorted(work.answers, key=lambda each: each["id"])
        await self._shelf.keep(batch, work.version, now, (answers, work.out) if new else None)
        work.version, work.out, work.saved = work.version + 1, work.out + new, len(answers)

    async def _lane(self, work: _Work, rest: Any) -> None:
        for at, request in rest:
            work.answers.append(await self._answer(work.batch, at, request))

    async def _answer(self, batch: Batch, at: int, request: Json) -> Json:
        row = {"id": at, "success": False, "external_reference": request.get("external_reference")}
        try:
            said = await self._said(batch, request)
            _check_depth(said)
        except Exception as e:  # its own, not the batch's: asked again it would be the same, and paid for again
            log.exception("request %d of batch %s", at, batch.id)
            said = failed(FAILED, f"the request could not be answered: {type(e).__name__}")
        if said["success"]:
            return {**row, "success": True, "result": said["result"]}
        return {**row, "error": said["errors"][0]}

    async def _said(self, batch: Batch, request: Json) -> Json:
        """When there is room for it."""
        until = batch.created + KEPT * 1e3
        tried = 0
        while True:
            await self._turn()
            said, busy = await self._asked(batch, request)
            if not busy or self._now() > until:
                return said
            await asyncio.sleep(PAUSES[min(tried, len(PAUSES) - 1)])
            tried += 1

    async def _asked(self, batch: Batch, request: Json) -> tuple[Json, bool]:
        asked = written(batch.model, _input(request))
        path = f"/accounts/{batch.account}/ai{asked.path}"
        headers = {**batch.asked, "content-type": "application/json", "cf-aig-gateway-id": batch.gateway}
        self._mine += 1
        try:
            reply = await self._ask(Request("POST", path, "", headers, asked.body), batch.key_id)
            try:
                return await told(asked, reply), is_busy(reply) or reply.error in _PASSES
            finally:
                await reply.close()
        finally:
            self._mine -= 1

    async def _turn(self) -> None:
        """Others go first, but not for ever."""
        for _ in range(int(PATIENCE / 0.25)):
            if self._others() - self._mine < WIDTH:
                return
            await asyncio.sleep(0.25)

    def _now(self) -> int:
        return round(self._wall.now() * 1e3)


class _Work(msgspec.Struct):
    """What this process knows of the batch it works on."""

    batch: Batch
    version: int  # of the stored batch
    answers: list[Json]
    out: int  # the version of the stored answers; 0: there are none
    saved: int = 0  # how many of them


def checked_requests(model: str, requests: Any) -> PackedRequests:
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise InvalidRequest("requests must be a list of inputs", param="requests")
    if not 1 <= len(requests) <= MOST_REQUESTS:
        raise InvalidRequest(f"there are {len(requests)} requests; 1 to {MOST_REQUESTS} are taken", param="requests")
    for each in requests:
        if each.get("stream"):
            raise InvalidRequest("what is queued cannot be streamed", param="requests[].stream")
        question(model, _input(each))
    return PackedRequests(len(requests), packed_rows(requests))


def _input(request: Json) -> Json:
    return {name: value for name, value in request.items() if name != "external_reference"}


def _check_depth(said: Json) -> None:
    """RecursionError, if it could not be written, or read again, among others."""
    deep: Any = said
    for _ in range(ROOM):
        deep = [deep]
    msgspec.json.encode(deep)


def _sum(answers: list[Json]) -> Json:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    used = [(each.get("result") or {}).get("usage") or {} for each in answers]
    return {name: sum(each.get(name) or 0 for each in used) for name in names}
