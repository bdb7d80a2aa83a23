"""measure_acceptance: how many drafted tokens of a head equal the target's own tokens, on held-out sequences.

A draft takes the head's most probable token in each pass. All passes are computed with the tokens of the data as input.
A real draft would get its own tokens as input instead. Up to its first wrong token, the two are the same, and tokens
after a wrong one are not accepted. So the result equals that of real drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from emberline.drafter.batches import make_batch, order_batches, target_span
from emberline.drafter.head import TrainableHead
from emberline.drafter.sequences import Answer
from emberline.drafter.target import TargetStates, copy_to_device
from emberline.drafter.trainer import compute_in_bfloat16
from emberline.drafter.vocabulary import DraftVocabulary

DRAFT_LENGTH = 4


def measure_acceptance(
    head: TrainableHead, vocabulary: DraftVocabulary, target: TargetStates, answers: Sequence[Answer], batch_tokens: int
) -> dict[str, Any]:
    """Return the acceptance for greedy and for sampled answers, as a report for report.json."""
    accepted: dict[int, np.ndarray] = {}
    for indexes in order_batches(answers, batch_tokens, 0, 0):
        chosen = [answers[index] for index in indexes]
        accepted |= dict(zip(indexes, _count_accepted(head, vocabulary, target, chosen), strict=True))
    kinds = {"greedy": [], "sampled": []}  # type: dict[str, list[np.ndarray]]
    for index, counts in sorted(accepted.items()):
        kinds["sampled" if answers[index].temperature else "greedy"].append(counts)
    return {
        "draft_length": DRAFT_LENGTH,
        "draft_vocab_coverage": round(vocabulary.covered_share(answers), 4),
        "answers": {name: _summarize(counts) for name, counts in kinds.items() if counts},
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the report as a table for the terminal."""
    length = report["draft_length"]
    columns = [f"a{number + 1}" for number in range(length)]
    lines = [f"{'answers':<9} {'drafts':>8}  " + "  ".join(f"{each:>5}" for each in columns) + "  length  tokens/step"]
    for name, figures in report["answers"].items():
        rates = "  ".join(f"{each:5.3f}" for each in figures["acceptance"])
        lines.append(
            f"{name:<9} {figures['drafts']:>8}  {rates}  {figures['acceptance_length']:6.2f}"
            f"  {figures['tokens_per_step']:11.2f}"
        )
    return "\n".join(lines)


def acceptance_length(rates: Sequence[float]) -> float:
    """Return the mean number of tokens of a step with a draft, the target's own token included.

    `rates`: for each token of a draft, the share that is accepted if all tokens before it are accepted."""
    return 1 + float(np.cumprod(rates).sum())


def _count_accepted(
    head: TrainableHead, vocabulary: DraftVocabulary, target: TargetStates, answers: Sequence[Answer]
) -> list[np.ndarray]:
    """Return, for each answer, how many tokens are accepted of the draft from each start position.

    The first draft starts at the last token of the prompt. The last one starts where the answer has just enough tokens
    left to compare all DRAFT_LENGTH tokens of the draft with them."""
    ids = copy_to_device(vocabulary.ids, target.device)
    batch = make_batch(answers, target, DRAFT_LENGTH, None)
    with torch.no_grad(), compute_in_bfloat16(target.device):
        outputs = head.unroll(batch.hidden, batch.embedded, DRAFT_LENGTH)
        matches = np.zeros((DRAFT_LENGTH, batch.hidden.shape[0] * batch.hidden.shape[1]), np.bool_)
        for number, (x, rows) in enumerate(zip(outputs, batch.passes, strict=True)):
            drafted = ids[head.logits(x.flatten(0, 1).index_select(0, rows.drafts)).argmax(-1)]
            is_equal = drafted == batch.next_tokens.index_select(0, rows.targets)
            matches[number, rows.drafts.cpu().numpy()] = is_equal.cpu().numpy()
    counts = np.cumprod(matches, axis=0).sum(0).reshape(batch.hidden.shape[:2])
    starts = [(each.prompt_length - 1, each.prompt_length + len(target_span(each)) - DRAFT_LENGTH) for each in answers]
    return [row[begin:end] for row, (begin, end) in zip(counts, starts, strict=True)]


def _summarize(counts: Sequence[np.ndarray]) -> dict[str, Any]:
    flat = np.concatenate(counts)
    reached = [int((flat >= number).sum()) for number in range(DRAFT_LENGTH + 1)]
    rates = [reached[n + 1] / max(1, reached[n]) for n in range(DRAFT_LENGTH)]
    steps = sum(_count_steps(each) for each in counts)
    return {
        "drafts": len(flat),
        "acceptance": [round(each, 4) for each in rates],
        "acceptance_length": round(acceptance_length(rates), 3),
        "tokens_per_step": round(len(flat) / max(1, steps), 3),
    }


def _count_steps(accepted: np.ndarray) -> int:
    """Return how many steps an answer takes if each step verifies a draft."""
    position = steps = 0
    while position < len(accepted):
        position += 1 + int(accepted[position])
        steps += 1
    return steps
