"""choose_stages: divides a model's layers into pipeline stages by how long they take on this machine.

One layer of each kind is loaded and timed, and so are the embedding, and the output head with sampling. Layers are of
the same kind if their tensors have the same shapes and formats, and their attention reads the same tokens. A prompt
needs the output head only for its last token, so the best division depends on the load. It is assumed that requests
generate as many tokens as their prompts have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.freememory import free_memory
from emberline.core.params import SamplingParams
from emberline.core.plan import Admission, StateWork, WorkItem
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.rank_model import RankModel, start_rank_backend
from emberline.engine.sampler import Sampler, SamplingStateFactory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.models.config import ModelConfig
from emberline.models.forward import ForwardBatch
from emberline.models.loader import load_checkpoint
from emberline.models.stage import Stage, split_layers
from emberline.models.weight_form import choose_weight_form

DECODE_ROWS = 8  # requests of a timed step that generates tokens, one each
CHUNK_TOKENS = 64  # of a timed step that computes a part of one prompt
SHAPES = ((DECODE_ROWS, 1), (1, CHUNK_TOKENS))  # of the timed steps: requests, and tokens of each
CONTEXT = 128  # tokens of each request before those of the timed step
MIN_REPEATS, MAX_REPEATS, MAX_SECONDS = 3, 20, 0.05  # of a timed call


@dataclass(frozen=True, slots=True)
class ComponentCost:
    """The time and memory of a part of a model: of a layer, the embedding, or the output head with sampling."""

    seconds: float  # for a token of a prompt and a generated token together
    weight_bytes: int
    block_bytes: int = 0  # of a KV block
    slot_bytes: int = 0  # of a request's recurrent states


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that each rank may use, and the size of the smallest useful KV cache."""

    all_bytes: int
    kv_bytes: int  # of these, bytes for the KV cache
    num_blocks: int  # KV blocks of the longest request, which must fit

    @staticmethod
    def from_config(config: EngineConfig, ranks_per_node: int, context: int) -> RankMemory:
        all_bytes = free_memory() // ranks_per_node
        return RankMemory(all_bytes, config.kv_cache.kv_memory or all_bytes, -(-context // config.scheduler.block_size))


@dataclass(frozen=True, slots=True)
class ModelCosts:
    layers: tuple[ComponentCost, ...]
    embedding: ComponentCost
    head: ComponentCost

    def split(self, stages: int, memory: RankMemory) -> tuple[int, ...]:
        """Return the number of layers of each stage.

        Of the divisions that fit into the memory, the one whose slowest stage is fastest is returned."""

        def fits(layers: range) -> bool:
            ends = [self.embedding] * (layers.start == 0) + [self.head] * (layers.stop == len(self.layers))
            parts = [*self.layers[layers.start : layers.stop], *ends]
            kv_bytes = sum(memory.num_blocks * each.block_bytes + each.slot_bytes for each in parts)
            return kv_bytes <= memory.kv_bytes and kv_bytes + sum(x.weight_bytes for x in parts) <= memory.all_bytes

        costs = [each.seconds for each in self.layers]
        ranges = split_layers(costs, self.head.seconds, stages, self.embedding.seconds, fits)
        return tuple(map(len, ranges))

    def stage_shares(self, stage_layers: Sequence[int]) -> list[float]:
        """Return each stage's share of the time of all stages."""
        ends = list(accumulate(stage_layers))
        found = [
            sum(each.seconds for each in self.layers[end - count : end])
            for end, count in zip(ends, stage_layers, strict=True)
        ]
        found[0] += self.embedding.seconds
        found[-1] += self.head.seconds
        return [each / sum(found) for each in found]


def choose_stages(config: EngineConfig, layout: Layout, model: ModelConfig) -> tuple[Layout, list[float]]:
    """Return the layout with the number of layers of each stage, and each stage's share of a step's time.

    If the settings give the numbers of layers, only the shares are measured."""
    if layout.pp == 1:
        return layout, [0.0]
    layout.stage(0, model)  # raises an error if the model cannot be divided
    costs = measure_costs(config, layout)
    if not layout.stage_layers:
        memory = RankMemory.from_config(config, layout.ranks_per_node, config.requested_context or model.max_context)
        layout = replace(layout, stage_layers=costs.split(layout.pp, memory))
    return layout, costs.stage_shares(layout.stage_layers)


def measure_costs(config: EngineConfig, layout: Layout) -> ModelCosts:
    """Time the layers, the embedding and the output head of a model, of each only the part of one rank."""
    threads = start_rank_backend(config, layout)
    checkpoint = Checkpoint.open(Path(config.model))
    model = ModelConfig.from_checkpoint(checkpoint)
    load = partial(_load_stage, config, layout, checkpoint)
    kinds = [_describe_kind(checkpoint, model, layer) for layer in range(model.layers)]
    by_kind: dict[object, ComponentCost] = {}
    for layer, kind in enumerate(kinds):
        if kind not in by_kind:
            by_kind[kind] = _measure_layer(load(Stage(1, 3, range(layer, layer + 1))), threads)
    layers = tuple(by_kind[kind] for kind in kinds)
    first, last = load(Stage(0, 2, range(1))), load(Stage(1, 2, range(model.layers - 1, model.layers)))
    embed = [partial(first.model.embed, _make_batch(first, *each)) for each in SHAPES]
    return ModelCosts(
        layers,
        ComponentCost(_measure_token(embed, threads), first.model.weight_bytes - layers[0].weight_bytes),
        ComponentCost(_measure_head(last, threads), last.model.weight_bytes - layers[-1].weight_bytes),
    )


def _load_stage(config: EngineConfig, layout: Layout, checkpoint: Checkpoint, stage: Stage) -> RankModel:
    """Load one rank's part of some layers, with caches for the largest step."""
    form = choose_weight_form(checkpoint, config.dtype, config.gpu.weights)
    comm = LoneRank(0, layout.tp) if layout.tp > 1 else None
    model = load_checkpoint(
        checkpoint, config.dtype, config.requested_context, form, stage, layout.shard(0) if comm else None, comm
    )
    whole = ModelConfig.from_checkpoint(checkpoint)
    rank_model = RankModel(model, stage.layers, config, layout.shard(0), whole)
    num_groups, block_size = len(rank_model.groups.windows), config.scheduler.block_size
    rank_model.allocate(DECODE_ROWS * num_groups * _count_blocks(rank_model, block_size) + 1, DECODE_ROWS + 1)
    return rank_model


def _count_blocks(rank_model: RankModel, block_size: int) -> int:
    """Return the number of blocks of each block table of a request in a timed step."""
    return (min(CONTEXT + CHUNK_TOKENS, rank_model.model.context) - 1) // block_size + 1


def _describe_kind(checkpoint: Checkpoint, model: ModelConfig, layer: int) -> object:
    prefix = f"model.layers.{layer}."
    infos = ((name.removeprefix(prefix), each) for name, each in checkpoint.tensors.items() if name.startswith(prefix))
    tensors = sorted((name, str(each.dtype), str(each.shape)) for name, each in infos)
    return model.windows[layer], layer in model.parts.attention.state_layers, tuple(tensors)


def _make_batch(rank_model: RankModel, rows: int, tokens_per_row: int) -> ForwardBatch:
    """Return a step with this many tokens of each of `rows` requests."""
    count, groups = _count_blocks(rank_model, rank_model.cache.shape.block_size), len(rank_model.groups.windows)
    numbers = iter(range(1, 1 + rows * groups * count))
    has_states = bool(rank_model.model.config.parts.attention.state_layers)
    length = min(tokens_per_row, rank_model.model.context)
    start = min(CONTEXT, rank_model.model.context - length)
    work = []
    for row in range(rows):
        first, *windows = [[next(numbers) for _ in range(count)] for _ in range(groups)]
        state = StateWork(1 + row) if has_states else None
        item = WorkItem(f"r{row}", start, (row,) * length, first, samples=True, window_blocks=windows, state=state)
        work.append(item)
    return rank_model.executor.build_batch(work)


def _measure_layer(rank_model: RankModel, threads: int) -> ComponentCost:
    calls = []
    for shape in SHAPES:
        batch = replace(_make_batch(rank_model, *shape), logit_rows=None)
        calls.append(
            partial(rank_model.model.run_layers, torch.randn(len(batch.tokens), rank_model.model.config.hidden), batch)
        )
    described = rank_model.describe()
    sizes = described.weight_bytes, described.block_bytes, described.slot_bytes
    return ComponentCost(_measure_token(calls, threads), *sizes)


def _measure_head(rank_model: RankModel, threads: int) -> float:
    model, sampler = rank_model.model, Sampler(rank_model.model.config.vocab, SamplingStateFactory(frozenset(), None))
    work = [WorkItem(f"r{row}", 0, (0,), (), samples=True) for row in range(DECODE_ROWS)]
    for each in work:
        sampler.admit(Admission(each.id, [0], 1, SamplingParams(), 0))
    x = torch.randn(DECODE_ROWS, model.config.hidden)
    return _measure(lambda: sampler.sample(work, model.compute_logits(x)), threads) / DECODE_ROWS


def _measure_token(calls: Sequence[Callable[[], object]], threads: int) -> float:
    """Return the seconds for one generated token plus one prompt token.

    `calls`: for each of SHAPES, a function that computes a step of this shape."""
    return sum(_measure(call, threads) / (rows * tokens) for call, (rows, tokens) in zip(calls, SHAPES, strict=True))


@torch.inference_mode()
def _measure(call: Callable[[], object], threads: int) -> float:
    """Return the shortest time of a call in seconds: other processes can only make it longer.

    With one thread, this is CPU time, which other processes change less."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times, began = list[float](), time.perf_counter()
    call()  # the first call may allocate memory
    while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and time.perf_counter() - began < MAX_SECONDS):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)
