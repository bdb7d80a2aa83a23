"""GPURunner: executes plans one after the other on a GPU and returns their results asynchronously.

A launch writes the step's inputs to a pinned buffer, then queues one copy to the device, the model, sampling, one copy
back, and an event. It never waits for the device. A step runs as a captured graph of the next larger shape, if any.

A grammar's mask needs the previous token on the host. If that token is still pending, the launch ends with the
model, and the step is sampled when the result of the previous step is read: masks are computed while the model runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.plan import StepPlan, StepResult, WorkItem
from emberline.engine.gpu.attention_planner import make_attention_planner
from emberline.engine.gpu.batch import DeviceBatch
from emberline.engine.gpu.copier import DeviceCopier
from emberline.engine.gpu.data_parallel_rows import DataParallelRows, DividedStep, fill_uncaptured
from emberline.engine.gpu.device import Device
from emberline.engine.gpu.draft_boot import summarise_draft_model
from emberline.engine.gpu.drafting import DeviceDrafting
from emberline.engine.gpu.expert_kernels import launch_expert_kernels
from emberline.engine.gpu.graphs import CapturedStep, ModelStep, StepGraphs, StepInputs, max_input_bytes
from emberline.engine.gpu.next_tokens import ComputedStep
from emberline.engine.gpu.rank_role import RankRole
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.shape import StepShape, captured_shapes, max_step_rows, max_step_tokens, order_by_expected_use
from emberline.engine.gpu.staging import InputStaging, StagedInputs
from emberline.engine.gpu.state_copies import DeviceStateCopies
from emberline.engine.gpu.step_batch import build_step_batch
from emberline.engine.memory import shape_grid_for
from emberline.engine.sampler import SamplingStateFactory
from emberline.kernels import ops
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel

log = logging.getLogger("emberline.engine")


class GPURunner:
    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        eos: frozenset[int],
        make_state: SamplingStateFactory,
        settings: EngineConfig,
        device: Device,
        max_context: int,
        draft_model: DraftModel | None = None,
        groups: LayerGroups | None = None,
        states: StateCache | None = None,
        rank: RankRole | None = None,
    ) -> None:
        """`groups`: layers of the whole model that share block tables; None: all share one.

        `states`: memory of recurrent layers, with a slot for padding; None: the model has none. `rank`: this runner's
        part of an engine on several ranks; `model`, `cache` and `states` are this part. None: there is only one."""
        limits = settings.scheduler
        self.model, self.cache, self.step_stream = model, cache, device.step_stream
        self.num_blocks, self._block_size = cache.num_blocks, cache.shape.block_size
        self.groups = groups or LayerGroups.single(model.config.layers)
        self.rank = rank or RankRole.single(model.config, self.groups, 0 if states is None else states.num_slots)
        self.states, self.num_state_slots = states, self.rank.num_state_slots
        self.vocab_size, self.eos, self.max_batch_tokens = model.config.vocab, eos, limits.max_batch_tokens
        self._make_state, self.prepare = make_state, make_state.prepare
        self._drafts = drafts = self.rank.draft_model or summarise_draft_model(model.config, draft_model)
        max_draft = settings.speculation.max_draft_tokens if drafts.exists else 0
        width, tables, running = -(-max_context // self._block_size), len(self.groups.windows), limits.max_running
        self._rows = DeviceRows(running, width, device.torch_device, max_draft, tables, states)
        heads = model.config.heads, model.config.kv_heads, model.config.head_dim
        max_queries = min(settings.speculation.max_new_tokens, drafts.max_row_queries)
        self._attention_planner = make_attention_planner(model, cache, settings, max_context, max_queries)
        self._max_queries = self._attention_planner.limit_queries(max_queries)
        self._row_queries = self._attention_planner.list_row_queries(self._max_queries)
        self._has_decode_kernel = cache.keys.is_cuda and self._attention_planner.limit_queries(2) > 1
        self.exact = settings.gpu.exact  # whether a token's logits have the same bits in any batch
        self.graphs = settings.gpu.graphs  # whether steps are captured; False while another thread uses the device
        self._grid = shape_grid_for(model.config, limits.max_batch_tokens, self.rank.exchanging_ranks)
        shapes = captured_shapes(running, limits.max_batch_tokens, self._grid, queries=self._row_queries)
        self.shapes = order_by_expected_use(shapes)
        self._next_shape = 0  # index of the first shape that was not captured ahead of its first use
        size = max_input_bytes(limits, self._attention_planner, tables)
        self._dp_rows = self.rank.make_dp_rows(max_step_rows(running))
        ahead = model.make_unpacker(device.step_stream, device.new_stream(), exchanges_rows=self.rank.has_dp_attention)
        staging, self._table_inputs = (InputStaging(size, device, self.rank.num_plans + 1) for _ in range(2))
        self._graphs = StepGraphs(device.step_stream, staging, ahead, max_step_rows(running))
        self._next_tokens = self.rank.make_next_tokens(self._rows, device, self.vocab_size, size)
        copies = None if states is None else DeviceStateCopies(states, cache, self.rank.pages_per_slot)
        self._state_copies, self.pages_per_slot = copies, copies.pages.per_slot if copies else self.rank.pages_per_slot
        self.copier = DeviceCopier(cache, device, copies, self.rank.dp_rank) if settings.tiers.has_tiers else None
        self.draft_model = draft_model
        self._drafting: DeviceDrafting | None = None
        if draft_model is not None:
            target = heads, model.dtype, self._max_queries, max_step_tokens(self.shapes, self._grid, limits)
            args = draft_model, cache, self._rows, device, limits, self.graphs, target
            self._drafting = DeviceDrafting(*args, self.rank.share_tokens)

    @property
    def model_configs(self) -> list[ModelConfig]:
        """The configs of the model and of its draft model, if any."""
        return [model.config for model in (self.model, self.draft_model) if model is not None]

    @property
    def layout(self) -> str:
        shape = self.cache.shape
        parts = self.model.fingerprint, str(shape.dtype), str(shape.block_size), "rows", self.groups.name
        return "/".join(filter(None, parts))

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        for request_id in plan.ended_ids:
            self._rows.remove(request_id)
        failed: dict[str, str] = {}
        for admission in plan.admitted:
            try:
                self._rows.add(admission.id, self._make_state(admission))
            except InvalidRequest as e:
                failed[admission.id] = str(e)
        # A request that failed in the previous step may still be in this plan, which was made before that was known.
        work = self._rows.filter_admitted(plan.work)
        with torch.inference_mode(), self._graphs.stream.activate():
            copied = self._launch_copies(plan)
            computed = self._launch_step(plan, work, failed) if work else partial(StepResult, plan.step, {}, {}, failed)

        def finish() -> StepResult:
            copied()
            return computed()

        return finish

    def drop_device_addresses(self) -> None:
        """Drop captured graphs and all else that contains device addresses, before device memory moves.

        What was dropped is rebuilt when it is next needed."""
        self._graphs.drop_device_addresses()
        self._next_shape = 0
        self._next_tokens.drop_device_addresses()
        self._table_inputs.forget_views()
        self._attention_planner.drop_tensor_maps()
        if self.copier is not None:
            self.copier.drop_device_addresses()
        if self._drafting is not None:
            self._drafting.drop_device_addresses()

    def device_buffers(self) -> list[Tensor]:
        """Return all tensors that stay on the device between steps, except weights.

        While the runner is idle, these tensors may be replaced by zeros: their counters are zero then, and everything
        else is written before it is read."""
        state = [self.cache.keys, self.cache.values, *self._rows.device_buffers(), *self._next_tokens.device_buffers()]
        staged = [staging.device for staging in (self._table_inputs, self._graphs.inputs)]
        copying = self.copier.device_buffers() if self.copier is not None else []
        drafting = self._drafting.device_buffers() if self._drafting is not None else []
        recurrent = [] if self.states is None else self.states.tensors
        return [*state, *recurrent, *staged, *self._attention_planner.scratch_buffers(), *copying, *drafting]

    def _launch_copies(self, plan: StepPlan) -> Callable[[], None]:
        if self._state_copies is not None:
            self._state_copies.clear_blocks(plan.work)
        if not plan.saves and not plan.loads:
            return lambda: None
        assert self.copier is not None, "EngineConfig.tiers has no tier"
        return self.copier.launch(plan.saves, plan.loads)

    def _launch_step(
        self, plan: StepPlan, work: Sequence[WorkItem], failures_by_request: dict[str, str]
    ) -> Callable[[], StepResult]:
        began = self._graphs.stream.record_event()
        self._rows.assign_rows(work)
        singles, chunks = DeviceBatch.split(work, self._rows.is_prompt if self.exact else None)
        if self._dp_rows is not None:
            logits = self._launch_data_parallel(self._dp_rows, self._dp_rows.divide(singles, chunks))
            fields = singles, chunks, logits, None, self._count_prepared
            return self._next_tokens.launch(ComputedStep(plan, failures_by_request, began, *fields))
        self._send_table_updates(work)
        batch = DeviceBatch.from_work(singles, chunks, self._rows, self._block_size, max_queries=self._max_queries)
        longest = int(batch.counts[: batch.singles].max()) if (has_drafts := batch.single_tokens > len(singles)) else 1
        queries = next(count for count in self._row_queries if count >= longest) if has_drafts else 1
        assert queries > 1 or not (has_drafts and self._has_decode_kernel), "drafts need EngineConfig.speculation"
        shape = self._choose_captured_shape(batch.single_tokens, chunks, queries)
        model_step = self._prepare_model_step(batch, shape, queries)
        if self._state_copies is not None:
            self._state_copies.begin_step(work)
        logits = self._run_model_step(model_step)
        if self._state_copies is not None:
            self._state_copies.save_snapshots(chunks if self._rows.keeps_drafted_rows else work)
        draft = None
        if self._drafting is not None and plan.runs_draft_model:
            draft = partial(self._drafting.prepare, singles, chunks, batch, shape, model_step.inputs)
        rest = singles, chunks, logits, draft, self._count_prepared
        return self._next_tokens.launch(ComputedStep(plan, failures_by_request, began, *rest))

    def _launch_data_parallel(self, exchanger: DataParallelRows, step: DividedStep) -> Tensor:
        """Queue the forward pass of this rank's requests, and return the logits of the requests of all ranks."""
        rank_work = exchanger.rank_work(step)
        self._send_table_updates(rank_work.all)
        parts = rank_work.singles, rank_work.chunks, self._rows, self._block_size
        batch = DeviceBatch.from_work(*parts, max_queries=self._max_queries)
        longest = min(step.longest_single, self._max_queries)
        queries = next(count for count in self._row_queries if count >= longest) if step.longest_single > 1 else 1
        shape = exchanger.find_shape(step, self._grid, queries, self._attention_planner) if self.graphs else None
        batch = fill_uncaptured(batch, self._rows) if shape is None else self._pad_batch(batch, shape)
        staged = self._graphs.inputs.new_inputs()
        inputs = self._stage_inputs(batch, shape, staged, self._graphs.weight_unpacker, queries)
        inputs = replace(inputs, exchanged=exchanger.stage(step, shape, staged))
        staged.send()
        logits, replay = (None, None) if shape is None else self._find_or_capture_graph(shape, inputs)
        if self._state_copies is not None:
            self._state_copies.begin_step(rank_work.all)
        logits = self._run_model_step(ModelStep(inputs, logits, replay, step.num_logits, None))
        if self._state_copies is not None:
            self._state_copies.save_snapshots(rank_work.all)
        return logits

    def _pad_batch(self, batch: DeviceBatch, shape: StepShape) -> DeviceBatch:
        return batch.pad_to(shape, self._rows.padding_row, self._rows.padding_state)

    def _count_prepared(self) -> int:
        return len(self._graphs.captured) + (0 if self._drafting is None else self._drafting.num_prepared)

    def _send_table_updates(self, work: Sequence[WorkItem]) -> None:
        """Queue the copy of new block table entries to the device."""
        indexes, blocks = self._rows.take_block_table_updates(work)
        if len(indexes):
            staged = self._table_inputs.new_inputs()
            device_indexes, device_blocks = staged.put(indexes), staged.put(blocks)
            staged.send()
            self._rows.tables.view(-1).index_copy_(0, device_indexes, device_blocks)

    def _choose_captured_shape(self, single_tokens: int, chunks: list[WorkItem], queries: int) -> StepShape | None:
        """Return the shape of the captured step to use for this work; None if the work must run uncaptured."""
        sizes = [(w.start, len(w.tokens)) for w in chunks]
        can_capture = self.graphs and (not chunks or self._attention_planner.can_capture_chunks(sizes))
        return StepShape.for_work(single_tokens, chunks, self._grid, queries) if can_capture else None

    def _prepare_model_step(self, batch: DeviceBatch, shape: StepShape | None, queries: int) -> ModelStep:
        """Queue the copy of the model's inputs to the device, and return the step to run."""
        graphs = self._graphs
        if shape is not None:
            batch = self._pad_batch(batch, shape)
        staged = graphs.inputs.new_inputs()
        inputs = self._stage_inputs(batch, shape, staged, graphs.weight_unpacker, queries)
        is_contiguous = len(batch.used_logit_rows) == 0 or len(batch.used_logit_rows) == batch.used_logit_rows[-1] + 1
        wanted = None if is_contiguous else staged.put(batch.used_logit_rows)
        staged.send()
        logits, replay = (None, None) if shape is None else self._find_or_capture_graph(shape, inputs)
        return ModelStep(inputs, logits, replay, len(batch.used_logit_rows), wanted)

    def _run_model_step(self, step: ModelStep) -> Tensor:
        """Queue the model's computation of a step, and return the logits of the rows that are not padding."""
        logits = step.logits
        if step.replay is not None and logits is not None:
            step.replay()
        else:
            logits = self._run_model(step.inputs, logits)
        if not self.rank.has_logits:
            return logits
        return logits[: step.count] if step.used_rows is None else logits.index_select(0, step.used_rows)

    @property
    def is_preparing(self) -> bool:
        """Whether there are shapes of steps left to capture in idle time."""
        return self.num_unprepared > 0

    @property
    def num_unprepared(self) -> int:
        """The number of shapes of steps that are left to capture in idle time."""
        return len(self.shapes) - self._next_shape if self.graphs else 0

    def prepare_next(self) -> bool:
        """Capture a step of the next shape, filled with padding only; return False if all shapes are captured."""
        if not self.is_preparing:
            return False
        shape = self.shapes[self._next_shape]
        self._next_shape += 1
        with torch.inference_mode(), self._graphs.stream.activate():
            inputs = self._padding_inputs(shape)
            logits, replay = self._find_or_capture_graph(shape, inputs)
            if replay is not None:
                replay()  # the first replay also uploads the graph, which would delay a request
            elif not self.rank.is_alone:
                self._run_model(inputs, logits)  # the other ranks replay the step, and exchange tensors in it
            if self._drafting is not None and not shape.chunks:
                self._drafting.capture_ahead(shape, inputs)
        return True

    def run_uncaptured_once(self) -> None:
        """Run a step of each kind once, uncaptured, in the thread that will capture steps.

        A thread's first use of a library or stream initializes it, which is not allowed during a capture."""
        without_chunks = [shape for shape in self.shapes if not shape.chunks]
        mixed = [shape for shape in self.shapes if shape.chunks]
        with torch.inference_mode(), self._graphs.stream.activate():
            for shape in {*without_chunks[:1], *without_chunks[-1:], *mixed[:1], *mixed[-1:]}:
                logits = self._get_logits_buffer(shape)
                self._run_model(self._padding_inputs(shape), logits)

    def launch_all_kernels(self) -> None:
        """Launch every kernel that steps need, on padding only, so that the kernels are compiled together."""
        with torch.inference_mode(), self._graphs.stream.activate():
            for shape in self.shapes:
                logits = self._get_logits_buffer(shape)
                self._run_model(self._padding_inputs(shape), logits)
            launch_expert_kernels(self.model, self.draft_model, self.max_batch_tokens)

    def _get_logits_buffer(self, shape: StepShape) -> Tensor:
        """Return the buffer for the logits of a step of this shape; without columns on ranks of earlier stages."""
        width = self.vocab_size if self.rank.has_logits else 0
        rows = shape.rows if self._dp_rows is None else self._dp_rows.count_logits(shape)
        return self._graphs.get_logits_buffer(rows, width, self.cache.keys.device)

    def _padding_inputs(self, shape: StepShape) -> StepInputs:
        """Return inputs of a step that is only padding. The step writes only logits, which are not used."""
        batch = self._pad_batch(DeviceBatch.from_work([], [], self._rows, self._block_size), shape)
        staged = self._graphs.inputs.new_inputs()
        inputs = self._stage_inputs(batch, shape, staged, self._graphs.weight_unpacker, shape.queries)
        if (dp_rows := self._dp_rows) is not None:
            inputs = replace(inputs, exchanged=dp_rows.stage(dp_rows.divide([], []), shape, staged))
        staged.send()
        return inputs

    def _find_or_capture_graph(self, shape: StepShape, inputs: StepInputs) -> tuple[Tensor, Callable[[], None] | None]:
        """Return the logits buffer of a step of this shape, and a function that replays its captured graph.

        The graph is captured at its first use, which takes the host as long as launching the step once. The function
        is None if capturing failed."""
        graphs = self._graphs
        if shape in graphs.captured:
            captured = graphs.captured[shape]
            return captured.logits, captured.replay
        logits = self._get_logits_buffer(shape)
        if graphs.capture_failed:
            return logits, None
        try:
            replay = graphs.stream.capture(lambda: self._run_model(inputs, logits))
        except Exception as error:  # of the driver, of torch, or an assertion: torch cannot capture again after it
            log.exception(
                "Capturing a step as a CUDA graph failed, steps of new shapes run without graphs: shape=%s reason=%s",
                shape,
                error,
            )
            graphs.capture_failed = True
            return logits, None
        graphs.captured[shape] = CapturedStep(logits, replay)
        return logits, replay

    def _stage_inputs(
        self,
        batch: DeviceBatch,
        shape: StepShape | None,
        staged: StagedInputs,
        weight_unpacker: ops.WeightUnpacker,
        queries: int,
    ) -> StepInputs:
        """Stage the model's inputs. Steps of one shape get the same addresses, as captured graphs require."""
        min_tiles = 0 if shape is None else ops.max_prefill_tiles(shape.tokens, shape.chunks)
        logit_tokens = batch.logit_rows if shape is None else None
        return StepInputs(
            tokens=staged.put(batch.tokens),
            newest_index=staged.put(batch.newest_index),
            shifts=(staged.put(batch.token_shifts), staged.put(batch.row_shifts)) if self._drafts.exists else None,
            slots=staged.put(batch.slots),
            positions=staged.put(batch.positions),
            context=staged.put(batch.starts),
            rows=staged.put(batch.rows),
            query_start=staged.put(batch.query_start),
            tiles=self._attention_planner.plan(
                *(batch.max_starts, batch.counts, batch.singles, staged.put),
                min_tiles=min_tiles,
                logit_tokens=logit_tokens,
                max_queries=queries,
            ),
            logit_rows=staged.put(batch.logit_rows) if shape is None or shape.chunks else None,
            weight_unpacker=weight_unpacker,
            window_slots=None if batch.window_slots is None else staged.put(batch.window_slots),
            state_slots=None if (states := batch.states) is None else staged.put(states.slots),
            state_drafts=None if states is None or states.drafts is None else staged.put(states.drafts),
            state_starts=None if states is None or states.drafts is None else staged.put(states.query_start),
            has_drafts=queries > 1 or not self._has_decode_kernel,
        )

    def _run_model(self, inputs: StepInputs, out: Tensor | None) -> Tensor:
        capture = None if self._drafting is None else self._drafting.capture
        args = inputs, self._rows, self.cache, self.rank.groups, capture, self.states
        batch = build_step_batch(*args, computes_all_rows=self._drafts.reads_output)
        return self.rank.run_model(self.model, batch, out)
