"""score_prompts: the log-probabilities of prompt tokens of a step on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from emberline.core.plan import TokenLogprob, WorkItem
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.sampler import split_logit_rows, token_logprobs

PromptScores = dict[str, Callable[[], list[TokenLogprob]]]


def score_prompts(work: Sequence[WorkItem], logits: Tensor, rows: DeviceRows) -> tuple[PromptScores, Tensor]:
    """Return functions that compute log-probabilities of prompts, and the logits to sample from.

    There is a function for each request that needs it, by request id. Call it when the step's result is read."""
    if not any(w.prompt_logprobs for w in work):
        return {}, logits
    scored, sampled = split_logit_rows(work)
    # Cloned, since sampling overwrites the logits.
    scores: PromptScores = {w.id: partial(_prompt_logprobs, w, logits[part].clone(), rows) for w, part in scored}
    return scores, logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)]


def _prompt_logprobs(work: WorkItem, logits: Tensor, rows: DeviceRows) -> list[TokenLogprob]:
    request_row = rows.get(work.id)
    if request_row is None:
        return []
    successors = request_row.sampling.tokens[work.start + 1 : work.start + 1 + len(logits)]
    top = request_row.sampling.params.prompt_logprobs or 0
    return token_logprobs(logits[: len(successors)], successors, [top] * len(successors))
