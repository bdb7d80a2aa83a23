"""ChaosRun: injects several faults at a time while requests run, but always leaves a worker."""

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

BESIDE = 2
BREATH = 0.2  # between a background client's requests, at least the last one's duration: restarts need CPU time too
HANDS = 3
LOOK = 0.2
CHECKED = 40
FIRST_CASES = 6
TRIES = 4  # requests sent until one reaches the stage of a fault
MISSED = 100


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
    _moves: int = 0  # as of the last fault

    async def run(self, count: int) -> None:
        cluster = self.scene
        if missing := await cluster.full_strength():
            raise EmberlineError(f"the cluster did not start: {missing}", hint=f"see the log files in {cluster.home}")
        await self._prepare()
        self._going.set()
        background = [asyncio.create_task(self._clients()) for _ in range(BESIDE)]
        try:
            await self._strike(count)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _strike(self, count: int) -> None:
        scheduler = Turns(self.scene.workers, self.dice)
        faults = drawn([fault for fault in FAULTS if fault.possible(self.scene)], self.dice)
        while count and not self.ledger.unrecovered:
            next_faults = islice(faults, min(CHECKED, count))
            scheduler.ahead = sorted(
                next_faults, key=lambda item: not item[0].restart
            )  # other faults run during the restarts
            count -= len(scheduler.ahead)
            async with asyncio.TaskGroup() as injectors:
                for _ in range(HANDS):
                    injectors.create_task(self._hand(scheduler))
            await self._check()
            self.say(self.ledger.summary())

    async def _hand(self, turns: Turns) -> None:
        while (scheduled := await self._next(turns)) is not None:
            try:
                was_hit = await self._fault(scheduled)
            finally:
                turns.over(scheduled)
            if not was_hit:
                stages = scheduled.fault.stages
                turns.ahead.insert(0, (scheduled.fault, stages[stages.index(scheduled.stage) - 1]))  # try another stage
                if self.ledger.missed > MISSED:
                    self.ledger.gave_up(f"requests did not reach the stage of {MISSED} faults")
                    turns.ahead.clear()

    async def _next(self, turns: Turns) -> Turn | None:
        """Return the next fault; None if none is left or the cluster does not recover."""
        now = asyncio.get_running_loop().time
        end = now() + RESTART
        while turns.ahead:
            async with self._choosing:
                active = {*turns.struck}
                unavailable = await self.scene.absent(active)
                unchecked = active - turns.struck.keys()  # their faults ended during the check
                if (scheduled := turns.next({*unavailable, *unchecked})) is not None:
                    return scheduled
                await asyncio.sleep(LOOK)
            if turns.struck:
                end = now() + RESTART
            elif now() > end:
                self.ledger.gave_up(f"after {self._last[0]}, {self._last[1]}: {unavailable}")
                turns.ahead.clear()
        return None

    async def _prepare(self) -> None:
        http = self.scene.session
        async with asyncio.timeout(120):
            while not await self.scene.is_ready(self.scene.reference):
                await asyncio.sleep(0.2)
        await self.cases.measure(http)
        for i in range(FIRST_CASES):
            await self.cases.new(http, long=i % 2 == 0, stream=i % 3 != 0)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _clients(self) -> None:
        """Send requests one after another, whatever their outcome."""
        while True:
            await self._going.wait()
            progress = self.scene.sights.new()
            case = self.cases.old()
            outcome = await self._client().run(case, progress)
            self._passed(outcome)
            pause = 1.0 if outcome.verdict in (Verdict.ERROR, Verdict.CUT) else BREATH
            await asyncio.sleep(max(pause, outcome.seconds))

    def _passed(self, ending: Ending) -> None:
        self.ledger.passed(ending, self._last[0], excused=self.scene.routerless(ending.began))

    def _client(self) -> Client:
        return Client(self.scene.session, self.scene.router.url, self.scene.sights, self.scene.settings.deadline)

    async def _case(self, fault: Fault, stage: Stage) -> Case:
        def fits(case: Case) -> bool:
            return (case.stream or stage < Stage.FIRST) and (case.long or not fault.old)

        known_cases = [case for case in self.cases.known if fits(case)]
        is_new = stage in (Stage.PREFILL, Stage.TRANSFER) or self.dice.random() < 0.5
        if known_cases and (fault.old or not is_new):
            return self.dice.choice(known_cases)
        stream, long = stage >= Stage.FIRST or self.dice.random() < 0.7, is_new or self.dice.random() < 0.5
        return await self.cases.new(self.scene.session, long=long, stream=stream)

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _fault(self, turn: Turn) -> bool:
        """Inject a fault; return False if no request reached the stage."""
        for _ in range(TRIES):
            if await self._try(turn.fault, turn.stage, turn.home):
                return True
        self.ledger.missed += 1
        return False

    async def _try(self, fault: Fault, stage: Stage, home: Place) -> bool:
        cluster, progress = self.scene, self.scene.sights.new()
        case = await self._case(fault, stage)
        request = self._client().run(case, progress, _session(home, cluster, self.dice))
        context = Victims(cluster, progress, self.dice, home)
        await asyncio.to_thread(
            lambda: [process.engine for process in cluster.workers]
        )  # find the pids before the fault
        before = await cluster.noticed(fault.shows) if fault.shows else Counter[str]()
        if fault.first:
            self._last = fault.name, (stage_hit := str(stage))
            async with fault.strike(context):
                outcome = await request
        else:
            started_at, task = asyncio.get_running_loop().time(), asyncio.create_task(request)
            if not await self._comes_to(task, progress, stage) or context.decode is not home:
                self._passed(await task)
                return False
            self._last = fault.name, (stage_hit := str(progress.stage))
            async with fault.strike(context):
                if fault.leaves:
                    task.cancel()
                await asyncio.gather(asyncio.wait((task,), timeout=fault.hold), asyncio.sleep(fault.least))
            outcome = await (_left(task, started_at) if fault.leaves else task)
        detected = (await cluster.noticed(fault.shows) - before if fault.shows else before).total()
        await self._note(fault, stage_hit, outcome, detected)
        return True

    async def _note(self, fault: Fault, hit: str, ending: Ending, noticed: int) -> None:
        moves = await self._moved()
        moved, self._moves = max(0, moves - self._moves), moves
        excused = self.scene.routerless(ending.began)
        self.ledger.struck(fault.name, hit, ending, moved=moved, noticed=noticed, excused=excused)
        if ending.verdict not in (Verdict.ANSWERED, Verdict.LEFT):
            self.say(f"{fault.name}, {hit}: {ending.verdict} after {ending.seconds:.1f} s, {ending.why}")

    async def _comes_to(self, task: asyncio.Task[Ending], sight: Sight, stage: Stage) -> bool:
        """Wait until the request reaches the stage; return False if it ended before."""
        reached = asyncio.create_task(sight.reached(stage))
        await asyncio.wait((task, reached), return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if stage is Stage.QUEUED:
            await asyncio.sleep(self.dice.choice((0.0, 0.001, 0.005)))
        elif stage is Stage.DECODE:
            await asyncio.sleep(self.dice.uniform(0.0, 0.05))
        return not task.done() and sight.stage is not Stage.ENDED

    async def _moved(self) -> int:
        """Return how often requests continued or were retried at another worker."""
        status = await self.scene.ask(f"{self.scene.router.url}/cluster/status", timeout=1.0)
        if status is None:
            return 0
        moved = sum(row["count"] for row in status["migrations"] if row["outcome"] == "went on")
        return int(moved + sum(status["retries"].values()))

    async def _check(self) -> None:
        """Check that an idle cluster holds no resources.

        Requests must run until all workers are healthy, because circuit breakers close only after a successful one."""
        if missing := await self.scene.full_strength():
            self.ledger.gave_up(missing)
        self._going.clear()
        self.ledger.checks += 1
        if held_resources := await self.scene.quiet():
            self.ledger.leaked(*self._last, held_resources)
        self._going.set()


async def _left(task: asyncio.Task[Ending], began: float) -> Ending:
    """Return the outcome of a request whose client disconnected, unless it had ended before."""
    await asyncio.wait((task,))
    if not task.cancelled():
        return task.result()
    return Ending(Verdict.LEFT, "", began, asyncio.get_running_loop().time() - began)


def _session(home: Place, scene: Scene, dice: random.Random) -> str:
    """Return a session id for which the router prefers this worker."""
    names = [worker.name for worker in scene.of("decode")]
    while True:
        session = f"{dice.getrandbits(48):x}"
        if max(names, key=lambda name: affinity(session, name)) == home.name:
            return session


async def play(scene: Scene, ledger: Ledger, count: int, seed: int, say: Callable[[str], None]) -> None:
    rng = random.Random(seed)
    try:
        await scene.start()
        await Play(scene, Cases(scene.reference.url, SERVED, rng), rng, say, ledger).run(count)
    finally:
        await scene.stop()
