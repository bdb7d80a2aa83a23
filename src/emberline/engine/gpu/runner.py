"""GPURunner: carries plans out one after the other on a device, and hands results over when they are asked for.

A launch is: write the step's inputs into a pinned buffer, one copy, the model, sampling, one copy home, a mark. Nothing
in it waits for the device. A step runs as a captured graph of the next larger shape, where there is one.

A grammar's mask needs the token before on the host. Where that token is still pending, the launch ends with the model,
and the step is sampled as soon as the result of the step before it is taken: masks are computed while the model runs.
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
        most, widened = settings.max_running, widened_blocks(self._block, max_context, settings.max_batch_tokens)
        self._penalties = DevicePenalties(settings.max_running + 1, self.vocab_size, device.torch)
        self._unsampled: SampledStep | None = None  # the newest step, where it waits for tokens of the one before
        self._cutter = ops.Cutter(heads, cache.keys, model.dtype, most_rows(most), widened=widened)
        self.graphs = settings.graphs  # whether steps are captured; not while another thread uses the device
        self._grid = grid_of(model.config, settings.max_batch_tokens)
        self.shapes = by_use(shapes(most, settings.max_batch_tokens, self._grid))
        self._next_shape = 0  # the first of them that was not captured ahead of time
        size = _staging_bytes(settings, self._cutter)
        ahead = model.ahead(device.lane, device.beside())
        self._track = Track(device.lane, Staging(size, device), ahead, most_rows(most))
        masks = settings.max_running * mask_words(self.vocab_size) * 4
        self._others = Staging(size + masks, device)  # what a step brings besides the model's inputs
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
        # Who failed a step ago may still be in this plan: it was made before that was known.
        work = self._rows.known(plan.work)
        with torch.inference_mode(), self._track.lane.working():
            copied = self._copy(plan)
            computed = self._launch(plan.step, work, failed) if work else partial(StepResult, plan.step, {}, {}, failed)

        def finish() -> StepResult:
            copied()
            return computed()

        return finish

    def forget(self) -> None:
        """Drops what holds addresses, before memory moves; it is made again when it is needed."""
        self._track.forget()
        self._next_shape = 0
        self._others.forget()
        self._cutter.forget()
        if self.copier is not None:
            self.copier.forget()

    def buffers(self) -> list[Tensor]:
        """All that is kept on the device between steps, besides weights. Of an idle runner, nothing in it is wanted:
        counters are back at zero, and a row's table, newest token and counts are written before they are read."""
        kept = [self.cache.keys, self.cache.values, self._rows.tables, self._rows.newest, self._penalties.counts]
        staged = [staging.device for staging in (self._others, self._track.inputs)]
        copying = self.copier.buffers() if self.copier is not None else []
        return [*kept, *staged, *self._cutter.buffers(), *copying]

    def _copy(self, plan: StepPlan) -> Callable[[], None]:
        if not plan.saves and not plan.loads:
            return lambda: None
        assert self.copier is not None, "it was not told that there are tiers"
        return self.copier.launch(plan.saves, plan.loads)

    def _launch(self, step: int, work: Sequence[Work], failed: dict[str, str]) -> Callable[[], StepResult]:
        began = self._track.lane.mark()
        self._rows.seat(work)
        where, blocks = self._rows.news(work)
        singles, chunks = Batch.split(work)
        part = self._part(singles, chunks)
        sheet = self._others.sheet()
        table_at, table_of = sheet.put(where), sheet.put(blocks)
        reset = self._penalties.prepare_reset(self._rows.places(work), sheet)
        sampled = SampledStep([*singles, *(w for w in chunks if w.samples)], self._rows, self._penalties)
        waits = sampled.waits_for_tokens()
        if not waits:
            sampled.prepare(self.vocab_size, sheet)
        sheet.send()
        if len(where):
            self._rows.tables.view(-1).index_copy_(0, table_at, table_of)
        if reset is not None:
            self._penalties.reset(reset)
        logits = self._run(part)
        scores, sampled.logits = self._score_prompts([*singles, *chunks], logits)
        if waits:
            assert self._unsampled is None, "the step before has not been sampled"
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
        """Samples the step after the one whose tokens have just come, if it waits for them."""
        step, self._unsampled = self._unsampled, None
        if step is not None:
            with torch.inference_mode(), self._track.lane.working():
                sheet = self._others.sheet()
                step.prepare(self.vocab_size, sheet)
                sheet.send()
                step.launch(self._track.lane)

    def _shape(self, singles: list[Work], chunks: list[Work]) -> Shape | None:
        ends = (w.start + len(w.tokens) for w in chunks)
        fixed = self.graphs and (not chunks or (self._cutter.fixed and self._cutter.fits(ends)))
        return Shape.of(singles, chunks, self._grid) if fixed else None

    def _part(self, singles: list[Work], chunks: list[Work]) -> Part:
        """What the model does. Its inputs are on their way when it returns."""
        track = self._track
        shape = self._shape(singles, chunks)
        batch = Batch.of(singles, chunks, self._rows, self._block)
        if shape is not None:
            batch = batch.shaped(shape, self._rows.padding)
        sheet = track.inputs.sheet()
        inputs = self._inputs(batch, shape, sheet, track.ahead)
        alone = len(batch.wanted) == 0 or len(batch.wanted) == batch.wanted[-1] + 1
        wanted = None if alone else sheet.put(batch.wanted)
        sheet.send()
        logits, replay = (None, None) if shape is None else self._captured(shape, inputs)
        return Part(inputs, logits, replay, len(batch.wanted), wanted)

    def _run(self, part: Part) -> Tensor:
        """The logits that are wanted."""
        logits = part.logits
        if part.replay is not None and logits is not None:
            part.replay()
        else:
            logits = self._forward(part.inputs, logits)
        return logits[: part.count] if part.wanted is None else logits.index_select(0, part.wanted)

    @property
    def is_preparing(self) -> bool:
        """Whether shapes are left to be captured in idle time."""
        return self.graphs and self._next_shape < len(self.shapes)

    def prepare_next(self) -> bool:
        """Capture the step of the next shape by use, with padding alone as its work; return False if all are."""
        if not self.is_preparing:
            return False
        shape = self.shapes[self._next_shape]
        self._next_shape += 1
        if self._can_be_captured(shape):
            with torch.inference_mode(), self._track.lane.working():
                _, replay = self._captured(shape, self._padding_inputs(shape))
                if replay is not None:
                    replay()  # the first time it is also sent to the device, which a request would have to wait for
        return True

    def set_up(self) -> None:
        """Run a step of each kind once, uncaptured, in the thread that will capture: what a thread's first use of a
        library or a stream sets up may not be set up during a capture."""
        alone = [shape for shape in self.shapes if not shape.chunks]
        mixed = [shape for shape in self.shapes if shape.chunks and self._can_be_captured(shape)]
        with torch.inference_mode(), self._track.lane.working():
            for shape in {*alone[:1], *alone[-1:], *mixed[:1], *mixed[-1:]}:
                logits = self._track.logits(shape.rows, self.vocab_size, self.cache.keys.device)
                self._forward(self._padding_inputs(shape), logits)

    def meet_kernels(self) -> None:
        """Launch every kernel that steps need, inside `driver.compiling_together`, with padding alone as work."""
        with torch.inference_mode(), self._track.lane.working():
            for shape in filter(self._can_be_captured, self.shapes):
                logits = self._track.logits(shape.rows, self.vocab_size, self.cache.keys.device)
                self._forward(self._padding_inputs(shape), logits)

    def _can_be_captured(self, shape: Shape) -> bool:
        return not shape.chunks or self._cutter.fixed

    def _padding_inputs(self, shape: Shape) -> Inputs:
        """The inputs of a step of padding alone: it writes nothing but logits that are not used."""
        batch = Batch.of([], [], self._rows, self._block).shaped(shape, self._rows.padding)
        sheet = self._track.inputs.sheet()
        inputs = self._inputs(batch, shape, sheet, self._track.ahead)
        sheet.send()
        return inputs

    def _captured(self, shape: Shape, inputs: Inputs) -> tuple[Tensor, Callable[[], None] | None]:
        """Return where a shape's logits go, and a call that repeats its step; None if it cannot be captured.

        It is captured when it is first met: that takes the host as long as launching the step once."""
        track = self._track
        if shape in track.captured:
            captured = track.captured[shape]
            return captured.logits, captured.replay
        logits = track.logits(shape.rows, self.vocab_size, self.cache.keys.device)
        if track.capture_failed:
            return logits, None
        try:
            replay = track.lane.capture(lambda: self._forward(inputs, logits))
        except Exception as error:  # a driver's, torch's, an assertion: torch cannot capture again after it
            log.exception("step not captured, further shapes run uncaptured: shape=%s reason=%s", shape, error)
            track.capture_failed = True
            return logits, None
        track.captured[shape] = Captured(logits, replay)
        return logits, replay

    def _inputs(self, batch: Batch, shape: Shape | None, sheet: Sheet, ahead: ops.Ahead) -> Inputs:
        """Of a shape, all lies where it lay when that was captured."""
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
        """Takes the rows that only score the prompt out of the logits; what is left is one row per sampling request."""
        if not any(w.prompt_logprobs for w in work):
            return {}, logits
        spans, keep = scored_rows(work)
        # Cloned, since sampling overwrites.
        scores: Scores = {w.id: partial(self._prompt_logprobs, w, logits[rows].clone()) for w, rows in spans}
        return scores, logits[torch.tensor(keep, dtype=torch.int64, device=logits.device)]

    def _prompt_logprobs(self, work: Work, logits: Tensor) -> list[TokenLogprob]:
        place = self._rows.get(work.id)
        if place is None:
            return []
        successors = place.row.tokens[work.start + 1 : work.start + 1 + len(logits)]
        top = place.row.params.prompt_logprobs or 0
        return token_logprobs(logits[: len(successors)], successors, [top] * len(successors))


def _staging_bytes(settings: GPUConfig, cutter: ops.Cutter) -> int:
    per_token, per_row = 8 + 8 + 8 + 4, 4 + 8 + 4 + 8 + 64
    tables = 16 * (settings.max_batch_tokens // settings.block_size + settings.max_running)
    rows = most_rows(settings.max_running)
    tiles = cutter.most_bytes(rows, settings.max_batch_tokens)
    return 2 * (settings.max_batch_tokens * per_token + rows * per_row + tables + tiles) + (1 << 20)
