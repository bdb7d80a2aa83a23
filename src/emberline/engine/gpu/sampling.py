"""StepSampling: samples a step's tokens on the device, without copying the logits to the host.

Grammar masks, which only the host can compute, are copied to the device after the step's other inputs. Tokens and
log-probabilities are copied to the host with the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from emberline.core.plan import PENDING_TOKEN, SampledToken, TokenLogprob, WorkItem
from emberline.engine.gpu.batch import expand_drafts
from emberline.engine.gpu.device import DeviceEvent, DeviceStream
from emberline.engine.gpu.penalties import (
    DevicePenalties,
    DraftPenalties,
    PenalisedRows,
    prepare_draft_penalties,
    prepare_penalised_rows,
)
from emberline.engine.gpu.rows import DeviceRows, HostDrafts, RequestRow
from emberline.engine.gpu.staging import StagedInputs, copy_to_host
from emberline.engine.sampler import SamplingState
from emberline.engine.token_rules import TokenMasker, fill_masks
from emberline.kernels import ops

# Queues the drafting behind the sampled tokens, if any, and returns a function that reads the drafts.
LaunchDrafting = Callable[[Tensor | None], Callable[[], dict[str, Sequence[int]]]]
ShareTokens = Callable[[Tensor], None]  # queues the sending of sampled tokens to other ranks


class StepSampling:
    """The sampling of one step: prepared by the host, launched after the model, and read later."""

    def __init__(
        self,
        work: Sequence[WorkItem],
        rows: DeviceRows,
        penalties: DevicePenalties,
        share_tokens: ShareTokens | None = None,
    ) -> None:
        # After the model is launched: for each work item a row, and one more for each drafted token.
        self.logits: Tensor | None = None
        self._share_tokens = share_tokens
        self._work = work
        self._rows = rows
        self._penalties = penalties
        self._inputs: SamplingInputs | None = None
        self._outputs: SamplingOutputs | None = None
        self._end_event: DeviceEvent | None = None
        self.draft_next: LaunchDrafting | None = None
        self.read_drafts: Callable[[], dict[str, Sequence[int]]] = dict

    def waits_for_tokens(self) -> bool:
        """Return whether a grammar's mask can be computed only after the previous step's tokens were read."""
        return any(
            not row.is_plain and row.sampling.matcher is not None and w.tokens[-1 - w.num_draft] == PENDING_TOKEN
            for w, row in zip(self._work, self._rows.rows_of(self._work), strict=True)
        )

    def prepare(self, vocab_size: int, staged: StagedInputs) -> None:
        if self._work:
            self._inputs = prepare_sampling(self._work, self._rows, vocab_size, staged)

    def launch(self, stream: DeviceStream) -> None:
        """Queue the sampling, and record an event behind it."""
        if self._inputs is not None and self.logits is not None:
            self._outputs = launch_sampling(self._inputs, self.logits, self._rows, self._penalties)
            if self._share_tokens is not None:
                self._share_tokens(self._outputs.device_tokens)
        self.logits = None
        self._end_event = stream.record_event()

    def launch_drafting(self) -> None:
        """Queue the drafting behind the sampling, if the step has any."""
        if self.draft_next is not None:
            self.read_drafts = self.draft_next(None if self._outputs is None else self._outputs.device_tokens)

    @property
    def end_event(self) -> DeviceEvent:
        assert self._end_event is not None, "the step was not sampled yet: results must be read in order"
        return self._end_event

    def wait_for_tokens_and_failures(self) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Wait for the device; return the sampled tokens, and errors of requests that cannot continue.

        Both are dicts by request id."""
        self.end_event.wait()
        if self._inputs is None or self._outputs is None:
            return {}, {}
        return self._outputs.tokens_and_failures(self._inputs, self._rows)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What the device needs to sample S tokens: one after each work item's known tokens and each drafted token."""

    work: Sequence[WorkItem]
    request_rows: Sequence[RequestRow]
    first: Sequence[int]  # index in [0, S) of the first token of each work item
    newest_rows: Tensor  # [S] int64: index in DeviceRows.newest to which each token is written
    position: Tensor  # [S] int32: position of the token to be sampled
    shifts: Tensor | None  # [S] int64: row in DeviceRows.accepted by which the position is shifted; None: none is
    settings: ops.SamplingTensors
    seed: Tensor
    penalised: PenalisedRows | None
    draft_penalties: Sequence[DraftPenalties]
    edits: tuple[Tensor, Tensor, Tensor, Tensor] | None  # rows, ids, divide, add
    mask: tuple[Tensor, Tensor] | None  # bits, rows
    scored: tuple[list[int], Tensor] | None  # indexes in [0, S) of tokens with log-probabilities, on host and device
    num_top: Sequence[int]  # for each of these, how many likely tokens are reported beside it
    pending_drafts: Mapping[str, tuple[HostDrafts, int]]  # by request: drafts that the host did not know at launch

    def draft_of(self, work: WorkItem) -> Sequence[int]:
        """Return the draft of a work item. If only the device had it at launch, the host has a copy by now."""
        if work.id not in self.pending_drafts:
            return work.tokens[len(work.tokens) - work.num_draft :]
        drafts, at = self.pending_drafts[work.id]
        return drafts.values[at][: work.num_draft]


def words_per_mask(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask with one bit for each token."""
    return -(-vocab_size // 32)


def prepare_sampling(
    work: Sequence[WorkItem], rows: DeviceRows, vocab_size: int, staged: StagedInputs
) -> SamplingInputs:
    """Stage the inputs of sampling."""
    request_rows = rows.rows_of(work)
    index = np.array([p.index for p in request_rows], np.int64)
    known = np.array([w.start + len(w.tokens) - w.num_draft for w in work], np.int32)
    drafted = np.array([w.num_draft for w in work])
    newest = _place_newest(index, drafted, rows)
    offsets, first = np.zeros(len(work), np.int32), list(range(len(work)))
    if len(newest) > len(work):
        begin = np.cumsum(1 + drafted) - 1 - drafted
        first = begin.tolist()
        offsets = (np.arange(len(newest)) - np.repeat(begin, 1 + drafted)).astype(np.int32)
        index, known = np.repeat(index, 1 + drafted), np.repeat(known, 1 + drafted) + offsets
    rules = SpecialRows.select(work, request_rows, offsets, first)
    requests, special = rules.request_rows, rules.rows
    scored = [i for i in special if requests[i].sampling.params.logprobs is not None]
    return SamplingInputs(
        work,
        request_rows,
        first,
        staged.put(newest),
        staged.put(known),
        _stage_shifts(work, request_rows, drafted, rows.padding_row, staged),
        ops.SamplingTensors(
            staged.put(rows.temperature[index]),
            staged.put(rows.top_k[index]),
            staged.put(rows.top_p[index]),
            staged.put(rows.min_p[index]),
        ),
        staged.put(rows.seed[index]),
        prepare_penalised_rows(requests, [i for i in special if not offsets[i]], staged),
        prepare_draft_penalties(rules.work, requests, [i for i in special if offsets[i]], rules.offsets, staged),
        _stage_logit_edits(requests, special, known, staged),
        _stage_masks(rules.work, requests, special, rules.offsets, vocab_size, staged),
        (scored, staged.put(np.array(scored, np.int64))) if scored else None,
        [requests[i].sampling.params.logprobs or 0 for i in scored],
        {
            w.id: row.drafts
            for w, row in zip(work, request_rows, strict=True)
            if w.num_draft and row.drafts is not None and w.tokens[-1] == PENDING_TOKEN
        },
    )


def list_newest_indexes(work: Sequence[WorkItem], rows: DeviceRows) -> np.ndarray:
    """Return, for each sampled token of a step, the index in DeviceRows.newest to which it is written."""
    index = np.array([row.index for row in rows.rows_of(work)], np.int64)
    return _place_newest(index, np.array([w.num_draft for w in work]), rows)


def _place_newest(row_indexes: np.ndarray, drafted: np.ndarray, rows: DeviceRows) -> np.ndarray:
    """Return the index in DeviceRows.newest to which each sampled token is written.

    `drafted`: the number of drafted tokens of each work item. Tokens of requests with drafts go to the padding row,
    because only the host knows which of them is the newest."""
    if drafted.any():
        row_indexes = np.repeat(np.where(drafted > 0, rows.padding_row, row_indexes), 1 + drafted)
    return row_indexes * (1 + rows.max_draft)


def _stage_shifts(
    work: Sequence[WorkItem],
    request_rows: Sequence[RequestRow],
    drafted: np.ndarray,
    padding_row: int,
    staged: StagedInputs,
) -> Tensor | None:
    if not any(w.max_shift for w in work):
        return None
    shifted = [p.index if w.max_shift else padding_row for w, p in zip(work, request_rows, strict=True)]
    return staged.put(np.repeat(np.array(shifted, np.int64), 1 + drafted))


class SpecialRows(NamedTuple):
    """Which sampled tokens belong to requests with penalties, biases, masks or log-probabilities.

    If there is such a request, the first three fields have an entry for each token that the step samples. Otherwise all
    fields are empty."""

    work: Sequence[WorkItem]  # drafted tokens are work items of their own
    request_rows: Sequence[RequestRow]
    offsets: Sequence[int]  # for each token, the place in the draft of the token before it, from 1; 0: not drafted
    rows: list[int]  # indexes of the tokens of such requests

    @staticmethod
    def select(
        work: Sequence[WorkItem], request_rows: Sequence[RequestRow], offsets: np.ndarray, first: Sequence[int]
    ) -> SpecialRows:
        if all(row.is_plain for row in request_rows):
            return SpecialRows((), (), (), [])
        expanded = expand_drafts(work)
        owners = [row for w, row in zip(work, request_rows, strict=True) for _ in range(1 + w.num_draft)]
        return SpecialRows(expanded, owners, offsets.tolist(), [i for i, p in enumerate(owners) if not p.is_plain])


def launch_sampling(
    inputs: SamplingInputs, logits: Tensor, rows: DeviceRows, penalties: DevicePenalties
) -> SamplingOutputs:
    """Queue the sampling of a step. This overwrites the logits and stores the tokens on the device.

    The returned tensors are still being copied to the host: wait for an event recorded after this call."""
    raw = logits.index_select(0, inputs.scored[1]) if inputs.scored else None
    if inputs.penalised is not None:
        penalties.apply(logits, inputs.penalised)
        for draft in inputs.draft_penalties:
            penalties.count_tokens(draft.tokens, draft.penalised)
            penalties.apply(logits, draft.penalised)
    if inputs.edits is not None:
        ops.edit_logits(logits, *inputs.edits)
    if inputs.mask is not None:
        ops.apply_bitmask(logits, *inputs.mask)
    position = inputs.position
    if inputs.shifts is not None:
        position = position + rows.accepted[inputs.shifts].int()
    tokens = ops.sample_with_seed(logits, inputs.settings, inputs.seed, position)
    rows.newest.index_copy_(0, inputs.newest_rows, tokens)
    if inputs.penalised is not None:
        penalties.count_tokens(tokens, inputs.penalised)
    parts = [tokens]
    if inputs.scored is not None and raw is not None:
        parts += ops.log_probs(raw, tokens.index_select(0, inputs.scored[1]), max(inputs.num_top))
    return SamplingOutputs(tokens, *map(copy_to_host, parts))


@dataclass(frozen=True, slots=True)
class SamplingOutputs:
    device_tokens: Tensor
    tokens: Tensor  # on the host
    chosen: Tensor | None = None
    top_ids: Tensor | None = None
    top: Tensor | None = None
    rank: Tensor | None = None

    def tokens_and_failures(
        self, inputs: SamplingInputs, rows: DeviceRows
    ) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Return the sampled tokens, and errors of requests that cannot continue, both by request id.

        Requests that have ended in the meantime are left out. A token after a drafted one counts only if all drafted
        tokens before it were sampled."""
        scores = self._logprobs_by_row(inputs)
        sampled: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        current, tokens = rows.by_request, self.tokens.tolist()
        for w, row, first in zip(inputs.work, inputs.request_rows, inputs.first, strict=True):
            if current.get(w.id) is not row:
                continue
            if not row.is_plain:
                found = _follow_rules(row.sampling, tokens, first, inputs.draft_of(w), scores)
                if isinstance(found, str):
                    failed[w.id] = found
                else:
                    sampled[w.id] = found
                continue
            sampled[w.id] = one = SampledToken(tokens[first])
            if w.num_draft:
                accepted, draft = 0, inputs.draft_of(w)
                while accepted < w.num_draft and tokens[first + accepted] == draft[accepted]:
                    accepted += 1
                one.further = [SampledToken(token) for token in tokens[first + 1 : first + 1 + accepted]]
        return sampled, failed

    def _logprobs_by_row(self, inputs: SamplingInputs) -> dict[int, TokenLogprob]:
        if inputs.scored is None or self.chosen is None:
            return {}
        assert self.top_ids is not None and self.top is not None and self.rank is not None
        ids, values = self.top_ids.tolist(), self.top.tolist()
        return {
            i: TokenLogprob(c, r, list(zip(ids[j][:n], values[j][:n], strict=True)))
            for j, (i, c, r, n) in enumerate(
                zip(inputs.scored[0], self.chosen.tolist(), self.rank.tolist(), inputs.num_top, strict=True)
            )
        }


def _follow_rules(
    state: SamplingState, tokens: Sequence[int], first: int, draft: Sequence[int], scores: Mapping[int, TokenLogprob]
) -> SampledToken | str:
    """Append a request's sampled tokens to its state, and return them, or return why the request cannot continue.

    A token after a drafted one counts only if that drafted token was sampled. A failure after other tokens of this step
    is not reported, because the next step fails again."""
    run: list[SampledToken] = []
    for i in range(1 + len(draft)):
        if i and (run[-1].stop or run[-1].token != draft[i - 1]):
            break
        if state.error is None:  # the mask was valid
            state.append_token(tokens[first + i])
        if state.error is not None:
            if run:
                break
            return state.error
        run.append(SampledToken(tokens[first + i], scores.get(first + i), stop=state.is_complete))
    run[0].further = run[1:]
    return run[0]


def _stage_logit_edits(
    request_rows: Sequence[RequestRow], special_rows: Sequence[int], num_known: np.ndarray, staged: StagedInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    edits = [(i, e) for i in special_rows if (e := request_rows[i].sampling.logit_edits(int(num_known[i]))) is not None]
    if not edits:
        return None
    rows = np.concatenate([np.full(len(e.ids), i, np.int32) for i, e in edits])
    return (
        staged.put(rows),
        staged.put(np.concatenate([e.ids for _, e in edits]).astype(np.int32)),
        staged.put(np.concatenate([e.divide for _, e in edits])),
        staged.put(np.concatenate([e.add for _, e in edits])),
    )


def _stage_masks(
    work: Sequence[WorkItem],
    request_rows: Sequence[RequestRow],
    special_rows: Sequence[int],
    offsets: Sequence[int],
    vocab_size: int,
    staged: StagedInputs,
) -> tuple[Tensor, Tensor] | None:
    matchers: dict[int, TokenMasker] = {}  # by row
    for i in special_rows:
        matcher = request_rows[i].sampling.matcher
        if offsets[i] and matcher is not None:
            before = matchers.get(i - 1)  # None: an earlier drafted token cannot be sampled, so the row is not used
            matcher = before and request_rows[i].sampling.masker_after(before, work[i].tokens[0])
        if matcher is not None:
            matchers[i] = matcher
    masked = [(i, m) for i, m in matchers.items() if not (m.is_complete or m.error)]
    if not masked:  # a request whose grammar is already complete is not masked: its token is dropped
        return None
    bits = np.full((len(masked), words_per_mask(vocab_size)), -1, np.int32)
    fill_masks([matcher for _, matcher in masked], bits)
    return staged.put(bits), staged.put(np.array([i for i, _ in masked], np.int64))
