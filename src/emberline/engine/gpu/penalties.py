"""DevicePenalties: how often each token occurred in a request, counted on the device for penalties.

The device counts the tokens it samples, so a step can be launched before the host knows the tokens of the previous
step. Each request has a row with 16 bits per token id. The row is rebuilt from the request's tokens when the request
starts, and after a preemption if the row was given to a different request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emberline.core.params import SamplingParams
from emberline.core.plan import WorkItem
from emberline.engine.gpu.rows import RequestRow
from emberline.engine.gpu.staging import StagedInputs
from emberline.kernels import ops
from emberline.kernels.reference import IN_PROMPT_BIT, MAX_TOKEN_COUNT

COUNTS_PER_LOAD = 8  # the table's width is a multiple of this, since a kernel reads 8 counts at once


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """The rows of one step whose requests have penalties."""

    rows: Tensor  # [P] int32: rows of the logits
    slots: Tensor  # [P] int32: rows of the counts
    settings: Tensor  # [P, 3] float32: repetition, frequency, presence


@dataclass(frozen=True, slots=True)
class DraftPenalties:
    """The penalties for the rows of logits that follow the n-th drafted token of each request, for one n.

    That token is counted before the row is penalised, as if it had been sampled."""

    penalised: PenalisedRows
    tokens: Tensor  # [S] int64: the token before each row of the logits, which is drafted for these rows


@dataclass(frozen=True, slots=True)
class CountReset:
    """Token counts to write to the device for requests that get a row in this step.

    `prompt`, `output`: the tokens that occur in prompts and outputs, as indexes into the flattened table of counts."""

    slots: Tensor  # int64: rows of the counts
    prompt: Tensor  # int64
    output: Tensor  # int64, without duplicates
    occurrences: Tensor  # int16, for each of `output`


class DevicePenalties:
    def __init__(self, capacity: int, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(
            capacity, -(-vocab // COUNTS_PER_LOAD) * COUNTS_PER_LOAD, dtype=torch.int16, device=device
        )

    def prepare_reset(self, rows: Sequence[RequestRow], inputs: StagedInputs) -> CountReset | None:
        """Stage the token counts of requests that just got a row; return None if none of them has penalties."""
        new = [p for p in rows if not p.is_plain and not p.has_counts and p.sampling.params.has_penalties]
        if not new:
            return None
        prompt, output, occurrences = [], [], []
        for request_row in new:
            request_row.has_counts = True
            state, base = request_row.sampling, request_row.index * self.counts.shape[1]
            tokens = np.array(state.tokens, np.int64)
            ids, counts = np.unique(tokens[state.prompt_len :], return_counts=True)
            prompt.append(base + np.flatnonzero(np.bincount(tokens[: state.prompt_len])))
            output.append(base + ids)
            occurrences.append(np.minimum(counts, MAX_TOKEN_COUNT).astype(np.int16))
        return CountReset(
            inputs.put(np.array([p.index for p in new], np.int64)),
            *(inputs.put(np.concatenate(parts)) for parts in (prompt, output, occurrences)),
        )

    def reset_counts(self, new_counts: CountReset) -> None:
        self.counts.index_fill_(0, new_counts.slots, 0)
        flat = self.counts.view(-1)
        flat.index_fill_(0, new_counts.prompt, IN_PROMPT_BIT)
        if len(new_counts.output):
            flat.index_add_(0, new_counts.output, new_counts.occurrences)

    def apply(self, logits: Tensor, penalised: PenalisedRows) -> None:
        ops.apply_penalties(logits, penalised.rows, penalised.slots, penalised.settings, self.counts)

    def count_tokens(self, tokens: Tensor, penalised: PenalisedRows) -> None:
        """Count the sampled tokens of requests with penalties. `tokens`: one for each row of the logits."""
        ops.count_tokens(self.counts, penalised.slots, penalised.rows, tokens)


def prepare_penalised_rows(
    rows: Sequence[RequestRow], special_rows: Sequence[int], inputs: StagedInputs
) -> PenalisedRows | None:
    """Stage the penalties of one step; return None if no request of the step has penalties.

    `special_rows`: indexes in `rows` of the requests that may have penalties."""
    indexes = [i for i in special_rows if rows[i].sampling.params.has_penalties]
    if not indexes:
        return None
    settings = np.array([_penalty_settings(rows[i].sampling.params) for i in indexes], np.float32)
    slots = np.array([rows[i].index for i in indexes], np.int32)
    return PenalisedRows(inputs.put(np.array(indexes, np.int32)), inputs.put(slots), inputs.put(settings))


def prepare_draft_penalties(
    work: Sequence[WorkItem],
    rows: Sequence[RequestRow],
    draft_rows: Sequence[int],
    offsets: Sequence[int],
    inputs: StagedInputs,
) -> list[DraftPenalties]:
    """Stage the penalties for the logits after drafted tokens; return one entry per position in a draft.

    `draft_rows`: indexes in `work` of drafted tokens whose requests may have penalties. `offsets`: see SpecialRows. The
    device counts the whole draft, so the counts of these requests are rebuilt before their next step."""
    found: list[DraftPenalties] = []
    if not draft_rows:
        return found
    drafted = np.array([w.tokens[0] for w in work], np.int64)
    for offset in sorted({offsets[i] for i in draft_rows}):
        penalised = prepare_penalised_rows(rows, [i for i in draft_rows if offsets[i] == offset], inputs)
        if penalised is not None:
            found.append(DraftPenalties(penalised, inputs.put(drafted)))
    for i in draft_rows:
        rows[i].has_counts = False
    return found


def _penalty_settings(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
