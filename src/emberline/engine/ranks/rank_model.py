"""RankModel: the part of a model that one rank computes, with its caches and its connections to other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from emberline.core.cpus import core_count
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.engine.engine_components import choose_kv_dtype
from emberline.engine.group_choice import choose_groups
from emberline.engine.kv_shape import make_kv_shape, make_state_shape
from emberline.engine.ranks.control import RankLoaded
from emberline.engine.ranks.data_parallel_work import DataParallelExecutor
from emberline.engine.ranks.draft_model import load_draft_model_of_ranks
from emberline.engine.ranks.expert_moves import ExpertMoves
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.settings import transfer_obstacle
from emberline.engine.speculation.draft_cache import draft_block_bytes, make_draft_cache
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.work_executor import ForwardModel, WorkExecutor
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.comm.gloo import GlooGroup
from emberline.kernels.comm.rendezvous import Rendezvous
from emberline.kernels.mixture import Expert
from emberline.kv.block_shard import BlockShard, StateShard, rank_state_layers
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.tiers.block_shard_copier import BlockShardCopier, RankShare
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.region import HostRegion
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.expert_loader import ExpertLoader
from emberline.models.expert_placement import EMPTY_SLOT
from emberline.models.forward import ForwardBatch
from emberline.models.loader import load_checkpoint
from emberline.models.pipeline import PipelineModel
from emberline.models.shard import Shard
from emberline.models.weight_form import choose_weight_form

log = logging.getLogger("emberline.engine")

CONNECT_TIMEOUT_S = 30.0  # between ranks that have all started
# Of a collective. A long step of a slow rank must not end the group: the leader notices lost ranks earlier.
COLLECTIVE_TIMEOUT_S = 1800.0

ConnectRanksFunction = Callable[[str, int, int], Communicator]  # arguments: a group's name, a rank in it, its size


class RankModel:
    executor: WorkExecutor  # set by `allocate`
    cache: KVCache
    draft_model: DraftModel | None = None  # only the leader has one
    draft_runner: DraftRunner | None = None

    def __init__(
        self, model: DecoderModel, layers: range, config: EngineConfig, shard: Shard, whole: ModelConfig
    ) -> None:
        """`model`: this rank's part, with these layers and this shard. `whole`: config of the undivided model."""
        self.model, parts = model, model.config.parts
        self.groups = choose_groups(model.config.windows, model.context, parts.attention.state_layers)
        self._rank_groups = self.groups.of_layers(layers)
        self.kv_shape = make_kv_shape(
            model.config,
            config.scheduler.block_size,
            choose_kv_dtype(config.kv_cache.kv_dtype, model.dtype),
            self._rank_groups,
        )
        self.share = self._share_of(layers, shard, whole)
        shape, num_layers = make_state_shape(model.config), len(set(layers) & set(parts.attention.state_layers))
        self._state_shape = replace(shape, layers=num_layers) if shape is not None and num_layers else None
        self._max_running, self._max_draft = config.scheduler.max_running, config.speculation.max_new_tokens - 1
        self._forward_model: ForwardModel = model
        self._connections: list[Communicator] = []
        self._attending: Communicator | None = None  # of ranks that attend to different requests
        self._expert_loader: ExpertLoader | None = None  # None: experts stay where they are
        self._expert_group = 0

    def _share_of(self, layers: range, shard: Shard, whole: ModelConfig) -> RankShare:
        """Return what this rank has of the blocks and states of the whole model."""
        shard = shard if shard.divides_attention else Shard()
        heads, is_first = shard.divide(whole.kv_heads), shard.is_first_of(whole.kv_heads)
        blocks = BlockShard.of_rank(self.groups, layers, heads, is_first=is_first)
        shape = replace(self.kv_shape, layers=self.groups.block_layers, kv_heads=whole.kv_heads)
        state_shape, state_layers = make_state_shape(whole), rank_state_layers(self.groups, layers)
        if state_shape is None:
            return RankShare(blocks, shape)
        states = StateShard.of_rank(state_shape, state_layers, shard.rank, shard.world_size)
        return RankShare(blocks, shape, states, state_shape.slot_bytes)

    @staticmethod
    def load(config: EngineConfig, layout: Layout, rank: int, connect: ConnectRanksFunction) -> RankModel:
        """Connect to the other ranks and load this rank's part of the model.

        Raises RankLost if a rank does not connect, EmberlineError if settings or model are not usable."""
        start_rank_backend(config, layout)
        checkpoint = Checkpoint.open(Path(config.model))
        whole = ModelConfig.from_checkpoint(checkpoint)
        stage, shard = layout.stage(rank, whole), layout.shard(rank)
        stages = connect(f"stages-{shard.rank}", stage.index, layout.pp) if layout.pp > 1 else None
        shards = connect(f"shards-{stage.index}", shard.rank, layout.tp) if layout.tp > 1 else None
        form = choose_weight_form(checkpoint, config.dtype, config.gpu.weights)
        model = load_checkpoint(checkpoint, config.dtype, config.requested_context, form, stage, shard, shards)
        rank_model = RankModel(model, stage.layers, config, shard, whole)
        rank_model._connections = [each for each in (stages, shards) if each is not None]
        rank_model._attending = shards if layout.dp_attention else None
        rank_model._expert_loader = (
            ExpertLoader(checkpoint, config.dtype, form, shard) if shard.redundant_experts else None
        )
        rank_model._expert_group = shard.expert_group
        if stages is not None:
            rank_model._forward_model = PipelineModel(model, stage, stages)
        exchanges_blocks = config.transfer is not None and not transfer_obstacle(config, whole)
        if exchanges_blocks and stage.is_last and shards is not None:
            rank_model._forward_model = OrderedModel(rank_model._forward_model, shards)
        if rank == layout.leader:
            rank_model.draft_model = load_draft_model_of_ranks(config, checkpoint, model)
        return rank_model

    def move_experts(self, moves: ExpertMoves) -> bool:
        """Load the experts that these placements add to this rank, and use the placements from the next step on.

        If any rank cannot load an expert, change nothing and return False. All ranks must call this between the same
        two steps. Raises RankLost."""
        assert self._attending is not None and self._expert_loader is not None
        networks, group = self.model.dispatching_layers, self._expert_group
        loaded: dict[int, dict[int, Expert]] = {}
        try:
            for layer, placement in moves.items():
                dispatch = networks[layer].dispatch
                assert dispatch is not None
                new = set(placement[group]) - set(dispatch.placement[group]) - {EMPTY_SLOT}
                loaded[layer] = {expert: self._expert_loader.load(layer, expert) for expert in sorted(new)}
            failed = 0.0
        except (EmberlineError, OSError) as error:
            log.warning("Experts not moved: rank=%d reason=%s", self._attending.rank, error)
            failed = 1.0
        if float(self._attending.all_reduce(torch.tensor([failed]))):
            return False
        for layer, placement in moves.items():
            networks[layer].place_experts(placement, group, loaded[layer])
        return True

    def close(self) -> None:
        """Close the connections to other ranks."""
        for connection in self._connections:
            connection.close()

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of this rank's part of a block."""
        return self.kv_shape.layout(self.model.fingerprint)

    def describe(self) -> RankLoaded:
        draft, states = self.draft_model, self._state_shape
        return RankLoaded(
            fingerprint=self.model.fingerprint,
            layers=len(self.model.layers),
            weight_bytes=self.model.weight_bytes + (0 if draft is None else draft.weight_bytes),
            block_bytes=self.kv_shape.block_bytes + (0 if draft is None else draft_block_bytes(draft, self.kv_shape)),
            slot_bytes=0 if states is None else states.slot_bytes,
            draft_bytes=0 if states is None else self._max_draft * states.draft_bytes,
        )

    def allocate(self, num_blocks: int, num_slots: int, region: HostRegion | None = None) -> None:
        """Allocate this rank's part of the KV cache, and of `num_slots` slots for recurrent states.

        `region`: shared memory for the KV cache; None: it is allocated in this process."""
        self.cache = KVCache(self.kv_shape, num_blocks, region=region)
        states = None
        if self._state_shape is not None:
            places = min(num_slots, self._max_running)
            states = StateCache(self._state_shape, num_slots, num_draft_slots=places, max_draft=self._max_draft)
        if self.draft_model is not None:
            self.draft_runner = DraftRunner(self.draft_model, make_draft_cache(self.draft_model, self.cache))
        copier = BlockShardCopier(self.cache, self.share, states)
        args = self._forward_model, self.cache, self._rank_groups, states, copier
        self.executor = WorkExecutor(*args) if self._attending is None else DataParallelExecutor(self._attending, *args)


@dataclass(frozen=True, slots=True)
class OrderedModel:
    """The last stage of a model. When its `forward` returns, all ranks have written the step's keys and values.

    Only then may the leader let other engines read or overwrite the blocks. In each layer, a rank writes its keys and
    values before it takes part in the sum of the attention's outputs, so the sum of a layer shows that all ranks have
    written. The last layer of a step without logits has no sum; there the ranks exchange one number instead."""

    model: ForwardModel
    comm: Communicator  # with the other ranks of the last stage

    def forward(self, batch: ForwardBatch) -> Tensor:
        logits = self.model.forward(batch)
        if not len(logits):
            self.comm.all_gather(torch.zeros(1))
        return logits


def start_rank_backend(config: EngineConfig, layout: Layout) -> int:
    """Start the kernels with the number of threads of one rank, and return that number."""
    threads = config.threads or max(1, core_count() // layout.ranks_per_node)
    backend = ops.start_backend(threads=threads)
    torch.set_num_threads(1 if backend.library else threads)
    return threads


def connect_processes(rendezvous: Rendezvous, name: str, rank: int, size: int) -> Communicator:
    """Connect this process to the other processes of a group, through main memory. Raises RankLost."""
    timeouts = {"connect_timeout_s": CONNECT_TIMEOUT_S, "timeout_s": COLLECTIVE_TIMEOUT_S}
    return GlooGroup(rendezvous, name, rank, size, **timeouts)
