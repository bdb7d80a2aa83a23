"""GPURunner: carries plans out one after the other on a device, and hands results over when they are asked for.

A launch is: write the step's inputs into a pinned buffer, one copy, the model (a captured graph where every row has one
token), sampling, one copy home, a mark. Nothing in it waits for the device. With `decode_sms`, the single tokens of a
step that also has chunks run as a graph on a few multiprocessors of their own, beside the chunks on the others: one is
bound by memory, the other by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.core.config import GPUConfig
from emberline.core.errors import InvalidRequest
from emberline.core.plan import StepPlan, StepResult, TokenLogprob, Work
from emberline.engine.gpu import sampling
from emberline.engine.gpu.batch import Batch
from emberline.engine.gpu.device import Device, Lane
from emberline.engine.gpu.rows import Rows
from emberline.engine.gpu.staging import Sheet, Staging
from emberline.engine.sampler import RowMaker, token_logprobs
from emberline.kernels import ops
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder
from emberline.models.forward import Forward

Scores = dict[str, Callable[[], list[TokenLogprob]]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a step's inputs are on the device."""

    tokens: Tensor
    token_rows: Tensor
    slots: Tensor
    positions: Tensor
    context: Tensor
    rows: Tensor
    query_start: Tensor
    tiles: ops.Tiles
    logit_rows: Tensor | None  # None: all


@dataclass(frozen=True, slots=True)
class Captured:
    """A step of so many single tokens, ready to be repeated: inputs at fixed addresses in, logits out."""

    logits: Tensor
    replay: Callable[[], None]


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
        self.layout = f"{model.fingerprint}/{cache.shape.dtype}/{cache.shape.block_size}/rows"
        self._settings = settings
        self._lane = device.lane
        self._beside = device.split(settings.decode_sms) if settings.decode_sms and settings.graphs else None
        self._make_row = rows
        self._block = cache.shape.block_size
        self._rows = Rows(settings.max_running, -(-max_context // self._block), device.torch)
        heads = model.config.heads, model.config.kv_heads, model.config.head_dim
        most = captured_size(settings.max_running)
        self._cutter = ops.Cutter(heads, cache.keys, model.dtype, most)
        self._staging = Staging(_staging_bytes(settings, self._cutter), device)
        self._logits = torch.empty(most, self.vocab_size, device=device.torch)
        self._captured: dict[tuple[int, Lane], Captured] = {}

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
        work = [w for w in plan.work if w.id not in failed]
        if not work:
            return lambda: StepResult(plan.step, {}, failed=failed)
        with torch.inference_mode(), self._lane.working():
            return self._launch(plan.step, work, failed)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Captures the steps of these sizes before anybody waits for them."""
        with torch.inference_mode(), self._lane.working():
            for size in sorted({captured_size(size) for size in sizes}, reverse=True):  # the largest first: one pool
                self._capture(size, self._lane)

    def _launch(self, step: int, work: Sequence[Work], failed: dict[str, str]) -> Callable[[], StepResult]:
        began = self._lane.mark()
        where, blocks = self._rows.news(work)
        singles, chunks = Batch.split(work)
        size = captured_size(len(singles)) if self._graphed(singles, chunks) else 0
        lane = self._lane if not chunks or self._beside is None else self._beside[0]
        captured = self._capture(size, lane) if size else None
        sheet = self._staging.sheet()
        if captured is not None:  # first of all, where the captured step expects its inputs
            padded = Batch.of(singles, self._rows, self._block).padded(size, self._rows.padding)
            self._inputs(padded, sheet, padded=True)
        rest = chunks if captured is not None else [*singles, *chunks]
        inputs = self._inputs(Batch.of(rest, self._rows, self._block), sheet, padded=False) if rest else None
        ordered = [*singles, *chunks]
        sampled = [w for w in ordered if w.samples]
        draw = sampling.prepare(sampled, self._rows, self.vocab_size, sheet) if sampled else None
        table_at, table_of = sheet.put(where), sheet.put(blocks)
        sheet.send()
        if len(where):
            self._rows.tables.view(-1).index_copy_(0, table_at, table_of)
        logits = self._model(captured, len(singles), inputs)
        scores, logits = self._score_prompts(ordered, logits)
        fetch = sampling.sample(draw, logits, self._rows.newest) if draw is not None else None
        fetched = fetch(_home) if fetch is not None else None
        ended = self._lane.mark()

        def finish() -> StepResult:
            ended.wait()
            sampled, lost = fetched.results(draw, self._rows) if draw is not None and fetched is not None else ({}, {})
            prompts = {name: score() for name, score in scores.items()}
            return StepResult(step, sampled, prompts, failed | lost, ended.since(began))

        return finish

    def _graphed(self, singles: Sequence[Work], chunks: Sequence[Work]) -> bool:
        return self._settings.graphs and bool(singles) and (not chunks or self._beside is not None)

    def _model(self, captured: Captured | None, singles: int, inputs: Inputs | None) -> Tensor:
        """The logits of a captured step's rows, then those of the rest."""
        if captured is None:
            assert inputs is not None
            return self._forward(inputs, None)
        if inputs is None or self._beside is None:
            captured.replay()
            return captured.logits[:singles]
        narrow, wide = self._beside
        ready = self._lane.mark()
        with narrow.working():
            narrow.after(ready)
            captured.replay()
            self._lane.after(narrow.mark())
        with wide.working():
            wide.after(ready)
            logits = self._forward(inputs, None)
            self._lane.after(wide.mark())
        return torch.cat([captured.logits[:singles], logits])

    def _capture(self, size: int, lane: Lane) -> Captured:
        if (size, lane) not in self._captured:
            sheet = self._staging.sheet()
            inputs = self._inputs(Batch.nobody(size, self._rows.padding), sheet, padded=True)
            sheet.send()
            lane.after(self._lane.mark())
            logits = self._logits[:size]
            replay = lane.capture(lambda: self._forward(inputs, logits))
            self._captured[size, lane] = Captured(logits, replay)
        return self._captured[size, lane]

    def _inputs(self, batch: Batch, sheet: Sheet, *, padded: bool) -> Inputs:
        return Inputs(
            tokens=sheet.put(batch.tokens),
            token_rows=sheet.put(batch.token_rows),
            slots=sheet.put(batch.slots),
            positions=sheet.put(batch.positions),
            context=sheet.put(batch.starts),
            rows=sheet.put(batch.rows),
            query_start=sheet.put(batch.query_start),
            tiles=self._cutter.cut(batch.starts, batch.counts, batch.singles, sheet.put),
            logit_rows=None if padded else sheet.put(batch.logit_rows()),
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
                tiles=inputs.tiles,
            ),
            out=out,
        )

    def _score_prompts(self, work: Sequence[Work], logits: Tensor) -> tuple[Scores, Tensor]:
        """Takes the rows that only score the prompt out of the logits; what is left is one row per sampling request."""
        if not any(w.prompt_logprobs for w in work):
            return {}, logits
        scores: Scores = {}
        keep: list[int] = []
        at = 0
        for w in work:
            if w.prompt_logprobs:
                rows = logits[at : at + len(w.tokens)].clone()  # sampling overwrites
                scores[w.id] = lambda rows=rows, w=w: self._prompt_logprobs(w, rows)  # type: ignore[misc]
                at += len(w.tokens)
            elif w.samples:
                at += 1
            if w.samples:
                keep.append(at - 1)
        return scores, logits[torch.tensor(keep, dtype=torch.int64, device=logits.device)]

    def _prompt_logprobs(self, work: Work, logits: Tensor) -> list[TokenLogprob]:
        place = self._rows.get(work.id)
        if place is None:
            return []
        successors = place.row.tokens[work.start + 1 : work.start + 1 + len(logits)]
        top = place.row.params.prompt_logprobs or 0
        return token_logprobs(logits[: len(successors)], successors, [top] * len(successors))


def captured_size(rows: int) -> int:
    """Few enough sizes to capture, and little padding: 1 2 4 8, then eighths, sixteenths and so on."""
    for most, step in ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (512, 32)):
        if rows <= most:
            return -(-rows // step) * step
    return -(-rows // 64) * 64


def _home(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _staging_bytes(settings: GPUConfig, cutter: ops.Cutter) -> int:
    per_token, per_row = 8 + 8 + 8 + 4, 4 + 8 + 4 + 8 + 64
    tables = 16 * (settings.max_batch_tokens // settings.block_size + settings.max_running)
    rows = captured_size(settings.max_running)
    tiles = cutter.most_bytes(rows, settings.max_batch_tokens)
    return 2 * (settings.max_batch_tokens * per_token + rows * per_row + tables + tiles) + (1 << 20)
