"""score_prompts: the log-probabilities of prompt tokens of a step on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from emberline.core.plan import TokenLogprob, WorkItem
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.staging import copy_to_host
from emberline.engine.sampler import list_logprobs, split_logit_rows
from emberline.kernels import ops
from emberline.kernels.sampling_arguments import LogProbs

PromptScores = dict[str, Callable[[], list[TokenLogprob]]]


def score_prompts(work: Sequence[WorkItem], logits: Tensor, rows: DeviceRows) -> tuple[PromptScores, Tensor]:
    """Queue the log-probabilities of prompts, and return functions that read them, and the logits to sample from.

    There is a function for each request whose prompt is scored, by request id. Call it when the step's result is read.
    If a prompt is scored, the logits are overwritten: since they take much memory, they are neither kept nor copied."""
    if not any(w.prompt_logprobs for w in work):
        return {}, logits
    scored, sampled = split_logit_rows(work)
    scores: PromptScores = {w.id: _queue_scores(w, logits[part], rows) for w, part in scored}
    index = torch.tensor(sampled, dtype=torch.int64, device=logits.device)
    return scores, logits[: len(sampled)].copy_(logits.index_select(0, index))


def _queue_scores(work: WorkItem, logits: Tensor, rows: DeviceRows) -> Callable[[], list[TokenLogprob]]:
    request_row = rows.get(work.id)
    if request_row is None:
        return list
    successors = request_row.sampling.tokens[work.start + 1 : work.start + 1 + len(logits)]
    top = request_row.sampling.params.prompt_logprobs or 0
    if not successors:
        return list
    ids = torch.tensor(successors, device=logits.device)
    found = LogProbs(*map(copy_to_host, ops.log_probs(logits[: len(successors)], ids, top)))
    return partial(list_logprobs, found, [top] * len(successors))
