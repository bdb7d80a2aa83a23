"""DeviceRankModel: the part of a model that one rank computes on a GPU, with caches and connections to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.engine import expert_limits, memory
from emberline.engine.gpu.boot import fill_and_identify, load_codec
from emberline.engine.gpu.device import CudaDevice, Device, measure_memory
from emberline.engine.gpu.draft_summary import DraftModelSummary
from emberline.engine.gpu.planned_model import PlannedModel
from emberline.engine.gpu.portable_limits import reject_unsupported_settings
from emberline.engine.gpu.rank_role import RankRole
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.shape import captured_shapes, max_step_tokens
from emberline.engine.gpu.weight_format import open_device_weights
from emberline.engine.ranks.block_buffer_layout import BlockBufferLayout
from emberline.engine.ranks.control import GPUMemoryBudget, MeasuredGPU, RankLoaded
from emberline.engine.ranks.device_draft_model import load_draft_model_on_gpu
from emberline.engine.ranks.device_experts import prepare_movable_experts
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.rank_model import ConnectRanksFunction
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.state_plan import state_slot_bytes
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.communicator import CollectivesUnavailable, Communicator
from emberline.kernels.comm.connect import connect_device_group
from emberline.kernels.comm.startup import StartupCommunicator
from emberline.kernels.gpu_choice import name_kernels
from emberline.kv.transfer.layout import KVLayout
from emberline.models.config import ModelConfig
from emberline.models.loader import DTYPES, compute_fingerprint
from emberline.models.stage import Stage
from emberline.models.tensor_names import load_model
from emberline.models.weight_dtype import DTYPE_BYTES, choose_weight_dtype
from emberline.models.weights import Weights

# Of a kernel that waits for other ranks: longer than a rank's host may be busy between publishing a step and launching
# it. The leader notices lost ranks earlier.
COLLECTIVE_TIMEOUT_S = 60.0
# Returns a communicator between GPUs. Arguments: one in main memory, and its ranks that send tensors to this rank.
ConnectDevices = Callable[[Communicator, Sequence[int]], Communicator]


@dataclass(frozen=True, slots=True)
class DeviceConnections:
    """A rank's connections: `shards` to the other ranks of its stage, `stages` to the same shard of other stages."""

    shards: StartupCommunicator | None
    stages: StartupCommunicator | None

    @staticmethod
    def connect(
        layout: Layout, rank: int, connect: ConnectRanksFunction, to_device: ConnectDevices = lambda host, _: host
    ) -> DeviceConnections:
        """Connect to the other ranks. Raises RankLost.

        `to_device`: replaces each communicator, which is in main memory, by one between GPUs."""
        stage, place = rank // layout.tp, rank % layout.tp
        stages = shards = None
        if layout.pp > 1:
            previous = [stage - 1] if stage else []
            stages = StartupCommunicator(to_device(connect(f"stages-{place}", stage, layout.pp), previous))
        if layout.tp > 1:
            shards = StartupCommunicator(to_device(connect(f"shards-{stage}", place, layout.tp), ()))
        return DeviceConnections(shards, stages)

    @property
    def all(self) -> list[StartupCommunicator]:
        return [each for each in (self.shards, self.stages) if each is not None]


class DeviceRankModel:
    runner: GPURunner  # set by `allocate`
    weight_format = "plain"

    def __init__(
        self,
        planned: PlannedModel,
        weights: Weights | None,
        stage: Stage,
        connections: DeviceConnections,
        fingerprint: str,
    ) -> None:
        """`weights`: the tensors of the model, which are still being loaded; None: all are loaded."""
        self.planned, self.stage, self.connections = planned, stage, connections
        self._weights, self._fingerprint = weights, fingerprint

    @staticmethod
    def load(
        config: EngineConfig,
        layout: Layout,
        rank: int,
        connect: ConnectRanksFunction,
        shared: GPUMemoryBudget | None = None,
    ) -> DeviceRankModel:
        """Connect to the other ranks and plan the memory of this rank's part of the model, on this process's GPU.

        `shared`: the memory to plan with; None: all that other processes leave. Raises RankLost if a rank does not
        connect, EmberlineError if settings or model are not usable."""
        checkpoint = Checkpoint.open(Path(config.model))
        model_config = ModelConfig.from_checkpoint(checkpoint)
        expert_limits.reject_unsupported_experts(model_config, config)
        context = memory.choose_max_context(model_config, config)
        dtype = choose_weight_dtype(checkpoint, config.dtype, on_gpu=True)
        packed = memory.uses_packed_weights(checkpoint, config, dtype, model_config)
        load_codec(checkpoint)
        device = CudaDevice(config.gpu.kernels)
        has_packed_experts = packed and model_config.experts is not None
        reject_unsupported_settings(config, device.torch_device, has_packed_experts=has_packed_experts)
        shard = layout.shard(rank)
        rank_config = shard.shard_config(model_config)
        to_device = partial(connect_devices, device, config, max_message_bytes(rank_config, config, DTYPE_BYTES[dtype]))
        connections = DeviceConnections.connect(layout, rank, connect, to_device)
        if not all(each.group.can_capture for each in connections.all):
            config = config.with_settings(graphs=False)
        stage, comm = layout.stage(rank, model_config), cast("Communicator | None", connections.shards)
        weights = open_device_weights(
            *(checkpoint, DTYPES[config.dtype], device.torch_device, None, config),
            packed=packed,
            shard=shard,
            comm=comm,
        )
        weights.reads_ranges = True  # also if the rank has whole tensors of some layers
        model = load_model(rank_config, weights, context, stage)
        is_leader = rank == layout.leader
        draft = load_draft_model_on_gpu(config, checkpoint, model, device, packed=packed) if is_leader else None
        sizes = measure_share(device, config.parallel.ranks_per_gpu)
        if shared is None:
            sizes = sizes[0], sizes[1] + sum(each.group.nbytes for each in connections.all)
        else:
            sizes, config = (shared.total_bytes, shared.other_bytes), config.with_settings(kv_memory=shared.kv_memory)
        planned = PlannedModel.from_model(model, weights, config, device, sizes, draft=draft, stage=stage)
        fingerprint = compute_fingerprint(checkpoint, model_config, dtype, context)
        return DeviceRankModel(planned, weights, stage, connections, fingerprint)

    def describe(self) -> RankLoaded:
        plan = self.planned.plan
        return RankLoaded(
            fingerprint=self._fingerprint,
            layers=len(self.planned.model.layers),
            weight_bytes=plan.weights,
            block_bytes=self.planned.kv_shape.block_bytes,
            slot_bytes=state_slot_bytes(self.planned.rank_config),
            max_blocks=plan.kv_blocks,
            max_slots=plan.state_slots,
            fixed_bytes=plan.fixed_bytes - plan.reserve,
            draft_block_bytes=self.planned.draft_block_bytes,
            device_name=describe_device(self.planned.device),
        )

    def allocate(
        self,
        num_blocks: int,
        num_slots: int,
        make_state: SamplingStateFactory,
        runner_class: Callable[..., GPURunner] = GPURunner,
        pages_per_slot: int = 0,
        draft_model: DraftModelSummary | None = None,
    ) -> dict[str, float]:
        """Allocate the caches, wait for the weights, and compile and try the kernels, without other ranks.

        Return the seconds of each phase, by name. `pages_per_slot`: that of BlockBufferLayout, if there are tiers.
        `draft_model`: on ranks other than the leader, what they must know of the leader's draft model."""
        is_leader = self.stage.is_last and (self.connections.shards is None or self.connections.shards.rank == 0)
        stages, shards = (
            cast("Communicator | None", each) for each in (self.connections.stages, self.connections.shards)
        )
        first = self.planned.plan.groups, num_slots, is_leader, self.stage, stages, shards
        parallel = self.planned.settings.parallel
        role = RankRole(
            *first,
            has_dp_attention=parallel.dp_attention,
            pages_per_slot=pages_per_slot,
            counts_rows=parallel.redundant_experts > 0,
            draft_model=draft_model,
        )
        self.runner = self.planned.make_runner(make_state, num_blocks, num_slots, role, runner_class)
        seconds: dict[str, float] = {}
        if self._weights is not None:
            args = self._weights, self.runner, self.planned.settings, self.planned.plan
            self.weight_format, seconds = fill_and_identify(*args, lambda: self._fingerprint)
            self._weights = None
        prepare_movable_experts(self.runner.model)
        for each in self.connections.all:
            each.open()
        return seconds

    def describe_whole_blocks(self, model: ModelConfig, fingerprint: str) -> KVLayout:
        """Return the layout of blocks with the parts of all ranks. `model`: config of the undivided model."""
        groups = self.planned.groups
        shape = replace(self.planned.kv_shape, layers=groups.block_layers, kv_heads=model.kv_heads)
        return shape.layout(fingerprint, transposed_keys=False, groups=groups.name)

    def attach_buffers(self, buffers: HostBuffers, layout: BlockBufferLayout, rank: int) -> None:
        """Let the runner copy its part of KV blocks to and from these buffers. `rank`: the number of this rank."""
        assert self.runner.copier is not None
        args = buffers.memory, layout.offsets[rank]
        self.runner.copier.attach_host_memory(*args, saves_blocks=layout.saves_blocks(rank))

    def check_connections(self) -> None:
        """Raise RankLost if a collective of an earlier step has failed."""
        for each in self.connections.all:
            each.group.check()

    def close(self) -> None:
        """Close the connections to other ranks."""
        for each in self.connections.all:
            each.close()


def connect_devices(
    device: Device, config: EngineConfig, message_bytes: int, host: Communicator, senders: Sequence[int]
) -> Communicator:
    """Return a communicator between the GPUs of ranks that `host` already connects in main memory.

    `message_bytes`: the most bytes that one message of `send` has. `senders`: the ranks that send to this rank. Raises
    InvalidRequest if `--collectives` has a value that does not work on this machine."""
    collectives = config.parallel.collectives
    try:
        return connect_device_group(
            host,
            device.torch_device,
            collectives,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            message_bytes=message_bytes,
            senders=senders,
        )
    except CollectivesUnavailable as error:
        message = f"collectives is {collectives}, which these ranks cannot use: {error}"
        raise InvalidRequest(message, param="collectives", hint="use --collectives auto") from error


def max_message_bytes(config: ModelConfig, settings: EngineConfig, dtype_bytes: int) -> int:
    """Return the bytes of the activations of the largest step, which one stage sends to the next."""
    limits = settings.scheduler
    grid = memory.shape_grid_for(config, limits.max_batch_tokens)
    shapes = captured_shapes(limits.max_running, limits.max_batch_tokens, grid)
    return max_step_tokens(shapes, grid, limits) * config.hidden * dtype_bytes


def measure_share(device: Device, ranks_per_gpu: int) -> tuple[int, int]:
    """Return the bytes of a rank's share of a GPU, and how many of them other processes use.

    The second number is 0 if several ranks share the GPU."""
    total, others = measure_memory(device)
    return (total // ranks_per_gpu, 0) if ranks_per_gpu > 1 else (total, others)


def measure_device(config: EngineConfig) -> MeasuredGPU:
    """Return the kernels of this process's GPU, and its memory or one rank's share of it."""
    device = CudaDevice(config.gpu.kernels)
    return MeasuredGPU(*measure_share(device, config.parallel.ranks_per_gpu), name_kernels(device.torch_device))


def describe_device(device: Device) -> str:
    return torch.cuda.get_device_name(device.torch_device) if device.torch_device.type == "cuda" else "cpu"
