"""DeviceLeaderRunner: the runner of an engine on several GPUs, in the leader's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from emberline.core.plan import StepPlan, StepResult, WorkItem
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.ranks.copy_codec import encode_copies
from emberline.engine.ranks.device_part import DevicePart
from emberline.engine.ranks.device_tiers import DeviceHostTier
from emberline.engine.ranks.leader import FollowerGroup, ending_group
from emberline.engine.ranks.work_codec import WorkEncoder
from emberline.kernels import ops

# Messages to the other ranks beside the work of steps, which is a MessagePack array: these are strings.
PREPARE_NEXT, RUN_UNCAPTURED = b"\xa7prepare", b"\xaauncaptured"


Result = TypeVar("Result")


class DeviceLeaderRunner(GPURunner):
    """Publishes the work of each step, then launches the leader's part and samples.

    Until `lead` is called, it computes its part without the other ranks, to try its kernels."""

    _group: FollowerGroup | None = None
    _host: DeviceHostTier | None = None
    num_caches = 1  # see DataParallelRunner; set by `lead`

    def lead(self, group: FollowerGroup, part: DevicePart, host: DeviceHostTier | None = None) -> None:
        """Compute steps together with these ranks from now on. `part`: the leader's, which has this runner.

        `host`: the first KV tier; None: there are no tiers."""
        self._group, self._part, self._host = group, part, host
        self.num_caches = group.layout.num_caches
        self._encoder, self._num_published = WorkEncoder(group.layout.pp), 0
        self._cleared: list[int] = []  # blocks that the other ranks clear before the next published step

    @property
    def layout(self) -> str:
        if self._group is None:
            return super().layout
        division = "" if self._host is None else self._host.division
        return "/".join(filter(None, (super().layout, str(self._group.layout), division)))

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Raises EngineFailed, after which the group cannot be used any more."""
        if (group := self._group) is None:
            return super().launch(plan)
        group.check()
        count = self._num_published
        self._encoder.forget(plan.ended_ids)
        self._cleared += [block for w in plan.work for block in w.cleared_blocks]
        with ending_group(group):
            finish = super().launch(plan)
        is_published = self._num_published > count

        def finish_step() -> StepResult:
            with ending_group(group):
                result = finish()
                self._part.check_connections()
            if is_published:
                group.finish_step()
                ops.mark_progress()  # captured steps do not
            return result

        return finish_step

    def _launch_step(
        self, plan: StepPlan, work: Sequence[WorkItem], failures_by_request: dict[str, str]
    ) -> Callable[[], StepResult]:
        if self._group is not None:
            self._publish(self._encoder.encode(work, self._cleared))
            self._cleared = []
        return super()._launch_step(plan, work, failures_by_request)

    def _launch_copies(self, plan: StepPlan) -> Callable[[], None]:
        group, host = self._group, self._host
        if group is None or host is None or not (plan.saves or plan.loads):
            return super()._launch_copies(plan)
        group.publish_copies(encode_copies(plan.saves, plan.loads, host.buffers.number))
        finish_own = super()._launch_copies(plan)

        def finish() -> None:
            finish_own()
            group.finish_copies()  # only then buffers may be read, and used again

        return finish

    def _publish(self, message: bytes) -> None:
        assert self._group is not None
        self._group.publish(message)
        self._num_published += 1

    def prepare_next(self) -> bool:
        """Capture a step of the next shape on all ranks; return False if all shapes are captured."""
        return self.is_preparing and self._run_on_all_ranks(PREPARE_NEXT, super().prepare_next)

    def run_uncaptured_once(self) -> None:
        self._run_on_all_ranks(RUN_UNCAPTURED, super().run_uncaptured_once)

    def _run_on_all_ranks(self, message: bytes, run: Callable[[], Result]) -> Result:
        if (group := self._group) is None:
            return run()
        with ending_group(group):
            self._publish(message)
            result = run()
        group.finish_step()
        return result

    # -- for the engine (GroupRunner) ---------------------------------------------------------------------------------

    def check_ranks(self) -> None:
        """Raise EngineFailed if a rank was lost."""
        if self._group is not None:
            self._group.check()

    def progress_count(self) -> int:
        """Return a number that grows while other ranks compute."""
        return 0 if self._group is None else self._group.progress_count()

    def close(self) -> None:
        """End the other ranks and close the connections to them."""
        if self._group is not None:
            self._group.close()
            self._part.close()


class PipelineDeviceLeaderRunner(DeviceLeaderRunner):
    """The runner of an engine with several stages, which compute different steps at the same time."""

    max_in_flight = 1  # set by `lead`

    def lead(self, group: FollowerGroup, part: DevicePart, host: DeviceHostTier | None = None) -> None:
        super().lead(group, part, host)
        self.max_in_flight = group.layout.pp
