"""DeviceFollower: computes a rank's part of the steps that the leader publishes, on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from emberline.core.params import SamplingParams
from emberline.core.plan import Admission, StepPlan, WorkItem
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import RunnerMemory
from emberline.engine.ranks.control import RankAsleep, RankAwake
from emberline.engine.ranks.copy_codec import decode_copies, is_copies
from emberline.engine.ranks.device_experts import move_device_experts
from emberline.engine.ranks.expert_moves import decode_moves
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.piece_codec import is_piece_request
from emberline.engine.ranks.rank_commands import PREPARE_NEXT, RUN_UNCAPTURED, SLEEP, WAKE, decode_products
from emberline.engine.ranks.rank_transfers import RankTransfers
from emberline.engine.ranks.work_codec import WorkDecoder
from emberline.kernels import ops, tuning

PLAIN_PARAMS = SamplingParams()
FinishStep = Callable[[], object]


class DeviceFollower:
    def __init__(
        self,
        runner: GPURunner,
        num_plans: int = 1,
        buffers: HostBuffers | None = None,
        on_copied: Callable[[], None] = lambda: None,
        transfers: RankTransfers | None = None,
        report: Callable[[RankAsleep | RankAwake], None] = lambda message: None,
    ) -> None:
        """`num_plans`: the number of steps over which the leader remembers requests.

        `buffers`: host buffers for copies of KV blocks. `on_copied`: called when the copies of a message are complete.
        `transfers`: copies this rank's parts of the blocks that the engine exchanges with other engines; None: it
        exchanges none. `report`: sends the leader a message, when the device memory was freed or restored."""
        self._runner, self._plans, self._memory = runner, FollowerPlans(num_plans), RunnerMemory(runner)
        self._buffers, self._on_copied, self._transfers, self._report = buffers, on_copied, transfers, report

    def handle(self, message: bytes) -> FinishStep | None:
        """Do what a message of the leader asks for; return a function that waits for the step or the copies, if any."""
        if self._run_command(message):
            return None
        if is_piece_request(message):
            assert self._transfers is not None
            self._transfers.start(message)
            return None
        if is_copies(message):
            return self._launch_copies(message)
        return self._runner.launch(self._plans.decode(message))

    def _run_command(self, message: bytes) -> bool:
        """Run the message if it is a command, and return whether it was one."""
        if message == PREPARE_NEXT:
            self._runner.prepare_next()
        elif message == RUN_UNCAPTURED:
            self._runner.run_uncaptured_once()
        elif message == SLEEP:
            self._report(RankAsleep(self._memory.free()))
        elif message == WAKE:
            self._report(RankAwake(self._memory.restore()))
        elif (products := decode_products(message)) is not None:
            tuning.use_choices(products)
        elif (moves := decode_moves(message)) is not None:
            move_device_experts(self._runner, moves)
            self._memory.close()  # the weights that it has in host memory are outdated
        else:
            return False
        return True

    def _launch_copies(self, message: bytes) -> FinishStep:
        assert self._buffers is not None
        saves, loads = decode_copies(message, self._buffers.find)
        finish = self._runner.launch(StepPlan(0, [], [], [], saves, loads))

        def finish_copies() -> None:
            finish()
            self._on_copied()

        return finish_copies


class FollowerPlans:
    """Turns the published work of steps into plans for a runner that does not sample.

    The leader sends no request ids, so this class numbers the requests. A request that was in none of the last
    `num_plans` steps gets a new number when it comes back."""

    def __init__(self, num_plans: int) -> None:
        self._decoder = WorkDecoder(num_plans)
        self._recent: deque[list[WorkItem]] = deque(maxlen=num_plans)
        self._count = self._step = 0

    def decode(self, message: bytes) -> StepPlan:
        step = self._decoder.decode(message)
        work = step.fill_items()
        admitted = []
        for item in work:
            if not item.id:
                self._count += 1
                item.id = str(self._count)
                admitted.append(Admission(item.id, [], 0, PLAIN_PARAMS, 0))
        oldest = self._recent[0] if len(self._recent) == self._recent.maxlen else []
        self._recent.append(list(work))
        ended: list[str] = []
        if oldest != work:
            current = {item.id for step in self._recent for item in step}
            ended = [item.id for item in oldest if item.id not in current]
        for item in work:
            item.cleared_blocks = ()
        if work:
            work[0].cleared_blocks = step.cleared
        self._step += 1
        return StepPlan(self._step, admitted, work, ended)


class StepWaiter:
    """A thread that waits for launched steps, so that an error on the device is found even if no further step comes."""

    def __init__(self, check: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        """`check`: called after each step; raises an error if its collectives failed. `on_error`: ends the process."""
        self._steps: SimpleQueue[FinishStep] = SimpleQueue()
        self._check, self._on_error = check, on_error
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def add(self, finish: FinishStep) -> None:
        self._steps.put(finish)

    def _run(self) -> None:
        while True:
            finish = self._steps.get()
            try:
                finish()
                self._check()
            except BaseException as error:
                self._on_error(error)
                return
            ops.mark_progress()  # captured steps do not call it themselves
