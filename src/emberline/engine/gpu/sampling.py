"""StepSampling: samples a step's tokens on the device, without copying the logits to the host.

Grammar masks, which only the host can compute, are copied to the device after the step's other inputs. Tokens and
log-probabilities are copied to the host with the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emberline.core.plan import PENDING, Sampled, TokenLogprob, Work
from emberline.engine.gpu.device import Lane, Mark
from emberline.engine.gpu.penalties import DevicePenalties, PenalisedRows, prepare_rows
from emberline.engine.gpu.rows import Place, Rows
from emberline.engine.gpu.staging import Sheet
from emberline.engine.token_rules import fill_masks
from emberline.kernels import ops


class SampledStep:
    """The sampling of one step: prepared by the host, launched after the model, its results read later."""

    def __init__(self, work: Sequence[Work], rows: Rows, penalties: DevicePenalties) -> None:
        self.logits: Tensor | None = None  # one row for each work item, after the model is launched
        self._work = work
        self._rows = rows
        self._penalties = penalties
        self._draw: Draw | None = None
        self._fetched: Fetched | None = None
        self._ended: Mark | None = None

    def waits_for_tokens(self) -> bool:
        """Return whether a grammar's mask can only be computed after the previous step's tokens are read."""
        return any(
            not row.plain and row.row.matcher is not None and w.tokens[-1] == PENDING
            for w, row in zip(self._work, self._rows.places(self._work), strict=True)
        )

    def prepare(self, vocab: int, sheet: Sheet) -> None:
        if self._work:
            self._draw = prepare(self._work, self._rows, vocab, sheet)

    def launch(self, lane: Lane) -> None:
        if self._draw is not None and self.logits is not None:
            self._fetched = sample(self._draw, self.logits, self._rows.newest, self._penalties)
        self.logits = None
        self._ended = lane.mark()

    @property
    def ended(self) -> Mark:
        assert self._ended is not None, "the step was not sampled yet: results must be read in order"
        return self._ended

    def results(self) -> tuple[dict[str, Sampled], dict[str, str]]:
        """Wait for the device; return the sampled tokens, and why other requests cannot continue."""
        self.ended.wait()
        if self._draw is None or self._fetched is None:
            return {}, {}
        return self._fetched.results(self._draw, self._rows)


@dataclass(frozen=True, slots=True)
class Draw:
    """What the device needs to sample the step's tokens, one for each work item."""

    work: Sequence[Work]
    places: Sequence[Place]
    rows: Tensor  # [S] int64
    position: Tensor  # [S] int32: position of the token to be sampled
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    penalised: PenalisedRows | None
    edits: tuple[Tensor, Tensor, Tensor, Tensor] | None  # rows, ids, divide, add
    mask: tuple[Tensor, Tensor] | None  # bits, rows
    scored: tuple[list[int], Tensor] | None  # indexes in [0, S) of requests with log-probabilities, on host and device


def mask_words(vocab: int) -> int:
    """Return the number of 32-bit words of a mask with one bit for each token."""
    return -(-vocab // 32)


def prepare(work: Sequence[Work], rows: Rows, vocab: int, sheet: Sheet) -> Draw:
    request_rows = rows.places(work)
    index = np.array([p.index for p in request_rows], np.int64)
    known = np.array([w.start + len(w.tokens) for w in work], np.int32)
    special = [i for i, p in enumerate(request_rows) if not p.plain]
    scored = [i for i in special if request_rows[i].row.params.logprobs is not None]
    return Draw(
        work,
        request_rows,
        sheet.put(index),
        sheet.put(known),
        sheet.put(rows.temperature[index]),
        sheet.put(rows.top_k[index]),
        sheet.put(rows.top_p[index]),
        sheet.put(rows.min_p[index]),
        sheet.put(rows.seed[index]),
        prepare_rows(request_rows, special, sheet),
        _edits(request_rows, special, known, sheet),
        _mask(request_rows, special, vocab, sheet),
        (scored, sheet.put(np.array(scored, np.int64))) if scored else None,
    )


def sample(draw: Draw, logits: Tensor, newest: Tensor, penalties: DevicePenalties) -> Fetched:
    """Queue the sampling of a step; overwrites the logits and stores the tokens on the device.

    The returned tensors are being copied to the host: they are valid after an event recorded later has passed."""
    raw = logits.index_select(0, draw.scored[1]) if draw.scored else None
    if draw.penalised is not None:
        penalties.apply(logits, draw.penalised)
    if draw.edits is not None:
        ops.edit(logits, *draw.edits)
    if draw.mask is not None:
        ops.apply_bitmask(logits, *draw.mask)
    tokens = ops.draw(logits, draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seed, draw.position)
    newest.index_copy_(0, draw.rows, tokens)
    if draw.penalised is not None:
        penalties.count(tokens, draw.penalised)
    parts = [tokens]
    if draw.scored is not None and raw is not None:
        most = max(draw.places[i].row.params.logprobs or 0 for i in draw.scored[0])
        parts += ops.log_probs(raw, tokens.index_select(0, draw.scored[1]), most)
    return Fetched(*map(_home, parts))


@dataclass(frozen=True, slots=True)
class Fetched:
    tokens: Tensor
    chosen: Tensor | None = None
    top_ids: Tensor | None = None
    top: Tensor | None = None
    rank: Tensor | None = None

    def results(self, draw: Draw, rows: Rows) -> tuple[dict[str, Sampled], dict[str, str]]:
        """Return the sampled tokens of requests that are still open, and why others cannot continue."""
        scores = self._scores(draw)
        sampled, failed = {}, {}
        current = rows.current
        for i, (w, row, token) in enumerate(zip(draw.work, draw.places, self.tokens.tolist(), strict=True)):
            if current.get(w.id) is not row:
                continue
            if row.plain:
                sampled[w.id] = Sampled(token)
                continue
            state = row.row
            if state.error is None:  # the mask was valid
                state.append(token)
            if state.error is None:
                sampled[w.id] = Sampled(token, scores.get(i), stop=state.done)
            else:
                failed[w.id] = state.error
        return sampled, failed

    def _scores(self, draw: Draw) -> dict[int, TokenLogprob]:
        if draw.scored is None or self.chosen is None:
            return {}
        assert self.top_ids is not None and self.top is not None and self.rank is not None
        ids, values = self.top_ids.tolist(), self.top.tolist()
        return {
            i: TokenLogprob(c, r, list(zip(ids[j][:n], values[j][:n], strict=True)))
            for j, (i, c, r) in enumerate(zip(draw.scored[0], self.chosen.tolist(), self.rank.tolist(), strict=True))
            for n in (draw.places[i].row.params.logprobs or 0,)
        }


def _home(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _edits(
    places: Sequence[Place], special: Sequence[int], known: np.ndarray, sheet: Sheet
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    found = [(i, e) for i in special if (e := places[i].row.edits(int(known[i]))) is not None]
    if not found:
        return None
    rows = np.concatenate([np.full(len(e.ids), i, np.int32) for i, e in found])
    return (
        sheet.put(rows),
        sheet.put(np.concatenate([e.ids for _, e in found]).astype(np.int32)),
        sheet.put(np.concatenate([e.divide for _, e in found])),
        sheet.put(np.concatenate([e.add for _, e in found])),
    )


def _mask(places: Sequence[Place], special: Sequence[int], vocab: int, sheet: Sheet) -> tuple[Tensor, Tensor] | None:
    masked = [(i, m) for i in special if (m := places[i].row.matcher) is not None and not (m.done or m.error)]
    if not masked:  # a request whose grammar is already complete is not masked: its token is dropped
        return None
    bits = np.full((len(masked), mask_words(vocab)), -1, np.int32)
    fill_masks([matcher for _, matcher in masked], bits)
    return sheet.put(bits), sheet.put(np.array([i for i, _ in masked], np.int64))
