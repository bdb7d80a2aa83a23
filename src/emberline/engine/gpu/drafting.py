"""DeviceDrafting: runs a draft model on the device after each step, without waiting for the host.

The device compares the sampled tokens with the draft that the step verified, and the draft model continues after the
last accepted one. The new draft stays on the device, where the next step finds it: meanwhile the host reads the sampled
tokens and plans that step. The host needs a draft's tokens only for grammars and penalties.

The draft model has a KV cache of its own with the same blocks as the target model's: a token is at the same place in
both. If the target model has several groups of layers, these are the blocks of the first, which keeps all tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from emberline.core.engine_config import SchedulerConfig
from emberline.core.plan import PENDING_TOKEN, WorkItem
from emberline.engine.gpu.batch import DeviceBatch
from emberline.engine.gpu.device import Device, DeviceEvent
from emberline.engine.gpu.draft_inputs import DraftInputs, DraftRows, stage_draft_inputs
from emberline.engine.gpu.graphs import StepInputs
from emberline.engine.gpu.rows import DeviceRows, HostDrafts
from emberline.engine.gpu.sampling import ShareTokens
from emberline.engine.gpu.shape import StepShape, max_draft_rows, max_step_rows, pad_row_count
from emberline.engine.gpu.shared_drafts import DraftSender
from emberline.engine.gpu.staging import InputStaging, StagedInputs, copy_to_host
from emberline.engine.speculation.draft_cache import make_draft_cache
from emberline.kernels import ops
from emberline.kv.cache import KVCache
from emberline.models.draft_model import DraftModel
from emberline.models.forward import ForwardBatch, HiddenCapture

log = logging.getLogger("emberline.engine")
LENGTH_GRAIN = 512  # keys: plans of consecutive steps are the same until a request grows beyond such a multiple
DraftKey = tuple[StepShape, int, int, bool]  # of a captured chain
MAX_GRAPHS = 256  # captured chains; the oldest half is dropped when there are more


@dataclass(frozen=True, slots=True)
class PreparedDrafting:
    """The drafting of one step, whose inputs are on their way to the device."""

    inputs: DraftInputs
    rows: DraftRows
    key: DraftKey | None  # of its captured graph; None: it cannot be captured


class DeviceDrafting:
    def __init__(
        self,
        model: DraftModel,
        target_cache: KVCache,
        rows: DeviceRows,
        device: Device,
        limits: SchedulerConfig,
        graphs: bool,
        target_shape: tuple[tuple[int, int, int], torch.dtype, int, int],
        share_tokens: ShareTokens | None = None,
    ) -> None:
        """`graphs`: whether to capture CUDA graphs.

        `target_shape`: of the target model: (query heads, KV heads, head size), the dtype of its activations, the
        most tokens that its attention computes as one row, and the most tokens of a step, with padding.
        `share_tokens`: sends drafts to the other ranks; None: there are none."""
        target_heads, dtype, max_queries, max_step_tokens = target_shape
        max_running, max_batch_tokens = limits.max_running, limits.max_batch_tokens
        cache = make_draft_cache(model, target_cache, str(device.torch_device))
        self.cache = cache
        self.model = model
        self._rows = rows
        self._stream = device.step_stream
        heads = model.config.heads, model.config.kv_heads, model.config.head_dim
        is_portable = model.config.parts.needs_portable_attention
        # With equal shapes, the attention of both models is split in the same way.
        self._shares_plans = heads == target_heads and not is_portable
        max_rows = max_draft_rows(max_running, reads_states=bool(model.captured_layers))
        planner = ops.LatentPlanner if model.config.parts.attention.latent else ops.AttentionPlanner
        options = ops.PlannerOptions(max_queries=max_queries, length_grain=LENGTH_GRAIN, portable=is_portable)
        self._planner = planner(heads, cache.keys, dtype, max_rows, options)
        self._max_queries = max_queries
        self._query_start = torch.arange(2 * max_rows + 1, dtype=torch.int32, device=device.torch_device)
        self._draft_offsets = torch.arange(rows.max_draft, device=device.torch_device)
        plan_bytes = self._planner.max_plan_bytes(max_rows, max_batch_tokens)
        per_row, per_token = 96 + 32 * rows.max_draft, 24
        size = 2 * (max_rows * per_row + max_batch_tokens * per_token + 2 * plan_bytes) + (1 << 20)
        self._staging = InputStaging(size, device)
        max_sampled = max_step_rows(max_running) + max_batch_tokens + rows.max_draft
        self._sampled = torch.zeros(max_sampled, dtype=torch.int64, device=device.torch_device)
        self._drafts = torch.zeros(max_rows, rows.max_draft, dtype=torch.int64, device=device.torch_device)
        self._sender = None if share_tokens is None else DraftSender(share_tokens, max_rows, rows)
        self._captured = _allocate_captured_states(model, max_step_tokens, dtype, device)
        self._graphs = graphs
        self._max_running = max_running
        self._replays: dict[DraftKey, Callable[[], None]] = {}
        self._seen: set[DraftKey] = set()

    @property
    def capture(self) -> HiddenCapture | None:
        """Where the target model copies its hidden states in each step."""
        return None if self._captured is None else HiddenCapture(self.model.captured_layers, self._captured)

    @property
    def num_prepared(self) -> int:
        """The number of kinds of draft passes that ran once uncaptured, plus how many of them were captured."""
        return len(self._seen) + len(self._replays)

    def device_buffers(self) -> list[Tensor]:
        captured = [] if self._captured is None else [self._captured]
        scratch = self._planner.scratch_buffers()
        kept = [self._sampled, self._drafts, self._staging.device]
        sent = [] if self._sender is None else [self._sender.message]
        return [self.cache.keys, self.cache.values, *kept, *sent, *captured, *scratch]

    def drop_device_addresses(self) -> None:
        self._replays.clear()
        self._seen.clear()
        self._staging.forget_views()
        self._planner.drop_tensor_maps()

    def prepare(
        self,
        singles: Sequence[WorkItem],
        chunks: Sequence[WorkItem],
        batch: DeviceBatch,
        shape: StepShape | None,
        step: StepInputs,
    ) -> Callable[[Tensor | None], Callable[[], dict[str, Sequence[int]]]]:
        """Copy the inputs of drafting to the device; return a function that queues the drafting.

        Call that function with the sampled tokens; None: the step samples none. It returns another function, which
        returns the drafts by request id. `batch`: the step's work without padding."""
        rows = DraftRows.select(singles, chunks, self._rows)
        padded = pad_row_count(len(rows.work)) if rows.work else 0
        staged = self._staging.new_inputs()
        reads_states = self._captured is not None
        tokens = len(batch.tokens) if shape is None else shape.singles + shape.tokens
        inputs = stage_draft_inputs(
            rows, padded, staged, self._rows, self._planner, chunks, batch, tokens if reads_states else 0
        )
        if not self._shares_plans and (reads_states or inputs.computes_step):
            queries = self._max_queries if batch.single_tokens > len(singles) else 1
            queries = queries if shape is None else shape.queries
            inputs = replace(inputs, step_plan=self._plan_step(batch, shape, staged, queries))
        staged.send()
        can_capture = shape is not None and self._graphs and not chunks
        key = (shape, padded, inputs.length, inputs.computes_step) if can_capture and shape is not None else None
        return partial(self._launch, PreparedDrafting(inputs, rows, key), step)

    def _plan_step(
        self, batch: DeviceBatch, shape: StepShape | None, staged: StagedInputs, queries: int
    ) -> ops.AttentionPlan:
        """Plan the attention of the draft model's pass over all tokens of the target model's step."""
        padded = batch if shape is None else batch.pad_to(shape, self._rows.padding_row)
        min_tiles = 0 if shape is None else ops.max_prefill_tiles(shape.tokens, shape.chunks)
        plan = self._planner.plan(
            *(padded.max_starts, padded.counts, padded.singles, staged.put), min_tiles=min_tiles, max_queries=queries
        )
        # With rows of one query, as --exact requires, a drafted token attends to keys that the same pass writes.
        return replace(plan, reads_early=self._max_queries > 1)

    def capture_ahead(self, shape: StepShape, step: StepInputs) -> None:
        """Capture the draft passes after steps of this shape, for each number of requests they can have.

        The steps have no prompt chunks, and their requests have either drafts of the full length or none. `step`:
        inputs of such a step, with padding only."""
        if not self._graphs or not self._rows.max_draft:
            return
        # Requests with drafts have rows of several queries, or, if those have one each, several rows.
        has_drafts, has_none = shape.queries > 1 or self._max_queries == 1, shape.queries == 1
        longest = 1 + self._rows.max_draft
        tokens = [shape.queries if 1 < shape.queries < self._max_queries else longest] * has_drafts + [1] * has_none
        counts = {
            pad_row_count(requests)
            for each in tokens
            for requests in range(1, self._max_running + 1)
            if pad_row_count(requests * each) == shape.singles
        }
        for padded in sorted(counts):
            self._capture_chain(shape, step, padded)

    def _capture_chain(self, shape: StepShape, step: StepInputs, padded: int) -> None:
        """Capture the draft passes after a step of this shape, which draft the full length for `padded` requests."""
        staged = self._staging.new_inputs()
        empty = DeviceBatch.from_work([], [], self._rows, self.cache.shape.block_size)
        num_states = shape.singles if self._captured is not None else 0
        found = DraftRows([], [], [], [], [])
        inputs = stage_draft_inputs(found, padded, staged, self._rows, self._planner, [], empty, num_states)
        inputs = replace(inputs, length=self._rows.max_draft)
        if not self._shares_plans and num_states:
            inputs = replace(inputs, step_plan=self._plan_step(empty, shape, staged, shape.queries))
        staged.send()
        prepared = PreparedDrafting(inputs, found, (shape, padded, inputs.length, inputs.computes_step))
        for _ in range(2):  # uncaptured, then captured
            self._run_or_replay(prepared, step)

    def _launch(
        self, prepared: PreparedDrafting, step: StepInputs, sampled: Tensor | None
    ) -> Callable[[], dict[str, Sequence[int]]]:
        """Queue the drafting of a step; return a function that returns the drafts by request id.

        Tokens that the host does not need are returned as PENDING_TOKEN. `sampled`: the sampled tokens, if any."""
        if sampled is not None:
            self._sampled[: len(sampled)].copy_(sampled)
        self._run_or_replay(prepared, step)
        if not prepared.inputs.length:
            return dict
        if self._sender is not None:
            self._sender.send(len(prepared.rows.work))
        drafts = HostDrafts(copy_to_host(self._drafts[: len(prepared.rows.work), : prepared.inputs.length]))
        for i, row in enumerate(prepared.rows.request_rows):
            row.drafts = drafts, i
        event = self._stream.record_event()
        return lambda: _read_drafts(prepared.rows, drafts, event)

    def _run_or_replay(self, prepared: PreparedDrafting, step: StepInputs) -> None:
        key, run = prepared.key, partial(self._run, prepared.inputs, step)
        if key is None or (key not in self._replays and key not in self._seen):
            run()  # the first time uncaptured, so that all kernels are compiled
            if key is not None:
                self._seen.add(key)
            return
        if key not in self._replays:
            if len(self._replays) >= MAX_GRAPHS:
                for old in list(self._replays)[: MAX_GRAPHS // 2]:
                    del self._replays[old]
            try:
                self._replays[key] = self._stream.capture(run)
            except Exception:  # of the driver, of torch, or an assertion: torch cannot capture again after it
                log.exception("Capturing drafts as a CUDA graph failed, drafting runs without graphs")
                self._graphs = False
                run()
                return
        self._replays[key]()

    def _run(self, inputs: DraftInputs, step: StepInputs) -> None:
        """Draft after a step, and store the drafts in DeviceRows, if any are wanted.

        Before that, the draft model computes the step's tokens if its cache would otherwise lack them."""
        plan = step.tiles if inputs.step_plan is None else inputs.step_plan
        rows, model = self._rows, self.model
        accepted, hidden = None, None
        if inputs.length:
            index = inputs.rows[:, None] * (1 + rows.max_draft) + 1 + self._draft_offsets
            drafted = ops.fill_newest_tokens(inputs.drafts.view(-1), index.view(-1), rows.newest).view(index.shape)
            sampled = self._sampled[inputs.first[:, None] + self._draft_offsets]
            accepted = (sampled == drafted).cumprod(1).sum(1)
        if self._captured is not None:
            assert inputs.next_tokens is not None and inputs.next_index is not None
            tokens = ops.fill_newest_tokens(inputs.next_tokens, inputs.next_index, self._sampled)
            hidden = model.combine(self._captured[: len(tokens)])
            chosen = inputs.step_rows[:0] if accepted is None else inputs.step_rows + accepted
            token, hidden = model.forward(self._step_batch(step, tokens, chosen, plan), hidden)
        elif inputs.computes_step:
            model.forward(self._step_batch(step, step.tokens, step.rows[:0], plan), None)
        if accepted is None:
            return
        newest = self._sampled[inputs.first + accepted]
        tables = rows.first_tables.index_select(0, inputs.rows)
        position = inputs.starts + rows.accepted[inputs.shifts] + accepted
        if self._captured is None:
            token = self._compute_last_two(inputs, step, drafted, accepted, newest, position, tables)
            position = position + 1
        found = [newest, token]
        for _ in range(1, inputs.length):
            position = position + 1
            batch = self._chain_batch(found[-1], position, inputs.limits, tables, inputs.plan)
            token, hidden = model.forward(batch, hidden)
            found.append(token)
        values = torch.stack(found, dim=1)
        rows.store_drafts(inputs.rows, accepted, values)
        if self._sender is not None:
            self._sender.fill(accepted, values)
        self._drafts[: len(values), : inputs.length].copy_(values[:, 1:])

    def _step_batch(
        self, step: StepInputs, tokens: Tensor, logit_rows: Tensor, plan: ops.AttentionPlan
    ) -> ForwardBatch:
        """Return the batch of the first pass: `tokens`, at the positions of the target model's step."""
        metadata = ops.AttentionMetadata(
            *(step.positions, step.slots, step.query_start, step.context),
            self._rows.first_tables.index_select(0, step.rows),
        )
        return ForwardBatch(
            tokens, metadata, logit_rows, self.cache.keys, self.cache.values, plan=plan.with_block_tables()
        )

    def _compute_last_two(
        self,
        inputs: DraftInputs,
        step: StepInputs,
        drafted: Tensor,
        accepted: Tensor,
        newest: Tensor,
        position: Tensor,
        tables: Tensor,
    ) -> Tensor:
        """Return each request's first drafted token, for a draft model that reads no hidden states.

        The draft model computes the two newest tokens of each request: its cache lacks the newest one, and the one
        before it too if the whole draft was accepted."""
        before = drafted.gather(1, (accepted - 1).clamp(min=0)[:, None]).squeeze(1)
        known = step.tokens[inputs.step_rows]
        before = torch.where(accepted > 0, before, known)
        assert inputs.pair_plan is not None
        batch = self._chain_batch(
            torch.cat([before, newest]),
            torch.cat([position, position + 1]),
            inputs.limits.repeat(2),
            tables.repeat(2, 1),
            inputs.pair_plan,
        )
        count = len(inputs.rows)
        rows = torch.arange(count, 2 * count, device=newest.device)
        return self.model.forward(replace(batch, logit_rows=rows), None)[0]

    def _chain_batch(
        self, tokens: Tensor, position: Tensor, limits: Tensor, tables: Tensor, plan: ops.AttentionPlan
    ) -> ForwardBatch:
        """Return the batch of a pass over one token of each request. Rows with a limit of 0 are padding."""
        at, slots = ops.find_slots(position, limits, tables, self.cache.shape.block_size)
        metadata = ops.AttentionMetadata(at, slots, self._query_start[: len(tokens) + 1], at, tables)
        return ForwardBatch(tokens, metadata, None, self.cache.keys, self.cache.values, plan=plan.with_block_tables())


def _allocate_captured_states(model: DraftModel, tokens: int, dtype: torch.dtype, device: Device) -> Tensor | None:
    if not model.captured_layers:
        return None
    width = len(model.captured_layers) * model.config.hidden
    kept = torch.float32 if device.torch_device.type == "cpu" else dtype  # activations on a CPU are float32
    return torch.zeros(tokens, width, dtype=kept, device=device.torch_device)


def _read_drafts(rows: DraftRows, drafts: HostDrafts, event: DeviceEvent) -> dict[str, Sequence[int]]:
    """Return the drafts by request id, with tokens only for requests whose rules need them on the host."""
    needed = [not row.is_plain and row.sampling.reads_tokens for row in rows.request_rows]
    if any(needed):
        event.wait()
    return {
        w.id: drafts.values[i][: w.num_propose] if needed[i] else [PENDING_TOKEN] * w.num_propose
        for i, w in enumerate(rows.work)
    }
