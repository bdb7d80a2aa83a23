"""Play: faults on a scene with requests under way; several at a time, but never so many that nobody could answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from emberline.chaos.case import Case, Cases
from emberline.chaos.client import Client, Ending, Verdict
from emberline.chaos.faults import FAULTS, Fault, Victims
from emberline.chaos.ledger import Ledger
from emberline.chaos.place import Place
from emberline.chaos.scene import RESTART, SERVED, Scene
from emberline.chaos.sight import Sight, Stage
from emberline.chaos.turns import Turn, Turns, drawn
from emberline.core.errors import EmberlineError
from emberline.router.policy import affinity

BESIDE = 2  # clients that no fault is aimed at
BREATH = 0.2  # seconds between two requests of theirs, or twice what one took: who starts needs the cores too
HANDS = 3  # faults at a time
LOOK = 0.2  # seconds between looks at who is there
CHECKED = 40  # faults between two looks for leaks
FIRST_CASES = 6
TRIES = 4  # to bring a request to the stage where it is to be struck
MISSED = 100  # faults that come to nothing before it is of no use to go on


@dataclass(slots=True)
class Play:
    scene: Scene
    cases: Cases
    dice: random.Random
    say: Callable[[str], None]
    ledger: Ledger
    _going: asyncio.Event = field(default_factory=asyncio.Event)
    _choosing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last: tuple[str, str] = ("nothing", "")
    _moves: int = 0  # until the last fault

    async def run(self, count: int) -> None:
        scene = self.scene
        if missing := await scene.full_strength():
            raise EmberlineError(f"the cluster did not start: {missing}", hint=f"its logs are in {scene.home}")
        await self._prepare()
        self._going.set()
        beside = [asyncio.create_task(self._clients()) for _ in range(BESIDE)]
        try:
            await self._strike(count)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _strike(self, count: int) -> None:
        turns = Turns(self.scene.workers, self.dice)
        faults = drawn([fault for fault in FAULTS if fault.possible(self.scene)], self.dice)
        while count and not self.ledger.unrecovered:
            some = islice(faults, min(CHECKED, count))
            turns.ahead = sorted(some, key=lambda one: not one[0].restart)  # others pass while they start
            count -= len(turns.ahead)
            async with asyncio.TaskGroup() as hands:
                for _ in range(HANDS):
                    hands.create_task(self._hand(turns))
            await self._check()
            self.say(self.ledger.summary())

    async def _hand(self, turns: Turns) -> None:
        while (turn := await self._next(turns)) is not None:
            try:
                hit = await self._fault(turn)
            finally:
                turns.over(turn)
            if not hit:
                stages = turn.fault.stages
                turns.ahead.insert(0, (turn.fault, stages[stages.index(turn.stage) - 1]))  # then at another
                if self.ledger.missed > MISSED:
                    self.ledger.gave_up("requests do not come to where they are to be struck")
                    turns.ahead.clear()

    async def _next(self, turns: Turns) -> Turn | None:
        """None: none is left, or the scene does not recover from the last."""
        now = asyncio.get_running_loop().time
        end = now() + RESTART
        while turns.ahead:
            async with self._choosing:
                struck = {*turns.struck}
                absent = await self.scene.absent(struck)
                unseen = struck - turns.struck.keys()  # whose fault is over by now
                if (turn := turns.next({*absent, *unseen})) is not None:
                    return turn
                await asyncio.sleep(LOOK)
            if turns.struck:
                end = now() + RESTART
            elif now() > end:
                self.ledger.gave_up(f"after {self._last[0]}, {self._last[1]}: {absent}")
                turns.ahead.clear()
        return None

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
            self._passed(ending)
            pause = 1.0 if ending.verdict in (Verdict.ERROR, Verdict.CUT) else BREATH
            await asyncio.sleep(max(pause, ending.seconds))

    def _passed(self, ending: Ending) -> None:
        self.ledger.passed(ending, self._last[0], excused=self.scene.routerless(ending.began))

    def _client(self) -> Client:
        return Client(self.scene.session, self.scene.router.url, self.scene.sights, self.scene.settings.deadline)

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

    async def _fault(self, turn: Turn) -> bool:
        """False: no request came to that stage."""
        for _ in range(TRIES):
            if await self._try(turn.fault, turn.stage, turn.home):
                return True
        self.ledger.missed += 1
        return False

    async def _try(self, fault: Fault, stage: Stage, home: Place) -> bool:
        scene, sight = self.scene, self.scene.sights.new()
        case = await self._case(fault, stage)
        asked = self._client().run(case, sight, _session(home, scene, self.dice))
        victims = Victims(scene, sight, self.dice, home)
        await asyncio.to_thread(lambda: [place.engine for place in scene.workers])  # when it comes to it, it is known
        before = await scene.noticed(fault.shows) if fault.shows else Counter[str]()
        if fault.first:
            self._last = fault.name, (hit := str(stage))
            async with fault.strike(victims):
                ending = await asked
        else:
            began, task = asyncio.get_running_loop().time(), asyncio.create_task(asked)
            if not await self._comes_to(task, sight, stage) or victims.decode is not home:
                self._passed(await task)
                return False
            self._last = fault.name, (hit := str(sight.stage))
            async with fault.strike(victims):
                if fault.leaves:
                    task.cancel()
                await asyncio.gather(asyncio.wait((task,), timeout=fault.hold), asyncio.sleep(fault.least))
            ending = await (_left(task, began) if fault.leaves else task)
        noticed = (await scene.noticed(fault.shows) - before if fault.shows else before).total()
        await self._note(fault, hit, ending, noticed)
        return True

    async def _note(self, fault: Fault, hit: str, ending: Ending, noticed: int) -> None:
        moves = await self._moved()
        moved, self._moves = max(0, moves - self._moves), moves
        excused = self.scene.routerless(ending.began)
        self.ledger.struck(fault.name, hit, ending, moved=moved, noticed=noticed, excused=excused)
        if ending.verdict not in (Verdict.ANSWERED, Verdict.LEFT):
            self.say(f"{fault.name}, {hit}: {ending.verdict} after {ending.seconds:.1f} s, {ending.why}")

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
        status = await self.scene.ask(f"{self.scene.router.url}/cluster/status", timeout=1.0)
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
            self.ledger.leaked(*self._last, held)
        self._going.set()


async def _left(task: asyncio.Task[Ending], began: float) -> Ending:
    """How a request ended whose client left, unless it had ended by then."""
    await asyncio.wait((task,))
    if not task.cancelled():
        return task.result()
    return Ending(Verdict.LEFT, "", began, asyncio.get_running_loop().time() - began)


def _session(home: Place, scene: Scene, dice: random.Random) -> str:
    """One that belongs to this worker."""
    names = [place.name for place in scene.of("decode")]
    while True:
        session = f"{dice.getrandbits(48):x}"
        if max(names, key=lambda name: affinity(session, name)) == home.name:
            return session


async def play(scene: Scene, ledger: Ledger, count: int, seed: int, say: Callable[[str], None]) -> None:
    dice = random.Random(seed)
    try:
        await scene.start()
        await Play(scene, Cases(scene.reference.url, SERVED, dice), dice, say, ledger).run(count)
    finally:
        await scene.stop()
