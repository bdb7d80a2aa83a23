"""TrainingBatch: sequences of similar length as tensors, and the rows that each pass of the head is trained on.

The target model's distribution at position r of a sequence is that of token r + 1. A draft that starts at position i
predicts token i + 2 + j in pass j, so it is compared with the target's distribution at position r = i + 1 + j. Drafts
start at the last token of the prompt or later, because the target itself always samples the first token of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emberline.drafter.sequences import Answer
from emberline.drafter.target import TargetStates, copy_to_device
from emberline.drafter.vocabulary import DraftVocabulary

LogitsReducer = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of one pass whose drafts are compared with the target: two lists of equal length.

    `drafts`: indexes of the drafts' outputs in the padded batch, seen as [batch * rows]. `targets`: indexes in the rows
    of the target's distributions."""

    drafts: Tensor  # [n] int64
    targets: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    hidden: Tensor  # [batch, rows, 3 hidden]: the target's hidden states, padded with zeros
    embedded: Tensor  # [batch, rows, hidden]
    next_tokens: Tensor  # [S] int64: the token of the data behind each of the target's rows
    passes: list[PassRows]
    probabilities: Tensor | None  # [S, draft vocabulary]: the target's distribution; None: not computed
    is_drafted: Tensor | None  # [S] bool: the target's most probable token is in the draft vocabulary


def target_span(answer: Answer) -> range:
    """Return the positions of a sequence at which drafts are compared with the target's distributions."""
    return range(answer.prompt_length, len(answer.tokens) - 1)


def order_batches(answers: Sequence[Answer], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch as indexes of answers. Each has about `batch_tokens` tokens with padding.

    Sequences of similar length are in one batch; which ones, and the order of batches, depends on seed and epoch."""
    random = np.random.default_rng([seed, epoch])
    lengths = np.array([len(each.tokens) for each in answers])
    batches: list[list[int]] = []
    for index in np.argsort(lengths + random.random(len(lengths)) * 16, kind="stable").tolist():
        longest = max((lengths[each] for each in batches[-1]), default=0) if batches else 0
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return [batches[each] for each in random.permutation(len(batches))]


def make_batch(
    answers: Sequence[Answer], target: TargetStates, passes: int, reduce: LogitsReducer | None
) -> TrainingBatch:
    """Compute the batch's tensors with the target model.

    `reduce`: restricts the target's distributions to the draft vocabulary; None: they are not needed."""
    device, rows = target.device, max(len(each.tokens) for each in answers)
    spans = [target_span(each) for each in answers]
    states: list[Tensor] = []
    reduced: list[tuple[Tensor, Tensor]] = []
    for hidden, logits in target.compute([each.tokens for each in answers], spans):
        states.append(hidden)
        if reduce is not None:
            reduced.append(reduce(logits))
    position = np.concatenate([np.arange(len(each.tokens)) + row * rows for row, each in enumerate(answers)])
    place = copy_to_device(position, device)
    padded = states[0].new_zeros(len(answers) * rows, states[0].shape[1])
    padded[place] = torch.cat(states)
    tokens = np.concatenate([each.tokens for each in answers]).astype(np.int64)
    embeddings = target.embed(copy_to_device(tokens, device))
    embedded = embeddings.new_zeros(len(answers) * rows, embeddings.shape[1])
    embedded[place] = embeddings
    following = np.concatenate([each.tokens[each.prompt_length + 1 :] for each in answers])
    return TrainingBatch(
        hidden=padded.view(len(answers), rows, -1),
        embedded=embedded.view(len(answers), rows, -1),
        next_tokens=copy_to_device(following.astype(np.int64), device),
        passes=[_rows_of_pass(spans, rows, number, device) for number in range(passes)],
        probabilities=torch.cat([p for p, _ in reduced]) if reduced else None,
        is_drafted=torch.cat([d for _, d in reduced]) if reduced else None,
    )


def _rows_of_pass(spans: Sequence[range], rows: int, number: int, device: torch.device) -> PassRows:
    drafts, targets, first = [], [], 0
    for row, span in enumerate(spans):
        used = np.arange(span.start + number, span.stop)
        targets.append(first + used - span.start)
        drafts.append(row * rows + used - 1 - number)
        first += len(span)
    return PassRows(*(copy_to_device(np.concatenate(each), device) for each in (drafts, targets)))


def make_reducer(vocabulary: DraftVocabulary, device: torch.device) -> LogitsReducer:
    """Return a function that restricts logits [S, vocab] to the draft vocabulary.

    For each row, the function returns the distribution over the draft vocabulary, and whether the most probable of all
    tokens is in that vocabulary."""
    ids, contained = (copy_to_device(each, device) for each in (vocabulary.ids, vocabulary.t2d))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def reduce(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.index_select(1, ids).softmax(-1).to(dtype), contained[logits.argmax(-1)]

    return reduce
