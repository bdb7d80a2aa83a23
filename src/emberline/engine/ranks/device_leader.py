"""DeviceLeaderRunner: the runner of an engine on several GPUs, in the leader's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from emberline.core.errors import EngineFailed
from emberline.core.events import ExpertStats
from emberline.core.plan import StepPlan, StepResult, WorkItem
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import RunnerMemory
from emberline.engine.ranks.control import RankAsleep, RankAwake
from emberline.engine.ranks.copy_codec import encode_copies
from emberline.engine.ranks.device_experts import move_device_experts
from emberline.engine.ranks.device_rank_model import DeviceRankModel
from emberline.engine.ranks.device_tiers import DeviceHostTier
from emberline.engine.ranks.expert_moves import ExpertMoves, encode_moves
from emberline.engine.ranks.leader import FollowerGroup, ending_group_on_error
from emberline.engine.ranks.leader_experts import LeaderExperts
from emberline.engine.ranks.rank_commands import PREPARE_NEXT, RUN_UNCAPTURED, SLEEP, WAKE, encode_products
from emberline.engine.ranks.work_codec import WorkEncoder
from emberline.kernels import ops, tuning
from emberline.models.movable_experts import read_row_counts

# Limit for the other ranks to put their parts of one model to sleep, or to wake them, after the leader has done so.
# Shorter than the default of --stall-timeout (120 s), so that the error usually names the late rank.
SLEEP_TIMEOUT_S = 100.0

Result = TypeVar("Result")


class DeviceLeaderRunner(GPURunner):
    """Publishes the work of each step, then launches the leader's part and samples.

    Until `lead_group` is called, the runner computes the leader's part without the other ranks, to try its kernels."""

    _group: FollowerGroup | None = None
    _host: DeviceHostTier | None = None
    num_caches = 1  # see DataParallelRunner; set by `lead_group`
    experts: LeaderExperts | None = None  # None: experts stay where they are, and their rows are not counted

    def lead_group(self, group: FollowerGroup, rank_model: DeviceRankModel, host: DeviceHostTier | None = None) -> None:
        """Compute steps together with the ranks of `group` from now on.

        `rank_model`: the leader's, which has this runner. `host`: the first KV tier; None: there are none.
        """
        self._group, self._rank_model, self._host = group, rank_model, host
        self.num_caches = group.layout.num_caches
        self._encoder, self._num_published = WorkEncoder(group.layout.pp), 0
        self._cleared: list[int] = []  # blocks that the other ranks clear before the next published step
        self._memory = RunnerMemory(self)
        self._side_stream = rank_model.planned.device.new_stream()
        self._movable = {i: each.movable for i, each in self.model.movable_layers.items() if each.movable is not None}
        if self._movable:
            self.experts = LeaderExperts(self._movable, group.layout, update_loads=self._update_loads)

    @property
    def layout(self) -> str:
        if self._group is None:
            return super().layout
        division = "" if self._host is None else self._host.division
        return "/".join(filter(None, (super().layout, str(self._group.layout), division)))

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Launch a step on all ranks; return a function that waits for it and returns the result.

        Raises EngineFailed, after which the group cannot be used any more."""
        if (group := self._group) is None:
            return super().launch(plan)
        group.check()
        count = self._num_published
        self._encoder.forget(plan.ended_ids)
        self._cleared += [block for w in plan.work for block in w.cleared_blocks]
        with ending_group_on_error(group):
            finish = super().launch(plan)
        is_published = self._num_published > count

        def finish_step() -> StepResult:
            with ending_group_on_error(group):
                result = finish()
                self._rank_model.check_connections()
            if is_published:
                group.finish_step()
                ops.mark_progress()  # captured steps do not call it themselves
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
            group.finish_copies()  # before that, buffers must not be read or used again

        return finish

    def _publish(self, message: bytes) -> None:
        assert self._group is not None
        self._group.publish(message)
        self._num_published += 1

    @property
    def is_preparing(self) -> bool:
        """Whether there is work for idle time: shapes of steps to capture, or layers whose experts may move."""
        return super().is_preparing or (self.experts is not None and self.experts.is_due)

    def prepare_next(self) -> bool:
        """Do some work for idle time on all ranks; return False if nothing was left.

        The work is to capture a step of the next shape, or to move the experts of one layer if that evens out the
        load."""
        if super().is_preparing:
            return self._run_on_all_ranks(PREPARE_NEXT, super().prepare_next)
        return self.experts is not None and self.experts.move_next(self._move_experts)

    def _move_experts(self, moves: ExpertMoves) -> bool:
        self._run_on_all_ranks(encode_moves(moves), lambda: move_device_experts(self, moves))
        self._memory.close()  # the weights that it has in host memory are outdated
        return True

    def _update_loads(self) -> None:
        """Read how many rows (tokens) each expert has computed.

        This does not wait for running steps, whose rows may be missing."""
        with self._side_stream.activate():
            read_row_counts(list(self._movable.values()))

    def expert_stats(self) -> ExpertStats | None:
        """Return how evenly the work of experts is spread over the ranks; None if this is not counted."""
        return None if self.experts is None else self.experts.stats()

    def run_uncaptured_once(self) -> None:
        self._run_on_all_ranks(RUN_UNCAPTURED, super().run_uncaptured_once)

    def _run_on_all_ranks(self, message: bytes, run: Callable[[], Result]) -> Result:
        if (group := self._group) is None:
            return run()
        with ending_group_on_error(group):
            self._publish(message)
            result = run()
        group.finish_step()
        return result

    # -- while other models use the GPUs ------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Free the device memory of all ranks, and return the bytes copied to main memory.

        The results of all steps must have been read. Raises EngineFailed, after which the group cannot be used."""
        return self._change_memory(SLEEP, self._memory.free, RankAsleep, "put its part of the model to sleep")

    def wake(self) -> int:
        """Restore the device memory of all ranks, and return the bytes copied from main memory.

        Raises EngineFailed, after which the group cannot be used."""
        return self._change_memory(WAKE, self._memory.restore, RankAwake, "wake its part of the model")

    def _change_memory(
        self, message: bytes, change_leader: Callable[[], int], report: type[RankAsleep] | type[RankAwake], what: str
    ) -> int:
        group = self._group
        assert group is not None
        group.check()
        with ending_group_on_error(group):
            group.publish_beside_steps(message)
            try:
                copied = change_leader()
            except Exception as error:
                name = group.layout.describe(group.layout.leader)
                raise EngineFailed(f"{name} could not {what}: {type(error).__name__}: {error}") from error
            reports = group.wait_for(report, SLEEP_TIMEOUT_S)
        return copied + sum(each.copied_bytes for each in reports.values())

    def share_kernel_choices(self) -> None:
        """Let the other ranks use the same kernels for matrix products as this process.

        Another model in this process may have measured further kernels since this model was loaded."""
        assert self._group is not None
        with ending_group_on_error(self._group):
            self._group.publish_beside_steps(encode_products(tuning.list_choices()))

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
            self._rank_model.close()
            self._memory.close()


class PipelineDeviceLeaderRunner(DeviceLeaderRunner):
    """The runner of an engine with several stages, which compute different steps at the same time."""

    max_in_flight = 1  # set by `lead_group`

    def lead_group(self, group: FollowerGroup, rank_model: DeviceRankModel, host: DeviceHostTier | None = None) -> None:
        super().lead_group(group, rank_model, host)
        self.max_in_flight = group.layout.pp
