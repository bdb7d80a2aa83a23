"""GPURunner: carries plans out one after the other on a device, and hands results over when they are asked for.

A launch is: write the step's inputs into a pinned buffer, one copy, the model (a captured graph where every row has one
token), sampling, one copy home, a mark. Nothing in it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emberline.core.config import GPUConfig
from emberline.core.errors import InvalidRequest
from emberline.core.plan import StepPlan, StepResult, TokenLogprob, Work
from emberline.engine.gpu import sampling
from emberline.engine.gpu.batch import Batch
from emberline.engine.gpu.device import Device, Mark
from emberline.engine.gpu.rows import Rows
from emberline.engine.gpu.staging import Sheet, Staging
from emberline.engine.sampler import RowMaker, token_logprobs
from emberline.kernels import ops
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder
from emberline.models.forward import Forward

Homeward = Callable[[Tensor], Tensor]


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
        self._device = device
        self._make_row = rows
        self._block = cache.shape.block_size
        self._rows = Rows(settings.max_running, -(-max_context // self._block), device.torch)
        heads = model.config.heads, model.config.kv_heads, model.config.head_dim
        most = captured_size(settings.max_running)
        self._cutter = ops.Cutter(heads, cache.keys, model.dtype, most)
        self._staging = Staging(_staging_bytes(settings, self._cutter), device)
        self._logits = torch.empty(most, self.vocab_size, device=device.torch)
        self._captured: dict[int, Captured] = {}

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
        with torch.inference_mode(), self._device.working():
            return self._launch(plan.step, work, failed)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Captures the steps of these sizes before anybody waits for them."""
        with torch.inference_mode(), self._device.working():
            for size in sorted({captured_size(size) for size in sizes}, reverse=True):  # the largest first: one pool
                self._step(size)

    def _launch(self, step: int, work: Sequence[Work], failed: dict[str, str]) -> Callable[[], StepResult]:
        began, ended = self._device.mark(), self._device.mark()
        began.record()
        where, blocks = self._rows.news(work)
        batch = Batch.of(work, self._rows, self._block)
        alone = self._settings.graphs and batch.singles == len(work)
        size = captured_size(len(work)) if alone else 0
        captured = self._step(size) if alone else None
        sheet = self._staging.sheet()
        inputs = self._inputs(batch.padded(size, self._rows.padding) if alone else batch, sheet, padded=alone)
        sampled = [w for w in batch.work if w.samples]
        draw = sampling.prepare(sampled, self._rows, self.vocab_size, sheet) if sampled else None
        table_at, table_of = sheet.put(where), sheet.put(blocks)
        sheet.send()
        if len(where):
            self._rows.tables.view(-1).index_copy_(0, table_at, table_of)
        if captured is not None:
            captured.replay()
            logits = captured.logits[: len(work)]
        else:
            logits = self._forward(inputs, None)
        scores, logits = self._score_prompts(batch.work, logits)
        fetch = sampling.sample(draw, logits, self._rows.newest) if draw is not None else None
        fetched = fetch(self._home) if fetch is not None else None
        ended.record()
        return lambda: self._finish(step, began, ended, draw, fetched, scores, failed)

    def _finish(
        self,
        step: int,
        began: Mark,
        ended: Mark,
        draw: sampling.Draw | None,
        fetched: sampling.Fetched | None,
        scores: dict[str, Callable[[], list[TokenLogprob]]],
        failed: dict[str, str],
    ) -> StepResult:
        ended.wait()
        sampled, lost = fetched.results(draw, self._rows) if draw is not None and fetched is not None else ({}, {})
        prompt_logprobs = {name: score() for name, score in scores.items()}
        return StepResult(step, sampled, prompt_logprobs, failed | lost, ended.since(began))

    def _step(self, size: int) -> Captured:
        if size not in self._captured:
            nobody = np.zeros(size, np.int64)
            batch = Batch(
                (), size, nobody + self._rows.padding, nobody.astype(np.int32), nobody.astype(np.int32) + 1,
                nobody, nobody.astype(np.int32), nobody - 1, nobody + self._rows.padding,
            )  # fmt: skip
            sheet = self._staging.sheet()
            inputs = self._inputs(batch, sheet, padded=True)
            sheet.send()
            logits = self._logits[:size]
            replay = self._device.capture(lambda: self._forward(inputs, logits))
            self._captured[size] = Captured(logits, replay)
        return self._captured[size]

    def _inputs(self, batch: Batch, sheet: Sheet, *, padded: bool) -> _Inputs:
        """Everything of a fixed size comes first, so that a captured step finds it again."""
        return _Inputs(
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

    def _forward(self, inputs: _Inputs, out: Tensor | None) -> Tensor:
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

    def _score_prompts(
        self, work: Sequence[Work], logits: Tensor
    ) -> tuple[dict[str, Callable[[], list[TokenLogprob]]], Tensor]:
        """Takes the rows that only score the prompt out of the logits; what is left is one row per sampling request."""
        if not any(w.prompt_logprobs for w in work):
            return {}, logits
        scores: dict[str, Callable[[], list[TokenLogprob]]] = {}
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

    def _home(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Inputs:
    tokens: Tensor
    token_rows: Tensor
    slots: Tensor
    positions: Tensor
    context: Tensor
    rows: Tensor
    query_start: Tensor
    tiles: ops.Tiles
    logit_rows: Tensor | None  # None: all


def captured_size(rows: int) -> int:
    """Few enough sizes to capture, and little padding: 1 2 4 8, then eighths, sixteenths and so on."""
    for most, step in ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (512, 32)):
        if rows <= most:
            return -(-rows // step) * step
    return -(-rows // 64) * 64


def _staging_bytes(settings: GPUConfig, cutter: ops.Cutter) -> int:
    per_token, per_row = 8 + 8 + 8 + 4, 4 + 8 + 4 + 8 + 64
    tables = 16 * (settings.max_batch_tokens // settings.block_size + settings.max_running)
    rows = captured_size(settings.max_running)
    tiles = cutter.most_bytes(rows, settings.max_batch_tokens)
    return 2 * (settings.max_batch_tokens * per_token + rows * per_row + tables + tiles) + (1 << 20)
