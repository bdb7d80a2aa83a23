"""GPURunner: executes plans one after the other on a GPU and returns their results asynchronously.

A launch writes the step's inputs to a pinned buffer, then queues one copy to the device, the model, sampling, one copy
back, and an event. It never waits for the device. A step runs as a captured graph of the next larger shape, if any.

A grammar's mask needs the previous token on the host. If that token is still pending, the launch ends with the
model, and the step is sampled when the result of the previous step is read: masks are computed while the model runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from emberline.core.config import GPUConfig
from emberline.core.errors import InvalidRequest
from emberline.core.plan import StepPlan, StepResult, TokenLogprob, Work
from emberline.engine.gpu.batch import Batch
from emberline.engine.gpu.copier import DeviceCopier
from emberline.engine.gpu.device import Device
from emberline.engine.gpu.penalties import DevicePenalties
from emberline.engine.gpu.rows import Rows
from emberline.engine.gpu.sampling import SampledStep, mask_words
from emberline.engine.gpu.shape import Shape, by_use, most_rows, shapes
from emberline.engine.gpu.staging import Sheet, Staging
from emberline.engine.gpu.track import Captured, Inputs, Part, Track
from emberline.engine.memory import grid_of, widened_blocks
from emberline.engine.sampler import RowMaker, scored_rows, token_logprobs
from emberline.kernels import ops
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder
from emberline.models.forward import Forward

log = logging.getLogger("emberline.engine")

Scores = dict[str, Callable[[], list[TokenLogprob]]]


class GPURunner:
    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        eos: frozenset[int],
        rows: RowMaker,
        settings: GPUConfig,
        device: Device,
        max_context: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.num_blocks = cache.num_blocks
        self.vocab_size = model.config.vocab
        self.eos = eos
        self.prepare = rows.prepare
        self._make_row = rows
        self._block = cache.shape.block_size
        self._rows = Rows(settings.max_running, -(-max_context // self._block), device.torch)
        heads = model.config.heads, model.config.kv_heads, model.config.head_dim
        running, widened = settings.max_running, widened_blocks(self._block, max_context, settings.max_batch_tokens)
        self._penalties = DevicePenalties(settings.max_running + 1, self.vocab_size, device.torch)
        self._unsampled: SampledStep | None = None  # the newest step, if it waits for tokens of the previous one
        self._cutter = ops.Cutter(heads, cache.keys, model.dtype, most_rows(running), widened=widened)
        self.graphs = settings.graphs  # whether steps are captured; False while another thread uses the device
        self._grid = grid_of(model.config, settings.max_batch_tokens)
        self.shapes = by_use(shapes(running, settings.max_batch_tokens, self._grid))
        self._next_shape = 0  # index of the first shape that was not captured ahead of its first use
        size = _staging_bytes(settings, self._cutter)
        ahead = model.ahead(device.lane, device.beside())
        self._track = Track(device.lane, Staging(size, device), ahead, most_rows(running))
        masks = settings.max_running * mask_words(self.vocab_size) * 4
        self._others = Staging(size + masks, device)  # a step's inputs other than the model's
        self.copier = DeviceCopier(cache, device) if settings.tiers else None

    @property
    def layout(self) -> str:
        return f"{self.model.fingerprint}/{self.cache.shape.dtype}/{self.cache.shape.block_size}/rows"

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        for request_id in plan.ended:
            self._rows.remove(request_id)
        failed: dict[str, str] = {}
        for admission in plan.admitted:
            try:
                self._rows.add(admission.id, self._make_row(admission))
            except InvalidRequest as e:
                failed[admission.id] = str(e)
        # A request that failed in the previous step may still be in this plan, which was made before that was known.
        work = self._rows.known(plan.work)
        with torch.inference_mode(), self._track.lane.working():
            copied = self._copy(plan)
            computed = self._launch(plan.step, work, failed) if work else partial(StepResult, plan.step, {}, {}, failed)

        def finish() -> StepResult:
            copied()
            return computed()

        return finish

    def forget(self) -> None:
        """Drop everything that refers to device addresses, before memory moves; it is made again on demand."""
        self._track.forget()
        self._next_shape = 0
        self._others.forget()
        self._cutter.forget()
        if self.copier is not None:
            self.copier.forget()

    def buffers(self) -> list[Tensor]:
        """Return all tensors kept on the device between steps, except weights.

        The content of an idle runner's buffers is not needed: counters are zero again, and a row's table, newest token
        and counts are written before they are read."""
        kept = [self.cache.keys, self.cache.values, self._rows.tables, self._rows.newest, self._penalties.counts]
        staged = [staging.device for staging in (self._others, self._track.inputs)]
        copying = self.copier.buffers() if self.copier is not None else []
        return [*kept, *staged, *self._cutter.buffers(), *copying]

    def _copy(self, plan: StepPlan) -> Callable[[], None]:
        if not plan.saves and not plan.loads:
            return lambda: None
        assert self.copier is not None, "GPUConfig.tiers is False"
        return self.copier.launch(plan.saves, plan.loads)

    def _launch(self, step: int, work: Sequence[Work], failed: dict[str, str]) -> Callable[[], StepResult]:
        began = self._track.lane.mark()
        self._rows.seat(work)
        table_indexes, table_blocks = self._rows.news(work)
        singles, chunks = Batch.split(work)
        model_step = self._part(singles, chunks)
        staged = self._others.sheet()
        device_indexes, device_blocks = staged.put(table_indexes), staged.put(table_blocks)
        reset = self._penalties.prepare_reset(self._rows.places(work), staged)
        sampled = SampledStep([*singles, *(w for w in chunks if w.samples)], self._rows, self._penalties)
        waits = sampled.waits_for_tokens()
        if not waits:
            sampled.prepare(self.vocab_size, staged)
        staged.send()
        if len(table_indexes):
            self._rows.tables.view(-1).index_copy_(0, device_indexes, device_blocks)
        if reset is not None:
            self._penalties.reset(reset)
        logits = self._run(model_step)
        scores, sampled.logits = self._score_prompts([*singles, *chunks], logits)
        if waits:
            assert self._unsampled is None, "the previous step was not sampled yet"
            self._unsampled = sampled
        else:
            sampled.launch(self._track.lane)

        def finish() -> StepResult:
            tokens, lost = sampled.results()
            self._sample_next()
            prompts = {name: score() for name, score in scores.items()}
            return StepResult(step, tokens, prompts, failed | lost, sampled.ended.since(began))

        return finish

    def _sample_next(self) -> None:
        """Sample the step that waits for the tokens that were just read, if there is one."""
        step, self._unsampled = self._unsampled, None
        if step is not None:
            with torch.inference_mode(), self._track.lane.working():
                staged = self._others.sheet()
                step.prepare(self.vocab_size, staged)
                staged.send()
                step.launch(self._track.lane)

    def _shape(self, singles: list[Work], chunks: list[Work]) -> Shape | None:
        """Return the shape of a captured step for this work; None if it must run uncaptured."""
        ends = (w.start + len(w.tokens) for w in chunks)
        can_capture = self.graphs and (not chunks or (self._cutter.fixed and self._cutter.fits(ends)))
        return Shape.of(singles, chunks, self._grid) if can_capture else None

    def _part(self, singles: list[Work], chunks: list[Work]) -> Part:
        """Return the model's part of a step; the copy of its inputs to the device is queued."""
        graphs = self._track
        shape = self._shape(singles, chunks)
        batch = Batch.of(singles, chunks, self._rows, self._block)
        if shape is not None:
            batch = batch.shaped(shape, self._rows.padding)
        staged = graphs.inputs.sheet()
        inputs = self._inputs(batch, shape, staged, graphs.ahead)
        is_contiguous = len(batch.wanted) == 0 or len(batch.wanted) == batch.wanted[-1] + 1
        wanted = None if is_contiguous else staged.put(batch.wanted)
        staged.send()
        logits, replay = (None, None) if shape is None else self._captured(shape, inputs)
        return Part(inputs, logits, replay, len(batch.wanted), wanted)

    def _run(self, part: Part) -> Tensor:
        """Queue the model's part of a step and return the logits that are used."""
        logits = part.logits
        if part.replay is not None and logits is not None:
            part.replay()
        else:
            logits = self._forward(part.inputs, logits)
        return logits[: part.count] if part.wanted is None else logits.index_select(0, part.wanted)

    @property
    def is_preparing(self) -> bool:
        """Whether shapes remain to be captured in idle time."""
        return self.graphs and self._next_shape < len(self.shapes)

    def prepare_next(self) -> bool:
        """Capture a step of the next shape, with only padding as its work; return False if all are captured."""
        if not self.is_preparing:
            return False
        shape = self.shapes[self._next_shape]
        self._next_shape += 1
        if self._can_be_captured(shape):
            with torch.inference_mode(), self._track.lane.working():
                _, replay = self._captured(shape, self._padding_inputs(shape))
                if replay is not None:
                    replay()  # the first replay also uploads the graph, which would delay a request
        return True

    def set_up(self) -> None:
        """Run a step of each kind once, uncaptured, in the thread that will capture.

        A thread's first use of a library or stream initializes it, which is not allowed during a capture."""
        without_chunks = [shape for shape in self.shapes if not shape.chunks]
        mixed = [shape for shape in self.shapes if shape.chunks and self._can_be_captured(shape)]
        with torch.inference_mode(), self._track.lane.working():
            for shape in {*without_chunks[:1], *without_chunks[-1:], *mixed[:1], *mixed[-1:]}:
                logits = self._track.logits(shape.rows, self.vocab_size, self.cache.keys.device)
                self._forward(self._padding_inputs(shape), logits)

    def meet_kernels(self) -> None:
        """Launch every kernel that steps need, with only padding as work, to have them compiled together."""
        with torch.inference_mode(), self._track.lane.working():
            for shape in filter(self._can_be_captured, self.shapes):
                logits = self._track.logits(shape.rows, self.vocab_size, self.cache.keys.device)
                self._forward(self._padding_inputs(shape), logits)

    def _can_be_captured(self, shape: Shape) -> bool:
        return not shape.chunks or self._cutter.fixed

    def _padding_inputs(self, shape: Shape) -> Inputs:
        """Return the inputs of a step with only padding: it writes nothing but logits that are not used."""
        batch = Batch.of([], [], self._rows, self._block).shaped(shape, self._rows.padding)
        staged = self._track.inputs.sheet()
        inputs = self._inputs(batch, shape, staged, self._track.ahead)
        staged.send()
        return inputs

    def _captured(self, shape: Shape, inputs: Inputs) -> tuple[Tensor, Callable[[], None] | None]:
        """Return a shape's logits, and a function that replays its step, or None if capturing failed.

        It is captured at its first use, which takes the host as long as launching the step once."""
        graphs = self._track
        if shape in graphs.captured:
            captured = graphs.captured[shape]
            return captured.logits, captured.replay
        logits = graphs.logits(shape.rows, self.vocab_size, self.cache.keys.device)
        if graphs.capture_failed:
            return logits, None
        try:
            replay = graphs.lane.capture(lambda: self._forward(inputs, logits))
        except Exception as error:  # of the driver, of torch, or an assertion: torch cannot capture again after it
            log.exception("step not captured, further shapes run uncaptured: shape=%s reason=%s", shape, error)
            graphs.capture_failed = True
            return logits, None
        graphs.captured[shape] = Captured(logits, replay)
        return logits, replay

    def _inputs(self, batch: Batch, shape: Shape | None, sheet: Sheet, ahead: ops.Ahead) -> Inputs:
        """Stage the model's inputs; those of one shape always get the addresses that they had at its capture."""
        most, sought = (0, batch.logit_rows) if shape is None else (ops.most_tiles(shape.tokens, shape.chunks), None)
        return Inputs(
            tokens=sheet.put(batch.tokens),
            token_rows=sheet.put(batch.token_rows),
            slots=sheet.put(batch.slots),
            positions=sheet.put(batch.positions),
            context=sheet.put(batch.starts),
            rows=sheet.put(batch.rows),
            query_start=sheet.put(batch.query_start),
            tiles=self._cutter.cut(batch.starts, batch.counts, batch.singles, sheet.put, most=most, sought=sought),
            logit_rows=sheet.put(batch.logit_rows) if shape is None or shape.chunks else None,
            ahead=ahead,
        )

    def _forward(self, inputs: Inputs, out: Tensor | None) -> Tensor:
        rows = self._rows
        return self.model.forward(
            Forward(
                tokens=ops.newest_tokens(inputs.tokens, inputs.token_rows, rows.newest),
                positions=inputs.positions,
                slots=inputs.slots,
                query_start=inputs.query_start,
                context=inputs.context,
                block_tables=rows.tables.index_select(0, inputs.rows),
                logit_rows=inputs.logit_rows,
                keys=self.cache.keys,
                values=self.cache.values,
                tiles=inputs.tiles.laid(),
                ahead=inputs.ahead.anew(),
            ),
            out=out,
        )

    def _score_prompts(self, work: Sequence[Work], logits: Tensor) -> tuple[Scores, Tensor]:
        """Return functions for the prompts' log-probabilities, and the logits that are sampled from."""
        if not any(w.prompt_logprobs for w in work):
            return {}, logits
        scored, sampled = scored_rows(work)
        # Cloned, since sampling overwrites the logits.
        scores: Scores = {w.id: partial(self._prompt_logprobs, w, logits[rows].clone()) for w, rows in scored}
        return scores, logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)]

    def _prompt_logprobs(self, work: Work, logits: Tensor) -> list[TokenLogprob]:
        request_row = self._rows.get(work.id)
        if request_row is None:
            return []
        successors = request_row.row.tokens[work.start + 1 : work.start + 1 + len(logits)]
        top = request_row.row.params.prompt_logprobs or 0
        return token_logprobs(logits[: len(successors)], successors, [top] * len(successors))


def _staging_bytes(settings: GPUConfig, cutter: ops.Cutter) -> int:
    per_token, per_row = 8 + 8 + 8 + 4, 4 + 8 + 4 + 8 + 64
    tables = 16 * (settings.max_batch_tokens // settings.block_size + settings.max_running)
    rows = most_rows(settings.max_running)
    tiles = cutter.most_bytes(rows, settings.max_batch_tokens)
    return 2 * (settings.max_batch_tokens * per_token + rows * per_row + tables + tiles) + (1 << 20)
