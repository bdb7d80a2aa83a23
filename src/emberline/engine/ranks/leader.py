"""LeaderRunner, PipelineLeaderRunner: the runners of an engine on several ranks, in the leader's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from emberline.core.errors import EmberlineError
from emberline.core.events import ExpertStats
from emberline.core.plan import BlockCopy, StepPlan, StepResult, WorkItem
from emberline.engine.ranks.control import RankMessage
from emberline.engine.ranks.copy_codec import encode_copies
from emberline.engine.ranks.expert_moves import ExpertMoves, encode_moves
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader_experts import LeaderExperts
from emberline.engine.ranks.rank_model import RankModel
from emberline.engine.ranks.work_codec import WorkEncoder
from emberline.engine.runner import TorchRunner
from emberline.engine.work_executor import StepExecutor, WorkExecutor
from emberline.kv.transfer.group_region import StepCounter
from emberline.models.forward import HiddenCapture

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

MessageT = TypeVar("MessageT", bound=RankMessage)


class FollowerGroup(Protocol):
    """The other ranks of an engine. RankGroup implements this protocol."""

    layout: Layout

    def publish(self, plan: bytes) -> None:
        """Send a plan to all other ranks. Raises RankLost."""
        ...

    def finish_step(self) -> None:
        """Note that the leader has computed the published plan."""
        ...

    def publish_copies(self, copies: bytes) -> None:
        """Ask all other ranks to make these copies of KV blocks. Raises RankLost."""
        ...

    def finish_copies(self) -> None:
        """Wait until all other ranks have made the copies of the oldest pending `publish_copies`.

        A call is pending until this method has waited for its copies. Raises EngineFailed."""
        ...

    def publish_beside_steps(self, message: bytes) -> None:
        """Send a message that is no step to all other ranks. Any thread may call this. Raises RankLost."""
        ...

    def wait_for(self, kind: type[MessageT], timeout_s: float) -> dict[int, MessageT]:
        """Return the next message of each other rank, by rank. Raises EngineFailed if a rank is lost or too slow."""
        ...

    def check(self) -> None:
        """Raise EngineFailed if a rank was lost."""
        ...

    def end_with_error(self, reason: BaseException) -> EmberlineError:
        """End the group, because a step of the leader failed for this reason, and return the error."""
        ...

    def progress_count(self) -> int:
        """Return a number that grows while the other ranks compute."""
        ...

    def close(self) -> None: ...


class GroupExecutor:
    """Computes steps on all ranks: publishes the work, then computes the leader's part."""

    def __init__(
        self, group: FollowerGroup, leader_executor: WorkExecutor, steps: StepCounter, buffers: HostBuffers | None
    ) -> None:
        """`leader_executor`: computes the leader's part.

        `buffers`: shared by all ranks, for copies of KV blocks; None: there are no tiers."""
        self._group, self.leader_executor, self._steps, self._buffers = group, leader_executor, steps, buffers
        self._encoder = WorkEncoder(group.layout.pp)
        self._cleared: list[int] = []  # blocks that the other ranks clear before the next published step

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Let all ranks copy their part of blocks, and wait until they have.

        Raises EngineFailed, after which the group cannot be used any more."""
        self.publish_copies(saves, loads)
        self.copy_on_leader(saves, loads)

    def publish_copies(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Let the other ranks copy their part of blocks, after all steps that were published before."""
        if saves or loads:
            assert self._buffers is not None
            self._group.check()
            self._steps.start_step()
            with ending_group_on_error(self._group):
                self._group.publish_copies(encode_copies(saves, loads, self._buffers.number))

    def copy_on_leader(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Copy the leader's part of published copies, and wait until the other ranks have copied theirs.

        Before that, the tiers must neither read a saved block from its buffer nor reuse the buffer of a loaded one."""
        if saves or loads:
            with ending_group_on_error(self._group):
                self.leader_executor.copy(saves, loads)
                self._group.finish_copies()
            self._steps.finish_step()

    def clear(self, blocks: Sequence[int]) -> None:
        self.leader_executor.clear(blocks)
        self._cleared += blocks

    def compute(self, work: Sequence[WorkItem], capture: HiddenCapture | None = None) -> Tensor:
        """Compute a step on all ranks, and return the logits.

        Raises EngineFailed, after which the group cannot be used any more."""
        with ending_group_on_error(self._group):
            self.publish(work, captured_layers=() if capture is None else capture.layers)
            return self.compute_on_leader(work, capture)

    def forget(self, ids: Sequence[str]) -> None:
        """Note that requests have ended. Their ids may be used again."""
        self._encoder.forget(ids)

    def publish(
        self, work: Sequence[WorkItem], cleared: Sequence[int] = (), captured_layers: Sequence[int] = ()
    ) -> None:
        """Let the other ranks begin with a step. `cleared`: blocks that they fill with zeros first.

        `captured_layers`: layers whose inputs the leader's draft model will read, as in the argument `capture` of
        `compute_on_leader`."""
        self._group.check()
        self._cleared += cleared
        if work:
            self._steps.start_step()
            with ending_group_on_error(self._group):
                self._group.publish(self._encoder.encode(work, self._cleared, captured_layers))
            self._cleared = []

    def compute_on_leader(self, work: Sequence[WorkItem], capture: HiddenCapture | None = None) -> Tensor:
        """Return the logits of a published step. Steps are computed in the order in which they were published."""
        with ending_group_on_error(self._group):
            logits = self.leader_executor.compute(work, capture)
        self._group.finish_step()
        self._steps.finish_step()
        return logits

    def run_on_all(self, message: bytes, run_on_leader: Callable[[], bool]) -> bool:
        """Send a message to the other ranks, call `run_on_leader` for the leader's part, and return its result."""
        self._group.check()
        with ending_group_on_error(self._group):
            self._group.publish(message)
            result = run_on_leader()
        self._group.finish_step()
        return result


@contextmanager
def ending_group_on_error(group: FollowerGroup) -> Iterator[None]:
    """End the group if the `with` block fails, also by KeyboardInterrupt: other ranks are in the middle of a step."""
    try:
        yield
    except Exception as error:
        raise group.end_with_error(error) from error
    except BaseException as error:
        group.end_with_error(error)
        raise


class PublishedExecutor:
    """Computes the leader's part of steps that were published earlier."""

    def __init__(self, executor: GroupExecutor) -> None:
        self._executor = executor

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        self._executor.copy_on_leader(saves, loads)

    def clear(self, blocks: Sequence[int]) -> None:
        self._executor.leader_executor.clear(blocks)

    def compute(self, work: Sequence[WorkItem], capture: HiddenCapture | None = None) -> Tensor:
        return self._executor.compute_on_leader(work, capture)


class LeaderRunner(TorchRunner):
    """The runner of an engine whose ranks compute one step at a time."""

    def __init__(
        self,
        group: FollowerGroup,
        rank_model: RankModel,
        eos: frozenset[int],
        make_compiler: Callable[[], GrammarCompiler],
        num_state_slots: int,
        steps: StepCounter,
        buffers: HostBuffers | None = None,
    ) -> None:
        """`steps`: counts the steps that the ranks start and finish.

        `buffers`: shared by all ranks, for copies of KV blocks; None: there are no tiers."""
        self._group_executor = GroupExecutor(group, rank_model.executor, steps, buffers)
        executor = self._make_executor()
        super().__init__(
            rank_model.model,
            rank_model.cache,
            eos,
            make_compiler,
            rank_model.draft_runner,
            groups=rank_model.groups,
            executor=executor,
        )
        self.num_state_slots, self.num_caches = num_state_slots, group.layout.num_caches
        self.pages_per_slot = rank_model.share.pages_per_slot
        self.layout = "/".join(filter(None, (self.layout, group.layout.numerics_name)))
        self.ranks, self._rank_model, self._steps = group, rank_model, steps
        networks = rank_model.model.dispatching_layers
        dispatches = {layer: each.dispatch for layer, each in networks.items() if each.dispatch is not None}
        self.experts = LeaderExperts(dispatches, group.layout)

    def _make_executor(self) -> StepExecutor:
        """Return the executor that computes the steps of this runner."""
        return self._group_executor

    def run(self, plan: StepPlan) -> StepResult:
        self._group_executor.forget(plan.ended_ids)
        return super().run(plan)

    def _admit_requests(self, plan: StepPlan) -> tuple[list[WorkItem], dict[str, str]]:
        """Return the result of the superclass, with the work sorted by rank: the rows of logits have this order."""
        work, failed = super()._admit_requests(plan)
        return work if self.num_caches == 1 else sorted(work, key=attrgetter("dp_rank")), failed

    def check_ranks(self) -> None:
        """Raise EngineFailed if a rank was lost."""
        self.ranks.check()

    def progress_count(self) -> int:
        """Return a number that grows while other ranks compute."""
        return self.ranks.progress_count()

    def expert_stats(self) -> ExpertStats | None:
        """Return how evenly the work of experts is spread over the ranks; None if this is not counted."""
        return self.experts.stats()

    @property
    def is_preparing(self) -> bool:
        """Whether experts of some layer may move to other ranks while the engine is idle."""
        return self.experts.is_due

    def prepare_next(self) -> bool:
        """Move the experts of one layer, if that evens out the load of the ranks; return False if no layer was left."""
        return self.experts.move_next(self._move_experts)

    def _move_experts(self, moves: ExpertMoves) -> bool:
        executor = self._executor
        assert isinstance(executor, GroupExecutor), "data-parallel attention has one stage"
        return executor.run_on_all(encode_moves(moves), lambda: self._rank_model.move_experts(moves))

    def close(self) -> None:
        """End the other ranks and close the connections to them."""
        self._steps.close()
        self.ranks.close()
        self._rank_model.close()


class PipelineLeaderRunner(LeaderRunner):
    """The runner of an engine with several stages, which compute different steps at the same time.

    The leader is the last stage. Earlier stages begin with a step as soon as it is launched; the leader computes its
    part, and samples, when the result is asked for."""

    def __init__(self, group: FollowerGroup, *args: Any) -> None:
        """The arguments are those of LeaderRunner."""
        super().__init__(group, *args)
        self.max_in_flight = group.layout.pp
        self._unfinished: list[StepPlan] = []  # plans that were launched, in order
        self._refused: set[str] = set()  # requests that cannot be sampled; later plans may still have their prompts

    def _make_executor(self) -> StepExecutor:
        return PublishedExecutor(self._group_executor)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Publish a plan; return a function that computes the leader's part and returns the result.

        The returned functions must be called in the order of the plans."""
        ended = set(plan.ended_ids)
        self._group_executor.forget(plan.ended_ids)
        sampled_later = ended & {w.id for each in self._unfinished for w in each.work}
        self._forget_requests(list(ended - sampled_later))
        self._refused -= ended
        work, failed = self._admit_requests(plan)
        self._refused |= failed.keys()
        work = [w for w in work if w.id not in self._refused]
        cleared = [block for w in plan.work for block in w.cleared_blocks]
        self._group_executor.publish_copies(plan.saves, plan.loads)
        captured = () if self._draft_runner is None else self._draft_runner.captured_layers(plan)
        self._group_executor.publish(work, cleared, captured)
        self._unfinished.append(plan)

        def finish() -> StepResult:
            assert self._unfinished.pop(0) is plan, "plans are finished in the order in which they were launched"
            began = time.perf_counter()
            self._executor.copy(plan.saves, plan.loads)
            self._executor.clear(cleared)
            self._forget_requests(list(sampled_later))
            return self._compute_step(plan, work, failed, began)

        return finish
