"""Play: faults, one after another, on a scene with requests under way."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from emberline.chaos.case import Case, Cases
from emberline.chaos.client import Client, Ending, Verdict
from emberline.chaos.faults import FAULTS, Fault, Victims
from emberline.chaos.ledger import Ledger
from emberline.chaos.scene import SERVED, Place, Scene
from emberline.chaos.sight import Sight, Stage
from emberline.core.errors import EmberlineError
from emberline.router.policy import affinity

BESIDE = 2  # requests under way that no fault is aimed at
CHECKED = 40  # faults between two looks for leaks
FIRST_CASES = 6
TRIES = 4  # to bring a request to the stage where it is to be struck


@dataclass(slots=True)
class Play:
    scene: Scene
    cases: Cases
    dice: random.Random
    say: Callable[[str], None]
    ledger: Ledger = field(default_factory=Ledger)
    _going: asyncio.Event = field(default_factory=asyncio.Event)
    _beside: set[asyncio.Task[None]] = field(default_factory=set)
    _struck: tuple[str, str] = ("nothing", "")
    _fault_now: Fault | None = None
    _moves: int = 0  # until the last fault
    _ready: list[Place] = field(default_factory=list)  # who may answer the next request

    async def run(self, count: int) -> Ledger:
        scene = self.scene
        if missing := await scene.full_strength():
            raise EmberlineError(f"the cluster did not start: {missing}", hint=f"its logs are in {scene.home}")
        await self._prepare()
        self._going.set()
        self._beside = {asyncio.create_task(self._clients()) for _ in range(BESIDE)}
        try:
            await self._strike(count)
        finally:
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)
        return self.ledger

    async def _strike(self, count: int) -> None:
        ahead = list(islice(_drawn(self.dice), count))
        while ahead and (chosen := await self._next(ahead)) is not None:
            fault, stage = chosen
            if not await self._fault(fault, stage):
                if self.ledger.missed > count:
                    self.ledger.gave_up("requests do not come to where they are to be struck")
                    return
                ahead.insert(0, (fault, fault.stages[fault.stages.index(stage) - 1]))  # then at another
            elif len(ahead) % CHECKED == 0:
                await self._check()
                self.say(self.ledger.summary())

    async def _next(self, ahead: list[tuple[Fault, Stage]]) -> tuple[Fault, Stage] | None:
        """The first; while one of those who answer is missing, the first that is gentle. None: it does not recover."""
        answering, absent = self.scene.of("decode"), await self.scene.absent()
        self._ready = [place for place in answering if place.name not in absent]
        if absent and self._ready and len(absent) + len(self._ready) == len(answering):
            gentle = next((i for i, (fault, _) in enumerate(ahead) if fault.gentle), None)
            if gentle is not None:
                return ahead.pop(gentle)
        if missing := await self.scene.full_strength():
            self.ledger.gave_up(f"after {self._struck[0]}, {self._struck[1]}: {missing}")
            return None
        self._ready = answering
        return ahead.pop(0)

    async def _prepare(self) -> None:
        session = self.scene.session
        async with asyncio.timeout(120):
            while not await self.scene.is_ready(self.scene.reference):
                await asyncio.sleep(0.2)
        await self.cases.measure(session)
        for i in range(FIRST_CASES):
            await self.cases.new(session, long=i % 2 == 0, stream=i % 3 != 0)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _clients(self) -> None:
        """Asks again and again, whatever happens."""
        while True:
            await self._going.wait()
            sight = self.scene.sights.new()
            case = self.cases.old()
            ending = await self._client().run(case, sight)
            if ending.verdict is Verdict.LEFT:
                return
            self._passed(ending)
            await asyncio.sleep(1.0 if ending.verdict in (Verdict.ERROR, Verdict.CUT) else 0.01)

    def _passed(self, ending: Ending) -> None:
        during = self._fault_now.name if self._fault_now else self._struck[0]
        self.ledger.passed(ending, during, excused=self.scene.routerless(ending.began))

    def _client(self) -> Client:
        return Client(self.scene.session, self.scene.url, self.scene.sights, self.scene.settings.deadline)

    async def _case(self, fault: Fault, stage: Stage) -> Case:
        def fits(case: Case) -> bool:
            return (case.stream or stage < Stage.FIRST) and (case.long or not fault.old)

        known = [case for case in self.cases.known if fits(case)]
        fresh = stage in (Stage.PREFILL, Stage.TRANSFER) or self.dice.random() < 0.5
        if known and (fault.old or not fresh):
            return self.dice.choice(known)
        stream, long = stage >= Stage.FIRST or self.dice.random() < 0.7, fresh or self.dice.random() < 0.5
        return await self.cases.new(self.scene.session, long=long, stream=stream)

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _fault(self, fault: Fault, stage: Stage) -> bool:
        """False: no request came to that stage."""
        for _ in range(TRIES):
            if await self._try(fault, stage):
                return True
        self.ledger.missed += 1
        return False

    async def _try(self, fault: Fault, stage: Stage) -> bool:
        scene, sight, dice = self.scene, self.scene.sights.new(), self.dice
        case = await self._case(fault, stage)
        home = dice.choice([place for place in self._ready if not (fault.wired and place.mapped)])
        asked = self._client().run(case, sight, _session(home, scene, dice))
        victims = Victims(scene, sight, dice, home)
        await asyncio.to_thread(lambda: [place.engine for place in scene.workers])  # when it comes to it, it is known
        before = await scene.noticed(fault.shows) if fault.shows else Counter[str]()
        if fault.first:
            self._fault_now = fault
            async with fault.strike(victims):
                ending, hit = await asked, str(stage)
        else:
            task = asyncio.create_task(asked)
            if not await self._comes_to(task, sight, stage):
                self._passed(await task)
                return False
            self._fault_now, hit = fault, str(sight.stage)
            async with fault.strike(victims):
                if fault.leaves:
                    task.cancel()
                await asyncio.gather(asyncio.wait((task,), timeout=fault.hold), asyncio.sleep(fault.least))
            ending = await task
        self._struck, self._fault_now = (fault.name, hit), None
        moves, self._moves = self._moves, await self._moved()
        noticed = (await scene.noticed(fault.shows) - before if fault.shows else before).total()
        excused = scene.routerless(ending.began)
        moved = max(0, self._moves - moves)
        self.ledger.struck(fault.name, hit, ending, moved=moved, noticed=noticed, excused=excused)
        if ending.verdict not in (Verdict.ANSWERED, Verdict.LEFT):
            self.say(f"{fault.name}, {hit}: {ending.verdict} after {ending.seconds:.1f} s, {ending.why}")
        return True

    async def _comes_to(self, task: asyncio.Task[Ending], sight: Sight, stage: Stage) -> bool:
        """False: it has ended before."""
        seen = asyncio.create_task(sight.reached(stage))
        await asyncio.wait((task, seen), return_when=asyncio.FIRST_COMPLETED)
        seen.cancel()
        if stage is Stage.QUEUED:
            await asyncio.sleep(self.dice.choice((0.0, 0.001, 0.005)))
        elif stage is Stage.DECODE:
            await asyncio.sleep(self.dice.uniform(0.0, 0.05))
        return not task.done() and sight.stage is not Stage.ENDED

    async def _moved(self) -> int:
        """Times that a request went on, or was tried again, at another worker, or a prompt was computed elsewhere."""
        status = await self.scene.ask(f"{self.scene.url}/cluster/status", timeout=1.0)
        if status is None:
            return 0
        moved = sum(row["count"] for row in status["migrations"] if row["outcome"] == "went on")
        return int(moved + sum(status["retries"].values()))

    async def _check(self) -> None:
        """With nothing under way, nothing is held. Until all are back there must be requests: breakers want them."""
        if missing := await self.scene.full_strength():
            self.ledger.gave_up(missing)
        self._going.clear()
        self.ledger.checks += 1
        if held := await self.scene.quiet():
            self.ledger.leaked(*self._struck, held)
        self._going.set()


def _drawn(dice: random.Random) -> Iterator[tuple[Fault, Stage]]:
    """Each kind once, then as often as its weight says; stages in turn. Without end."""
    order = list(FAULTS)
    dice.shuffle(order)
    turns = {fault.name: dice.randrange(len(fault.stages)) for fault in FAULTS}
    while True:
        fault = order.pop() if order else dice.choices(FAULTS, [fault.weight for fault in FAULTS])[0]
        turns[fault.name] += 1
        yield fault, fault.stages[turns[fault.name] % len(fault.stages)]


def _session(home: Place, scene: Scene, dice: random.Random) -> str:
    """One that belongs to this worker."""
    names = [place.name for place in scene.of("decode")]
    while True:
        session = f"{dice.getrandbits(48):x}"
        if max(names, key=lambda name: affinity(session, name)) == home.name:
            return session


async def play(scene: Scene, count: int, seed: int, say: Callable[[str], None]) -> tuple[Ledger, float]:
    began = time.monotonic()
    dice = random.Random(seed)
    try:
        await scene.start()
        ledger = await Play(scene, Cases(scene.reference_url, SERVED, dice), dice, say).run(count)
        return ledger, time.monotonic() - began
    finally:
        await scene.stop()
